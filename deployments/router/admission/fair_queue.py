"""FairQueue: decides which requests a router admits, and in which order they go to replicas.

It also computes the Retry-After of refused requests. The module uses no Ray, event loop or clock;
`now` is in monotonic seconds.

  request -- refused: 429 or 503, with the seconds until there is room
    |
    +-- a replica has room and no request waits ----------------> replica
    |                                                              ^
    +-> FairQueue, in the order of (fair share, priority) -- room -+

Requests wait here rather than in the engines. Here requests can still be reordered, end at their
deadline, and go to whichever replica has room first. An engine gets the requests that its batch can
hold and a few more, so that it never idles.

Work is counted in tokens: those of the prompt and the expected output. Limits in seconds are work
divided by the measured rate of the replicas. So a fast pool has a longer queue than a slow one, and
needs no tuning.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nlargest
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Fields = NDArray[np.float64]  # a value for each replica

# Expected output tokens of a request without a limit, until a request has ended. The value exceeds
# the guess of routing (`OUTPUT_GUESS`), to admit too little rather than too much.
_GUESS = 256
_LEARN = 0.05  # weight of the newest output length in the moving average
# A choice longer than expected is assumed to generate this share of the expected tokens more.
_OVERDUE = 0.1

# The waiting work of one key may be this many times the queue's free room.
_SHARE = 4.0
# Priorities are clamped to +-3 when requests are admitted.
_LEVELS = 3
# Priorities are clamped to +-16 when requests are ordered.
_STEPS = 16
_CALM = 0.25  # an overload has ended when less than this x queue_seconds of work waits
_WHOLE = 1.5  # maximum time to the first token, queue plus engine, in units of queue_seconds
_LEAST = 0.1  # wait that is always allowed, however slow the engine is, in units of queue_seconds
_BURST = 4.0  # maximum wait while a burst fills the batch, in units of queue_seconds
_MARGIN = 1.25  # a deadline must be at least this many expected waits away
_PROMISED = 0.5  # share of the rate that is reserved for retries of refused requests
# Share of a Retry-After that is random, so that refused requests do not return together.
_JITTER = 0.25
_SLOWEST = 60.0  # longest Retry-After in seconds; official clients ignore a longer one


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The limits of one router's queue.

    queue_seconds: maximum of the waiting work, in seconds at the measured rate.
    queue_tokens: maximum of the waiting work in tokens, whatever the rate.
    age_seconds: seconds of waiting that outweigh one step of priority.
    """

    queue_seconds: float = 1.5
    queue_tokens: int = 1_000_000
    age_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of the replicas for one router, from which waiting times are estimated.

    rate: tokens/s; inf while unknown.
    rows: number of choices that the replicas can run concurrently.
    free: unused rows minus the choices that wait at the replicas for a row; may be negative.
    endings: expected seconds until each choice at a replica ends, ascending; empty if unknown.
    first_seconds: seconds from sending a choice to a replica to its first token.
    """

    rate: float = math.inf
    rows: float = math.inf
    free: float = math.inf
    endings: Sequence[float] = ()
    first_seconds: float = 0.0

    @classmethod
    def over(
        cls,
        rates: Fields,
        rows: Fields,
        free: Fields,
        first_seconds: Fields,
        endings: Sequence[float] = (),
    ) -> "Capacity":
        """Return the combined capacity of all replicas: each field summed, but first_seconds
        averaged.

        A replica with an unknown rate is assumed to have the mean rate of the others.

        rates, rows, free, first_seconds: fields of Capacity, one value per replica.
        endings: the field `endings` of Capacity, over all replicas.
        """
        count = len(rates)
        places, unused = float(rows.sum()), float(free.sum())
        first = float(first_seconds.sum()) / max(1, count)
        known = rates[rates < math.inf]
        if not len(known):
            return cls(math.inf, places or math.inf, unused, endings, first)
        rate = max(1.0, float(known.sum()) * count / len(known))
        return cls(rate, places, unused, endings, first)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason to refuse a request.

    code: "overloaded" (all keys together have too much work waiting), "rate_limit_exceeded" (the
        request's key alone has too much) or "deadline_exceeded".
    seconds: seconds until the request would be admitted; 0 for a deadline.
    """

    code: str
    seconds: float


