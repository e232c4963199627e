"""Simulates replicas and routers' queues in virtual time, so that minutes of overload take a
second."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np

from deployments.router.admission.fair_queue import (
    AdmissionLimits,
    Capacity,
    FairQueue,
    OutputEstimate,
    Refusal,
    Ticket,
)
from deployments.routing.replica_state import ReplicaState
from engine.messages import EngineStats


@dataclass(eq=False)
class Request:
    arrived: float
    key: str = ""
    priority: int = 0
    prompt: int = 100
    output: int = 32
    limit: int = 128
    deadline: float | None = None
    router: "Router | None" = None
    id: int = field(default_factory=count(1).__next__)
    filled: int = 0  # prompt tokens computed
    made: int = 0
    sent: float = math.nan
    first: float = math.nan
    ended: float = math.nan
    refused: Refusal | None = None


class Replica:
    """A simulated replica that runs up to `rows` requests at once.

    Each decoding request gets one token per step. Prompts share `budget` tokens of each step.
    """

    def __init__(self, rows: int = 32, seconds: float = 0.02, budget: int = 512) -> None:
        self.rows, self.seconds, self.budget = rows, seconds, budget
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.stats = EngineStats(rows=rows, total_blocks=10**6, free_blocks=10**6, block_size=16)

    def step(self, now: float) -> list[Request]:
        """Run a step, and return the requests that got their first token in it."""
        while self.waiting and len(self.running) < self.rows:
            self.running.append(self.waiting.pop(0))
        budget, begun, stats = self.budget, [], self.stats
        for request in self.running:
            if request.filled < request.prompt:
                part = min(budget, request.prompt - request.filled)
                budget -= part
                request.filled += part
                stats.prompt_tokens += part
                if request.filled < request.prompt:
                    continue
                request.first = now
                begun.append(request)
            request.made += 1
            stats.output_tokens += 1
            if request.made == request.output:
                request.ended = now
        self.running = [r for r in self.running if r.made < r.output]
        return begun

    def taken(self, router: "Router") -> list[int]:
        """Return the ids of a router's requests that the replica's stats include.

        Ids that earlier frames reported are repeated, which has no effect.
        """
        return [r.id for r in self.running + self.waiting if r.router is router]

    def frame(self, routers: int) -> EngineStats:
        stats = self.stats
        stats.step += 1
        stats.routers = routers
        stats.step_seconds = self.seconds
        stats.busy_seconds += self.seconds
        stats.running, stats.waiting = len(self.running), len(self.waiting)
        everybody = self.running + self.waiting
        stats.waiting_tokens = sum(r.prompt - r.filled for r in everybody if r.filled < r.prompt)
        return EngineStats(**{name: getattr(stats, name) for name in stats.__struct_fields__})


class Router:
    """A stand-in for RequestQueue, with one replica and without an event loop."""

    def __init__(self, limits: AdmissionLimits, replica: Replica, seed: int = 1) -> None:
        self.queue: FairQueue[Request] = FairQueue(limits, Random(seed).random)
        self.state = ReplicaState("r", step_tokens=replica.budget)
        self.estimate = OutputEstimate()
        self.tickets: dict[int, Ticket[Request]] = {}
        self._replica = replica

    def capacity(self) -> Capacity:
        state = self.state
        fields = state.rate(), state.room()[2], state.room()[1], state.first_seconds
        columns = [np.array([field], np.float64) for field in fields]
        return Capacity.over(*columns, sorted(self._endings()))

    def _endings(self) -> Iterator[float]:
        for request in self._replica.running + self._replica.waiting:
            if request.router is self:
                yield self.estimate.left(request.limit, request.made) * self._replica.seconds

    def offer(self, request: Request, now: float) -> None:
        request.router = self
        roomy = not self.queue and self.state.room()[0] > 0
        if roomy and self.state.room()[1] > 0:
            self._send(request, now)
            return
        work = request.prompt + self.estimate.expected(request.limit)
        capacity = self.capacity()
        args = request.key, request.priority, work
        request.refused = self.queue.refusal(*args, now, capacity, request.deadline)
        if request.refused is None and roomy:
            self._send(request, now)
        elif request.refused is None:
            self.tickets[request.id] = self.queue.push(request, *args, 1, capacity.rate)

    def leave(self, request: Request) -> None:
        self.queue.remove(self.tickets[request.id])

    def fill(self, now: float) -> None:
        while self.queue.head() is not None and self.state.room()[0] > 0:
            self._send(self.queue.pop(), now)

    def _send(self, request: Request, now: float) -> None:
        request.sent = now
        self.state.book(request.id, request.prompt, request.prompt)
        self._replica.waiting.append(request)

    def ended(self, request: Request) -> None:
        self.state.unbook(request.id)
        expected = self.estimate.expected(request.limit)
        self.estimate.learn(request.limit, request.made)
        self.queue.correct(request.key, request.made - expected)


def run(
    arrivals: Iterator[tuple[int, Request]],
    replica: Replica,
    routers: list[Router],
    seconds: float,
) -> list[Request]:
    """Simulate `seconds`, and return all requests that arrived in them, with their outcomes.

    arrivals: (index of the router, request) in the order of time.
    """
    seen: list[Request] = []
    now, coming, dice = 0.0, next(arrivals, None), Random(0)
    while now < seconds:
        while coming is not None and coming[1].arrived <= now:
            index, request = coming
            seen.append(request)
            routers[index].offer(request, request.arrived)
            coming = next(arrivals, None)
        now += replica.seconds
        before = list(replica.running) + list(replica.waiting)
        for request in replica.step(now):
            assert request.router is not None
            request.router.state.begun(request.id)
            request.router.state.measure_first(request.sent, now)
        for request in before:
            if request.ended == now:
                assert request.router is not None
                request.router.ended(request)
        for router in sorted(routers, key=lambda _: dice.random()):  # frames in random order
            router.state.observe(replica.frame(len(routers)), replica.taken(router), now)
            router.fill(now)
    return seen


def poisson(rate: float, dice: Random, begin: float = 0.0, **more: object) -> Iterator[Request]:
    """Yield requests of mixed lengths at a mean rate per second."""
    now = begin
    while True:
        now += dice.expovariate(rate)
        prompt, output = dice.randrange(20, 180), dice.randrange(8, 57)
        yield Request(now, prompt=prompt, output=output, **more)  # type: ignore[arg-type]
