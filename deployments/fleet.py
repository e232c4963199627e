"""Fleet: what a router knows of its replicas, in columns, so that a decision is a few operations on
arrays however many there are. Pure: times are arguments.

Each replica's row is refreshed when a frame of it arrives or something is sent there. A row's
columns give the seconds that a request would add, as a linear function of what it asks:

    fixed + uncached prompt tokens x token + output tokens x decode

From a frame come the sequences, the queue and the free memory; what was sent since, and cannot be
in the frame's figures yet, is booked on top. Rates are measured (steps.py).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from deployments.decision import Decision, Work
from deployments.prefix_index import STRIDE, PrefixIndex
from deployments.steps import Cost, StepModel
from engine.lora.popularity import Popularity
from engine.messages import EngineStats

Column = NDArray[np.float64]

FIXED, TOKEN, DECODE = range(3)  # rows of Fleet.terms
HARM = 0.1  # what a second of each running stream counts against a second of the new request
_SETTLE = 0.02  # seconds that a request may take to show in a replica's figures, and two steps
_STALE = 0.25  # seconds without a frame that are normal for a busy replica, and three steps
_OUTPUT = 128.0  # output tokens of a request, until some have ended
_ADAPTER_SECONDS = 0.1  # a load, until one was seen


@dataclass(slots=True)
class Replica:
    """One row. step_tokens: of a step of its engine, at most."""

    name: str
    row: int
    pool: str
    step_tokens: int
    adapter_slots: int
    prefix_caching: bool
    steps: StepModel
    stats: EngineStats = field(default_factory=EngineStats)
    available: bool = False
    seen: float = 0.0  # when the last frame came
    booked: deque[tuple[float, int, int]] = field(default_factory=deque)  # when, tokens, sequences
    booked_tokens: int = 0
    booked_sequences: int = 0
    adapters: tuple[str, ...] = ()
    sent_adapters: dict[str, float] = field(default_factory=dict)  # not yet in its figures: when
    missed: float = 1.0  # share of prompt tokens that its prefix cache does not have


class Fleet:
    """Replicas by name. `terms`, `room` and so on are for routing.route; the rest is for the
    router."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self.rows: list[Replica | None] = []
        self.replicas: dict[str, Replica] = {}
        self.holders: dict[str, set[int]] = {}  # adapter -> rows
        self.popularity = Popularity()  # of adapters
        self.adapter_seconds = _ADAPTER_SECONDS
        self._resize(16)

    def _resize(self, capacity: int) -> None:
        kept = len(self.rows)
        old = getattr(self, "_table", None)
        # terms, room, seconds a token beyond it, when silence begins, step, victim, ending
        self._table: Column = np.zeros((9, capacity))
        self._table[FIXED] = np.inf
        self._table[5] = np.inf
        self.hashes: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        if old is not None:
            self._table[:, :kept] = old[:, :kept]
        for replica in self.replicas.values():
            self.hashes[replica.row] = _hash(replica.name)
        self._view(kept)

    def _view(self, count: int) -> None:
        table = self._table[:, :count]
        self.terms = table[:3]
        self.room, self.beyond, self.due, self.step, self.victim, self.ending = table[3:]

    # -- members

    def add(
        self,
        name: str,
        pool: str = "",
        *,
        step_tokens: int,
        adapter_slots: int = 0,
        prefix_caching: bool = True,
    ) -> Replica:
        """A replica that will send frames. It is taken to be as fast as its pool until it has
        been measured. adapter_slots: 0 is unknown."""
        row = next((i for i, known in enumerate(self.rows) if known is None), len(self.rows))
        if row == len(self.rows):
            if row == self._table.shape[1]:
                self._resize(2 * row)
            self.rows.append(None)
            self._view(len(self.rows))
        peers = [one.steps.cost for one in self.replicas.values() if one.pool == pool]
        replica = Replica(
            name,
            row,
            pool,
            step_tokens,
            adapter_slots,
            prefix_caching,
            StepModel(Cost.mean(peers)),
        )
        self.rows[row] = replica
        self.replicas[name] = replica
        self.hashes[row] = _hash(name)
        self._refresh(replica)
        return replica

    def remove(self, name: str) -> None:
        self.lost(name)
        row = self.replicas.pop(name).row
        self.rows[row] = None
        self._table[FIXED, row] = self._table[5, row] = np.inf

    # -- news

    def set_available(self, name: str, available: bool) -> None:
        """Connected and not draining; a replica that is not gets nothing."""
        replica = self.replicas[name]
        replica.available = available
        self._refresh(replica)

    def lost(self, name: str) -> None:
        """Its connection broke: what was sent there is elsewhere now, its caches are empty."""
        replica = self.replicas[name]
        replica.booked.clear()
        replica.booked_tokens = replica.booked_sequences = 0
        self.index.capacity -= _share(replica.stats)
        replica.stats = EngineStats()
        replica.sent_adapters.clear()
        self._hold(replica, ())
        self.index.forget(replica.row)
        self.set_available(name, False)

    def observe(self, name: str, stats: EngineStats, now: float) -> None:
        """The figures of a frame. now: seconds of any clock that the other calls use too."""
        replica = self.replicas[name]
        last = replica.stats
        replica.steps.observe_frame(stats)
        if stats.total_blocks != last.total_blocks:
            self.index.capacity += _share(stats) - _share(last)
        asked = stats.prefix_queries - last.prefix_queries
        if asked > 0:
            hit = (stats.prefix_hits - last.prefix_hits) / asked
            replica.missed += min(0.5, asked / 20_000) * (1 - hit - replica.missed)
        replica.stats = stats
        replica.seen = now
        settled = now - max(_SETTLE, 2 * stats.step_seconds)
        booked = replica.booked
        while booked and booked[0][0] < settled:
            _, tokens, sequences = booked.popleft()
            replica.booked_tokens -= tokens
            replica.booked_sequences -= sequences
        if stats.adapters or replica.adapters:
            sent = replica.sent_adapters
            for adapter in [one for one, when in sent.items() if when < settled]:
                del sent[adapter]
            self._hold(replica, (*sent, *(one for one in stats.adapters if one not in sent)))
        if stats.draining:
            replica.available = False
        self._refresh(replica)

    def send(self, decision: Decision, work: Work, now: float) -> None:
        """It was sent where the decision says."""
        replica = self.replicas[decision.replica]
        # The other routers see the same figures and choose alike, unseen until the next frame.
        routers = max(1, replica.stats.routers)
        tokens = routers * (work.prompt_tokens - decision.cached)
        sequences = routers * work.sequences
        replica.booked.append((now, tokens, sequences))
        replica.booked_tokens += tokens
        replica.booked_sequences += sequences
        if work.adapter:
            self.popularity.count(work.adapter, now)
            if work.adapter not in replica.adapters:
                replica.sent_adapters[work.adapter] = now
                slots = replica.adapter_slots or 2**31
                self._hold(replica, (work.adapter, *replica.adapters)[:slots])
        if work.links and replica.prefix_caching:
            self.index.add(work.links, replica.row)
        self._refresh(replica)

    def hear(self, name: str, links: Sequence[bytes]) -> None:
        """Another router has sent a prompt with these links there."""
        self.index.add(links, self.replicas[name].row)

    def adapter_loaded(self, seconds: float) -> None:
        """A request waited so long until its adapter was on the device."""
        self.adapter_seconds += 0.1 * (min(max(seconds, 0.001), 30.0) - self.adapter_seconds)

    # -- columns

    def _hold(self, replica: Replica, adapters: tuple[str, ...]) -> None:
        if adapters != replica.adapters:
            for gone in set(replica.adapters).difference(adapters):
                self.holders[gone].discard(replica.row)
            for adapter in adapters:
                self.holders.setdefault(adapter, set()).add(replica.row)
            replica.adapters = adapters

    def _refresh(self, replica: Replica) -> None:
        """From what is known of a replica to its columns."""
        stats, row, table = replica.stats, replica.row, self._table
        cost = replica.steps.cost
        running = stats.running
        sequences = running + stats.waiting + replica.booked_sequences
        limit = stats.rows or 2**31
        crowd = min(sequences, limit)
        step = cost.base + cost.sequence * crowd
        chunk = max(1, replica.step_tokens - crowd)
        token = cost.token + step / chunk
        # Part of what waits there will be found in its cache; of what we sent, we know which.
        queued = stats.waiting_tokens * replica.missed + replica.booked_tokens
        # One sequence ends every so many seconds, if all have the usual length.
        output = stats.output_tokens / stats.finished if stats.finished else _OUTPUT
        ending = step * output / max(1, crowd)
        fixed = queued * token + step * (1.5 if sequences else 1.0)
        if sequences >= limit:
            fixed += (sequences - limit + 1) * ending
        table[FIXED, row] = fixed if replica.available else np.inf
        table[TOKEN, row] = token + HARM * running * cost.token
        table[DECODE, row] = cost.base + cost.sequence * (crowd + 1 + HARM * running)
        if stats.total_blocks:
            free = stats.free_blocks * stats.block_size
            used = (stats.total_blocks - stats.free_blocks) * stats.block_size
            table[3, row] = free - queued
            table[4, row] = ending * max(1, running) / max(1.0, used)
        else:
            table[3, row] = np.inf
            table[4, row] = 0.0
        table[5, row] = replica.seen + _STALE + 3 * stats.step_seconds if running else np.inf
        table[6, row] = step
        table[8, row] = ending
        table[7, row] = 0.0
        if replica.adapters and len(replica.adapters) >= replica.adapter_slots > 0:
            table[7, row] = self.popularity[replica.adapters[-1]]


def _share(stats: EngineStats) -> int:
    """Links that a replica's cache can hold."""
    return stats.total_blocks * stats.block_size // STRIDE


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
