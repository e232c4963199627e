"""Fleet: a router's knowledge of all its replicas, as a table with one column per replica.

With the table a routing decision takes a few array operations, however many replicas there are.
Times are arguments. A replica's column is derived from its ReplicaState, at the first decision
after a change of that state. The first three fields of a column predict the seconds that a request
would take at the replica:

  fixed + uncached prompt tokens x token + output tokens x decode

Data about a single replica are in its ReplicaState. This module adds the columns, and records which
replicas have which prefixes and adapters.
"""

from collections.abc import Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from deployments.routing.decision import RoutingDecision, RoutingRequest
from deployments.routing.prefix_index import STRIDE, PrefixIndex
from deployments.routing.replica_state import ReplicaState
from deployments.routing.sessions import Sessions
from deployments.routing.step_cost import StepCost
from engine.lora.tiers.popularity import Popularity
from engine.messages import EngineStats

Fields = NDArray[np.float64]  # [fields, columns]

# The fields of a column, which are rows of the table; the first three are `Fleet.terms`.
FIXED, TOKEN, DECODE, _ROOM, _BEYOND, _DUE, _STEP, _VICTIM, _ENDING, _MOVE = range(10)
# The fields that admission reads: see `Fleet.places` and the attributes after it.
_PLACES, _FREE_ROWS, _ROUTERS, _RATE, _ROWS, _FIRST, _ROLE = range(10, 17)
_LOAD, _BATCH_PLACES = 17, 18
_FIELDS = 19
# The codes of `ReplicaState.role`. A DECODES replica continues prompts that others have computed.
ENGINE, PREFILL, DECODES = range(3)
_ROLES = {"engine": ENGINE, "prefill": PREFILL, "decode": DECODES}
HARM = 0.1  # weight of a running stream's delay, relative to a delay of the new request
# A busy replica's frame is overdue after three steps and this many seconds.
_STALE = 0.25
OUTPUT_GUESS = 128.0  # output tokens assumed for a request until some requests have ended
_ADAPTER_SECONDS = 0.1  # seconds to load an adapter, until measured
# Minimum number of tokens for which KV blocks are pulled from another replica rather than computed.
MOVE_TOKENS = 256
MOVE_SECONDS = 0.01  # constant part of a pull's seconds: connections, and steps in flight
_WAKE_SECONDS = 1.0  # seconds for a sleeping engine to wake, until measured
_PEERS = 32  # number of replicas of a pool whose mean speed is assumed for a new replica


