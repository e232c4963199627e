"""RequestQueue: admits a router's requests, and keeps them until a replica has room.

It combines the FairQueue with a clock and the replicas.
"""

import asyncio
import math
import time
from dataclasses import replace
from random import Random

from deployments.backend import GenerationRequest
from deployments.router.admission.fair_queue import Capacity, FairQueue, OutputEstimate, Ticket
from deployments.router.admission.scale_from_zero import Waking
from deployments.router.assignment import Assignment
from deployments.router.inflight import InflightRequest
from deployments.router.models.model_cards import ModelCards
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.requests_in_flight import RequestsInFlight
from deployments.routing.fleet import DECODES, PREFILL, Fleet
from deployments.routing.replica_state import ReplicaState
from engine.errors import MantaError, Overloaded
from engine.messages import BATCH_PRIORITY

_CAPACITY_SECONDS = 0.05  # seconds for which a computed capacity is reused


class RequestQueue:
    """The requests of one router that wait until a replica has room.

    fleet: the router's replicas.
    requests: all requests in flight; the queue is notified when one ends.
    assignment: sends requests to replicas.
    waking: wakes the model if it sleeps.
    """

    def __init__(
        self,
        limits: DispatchLimits,
        fleet: Fleet,
        requests: RequestsInFlight,
        cards: ModelCards,
        assignment: Assignment,
        waking: Waking,
        random: Random,
    ) -> None:
        self._limits = limits
        self._fleet = fleet
        self._requests = requests
        self._cards = cards
        self._assignment = assignment
        self._waking = waking
        self._queue: FairQueue[InflightRequest] = FairQueue(limits.admission, random.random)
        # Batch work goes to replicas only while no other request waits.
        self._batch_queue: FairQueue[InflightRequest] = FairQueue(limits.admission, random.random)
        self._tickets: dict[InflightRequest, Ticket[InflightRequest]] = {}
        self._estimate = OutputEstimate()
        self._capacity = (0.0, Capacity())  # (monotonic seconds until it is valid, capacity)
        self._rate = math.inf  # last known tokens/s of the replicas
        # Error for waiting requests while the model is being removed; None: it is not being
        # removed.
        self._leaving: MantaError | None = None
        requests.on_end.append(self.ended)

    @property
    def choices(self) -> int:
        """The number of choices that wait."""
        return self._queue.sequences + self._batch_queue.sequences

    @property
    def tokens(self) -> int:
        """The work of the waiting requests, in tokens."""
        return int(self._queue.tokens + self._batch_queue.tokens)

    def seconds(self) -> float:
        """Return the expected seconds until all waiting requests have gone to replicas."""
        return self.tokens / self._capacity_at(time.monotonic()).rate

    def ready(self) -> bool:
        """Whether any replica can be sent requests."""
        return any(replica.available for replica in self._fleet.replicas.values())

    def longest(self, count: int) -> list[tuple[str, int, float]]:
        """Return (key, number of waiting requests, their tokens) of the `count` keys with the most
        waiting tokens."""
        keys = self._queue.longest(count) + self._batch_queue.longest(count)
        return sorted(keys, key=lambda item: -item[2])[:count]

    def _queue_of(self, priority: int) -> FairQueue[InflightRequest]:
        return self._batch_queue if priority >= BATCH_PRIORITY else self._queue

    # -- requests that come in

    def admit(self, key: str, priority: int) -> None:
        """Raise Overloaded if a new request of this key and priority would be refused.

        The request's size is not known yet. It is assumed to be the mean of the waiting requests of
        its queue, or 0 while none waits.
        """
        batch_work = priority >= BATCH_PRIORITY
        if not (self._queue.sequences or (batch_work and self._batch_queue.sequences)):
            ready, _, free = self._survey(batch_work=batch_work)
            if free or not ready:
                return
        queue = self._queue_of(priority)
        work = queue.tokens / len(queue) if queue.sequences else 0.0
        self._check(queue, key, priority, work, None)

    def check(self, request: GenerationRequest) -> bool:
        """Return whether a new request may be sent to a replica now; if false, it must wait in the
        queue.

        Raises MantaError if the request is refused.
        """
        limits, batch_work = self._limits, request.priority >= BATCH_PRIORITY
        ready, roomy, free = self._survey(batch_work=batch_work)
        if not ready:
            self._waking.wake()
            self._waking.check(limits.wait_seconds)
        if len(self._requests) >= limits.in_flight:
            message = f"this router has {len(self._requests)} requests in flight already"
            raise Overloaded(message, retry_after=self.seconds())
        if self._queue.sequences or (batch_work and self._batch_queue.sequences):
            roomy = False
        elif free:
            return roomy
        if not ready and self.choices >= limits.waiting:
            message = "no replica is ready and too many requests wait for one"
            raise Overloaded(message, code="no_replica", retry_after=self._waking.seconds())
        self._check(
            self._queue_of(request.priority),
            request.key,
            request.priority,
            self._work(request),
            request.deadline,
        )
        # If `roomy`, the request may wait at a replica for the next free row instead of in this
        # queue.
        return roomy

    def enter(self, inflight: InflightRequest, roomy: bool) -> None:
        """Send a request to a replica, or add it to the queue.

        roomy: the result of `check` for this request.
        """
        if roomy:
            self._assignment.begin(inflight)
            return
        request = inflight.request
        self._tickets[inflight] = self._queue_of(request.priority).push(
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
                error = Overloaded(message, code="no_replica", retry_after=self._waking.seconds())
                inflight.fail(error)

    # -- requests that go out

    def fill(self) -> None:
        """Send waiting requests while any replica has room."""
        for queue in (self._queue, self._batch_queue):
            batch_work = queue is self._batch_queue
            while queue.head() is not None and self._survey(batch_work=batch_work)[1]:
                inflight = queue.pop()
                del self._tickets[inflight]
                self._assignment.begin(inflight)
            if queue.head() is not None:
                return

    def fail_all(self, error: MantaError) -> None:
        """Fail all waiting requests with an error, because no replica will become available."""
        for inflight in list(self._tickets):
            inflight.fail(error)

    def leave(self, reason: MantaError) -> None:
        """Prepare for the model's removal: fail waiting requests once its last replica has gone.

        reason: the error of these requests.
        """
        self._leaving = reason
        self.replicas_changed()

    def replicas_changed(self) -> None:
        """Fail all waiting requests if their model is being removed and has no replica left."""
        if self._leaving is not None and not self.ready():
            self._assignment.displaced.fail_all(self._leaving)
            self.fail_all(self._leaving)

    def hear_frame(self, replica: ReplicaState) -> None:
        """Send queued requests to replicas if this replica's last frame shows room."""
        room, *_, batch_room = replica.room()
        if self.choices and (room if self._queue.sequences else batch_room) > 0:
            self.fill()
        if self._leaving is not None:
            self.replicas_changed()

    def ended(self, inflight: InflightRequest) -> None:
        """Handle the end of a request. If it was still waiting, it is removed from the queue.

        Otherwise its real number of output tokens replaces the estimate in its key's service, and
        improves the estimate for later requests.
        """
        ticket = self._tickets.pop(inflight, None)
        queue = self._queue_of(inflight.request.priority)
        if ticket is not None:
            queue.remove(ticket)
            return
        limit = self._limit(inflight.request)
        expected = self._estimate.expected(limit) * len(inflight.choices)
        for choice in inflight.choices:
            expected -= len(choice.emitted)
            self._estimate.learn(limit, len(choice.emitted))
        queue.correct(inflight.request.key, -expected)

    # -- measures

    def _survey(self, *, batch_work: bool = False) -> tuple[bool, bool, bool]:
        """Return three booleans: whether any replica is available, whether any accepts more
        choices, and whether any of those that accept more has a free row.

        The cost is a few array operations, however many replicas there are.

        batch_work: whether the choices are batch work, which gets free rows only.
        """
        fleet = self._fleet
        fleet.refresh()
        places = fleet.batch_places if batch_work else fleet.places
        if not len(places):
            return False, False, False
        ready, takes = bool(places.max() > -math.inf), places > 0
        if fleet.apart:
            if not takes[fleet.roles != PREFILL].any():
                # No replica has room for decodes, so prompts would be computed long before their
                # decodes start.
                return ready, False, False
            takes &= fleet.roles != DECODES
        roomy = bool(takes.any())
        return ready, roomy, roomy and bool((fleet.free_rows[takes] > 0).any())

    def _limit(self, request: GenerationRequest) -> int:
        """Return the maximum of output tokens that a choice of the request can have."""
        limit = request.params.max_tokens
        if limit is None:
            return self._cards.base.max_model_len - len(request.token_ids)
        return limit

    def _work(self, request: GenerationRequest) -> float:
        """Return the expected work of a request, in tokens."""
        output = self._estimate.expected(self._limit(request))
        return len(request.token_ids) + request.params.n * output

    def _check(
        self,
        queue: FairQueue[InflightRequest],
        key: str,
        priority: int,
        work: float,
        deadline: float | None,
    ) -> None:
        now = time.monotonic()
        capacity = self._capacity_at(now)
        if queue is self._batch_queue:
            # first_seconds is measured without batch work, whose first tokens may be late.
            capacity = replace(capacity, first_seconds=0.0)
        refusal = queue.refusal(key, priority, work, now, capacity, deadline)
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
            fleet = self._fleet
            fleet.refresh()
            known = fleet.places > -math.inf
            capacity = Capacity.over(
                fleet.rates[known],
                fleet.rows[known],
                fleet.free_rows[known],
                fleet.first_seconds[known],
                self._endings(),
            )
            if capacity.rate < math.inf:
                self._rate = capacity.rate
            elif known.any():
                # All replicas are new, after an update or from another pool. The last known rate is
                # used until the new replicas are measured, so that waiting work is not refused.
                capacity = replace(capacity, rate=self._rate)
            self._capacity = (now + _CAPACITY_SECONDS, capacity)
        return capacity

    def _endings(self) -> list[float]:
        """Return the expected seconds until each choice at a replica ends, ascending.

        Rows of batch work count as free.
        """
        self._fleet.refresh()
        replicas, step = self._fleet.replicas, self._fleet.step
        endings = []
        for request in self._requests:
            if request.request.priority >= BATCH_PRIORITY:
                continue
            limit = self._limit(request.request)
            for choice in request.choices:
                replica = None if choice.done else replicas.get(choice.place)
                if replica is not None:
                    remaining_tokens = self._estimate.left(limit, len(choice.emitted))
                    endings.append(remaining_tokens * float(step[replica.column]))
        return sorted(endings)
