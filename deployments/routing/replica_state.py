"""ReplicaState: all that one router knows of one replica: its last stats, what was sent since and
is not in them yet, how fast the replica works, and how much more it can be given. Pure: no loop, no
clock, no connection.

A request that was sent is *booked* until the replica's stats count it. The replica's frame names
the requests that its stats count for the first time (`StepFrame.taken`). So a booking lasts as long
as the replica needs to take the request, through a step of any length. It ends with the request's
first tokens at the latest.
"""

import math
from collections.abc import Iterable

from deployments.routing.step_cost import StepCost, StepCostModel
from engine.messages import EngineStats

_RATE_SECONDS = 2.0  # how long a measurement of a rate counts
_RATE_ENOUGH = 0.25  # seconds of measurement that make a rate
_FIRST = 0.1  # weight of the newest choice's time to its first token
_ALL_HERE = 2.0  # seconds after which all routers have connected to a new replica

_SPARE = (
    1 / 16
)  # of the rows: choices that may wait at the replica, so that a freed row is filled at once
# Prompts that may wait at the replica: enough for its next step, and no more. A prompt that waits
# there is out of the router's order, and prompts that begin together end together.
_AHEAD_SECONDS = 0.5
_AHEAD_STEPS = 2.5  # at least, of what it computes in one beside its decodes
_AHEAD_LEAST = 1 / 8  # of a step's budget, at least
_AHEAD_UNKNOWN = 1 / 2  # of a step's budget, before a prompt has waited there
_MISSED_TOKENS = 20_000  # prompt tokens looked up that make half of the hit rate


class FadingRate:
    """An amount a second, as a mean in which older seconds fade."""

    __slots__ = ("_amount", "_seconds")

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        keep = math.exp(-seconds / _RATE_SECONDS)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds

    @property
    def measured(self) -> float | None:
        return self._amount / self._seconds if self._seconds >= _RATE_ENOUGH else None