class OutputEstimate:
    """An estimate of output tokens, learnt from requests with a similar limit."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}  # mean output tokens, by the bit length of the limit

    def expected(self, limit: int) -> float:
        """Return the expected output tokens of a request.

        limit: max_tokens, or the remaining context length.
        """
        return min(limit, self._means.get(limit.bit_length(), _GUESS))

    def left(self, limit: int, tokens: int) -> float:
        """Return the expected number of further tokens of a request.

        limit: max_tokens, or the context length remaining after the prompt.
        tokens: output tokens so far.
        """
        expected = self.expected(limit)
        return max(expected - tokens, _OVERDUE * expected)

    def learn(self, limit: int, tokens: int) -> None:
        size = limit.bit_length()
        mean = self._means.get(size, tokens)
        self._means[size] = mean + _LEARN * (tokens - mean)


class Ticket(Generic[T]):
    """A request's entry in the queue.

    item: the request; None after its removal from the queue.
    key: the API key whose share the request counts against.
    tokens: expected work of the request. sequences: number of its choices.
    start: virtual time at which the key's earlier requests have been served.
    """

    __slots__ = ("item", "key", "sequences", "start", "tokens")

    def __init__(self, item: T, key: str, tokens: float, sequences: int, start: float) -> None:
        self.item: T | None = item  # None: removed from the queue
        self.key = key
        self.tokens = tokens
        self.sequences = sequences
        self.start = start


class _Key:
    __slots__ = ("finish", "tokens", "waiting")

    def __init__(self) -> None:
        self.finish = 0.0  # virtual time at which the key's last request has been served
        self.tokens = 0.0  # tokens of its waiting requests
        self.waiting = 0


class FairQueue(Generic[T]):
    """The queue of one router's waiting requests, fair between API keys.

    Order: start-time fair queueing. Virtual time is the number of tokens served to each busy key. A
        request starts where its key's last request ends, or now if the key was idle. So a key that
        sends ten times as much delays only itself, and an idle key earns no credit. Each step of
        priority shifts a request by the tokens that its key is served in age_seconds. Waiting time
        outweighs priority, so no request starves.

    Bound: the waiting work of a key is at most `_SHARE` times the queue's free room, halved for
        each step of lower priority. So no key can fill the queue, a key without waiting requests
        always finds room, and the lowest priority is refused first. An admitted request is not
        refused later.

    random: returns uniform numbers in [0, 1), for the jitter of Retry-After.
    """

    def __init__(self, limits: AdmissionLimits, random: Callable[[], float]) -> None:
        self.tokens = 0.0
        self.sequences = 0
        self._limits = limits
        self._random = random
        self._heap: list[tuple[float, int, Ticket[T]]] = []
        self._live = 0  # number of tickets in the heap whose requests still wait
        self._count = 0
        self._keys: dict[str, _Key] = {}
        self._busy = 0  # keys with requests waiting
        self._now = 0.0  # virtual time
        self._long_since = math.inf  # time since when over queue_seconds of work waits
        self._calm_since = math.inf  # time since when at most `_CALM` of that work waits
        self._asked = -math.inf  # time of the last admission check
        self._promised = 0.0  # time until which future room is reserved for refused requests

    def __len__(self) -> int:
        return self._live

    @property
    def keys(self) -> int:
        """The number of remembered keys, for tests."""
        return len(self._keys)

    def longest(self, count: int) -> list[tuple[str, int, float]]:
        """Return (key, number of waiting requests, their tokens) of the `count` keys with the most
        waiting tokens."""
        waiting = ((state.tokens, key, state) for key, state in self._keys.items() if state.waiting)
        most = nlargest(count, waiting, key=lambda found: found[0])
        return [(key, state.waiting, tokens) for tokens, key, state in most]

    # -- requests that come in

    def refusal(
        self,
        key: str,
        priority: int,
        tokens: float,
        now: float,
        capacity: Capacity,
        deadline: float | None = None,
    ) -> Refusal | None:
        """Return the reason to refuse a new request; None if the request may enter the queue.

        tokens: expected work of the request.
        deadline: monotonic seconds; None: no deadline.
        """
        rate = capacity.rate
        state = self._keys.get(key)
        mine = state.tokens if state is not None else 0.0
        if deadline is not None and now + _MARGIN * self._ahead(mine) / rate > deadline:
            return Refusal("deadline_exceeded", 0.0)
        if rate == math.inf and self.sequences >= capacity.rows:
            return Refusal("overloaded", 1.0)  # rate unknown: admit only what can run at once
        if not self._live:
            return self._refusal_of_first(capacity)
        room = self._bound(capacity, now) - self.tokens
        share: float = _SHARE * 0.5 ** max(-_LEVELS, min(_LEVELS, priority))
        if room > 0 and not mine and priority <= 0:
            return None
        late = self._row_seconds(mine, capacity) - self._patience(capacity, _WHOLE)
        excess = mine + tokens - share * room
        if excess <= 0 and late <= 0:
            return None
        # Room grows as the queue drains. The share `part` of the waiting tokens belongs to this
        # key.
        part = mine / self.tokens
        seconds = max(late, excess / (share + part) / rate)
        # Each refused request reserves part of that room, so the next one gets a later time.
        at = max(now + seconds, min(self._promised, now + _SLOWEST))
        self._promised = at + tokens / (_PROMISED * rate)
        seconds = min(_SLOWEST, (at - now) * (1.0 + _JITTER * self._random()))
        fair = self._busy < 2 or part * self._busy <= 1.0
        return Refusal("overloaded" if fair else "rate_limit_exceeded", max(1.0, seconds))

    def _refusal_of_first(self, capacity: Capacity) -> Refusal | None:
        """Return the reason to refuse a request while the queue is empty; None if it may enter.

        No other request waits behind it, so it is refused only if it would wait longer than in a
        burst: `_BURST` times queue_seconds, including its time in the engine.
        """
        late = self._row_seconds(0.0, capacity) - self._patience(capacity, _BURST, _BURST)
        if late <= 0:
            return None
        return Refusal("overloaded", max(1.0, min(_SLOWEST, late)))

    def _ahead(self, mine: float) -> float:
        """Return the waiting tokens that are served before a new request of a key.

        mine: the key's own waiting tokens.
        """
        return min(self.tokens, mine * self._busy)

    def _patience(
        self, capacity: Capacity, most: float = 1.0, with_engine: float = _WHOLE
    ) -> float:
        """Return the seconds that a request may wait in the queue, excluding its time in the
        engine.

        most: limit of the wait, in units of queue_seconds.
        with_engine: limit of wait and engine time together, in units of queue_seconds.
        """
        seconds = self._limits.queue_seconds
        patience = with_engine * seconds - capacity.first_seconds
        return max(_LEAST * seconds, min(most * seconds, patience))

    def _row_seconds(self, mine: float, capacity: Capacity) -> float:
        """Return the expected seconds until a row is free for a new request of a key.

        Requests that began together end together, so an estimate from the mean rate would be wrong.

        mine: the key's own waiting tokens.
        """
        if not capacity.endings:
            return 0.0
        ahead = self.sequences * self._ahead(mine) / self.tokens if self.tokens else 0.0
        rank = ahead - capacity.free
        return capacity.endings[min(int(rank), len(capacity.endings) - 1)] if rank >= 0 else 0.0

    def _bound(self, capacity: Capacity, now: float) -> float:
        """Return the maximum of tokens that may wait in the queue.

        A burst into an idle batch may wait `_BURST` times as long as usual. Work that has waited
        for longer than that is no burst, so the usual limit applies to it.
        """
        limits = self._limits
        short = self._patience(capacity) * capacity.rate
        if self.tokens > _CALM * short:
            self._calm_since = math.inf
        elif self._calm_since == math.inf:
            self._calm_since = now
        if now - min(self._calm_since, self._asked) > limits.queue_seconds:
            self._long_since = math.inf
        self._asked = now
        if self.tokens > short and self._long_since == math.inf:
            self._long_since = now
        patience = _BURST * limits.queue_seconds
        burst = capacity.free > self.sequences and now - self._long_since < patience
        return min(limits.queue_tokens, short * (_BURST if burst else 1.0))

    def push(
        self, item: T, key: str, priority: int, tokens: float, sequences: int, rate: float
    ) -> Ticket[T]:
        """Add a request to the queue, and return its ticket.

        tokens: expected work of the request.
        sequences: number of its choices.
        rate: tokens/s of all replicas, as in Capacity.
        """
        state = self._keys.get(key)
        if state is None:
            self._forget()
            state = self._keys[key] = _Key()
        if not state.waiting:
            self._busy += 1
        start = max(self._now, state.finish)
        state.finish = start + tokens
        state.tokens += tokens
        state.waiting += 1
        self.tokens += tokens
        self.sequences += sequences
        tag = start
        if priority:
            steps = max(-_STEPS, min(_STEPS, priority))
            known = rate if rate < math.inf else self._limits.queue_tokens
            tag += steps * self._limits.age_seconds * known / self._busy
        ticket = Ticket(item, key, tokens, sequences, start)
        self._count += 1
        self._live += 1
        heappush(self._heap, (tag, self._count, ticket))
        return ticket

    # -- requests that go out

    def head(self) -> Ticket[T] | None:
        """Return the next request to send, without removing it; None if none waits."""
        heap = self._heap
        while heap and heap[0][2].item is None:
            heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> T:
        """Remove and return the next request, to send it to a replica. The queue must not be
        empty."""
        ticket = self.head()
        assert ticket is not None and ticket.item is not None
        self._now = max(self._now, ticket.start)
        item = ticket.item
        self._take_out(ticket)
        return item

    def remove(self, ticket: Ticket[T]) -> None:
        """Remove a request that ended while it waited, and subtract its tokens from its key's
        service.

        Idempotent.
        """
        if ticket.item is not None:
            self._keys[ticket.key].finish -= ticket.tokens
            self._take_out(ticket)

    def _take_out(self, ticket: Ticket[T]) -> None:
        ticket.item = None
        state = self._keys[ticket.key]
        state.waiting -= 1
        state.tokens -= ticket.tokens
        if not state.waiting:
            state.tokens = 0.0  # remove rounding errors
            self._busy -= 1
        self._live -= 1
        self.tokens -= ticket.tokens
        self.sequences -= ticket.sequences
        if not self._live:
            self._heap.clear()
            self._keys.clear()
            self.tokens = 0.0
            self._now = 0.0
        elif len(self._heap) > 2 * self._live + 64:
            self._heap = [entry for entry in self._heap if entry[2].item is not None]
            heapify(self._heap)

    def correct(self, key: str, tokens: float) -> None:
        """Charge a key for the tokens by which its request exceeded the estimate; negative: the
        request took fewer."""
        state = self._keys.get(key)
        if state is not None:
            state.finish += tokens

    def _forget(self) -> None:
        """Delete the state of idle keys whose `finish` is not after the present virtual time.

        Requests of such keys start now, like those of new keys, so their state is not needed.
        """
        if len(self._keys) > 2 * self._busy + 64:
            self._keys = {
                key: state
                for key, state in self._keys.items()
                if state.waiting or state.finish > self._now
            }