class Fleet:
    """The replicas in service as arrays, from which `route` chooses a replica for a request.

    `terms`, `room` and the other views of the table are for routing.route and for admission. They
    are valid after `refresh`.

    replicas: the states of the replicas by name. columns: the states by column; None: vacant.
    index: which replicas have which prefix. apart: see `_divide`.
    """

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self.columns: list[ReplicaState | None] = []
        self.replicas: dict[str, ReplicaState] = {}
        self.holders: dict[str, set[int]] = {}  # adapter -> columns of replicas that have it
        self.sessions = Sessions()
        self.popularity = Popularity()  # how often each adapter is requested
        self.adapter_seconds = _ADAPTER_SECONDS
        # column -> adapters of its replica; the last one is evicted next
        self._held: dict[int, tuple[str, ...]] = {}
        self._changed: set[ReplicaState] = set()  # states whose columns are out of date
        # whether both prefill replicas and replicas that continue their prompts are available
        self.apart = False
        self._has_roles = False  # whether any replica so far had a role other than "engine"
        # column -> stats of its last refresh, whose cache size is included in the index's capacity
        self._stats: dict[int, EngineStats] = {}
        self._vacant: list[int] = []  # heap of columns without a replica
        self._resize(16)

    def _resize(self, capacity: int) -> None:
        count = len(self.columns)
        old = getattr(self, "_table", None)
        self._table: Fields = np.zeros((_FIELDS, capacity))
        self._clear(slice(None))
        self.hashes: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        if old is not None:
            self._table[:, :count] = old[:, :count]
        for replica in self.replicas.values():
            self.hashes[replica.column] = _hash(replica.name)
        self._view(count)

    def _view(self, count: int) -> None:
        table = self._table[:, :count]
        self.terms = table[:_ROOM]
        # Free KV memory in tokens; seconds of waiting per token that exceeds it.
        self.room, self.beyond = table[_ROOM], table[_BEYOND]
        self.due = table[_DUE]  # time after which a busy replica's next frame is overdue
        # Seconds of a step; seconds between the ends of two sequences.
        self.step, self.ending = table[_STEP], table[_ENDING]
        self.load = table[_LOAD]  # seconds per token that is loaded from host memory or disk
        self.move = table[_MOVE]  # seconds per token that is pulled from another replica
        self.victim = table[_VICTIM]  # popularity of the adapter that a new adapter would evict
        # The first two results of ReplicaState.room; -inf if no request may be sent.
        self.places, self.free_rows = table[_PLACES], table[_FREE_ROWS]
        self.batch_places = table[_BATCH_PLACES]  # like `places`, for batch work
        # The results of ReplicaState.rate, this router's share of all rows, and first_seconds.
        self.rates, self.rows, self.first_seconds = table[_RATE], table[_ROWS], table[_FIRST]
        self.roles = table[_ROLE]

    def _clear(self, columns: slice | int) -> None:
        """Reset columns of the table to values with which they are never chosen."""
        for field in (FIXED, _DUE, _MOVE):
            self._table[field, columns] = np.inf
        for field in (_PLACES, _FREE_ROWS, _BATCH_PLACES):
            self._table[field, columns] = -np.inf
        self._table[_ROUTERS, columns] = 0

    # -- members

    def add_replica(
        self,
        name: str,
        pool: str = "",
        *,
        step_tokens: int,
        adapter_slots: int = 0,
        prefix_caching: bool = True,
        kv_token_bytes: float = 0.0,
        role: str = "engine",
    ) -> ReplicaState:
        """Add a replica, and return its state, which its frames update.

        Until it is measured, the replica is assumed to be as fast as others of its pool.

        step_tokens, adapter_slots, kv_token_bytes, role: see `ReplicaState`.
        """
        if self._vacant:
            column = heappop(self._vacant)
        else:
            column = len(self.columns)
            if column == self._table.shape[1]:
                self._resize(2 * column)
            self.columns.append(None)
            self._view(len(self.columns))
        peers = (peer.steps.cost for peer in self.replicas.values() if peer.pool == pool)
        replica = ReplicaState(
            name,
            pool,
            step_tokens=step_tokens,
            adapter_slots=adapter_slots,
            prefix_caching=prefix_caching,
            kv_token_bytes=kv_token_bytes,
            role=role,
            cost=StepCost.mean(list(islice(peers, _PEERS))),
            changed=self._changed,
        )
        self._has_roles = self._has_roles or role != "engine"
        replica.column = column
        self.columns[column] = replica
        self.replicas[name] = replica
        self.hashes[column] = _hash(name)
        self._stats[column] = replica.stats
        self._changed.add(replica)
        return replica

    def remove(self, replica: ReplicaState) -> None:
        """Remove a replica and its column from the table, so that it gets no new requests.

        Idempotent.
        """
        column = replica.column
        if column < 0:
            return
        self.forget_caches(replica)
        replica.retire()
        replica.column = -1
        del self.replicas[replica.name], self._stats[column]
        self.columns[column] = None
        heappush(self._vacant, column)
        self._clear(column)
        if self._has_roles:
            self._divide()

    def _divide(self) -> None:
        """Update `apart`: whether both a prefill replica and a replica of another role are
        available."""
        available = self.places > -np.inf
        computing = (available & (self.roles == PREFILL)).any()
        self.apart = bool(computing and (available & (self.roles != PREFILL)).any())

    def available(self) -> list[ReplicaState]:
        return [replica for replica in self.replicas.values() if replica.available]

    def routers(self) -> int:
        """Return the largest number of routers that a replica reports; 1 before any report."""
        self.refresh()
        return max(1, int(self._table[_ROUTERS, : len(self.columns)].max(initial=1)))

    # -- caches

    def send(
        self,
        replica: ReplicaState,
        choices: Sequence[int],
        decision: RoutingDecision,
        request: RoutingRequest,
        now: float,
    ) -> None:
        """Record that choices of one request are sent to a replica. The choices are booked in its
        state, and its caches are assumed to get the request's prefix and adapter.

        The first choice computes the prompt, which the others then find in the cache.

        choices: numbers of the choices. now: seconds of any clock.
        """
        uncached = request.prompt_tokens - decision.cached
        for choice in choices:
            replica.book(
                choice,
                request.prompt_tokens,
                uncached,
                request.adapter,
                batch_work=request.batch_work,
            )
            uncached = 0
        if replica.column < 0:
            return
        if request.session:
            self.sessions.note(request.session, replica.name)
        if request.adapter:
            self.popularity.count(request.adapter, now)
            held = self._held.get(replica.column, ())
            if request.adapter not in held:
                slots = replica.adapter_slots or 2**31
                self._hold(replica, (request.adapter, *held)[:slots])
        if request.prefix_hashes and replica.prefix_caching:
            self.index.add_prefix(request.prefix_hashes, replica.column)

    def add_prefix(self, replica: ReplicaState, prefix_hashes: Sequence[bytes]) -> None:
        """Record that another router has sent a prompt to a replica. prefix_hashes: the prompt's
        hashes."""
        if replica.column >= 0:
            self.index.add_prefix(prefix_hashes, replica.column)

    def remove_prefix(self, replica: ReplicaState, prefix_hashes: Sequence[bytes]) -> None:
        """Record that a replica has evicted prefixes from all tiers. prefix_hashes: their
        hashes."""
        if replica.column >= 0:
            self.index.remove(prefix_hashes, replica.column)

    def lower_prefix(self, replica: ReplicaState, prefix_hashes: Sequence[bytes]) -> None:
        """Record that a replica has moved prefixes from the device to host memory or disk.
        prefix_hashes: their hashes."""
        if replica.column >= 0:
            self.index.lower(prefix_hashes, replica.column)

    def adapter_loaded(self, seconds: float) -> None:
        """Add a measurement to `adapter_seconds`, the mean time to load an adapter on a device."""
        self.adapter_seconds += 0.1 * (min(max(seconds, 0.001), 30.0) - self.adapter_seconds)

    def adapters_of(self, replica: ReplicaState) -> tuple[str, ...]:
        """Return the adapters that a replica has or is loading; the last one is evicted next."""
        return self._held.get(replica.column, ())

    def forget_caches(self, replica: ReplicaState) -> None:
        """Mark a replica's caches as empty, because its engine is new or gone."""
        column = replica.column
        if column >= 0:
            self.index.capacity -= _share(self._stats[column])
            self._stats[column] = EngineStats()
            self._hold(replica, ())
            self.index.forget(column)

    def move_saves(self, replica: ReplicaState, tokens: int) -> bool:
        """Return whether pulling the KV blocks of `tokens` tokens from another replica is faster
        for a replica than computing them."""
        self.refresh()
        if tokens < MOVE_TOKENS or replica.column < 0:
            return False
        seconds = MOVE_SECONDS + tokens * float(self.move[replica.column])
        return seconds < tokens * float(self.terms[TOKEN, replica.column])

    def _see_adapters(self, replica: ReplicaState) -> None:
        known, sent = replica.stats.adapters, replica.sent_adapters
        held = self._held.get(replica.column, ())
        coming = [name for name in held if name in sent and name not in known]
        self._hold(replica, (*coming, *known))

    # -- columns

    def _hold(self, replica: ReplicaState, adapters: tuple[str, ...]) -> None:
        column = replica.column
        held = self._held.get(column, ())
        if adapters != held:
            for gone in set(held).difference(adapters):
                self.holders[gone].discard(column)
            for adapter in adapters:
                self.holders.setdefault(adapter, set()).add(column)
            self._held[column] = adapters
        if not adapters:
            self._held.pop(column, None)

    def refresh(self) -> None:
        """Derive the columns of the replicas whose states have changed since the last call."""
        if not self._changed:
            return
        while self._changed:
            replica = self._changed.pop()
            column = replica.column
            if column >= 0:
                stats, last = replica.stats, self._stats[column]
                self._stats[column] = stats
                if stats.total_blocks != last.total_blocks:
                    self.index.capacity += _share(stats) - _share(last)
                if stats is not last and (stats.adapters or column in self._held):
                    self._see_adapters(replica)
                self._derive(replica)
        if self._has_roles:
            self._divide()

    def _derive(self, replica: ReplicaState) -> None:
        """Derive a replica's column from its state."""
        stats, column, table = replica.stats, replica.column, self._table
        cost = replica.steps.cost
        running = stats.running
        # Other routers see the same stats and probably choose the same replica, so bookings are
        # multiplied by the number of routers.
        routers = max(1, stats.routers)
        sequences = running + stats.waiting + routers * len(replica.bookings)
        limit = stats.rows or 2**31
        crowd = min(sequences, limit)
        step = cost.base + cost.sequence * crowd
        chunk = max(1, replica.step_tokens - crowd)
        token = cost.token + step / chunk
        # Cached tokens of waiting prompts are subtracted: by the measured hit rate and, for this
        # router's booked choices, by the expected hits.
        waiting_tokens = stats.waiting_tokens - stats.batch_waiting_tokens
        queued = waiting_tokens * replica.missed + routers * replica.uncached_tokens
        # `ending`: seconds between the ends of two sequences, if all have the mean length.
        output = stats.output_tokens / stats.finished if stats.finished else OUTPUT_GUESS
        ending = step * output / max(1, crowd)
        fixed = queued * token + step * (1.5 if sequences else 1.0)
        others = sequences - stats.batch_requests  # batch work gives up its rows
        if others >= limit:
            fixed += (others - limit + 1) * ending
        if stats.asleep:
            fixed += stats.wake_seconds or _WAKE_SECONDS
        table[FIXED, column] = fixed if replica.available else np.inf
        table[TOKEN, column] = token + HARM * running * cost.token
        table[DECODE, column] = cost.base + cost.sequence * (crowd + 1 + HARM * running)
        if stats.total_blocks:
            free = stats.free_blocks * stats.block_size
            used = (stats.total_blocks - stats.free_blocks) * stats.block_size
            table[_ROOM, column] = free - queued
            table[_BEYOND, column] = ending * max(1, running) / max(1.0, used)
        else:
            table[_ROOM, column] = np.inf
            table[_BEYOND, column] = 0.0
        table[_DUE, column] = replica.seen + _STALE + 3 * stats.step_seconds if running else np.inf
        table[_ROUTERS, column], table[_ROLE, column] = stats.routers, _ROLES[replica.role]
        table[_PLACES, column] = table[_FREE_ROWS, column] = -np.inf
        table[_BATCH_PLACES, column] = -np.inf
        if replica.available:
            room, free_rows, rows, table[_BATCH_PLACES, column] = replica.room()
            table[_PLACES, column], table[_FREE_ROWS, column] = room, free_rows
            table[_ROWS, column], table[_RATE, column] = rows, replica.rate()
            table[_FIRST, column] = replica.first_seconds
        table[_STEP, column] = step
        table[_ENDING, column] = ending
        table[_LOAD, column] = min(token, replica.load_seconds(token))
        table[_MOVE, column] = replica.move_seconds() if replica.kv_token_bytes else np.inf
        table[_VICTIM, column] = 0.0
        held = self._held.get(column, ())
        if held and len(held) >= replica.adapter_slots > 0:
            table[_VICTIM, column] = self.popularity[held[-1]]


def _share(stats: EngineStats) -> int:
    """Return the number of prefix hashes whose tokens fit into a replica's prefix cache."""
    return stats.total_blocks * stats.block_size // STRIDE


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