class ReplicaState:
    """The state of one replica as one router knows it.

    step_tokens: tokens of a step of its engine, at most.
    adapter_slots: adapters on its device; 0: not reported.
    cost: what its steps are taken to cost until they were measured.
    changed: the fleet's set of states whose columns are out of date; this state adds itself.
    column: column in the fleet's table; -1: in none.
    available: whether requests may be sent to the replica.
    """

    def __init__(
        self,
        name: str,
        pool: str = "",
        *,
        step_tokens: int,
        adapter_slots: int = 0,
        prefix_caching: bool = True,
        cost: StepCost | None = None,
        changed: "set[ReplicaState] | None" = None,
    ) -> None:
        self.name = name
        self.pool = pool
        self.column = -1
        self.available = False
        self.step_tokens = step_tokens
        self.adapter_slots = adapter_slots
        self.prefix_caching = prefix_caching
        self.seen = 0.0  # when the last frame came
        self.stats = EngineStats()  # as published
        self.steps = StepCostModel(cost or StepCost.mean(()))
        self.missed = 1.0  # share of prompt tokens that its prefix cache does not have
        self.booked_tokens = 0  # prompts
        self.uncached_tokens = 0  # of these, those that its cache was not expected to have
        self._booked: dict[int, tuple[int, int]] = {}  # choice -> its part of these two
        self._ours: set[int] = set()  # choices there that are this router's
        self._unbegun: dict[int, str] = {}  # of these, those without a token -> adapter
        self.first_seconds = 0.0  # from sending a choice to its first token; newer ones count more
        self._open = False  # connected, and in service
        self._sharing = 0  # routers that a new replica will have soon
        self._opened = 0.0
        self._changed: set[ReplicaState] = set() if changed is None else changed
        self._room: int | None = None  # until something changes
        self._free_rows = 0.0  # counted with the room
        self._part = FadingRate()  # this router's choices among all there, while it is full
        self._prompts = FadingRate()  # while a prompt waits
        self._work = FadingRate()  # prompts (computed or found) and outputs, while it is full

    # -- the connection

    def opened(self, sharing: int, now: float) -> None:
        """Note that the connection is new.

        sharing: number of routers at the other replicas. These will connect here too, but the first
            to do so is told that it is the only one.
        """
        self._open, self.available = True, not self.stats.draining
        self._sharing, self._opened = sharing, now
        self._touch()

    def retire(self) -> None:
        """Note that nothing new may be sent to the replica."""
        self._open = self.available = False
        self._touch()

    def _touch(self) -> None:
        """Forget what was derived from this state."""
        self._room = None
        self._changed.add(self)

    def lost(self) -> None:
        """Note that the connection is gone, and the requests with it. Measurements stay."""
        self._open = self.available = False
        self._touch()
        self.stats = EngineStats()
        self.booked_tokens = self.uncached_tokens = 0
        self._booked.clear()
        self._ours.clear()
        self._unbegun.clear()

    # -- what is sent

    @property
    def booked(self) -> int:
        """The number of choices that were sent and are not in the replica's stats."""
        return len(self._booked)

    @property
    def held(self) -> int:
        """The number of this router's choices at the replica."""
        return len(self._ours)

    def book(self, choice: int, tokens: int, uncached: int, adapter: str = "") -> None:
        """Note that a choice was sent.

        tokens: tokens of its prompt.
        uncached: number of these tokens to be computed.
        """
        self._room = None
        self._changed.add(self)
        self._booked[choice] = tokens, uncached
        self._ours.add(choice)
        self._unbegun[choice] = adapter
        self.booked_tokens += tokens
        self.uncached_tokens += uncached

    def settle(self, choices: Iterable[int]) -> None:
        """Drop the bookings of choices that the stats count now, or that are gone. Idempotent."""
        settled = False
        for choice in choices:
            booking = self._booked.pop(choice, None)
            if booking is not None:
                self.booked_tokens -= booking[0]
                self.uncached_tokens -= booking[1]
                settled = True
        if settled:
            self._touch()

    def begun(self, choice: int) -> None:
        """Note that the choice's first tokens have come."""
        if self._unbegun.pop(choice, None) is not None:
            self._touch()
        self.settle((choice,))

    def measure_first(self, seconds: float) -> None:
        """Note the time from sending a choice to its first token."""
        self.first_seconds += _FIRST * (seconds - self.first_seconds)

    def unbook(self, choice: int) -> None:
        """Note that the choice ended, moved or was taken back. Idempotent."""
        self._ours.discard(choice)
        self.begun(choice)

    @property
    def sent_adapters(self) -> set[str]:
        """Adapters of choices that have not begun: they are on the device, or on their way."""
        return {adapter for adapter in self._unbegun.values() if adapter}

    # -- what it publishes

    def observe(self, stats: EngineStats, taken: Iterable[int], now: float) -> None:
        """Note a frame of the replica.

        taken: choices that its stats count for the first time.
        now: seconds of the clock that `opened` uses.
        """
        self._room = None
        self._changed.add(self)
        self.seen = now
        self.steps.observe_frame(stats)
        last, self.stats = self.stats, stats
        self.available = self._open and not stats.draining
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
        if last.waiting_tokens:
            self._prompts.observe(computed, seconds)
        if last.waiting or last.waiting_tokens or 0 < last.rows <= last.running:
            cached = stats.prefix_hits - last.prefix_hits
            sampled = stats.output_tokens - last.output_tokens
            self._work.observe(computed + cached + sampled, seconds)
            part = min(1.0, len(self._ours) / (last.running + last.waiting))
            self._part.observe(part * seconds, seconds)

    # -- what it can be given

    @property
    def routers(self) -> int:
        """Routers that share the replica, or soon will."""
        return max(1, self.stats.routers, self._sharing)

    @property
    def rows(self) -> float:
        """The router's share of the choices that the replica can run at once; inf while unknown."""
        return -(-self.stats.rows // self.routers) or math.inf

    def room(self) -> int:
        """Return how many more choices this router should send; none if it is not positive.

        Routers do not know of each other's requests. Each router takes its share of the free rows
        and sees in the next frame what is left. It sends its share of the choices that wait beyond
        the rows, too, so each router gets its turn.
        """
        if self._room is None:
            self._room, self._free_rows = self._count_room()
        return self._room

    def free_rows(self) -> float:
        """Return this router's share of the rows that no choice has or waits for, 0 while memory is
        short. Negative: its choices that wait there for a row. The other routers fill their shares
        meanwhile, unseen until the next frame."""
        if self._room is None:
            self._room, self._free_rows = self._count_room()
        return self._free_rows

    def _count_room(self) -> tuple[int, float]:
        """Return the room and the free rows."""
        stats, booked = self.stats, len(self._booked)
        routers = max(1, stats.routers, self._sharing)
        tokens = stats.waiting_tokens + self.booked_tokens
        rows_left = stats.rows - stats.running - stats.waiting
        # Where choices wait for memory, a free row is of no use.
        short = stats.total_blocks > 0 and tokens > stats.free_blocks * stats.block_size
        if short:
            free_rows: float = 0
        elif not stats.rows:
            free_rows = math.inf
        else:
            free_rows = -(-rows_left // routers) - booked
        backlog = stats.waiting_tokens + routers * self.booked_tokens
        if backlog and backlog > self._prompts_ahead():
            return 0, free_rows
        spare = max(1, max(2, int(stats.rows * _SPARE)) // routers)
        if not stats.rows:
            return spare, free_rows
        free = -stats.waiting if short else rows_left
        if free > 0:
            # What was sent since the frame counts against this router's share, not against all
            # rows. Otherwise a router takes half of what is left each time, and two routers take
            # all rows each.
            return spare - (-free // routers) - booked, free_rows
        over, waiting = booked - free, stats.waiting + booked
        room = spare - min(over, over * len(self._unbegun) // max(1, waiting))
        return room, free_rows

    def _prompts_ahead(self) -> float:
        """Return how many prompt tokens may wait at the replica."""
        rate = self._prompts.measured
        if rate is None:
            return _AHEAD_UNKNOWN * self.step_tokens
        seconds = max(_AHEAD_SECONDS, _AHEAD_STEPS * self.stats.step_seconds)
        return max(_AHEAD_LEAST * self.step_tokens, rate * seconds)

    def rate(self) -> float:
        """Return the tokens/s, of prompts and outputs, that the replica gives this router when it
        is full; inf before it was seen full."""
        rate, part = self._work.measured, self._part.measured
        if rate is None or part is None:
            return math.inf
        # A router that had nothing to send would get its share if it had.
        return rate * max(part, 1 / max(1, self.stats.routers))
