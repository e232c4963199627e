"""ReplicaState: one router's knowledge of one replica.

The state has the replica's last stats, the choices sent since then, the measured speed, and the
number of further choices that the replica can take. It uses no event loop, clock or connection.

A choice that was sent is *booked* until the replica's stats count it. Each frame of the replica
lists the choices that its stats count for the first time (`StepFrame.taken`). So a booking lasts
until the replica has received the choice, however long its present step is. A booking ends with the
choice's first tokens at the latest.
"""

import math
from collections.abc import Iterable

from deployments.routing.step_cost import StepCost, StepCostModel
from engine.messages import EngineStats

_RATE_SECONDS = 2.0  # time constant, in seconds, of the exponential decay in measured rates
_RATE_ENOUGH = 0.25  # minimum seconds of measurements, after decay, for a known rate
_FIRST = 0.1  # weight of the newest choice in the moving average first_seconds
_ALL_HERE = 2.0  # seconds within which all routers connect to a new replica

# Choices that may wait at the replica, as a share of its rows, so that freed rows are refilled.
_SPARE = 1 / 16
_KEPT = 8  # batch work leaves 1 / _KEPT of rows and blocks free
# Prompt tokens that may wait at the replica: as many as it computes in _AHEAD_SECONDS or in
# _AHEAD_STEPS steps, enough for its next step. More would be worse: the router can no longer
# reorder these prompts, and prompts that start together also finish together.
_AHEAD_SECONDS = 0.5
_AHEAD_STEPS = 2.5
_AHEAD_LEAST = 1 / 8  # lower bound of these tokens, as a share of a step's token budget
_AHEAD_UNKNOWN = 1 / 2  # the same share until the replica's prompt rate is measured
# The weight of a frame's hit rate is (prompt tokens looked up since the last frame) / this, at most
# 0.5.
_MISSED_TOKENS = 20_000
# (bytes, seconds) of moved KV blocks that are added to the measurements, so that the initial rate
# is 1 GB/s.
_MOVED = (64e6, 0.064)
_LOADED = 4096  # number of loaded tokens, at an assumed speed, that is added to the measurements


class FadingRate:
    """A rate per second: an exponentially decayed mean of (amount, seconds) observations.

    measured: the rate; None until observations cover _RATE_ENOUGH seconds.
    """

    __slots__ = ("_amount", "_seconds", "measured")

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0
        self.measured: float | None = None

    def observe(self, amount: float, seconds: float) -> None:
        keep = math.exp(-seconds / _RATE_SECONDS)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds
        enough = self._seconds >= _RATE_ENOUGH
        self.measured = self._amount / self._seconds if enough else None


