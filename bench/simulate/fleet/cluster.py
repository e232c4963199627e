"""run(speeds, policy, work): the discrete-event simulation of a fleet, whose policy chooses each
job's replica.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Protocol

from bench.simulate.fleet.replica import Job, SimReplica
from deployments.simulation.speed import Speed

_HOP = 0.0005  # seconds from router to replica
_TICK = 1.0  # seconds between two calls of `tick`
NOWHERE = -1  # a policy's choice while no replica is ready


class RoutingPolicy(Protocol):
    """A policy that chooses replicas from the events that a router observes."""

    name: str
    # whether the engines evict the least popular adapter instead of the least recently used one
    popular: bool

    def start(self, replicas: Sequence[SimReplica], routers: int, dice: Random) -> None: ...

    def choose(self, job: Job, now: float) -> int: ...

    def frame(self, replica: SimReplica, now: float) -> None:
        """Update the policy after a replica has finished a stretch of steps."""
        ...

    def first(self, job: Job, now: float) -> None:
        """Update the policy after a job's first token."""
        ...

    def end(self, job: Job, now: float) -> None: ...


@dataclass(slots=True)
class RoutingOutcome:
    """The outcome of a simulated run.

    jobs: jobs that arrived after the warm-up.
    pending: jobs among them that had no first token when the run ended, at second `stopped`.
    loads: adapter loads after the warm-up.
    """

    policy: str
    jobs: list[Job]
    replicas: list[SimReplica]
    pending: int
    loads: int
    stopped: float
    seed: int

    def waits(self) -> list[float]:
        """Return the seconds to the first token, in ascending order.

        A request without a first token counts as waiting until the end.
        """
        return sorted(
            (job.first if job.first >= 0 else self.stopped) - job.arrival for job in self.jobs
        )

    def ttft(self, share: float) -> float:
        """Return the quantile of the seconds to the first token. share: e.g. 0.99."""
        waits = self.waits()
        return waits[min(len(waits) - 1, int(share * len(waits)))]

    def speed(self, share: float) -> float:
        """Return the quantile of a request's mean seconds between tokens. share: e.g. 0.99."""
        gaps = sorted(
            (job.end - job.first) / (job.output - 1)
            for job in self.jobs
            if job.end >= 0 and job.output > 1
        )
        return gaps[min(len(gaps) - 1, int(share * len(gaps)))]

    def hit_rate(self) -> float:
        """Return the share of prompt tokens that came from prefix caches."""
        done = [job for job in self.jobs if job.first >= 0]
        return sum(job.cached for job in done) / max(1, sum(job.prompt for job in done))


def run(
    speeds: Sequence[Speed],
    policy: RoutingPolicy,
    work: Sequence[Job],
    *,
    routers: int = 2,
    warm_up: float = 0.0,
    patience: float = 20.0,
    seed: int = 1,
    tick: Callable[[float, Sequence[SimReplica], Sequence[Job]], None] | None = None,
) -> RoutingOutcome:
    """Simulate until every job has its first token, or `patience` seconds after the last arrival.

    tick: called each second with the time, the replicas, and the jobs for which no replica was
        ready; the policy then chooses again for these jobs.
    """
    dice = Random(seed)
    replicas = [
        SimReplica(index, speed, routers, popular=policy.popular)
        for index, speed in enumerate(speeds)
    ]
    policy.start(replicas, routers, dice)
    events: list[tuple[float, int, int, int]] = []  # time, number, replica, version of the replica
    number = 0
    last = work[-1].arrival if work else 0.0
    arrivals = iter(work)
    coming = next(arrivals, None)
    hops: list[tuple[float, int, Job]] = []
    held: list[Job] = []
    next_tick = 0.0 if tick else float("inf")
    pending = sum(job.arrival >= warm_up for job in work)
    loads_before = 0
    warm = False
    now = 0.0

    def begin(replica: SimReplica, now: float) -> None:
        nonlocal number
        at = replica.begin(now)
        replica.version += 1
        if at:
            number += 1
            heappush(events, (at, number, replica.index, replica.version))

    def place(job: Job, now: float) -> None:
        nonlocal number
        job.replica = policy.choose(job, now)
        if job.replica == NOWHERE:
            held.append(job)
            return
        number += 1
        heappush(hops, (now + _HOP, number, job))

    while pending:
        times = (
            coming.arrival if coming is not None else float("inf"),
            hops[0][0] if hops else float("inf"),
            events[0][0] if events else float("inf"),
            next_tick,
        )
        now = min(times)
        if now > last + patience:
            break
        if not warm and now >= warm_up:
            warm = True
            loads_before = sum(replica.loads for replica in replicas)
        if now == times[0]:
            assert coming is not None
            place(coming, now)
            coming = next(arrivals, None)
        elif now == times[1]:
            _, _, job = heappop(hops)
            replica = replicas[job.replica]
            replica.submit(job)
            if not replica.busy:
                begin(replica, now)
            elif replica.steps > 1:
                at = replica.interrupt(now)
                replica.version += 1
                number += 1
                heappush(events, (at, number, replica.index, replica.version))
        elif now == times[3]:
            assert tick is not None
            tick(now, replicas, held)
            next_tick = now + _TICK
            waiting, held = held, []
            for job in waiting:
                place(job, now)
        else:
            _, _, index, version = heappop(events)
            replica = replicas[index]
            if version != replica.version:
                continue
            if replica.busy:
                began = [job for job, length in replica.chunk if length == job.left]
                ended = replica.finish(now)
                for job in began:
                    pending -= job.arrival >= warm_up
                    policy.first(job, now)
                for job in ended:
                    policy.end(job, now)
                policy.frame(replica, now)
            begin(replica, now)
    counted = [job for job in work if job.arrival >= warm_up]
    return RoutingOutcome(
        policy.name,
        counted,
        replicas,
        sum(job.first < 0 for job in counted),
        sum(replica.loads for replica in replicas) - loads_before,
        now,
        seed,
    )
