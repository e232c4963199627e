"""RequestQueue: admits a router's requests and keeps them until a replica has room. It is the
FairQueue with a clock and replicas."""

import asyncio
import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from deployments.backend import GenerationRequest
from deployments.router.admission.fair_queue import Capacity, FairQueue, OutputEstimate, Ticket
from deployments.router.admission.limits import DispatchLimits
from deployments.router.admission.waking import UNKNOWN
from deployments.router.inflight import InflightRequest
from deployments.routing.fleet import Fleet
from deployments.routing.replica_state import ReplicaState
from engine.errors import MantaError, Overloaded

_CAPACITY_SECONDS = 0.05  # how long a sum over the replicas' figures is good for


class RequestQueue:
    """fleet: the router's replicas. requests: all in flight. max_len: tokens of the longest one.
    send(inflight, replicas): gives a request to one of these replicas, which have room. retry: the
    seconds after which to come back while none is ready."""

    def __init__(
        self,
        limits: DispatchLimits,
        fleet: Fleet,
        requests: Collection[InflightRequest],
        random: Callable[[], float],
        max_len: Callable[[], int],
        send: Callable[[InflightRequest, list[ReplicaState]], None],
        retry: Callable[[], float] = lambda: UNKNOWN,
    ) -> None:
        self._limits = limits
        self._fleet = fleet
        self._requests = requests
        self._max_len = max_len
        self._send = send
        self._retry = retry
        self._queue: FairQueue[InflightRequest] = FairQueue(limits.admission, random)
        self._tickets: dict[InflightRequest, Ticket[InflightRequest]] = {}
        self._estimate = OutputEstimate()
        self._capacity = (0.0, Capacity())  # good until, capacity
        self._rate = math.inf  # tokens/s of the replicas, when it was last known

    @property
    def choices(self) -> int:
        """Choices that wait."""
        return self._queue.sequences

    @property
    def tokens(self) -> int:
        """Work of the requests that wait."""
        return int(self._queue.tokens)

    def seconds(self) -> float:
        """How long it will take until they have gone to replicas."""
        return self._queue.tokens / self._capacity_at(time.monotonic()).rate

    def ready(self) -> bool:
        return any(one.available for one in self._fleet.replicas.values())

    def longest(self, count: int) -> list[tuple[str, int, float]]:
        """The keys with the most work waiting: the key, its requests and their tokens."""
        return self._queue.longest(count)

    # -- in

    def admit(self, key: str) -> None:
        """Raises Overloaded if an average request of this key would be refused."""
        if self._queue:
            self._check(key, 0, self._queue.tokens / len(self._queue), None)
        elif self.ready() and not self._free():
            self._check(key, 0, 0.0, None)

    def check(self, request: GenerationRequest) -> bool:
        """Whether a replica has room for it now; if not, it may wait. Raises MantaError."""
        if not self._queue and self._free():
            return True
        roomy = [] if self._queue else self._roomy()
        if self.choices >= self._limits.waiting and not self.ready():
            message = "no replica is ready and too many requests wait for one"
            raise Overloaded(message, code="no_replica", retry_after=self._retry())
        self._check(request.key, request.priority, self._work(request), request.deadline)
        return bool(roomy)  # it waits there rather than here, for the next row

    def enter(self, inflight: InflightRequest, *, now: bool) -> None:
        """Send the request now, or let it wait, as `check` has said."""
        if now:
            self._send(inflight, self._roomy())
            return
        request = inflight.request
        self._tickets[inflight] = self._queue.push(
            inflight,
            request.key,
            request.priority,
            self._work(request),
            len(inflight.choices),
            self._capacity[1].rate,
        )
        loop = asyncio.get_running_loop()
        inflight.timers.append(loop.call_later(self._limits.wait_seconds, self._expire, inflight))

    def _expire(self, inflight: InflightRequest) -> None:
        if inflight in self._tickets:
            seconds = f"{self._limits.wait_seconds:g} s"
            if self.ready():
                inflight.fail(Overloaded(f"no replica had room for it within {seconds}"))
            else:
                message = f"no replica became ready within {seconds}"
                error = Overloaded(message, code="no_replica", retry_after=self._retry())
                inflight.fail(error)

    # -- out

    def fill(self) -> None:
        """Send waiting requests while a replica has room."""
        queue = self._queue
        while queue.head() is not None and (roomy := self._roomy()):
            inflight = queue.pop()
            del self._tickets[inflight]
            self._send(inflight, roomy)

    def fail_all(self, error: MantaError) -> None:
        """No replica will come for those that wait."""
        for inflight in list(self._tickets):
            inflight.fail(error)

    def news(self, replica: ReplicaState) -> None:
        """A frame of this replica has come: it may have room."""
        if self._queue and replica.room() > 0:
            self.fill()

    def ended(self, inflight: InflightRequest) -> None:
        """A request has ended, wherever it was."""
        ticket = self._tickets.pop(inflight, None)
        if ticket is not None:
            self._queue.remove(ticket)
            return
        limit = self._limit(inflight.request)
        expected = self._estimate.expected(limit) * len(inflight.choices)
        for choice in inflight.choices:
            expected -= len(choice.emitted)
            self._estimate.learn(limit, len(choice.emitted))
        self._queue.correct(inflight.request.key, -expected)

    # -- measures

    def _roomy(self) -> list[ReplicaState]:
        return [one for one in self._fleet.replicas.values() if one.available and one.room() > 0]

    def _free(self) -> bool:
        """Whether a replica with room has a row for one more choice."""
        replicas = self._fleet.replicas.values()
        return any(one.available and one.room() > 0 and one.free_rows() > 0 for one in replicas)

    def _limit(self, request: GenerationRequest) -> int:
        """Output tokens that a choice can have at most."""
        limit = request.params.max_tokens
        return self._max_len() - len(request.token_ids) if limit is None else limit

    def _work(self, request: GenerationRequest) -> float:
        """Tokens that the request is likely to take."""
        output = self._estimate.expected(self._limit(request))
        return len(request.token_ids) + request.params.n * output

    def _check(self, key: str, priority: int, work: float, deadline: float | None) -> None:
        now = time.monotonic()
        refusal = self._queue.refusal(key, priority, work, now, self._capacity_at(now), deadline)
        if refusal is None:
            return
        if refusal.code == "deadline_exceeded":
            raise MantaError("it could not start before its deadline", code=refusal.code)
        message = "too much work is waiting"
        if refusal.code != "overloaded":
            message = "too much work of this key is waiting"
        raise Overloaded(message, code=refusal.code, retry_after=refusal.seconds)

    def _capacity_at(self, now: float) -> Capacity:
        until, capacity = self._capacity
        if now >= until:
            known = self._fleet.available()
            capacity = Capacity.over(
                [
                    Capacity(
                        rate=one.rate(),
                        rows=one.rows,
                        free=one.free_rows(),
                        first_seconds=one.first_seconds,
                    )
                    for one in known
                ],
                self._endings(),
            )
            if capacity.rate < math.inf:
                self._rate = capacity.rate
            elif known:
                # All replicas are new, after an update or from another pool. Until their rate is
                # known, the last known rate counts, so that what waits is not refused.
                capacity = replace(capacity, rate=self._rate)
            self._capacity = (now + _CAPACITY_SECONDS, capacity)
        return capacity

    def _endings(self) -> list[float]:
        """Seconds until each choice at a replica is expected to end, ascending."""
        replicas, step = self._fleet.replicas, self._fleet.step
        found = []
        for request in self._requests:
            limit = self._limit(request.request)
            for choice in request.choices:
                replica = None if choice.done else replicas.get(choice.place)
                if replica is not None:
                    left = self._estimate.left(limit, len(choice.emitted))
                    found.append(left * float(step[replica.column]))
        return sorted(found)