class ReplicaState:
    """The state of one replica as one router knows it.

    step_tokens: maximum of tokens in a step of its engine.
    adapter_slots: number of adapters that fit on its device; 0: not reported.
    kv_token_bytes: bytes of a token's keys and values in all layers; 0: the replica neither sends
        nor pulls KV blocks.
    role: "prefill" computes prompts for others, "decode" continues them; "engine" does both.
    cost: assumed cost of its steps, until measured.
    changed: the fleet's set of states whose columns are out of date; this state adds itself.
    column: its column in the fleet's table; -1: none.
    available: whether requests may be sent to the replica.
    kept_out: whether the replica gets no requests until it has loaded other weights.
    """

    def __init__(
        self,
        name: str,
        pool: str = "",
        *,
        step_tokens: int,
        adapter_slots: int = 0,
        prefix_caching: bool = True,
        kv_token_bytes: float = 0.0,
        role: str = "engine",
        cost: StepCost | None = None,
        changed: "set[ReplicaState] | None" = None,
    ) -> None:
        self.name = name
        self.pool = pool
        self.column = -1
        self.available = False
        self.kept_out = False
        self.step_tokens = step_tokens
        self.adapter_slots = adapter_slots
        self.prefix_caching = prefix_caching
        self.kv_token_bytes = kv_token_bytes
        self.role = role
        self.seen = 0.0  # time of the last frame
        self.stats = EngineStats()  # the stats of the last frame
        self.steps = StepCostModel(cost or StepCost.mean(()))
        self.missed = 1.0  # share of prompt tokens that are not in its prefix cache
        self.booked_tokens = 0  # prompt tokens of booked choices
        self.uncached_tokens = 0  # booked prompt tokens expected not to be cached
        # number of a booked choice -> (its prompt tokens, those not expected in the cache)
        self.bookings: dict[int, tuple[int, int]] = {}
        self._batch_bookings: dict[int, int] = {}  # booked choice of batch work -> prompt tokens
        self._ours: set[int] = set()  # this router's choices at the replica
        self._unbegun: dict[int, str] = {}  # this router's choices without output tokens -> adapter
        # Moving average of the seconds from sending a choice to its first token.
        self.first_seconds = 0.0
        # Time of the last frame that showed that the engine is, or was since the frame before,
        # prevented from running requests.
        self._held_at = -math.inf
        self._open = False  # whether the connection is open and Serve has not removed the replica
        self._sharing = 0  # number of routers that will soon be connected to a new replica
        self._opened = 0.0
        self._changed: set[ReplicaState] = set() if changed is None else changed
        # cached result of `room`; None: out of date
        self._room: tuple[int, float, float, int] | None = None
        self._part = FadingRate()  # this router's share of a full replica's choices
        self._prompts = FadingRate()  # prompt tokens/s, while a prompt waits
        # tokens/s of prompts (computed or cached) and outputs, while the replica is full
        self._work = FadingRate()

    # -- the connection

    def opened(self, sharing: int, now: float) -> None:
        """Mark the replica as available for choices, after its connection was opened.

        sharing: number of routers that other replicas report. They will soon connect to this
            replica; until then its stats report fewer routers. now: seconds of any clock.
        """
        self._open, self.available = True, not self.stats.draining and not self.kept_out
        self._sharing, self._opened = sharing, now
        self._touch()

    def keep_out(self, kept_out: bool) -> None:
        """Set `kept_out`: whether the replica gets no requests until it has loaded other
        weights."""
        if kept_out != self.kept_out:
            self.kept_out = kept_out
            self.available = self._open and not self.stats.draining and not kept_out
            self._touch()

    def retire(self) -> None:
        """Mark the replica as unavailable for new requests."""
        self._open = self.available = False
        self._touch()

    def _touch(self) -> None:
        """Mark the values derived from this state, `room` and the fleet's column, as out of
        date."""
        self._room = None
        self._changed.add(self)

    def lost(self) -> None:
        """Mark the replica as unavailable and drop its stats and bookings, after its connection was
        lost.

        Measurements are kept.
        """
        self._open = self.available = False
        self._touch()
        self.stats = EngineStats()
        self.booked_tokens = self.uncached_tokens = 0
        self.bookings.clear()
        self._batch_bookings.clear()
        self._ours.clear()
        self._unbegun.clear()

    # -- choices sent to the replica

    @property
    def held(self) -> int:
        """The number of this router's choices at the replica."""
        return len(self._ours)

    def book(
        self,
        choice: int,
        tokens: int,
        uncached: int,
        adapter: str = "",
        *,
        batch_work: bool = False,
    ) -> None:
        """Add a choice that is sent to the replica to the bookings, until the replica's stats count
        it.

        choice: number of the choice.
        tokens: number of its prompt tokens.
        uncached: number of prompt tokens that are not expected in the cache.
        """
        self._room = None
        self._changed.add(self)
        self.bookings[choice] = tokens, uncached
        if batch_work:
            self._batch_bookings[choice] = tokens
        self._ours.add(choice)
        self._unbegun[choice] = adapter
        self.booked_tokens += tokens
        self.uncached_tokens += uncached

    def settle(self, choices: Iterable[int]) -> None:
        """Drop the bookings of choices that the stats count now, or that have ended. Idempotent."""
        settled = False
        for choice in choices:
            booking = self.bookings.pop(choice, None)
            if booking is not None:
                self.booked_tokens -= booking[0]
                self.uncached_tokens -= booking[1]
                self._batch_bookings.pop(choice, None)
                settled = True
        if settled:
            self._touch()

    def begun(self, choice: int) -> None:
        """Drop a choice's booking, as its first tokens have arrived."""
        if self._unbegun.pop(choice, None) is not None:
            self._touch()
        self.settle((choice,))

    def measure_first(self, sent: float, now: float) -> None:
        """Add a measurement to the mean time from sending a choice to its first token.

        Choices that have waited for the end of a pause, a sleep or an update are ignored, as their
        wait does not depend on the engine's speed.

        sent, now: seconds of the clock that `opened` uses.
        """
        if sent > self._held_at:
            self.first_seconds += _FIRST * (now - sent - self.first_seconds)

    def unbook(self, choice: int) -> None:
        """Forget a choice that ended, moved or was aborted. Idempotent."""
        self._ours.discard(choice)
        self.begun(choice)

    @property
    def sent_adapters(self) -> set[str]:
        """The adapters of this router's choices without output tokens; these adapters may still be
        loading."""
        return {adapter for adapter in self._unbegun.values() if adapter}

    # -- frames of the replica

    def observe(self, stats: EngineStats, taken: Iterable[int], now: float) -> None:
        """Update the state from a frame of the replica.

        taken: numbers of the choices that the stats count for the first time.
        now: seconds of the clock that `opened` uses.
        """
        self._room = None
        self._changed.add(self)
        self.seen = now
        self.steps.observe_frame(stats)
        last, self.stats = self.stats, stats
        if _held(last) or _held(stats) or _holds(last) != _holds(stats):
            self._held_at = now
        self.available = self._open and not stats.draining and not self.kept_out
        if now > self._opened + _ALL_HERE:
            self._sharing = 0
        asked = stats.prefix_queries - last.prefix_queries
        if asked > 0:
            hit = (stats.prefix_hits - last.prefix_hits) / asked
            self.missed += min(0.5, asked / _MISSED_TOKENS) * (1 - hit - self.missed)
        seconds = stats.busy_seconds - last.busy_seconds
        if stats.step > last.step and seconds > 0:
            self._measure(last, stats, seconds)
        self.settle(taken)

    def _measure(self, last: EngineStats, stats: EngineStats, seconds: float) -> None:
        computed = stats.prompt_tokens - last.prompt_tokens
        if last.waiting_tokens > last.batch_waiting_tokens:
            self._prompts.observe(computed, seconds)
        # Batch work does not make a replica full, as other requests take its rows.
        others = last.running + last.waiting - last.batch_requests
        waiting = last.waiting > 0 and not last.batch_requests
        waiting = waiting or last.waiting_tokens > last.batch_waiting_tokens
        if waiting or 0 < last.rows <= others:
            cached = stats.prefix_hits - last.prefix_hits
            sampled = stats.output_tokens - last.output_tokens
            self._work.observe(computed + cached + sampled, seconds)
            part = min(1.0, len(self._ours) / (last.running + last.waiting))
            self._part.observe(part * seconds, seconds)

    def move_seconds(self) -> float:
        """Return the seconds per token for pulling KV blocks from another replica to this one; inf
        if this replica cannot pull blocks.

        The time of failed pulls is distributed over the tokens of successful ones.
        """
        if not self.kv_token_bytes:
            return math.inf
        stats = self.stats
        rate = (stats.moved_bytes + _MOVED[0]) / (stats.move_seconds + _MOVED[1])
        failed = (stats.failed_moves + 1) / (stats.moves + 2) if stats.failed_moves else 0.0
        return self.kv_token_bytes / rate / max(0.01, 1 - failed)

    def load_seconds(self, token: float) -> float:
        """Return the seconds per token for loading KV blocks from host memory or disk to the
        device, measured by requests' waiting times.

        token: seconds to compute a token; a tenth of it is assumed until loads were measured.
        """
        stats = self.stats
        tokens = stats.host_kv_loaded_tokens
        seconds = stats.host_kv_wait_seconds + stats.disk_kv_wait_seconds
        return (seconds + _LOADED * token / 10) / (tokens + _LOADED)

    # -- number of further choices

    def room(self) -> tuple[int, float, float, int]:
        """Return four numbers: further choices that this router may send, its share of the free
        rows, its share of all rows, and further choices of batch work that it may send. A share is
        inf while the replica's number of rows is unknown.

        If the number of further choices is zero or less, none may be sent. Routers do not know of
        each other's requests. Each uses its share of the free rows, and learns from the next frame
        how many are left. It also uses its share of the choices that may wait at the replica, so
        that no router waits for the others.

        The share of free rows is 0 while memory is short. If it is negative, its absolute value is
        the number of this router's choices that wait at the replica for a row. Other routers use
        their shares at the same time, which only the next frame shows.
        """
        if self._room is not None:
            return self._room
        stats, booked = self.stats, len(self.bookings) - len(self._batch_bookings)
        routers = max(1, stats.routers, self._sharing)
        booked_tokens = self.booked_tokens - sum(self._batch_bookings.values())
        waiting_tokens = stats.waiting_tokens - stats.batch_waiting_tokens
        tokens = waiting_tokens + booked_tokens
        waiting = stats.waiting - max(0, stats.batch_requests - stats.running)
        # The engine preempts batch work, so its rows count as free.
        rows_left = stats.rows - stats.running - stats.waiting + stats.batch_requests
        # While choices wait for memory, a free row is useless.
        short = stats.total_blocks > 0 and tokens > stats.free_blocks * stats.block_size
        short = short and not stats.batch_requests
        if short:
            free_rows: float = 0
        elif not stats.rows:
            free_rows = math.inf
        else:
            free_rows = -(-rows_left // routers) - booked
        backlog = waiting_tokens + routers * booked_tokens
        spare = max(1, max(2, int(stats.rows * _SPARE)) // routers)
        free = -waiting if short else rows_left
        ahead = self._prompts_ahead()
        if backlog and backlog > ahead:
            room = 0
        elif not stats.rows:
            room = spare
        elif free > 0:
            # Booked choices count against this router's share, not against all rows. Otherwise each
            # of two routers would repeatedly take half of the remaining rows, and finally all of
            # them.
            room = spare - (-free // routers) - booked
        else:
            over = booked - free
            room = spare - min(over, over * len(self._unbegun) // max(1, waiting + booked))
        # Batch work leaves 1 / _KEPT of rows and memory free, in which other requests can start
        # without preempting batch work.
        batch_room = room
        if stats.rows:
            tokens = stats.waiting_tokens + routers * self.booked_tokens
            free_tokens = (stats.free_blocks - stats.total_blocks // _KEPT) * stats.block_size
            kept_rows = -(-stats.rows // _KEPT) if stats.rows > 1 else 0
            batch_rows = stats.rows - stats.running - stats.waiting - kept_rows
            batch_room = min(room, -(-batch_rows // routers) - len(self.bookings))
            if tokens > ahead or (stats.total_blocks and tokens > free_tokens):
                batch_room = 0
        rows = -(-stats.rows // routers) or math.inf
        self._room = room, free_rows, rows, batch_room
        return self._room

    def _prompts_ahead(self) -> float:
        """Return the maximum number of prompt tokens that may wait at the replica."""
        rate = self._prompts.measured
        if rate is None:
            return _AHEAD_UNKNOWN * self.step_tokens
        seconds = max(_AHEAD_SECONDS, _AHEAD_STEPS * self.stats.step_seconds)
        return max(_AHEAD_LEAST * self.step_tokens, rate * seconds)

    def rate(self) -> float:
        """Return the tokens/s (prompts and outputs) that this router gets from the replica when it
        is full; inf until the replica was full for the first time.
        """
        rate, part = self._work.measured, self._part.measured
        if rate is None or part is None:
            return math.inf
        # A router that sends few requests now can get at least an equal share.
        return rate * max(part, 1 / max(1, self.stats.routers))


def _held(stats: EngineStats) -> bool:
    """Whether an engine cannot run requests, because it is paused, asleep or without weights."""
    return stats.paused or stats.asleep or stats.weights_dropped


def _holds(stats: EngineStats) -> tuple[int, int]:
    """Return the numbers of sleeps and updates that have ended since the engine's start."""
    return stats.wakes, stats.weight_updates
