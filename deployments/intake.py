"""Intake: how much one replica can be given, by what its frames tell. Pure: no loop, no clock."""

import math

from engine.messages import EngineStats

_RATE_SECONDS = 2.0  # how long a measurement of a rate counts
_RATE_ENOUGH = 0.25  # seconds of measurement that make a rate
_ALL_HERE = 2.0  # seconds after which all routers have connected to a new replica
_SETTLED = 0.02  # seconds after which a frame knows of a choice that was sent; or two steps

_SPARE = 1 / 16  # of its rows: what it has waiting, so that a freed row is filled at once
_AHEAD_SECONDS = 2.0  # of prompts that it has waiting; and at least so many steps
_AHEAD_STEPS = 2


class Rate:
    """An amount a second; older seconds fade."""

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


class Intake:
    """One replica as the router's queue sees it: its last frame, what was sent since, and how fast
    it works when it has all the work that it can take.

    step_tokens: that it computes in a step at most.
    """

    def __init__(self, step_tokens: int) -> None:
        self.stats = EngineStats()
        self._step_tokens = step_tokens
        self._room: int | None = None  # until something changes
        self._booked: dict[int, tuple[float, int]] = {}  # choice -> (when sent, prompt tokens)
        self._booked_tokens = 0
        self._ours: set[int] = set()  # choices there that are this router's
        self._unbegun: set[int] = set()  # of these, those that have brought nothing yet
        self._sharing = 0  # routers that a new replica will have soon
        self._opened = 0.0
        self._part = Rate()  # this router's choices among all there, while it is full
        self._prompts = Rate()  # while a prompt waits
        self._work = Rate()  # prompts (computed or found) and outputs, while it is full

    def opened(self, sharing: int, now: float) -> None:
        """The connection is new. sharing: routers at other replicas. They connect at once, and the
        first to do so is told that it is alone."""
        self._sharing, self._opened = sharing, now

    def book(self, choice: int, prompt_tokens: int, now: float) -> None:
        """A choice was sent. It counts until it begins, or a frame has it among the waiting."""
        self._room = None
        self._booked[choice] = (now, prompt_tokens)
        self._ours.add(choice)
        self._unbegun.add(choice)
        self._booked_tokens += prompt_tokens

    def unbook(self, choice: int) -> None:
        """It is there no more. Idempotent."""
        self._ours.discard(choice)
        self.begun(choice)

    def begun(self, choice: int) -> None:
        """Its first tokens have come."""
        self._room = None
        self._unbegun.discard(choice)
        self._settle(choice)

    def _settle(self, choice: int) -> None:
        found = self._booked.pop(choice, None)
        if found is not None:
            self._booked_tokens -= found[1]

    def observe(self, stats: EngineStats, now: float) -> None:
        """A frame has come."""
        self._room = None
        last, self.stats = self.stats, stats
        if now > self._opened + _ALL_HERE:
            self._sharing = 0
        seconds = stats.busy_seconds - last.busy_seconds
        if stats.step > last.step and seconds > 0:
            computed = stats.prompt_tokens - last.prompt_tokens
            if last.waiting_tokens:
                self._prompts.observe(computed, seconds)
            if last.waiting or 0 < last.rows <= last.running:
                found = stats.prefix_hits - last.prefix_hits
                sampled = stats.output_tokens - last.output_tokens
                self._work.observe(computed + found + sampled, seconds)
                part = min(1.0, len(self._ours) / (last.running + last.waiting))
                self._part.observe(part * seconds, seconds)
        settled = now - max(_SETTLED, 2 * stats.step_seconds)
        while self._booked:
            choice, (sent, _) = next(iter(self._booked.items()))
            if sent >= settled:
                break
            self._settle(choice)

    def lost(self) -> None:
        """The connection is gone, and what was there with it. Its rates stay."""
        self._room = None
        self.stats = EngineStats()
        self._booked.clear()
        self._booked_tokens = 0
        self._ours.clear()
        self._unbegun.clear()

    @property
    def rows(self) -> float:
        """Choices that it can run at once."""
        return self.stats.rows or math.inf

    def room(self) -> int:
        """How many more choices this router should send; none if it is not positive.

        Routers do not know of each other. Each takes its share of the free rows, and sees in the
        next frame what is left of them; of those that wait beyond the rows it sends its share, too,
        and so each gets its turn.
        """
        if self._room is None:
            self._room = self._count_room()
        return self._room

    def _count_room(self) -> int:
        stats = self.stats
        tokens = stats.waiting_tokens + self._booked_tokens
        if tokens > max(
            _AHEAD_STEPS * self._step_tokens, (self._prompts.measured or 0.0) * _AHEAD_SECONDS
        ):
            return 0
        booked = len(self._booked)
        routers = max(1, stats.routers, self._sharing)
        spare = max(1, max(2, int(stats.rows * _SPARE)) // routers)
        if not stats.rows:
            return spare
        free = stats.rows - stats.running - stats.waiting
        if tokens > self._free_tokens:  # they wait for memory, not for their turn
            free = -stats.waiting
        if free > 0:
            # What was sent since the frame is of this router's share, not of all rows: or it takes
            # half of what is left each time, and two routers take all rows each.
            return spare - (-free // routers) - booked
        over, waiting = booked - free, stats.waiting + booked
        return spare - min(over, over * len(self._unbegun) // max(1, waiting))

    def free_rows(self) -> float:
        """Rows that nobody has or waits for; none while memory is what is short."""
        stats = self.stats
        if stats.waiting_tokens + self._booked_tokens > self._free_tokens:
            return 0
        return max(0, self.rows - stats.running - stats.waiting - len(self._booked))

    @property
    def _free_tokens(self) -> int:
        stats = self.stats
        return stats.free_blocks * stats.block_size if stats.total_blocks else 2**62

    def rate(self) -> float:
        """Tokens/s, of prompts and outputs, that it gives this router when it is full; inf before
        it was seen full."""
        rate, part = self._work.measured, self._part.measured
        if rate is None or part is None:
            return math.inf
        # One that had nothing to send would get its share if it had.
        return rate * max(part, 1 / max(1, self.stats.routers))
