"""Controller: starts and stops the pools' replicas in virtual time, as Serve's controller does.

Once a second, routers and replicas report their load, and the real autoscaling policy decides on
the numbers of replicas.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.router.admission.scale_from_zero import Waking
from deployments.scaling.engine_load import EngineLoad
from deployments.scaling.policy import ENGINE_PREFIX, ROUTER, PoolsPolicy
from deployments.simulation.service import MODEL, Service, SimulatedReplica
from deployments.simulation.speed import Speed

_EVERY = 1.0  # seconds between two reports, and between two decisions
_REPORTS = 2  # number of last reports that are averaged, as in Serve


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """A pool of the configuration, as simulated.

    first: initial number of replicas. least, most: limits of the number.
    scales: whether the policy decides on the number.
    start_seconds: seconds from the decision to a replica that takes requests.
    price: price of one replica per hour.
    """

    speed: Speed
    first: int
    least: int
    most: int
    start_seconds: float
    price: float
    scales: bool


@dataclass(slots=True, eq=False)
class _Reporter:
    """The last reports of a router or replica. read: returns its present load, {metric: value}."""

    read: Callable[[], Mapping[str, float]]
    reports: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=_REPORTS))

    def mean(self, metric: str) -> float | None:
        """Return the mean of a metric, over the reports that have it."""
        values = [report[metric] for report in self.reports if metric in report]
        return sum(values) / len(values) if values else None


@dataclass(slots=True, eq=False)
class _Life:
    """The life of a replica, which begins with the decision to start it.

    wanted, ended: times of the decision and of the replica's end; -1: not yet.
    """

    wanted: float
    ended: float = -1.0
    replica: SimulatedReplica | None = None  # None until it is ready
    starting: asyncio.Task[None] | None = None
    reporter: _Reporter | None = None


@dataclass(slots=True)
class _Context:
    """The context of a deployment that is passed to the policy; see
    `scaling.policy.ServeContext`."""

    deployment_name: str
    current_num_replicas: int
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]]
    total_queued_requests: float = 0.0
    app_name: str | None = None
    current_time: float | None = None


class Controller:
    """The controller of a simulated service's pools.

    policy: the policy of the pools that scale; None: no pool scales.
    drain_seconds: maximum seconds for running requests of a replica that is to stop.
    """

    def __init__(
        self,
        service: Service,
        pools: Mapping[str, SimulatedPool],
        policy: PoolsPolicy | None,
        drain_seconds: float,
        *,
        wakes: "Wakes",
    ) -> None:
        self._service = service
        self._pools = pools
        self._policy = policy
        self._drain_seconds = drain_seconds
        self._wakes = wakes
        self._loop = asyncio.get_running_loop()
        self._lives: dict[str, list[_Life]] = {name: [] for name in pools}
        self._ending: set[asyncio.Task[None]] = set()
        self._routers = [_Reporter(router.load) for router in service.routers]
        self._ticks: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the first replicas without a delay; `run` decides on others."""
        for name, pool in self._pools.items():
            for _ in range(pool.first):
                life = _Life(self._loop.time())
                self._lives[name].append(life)
                await self._begin(life, pool.speed)

    def run(self) -> None:
        """Start deciding on the numbers of replicas, once a second."""
        self._ticks = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop deciding, and cancel starts and drains. Raises the error of a failed decision."""
        if self._ticks is not None and self._ticks.done():
            self._ticks.result()
        starting = (life.starting for lives in self._lives.values() for life in lives)
        tasks = [task for task in (self._ticks, *starting, *self._ending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def empty(self) -> bool:
        """Return whether all pools have shrunk to their minimum and no replica is draining."""
        return not self._ending and all(
            len(self._present(name)) <= pool.least for name, pool in self._pools.items()
        )

    def replica_seconds(self, name: str, since: float, until: float) -> float:
        """Return the sum of the lives of a pool's replicas, in seconds, between two times.

        A replica's life is from the decision to start it until its end.
        """
        return sum(
            max(
                0.0, (until if life.ended < 0 else min(life.ended, until)) - max(life.wanted, since)
            )
            for life in self._lives[name]
        )

    def most(self, name: str) -> int:
        """Return the largest number of replicas that a pool has had at once."""
        changes = [(life.wanted, 1) for life in self._lives[name]]
        changes += [(life.ended, -1) for life in self._lives[name] if life.ended >= 0]
        count = most = 0
        for _, change in sorted(changes):
            count += change
            most = max(most, count)
        return most

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            for reporter in self._reporters():
                reporter.reports.append(reporter.read())
            if self._policy is None:
                continue
            engines = {
                name: self._context(name, pool) for name, pool in self._pools.items() if pool.scales
            }
            plan = self._policy.decide(engines, [self._router_context()], self._loop.time())
            for name, target in plan.targets.items():
                self._scale(name, target)

    def _reporters(self) -> Iterable[_Reporter]:
        yield from self._routers
        for lives in self._lives.values():
            for life in lives:
                if life.reporter is not None and life.ended < 0:
                    yield life.reporter

    def _present(self, name: str) -> list[_Life]:
        """Return the pool's replicas that are not draining; those that are starting come last."""
        lives = [life for life in self._lives[name] if life.ended < 0 and not self._leaves(life)]
        return sorted(lives, key=lambda life: (life.replica is None, life.wanted))

    def _leaves(self, life: _Life) -> bool:
        return life.replica is not None and life.replica not in self._service.replicas

    def _context(self, name: str, pool: SimulatedPool) -> _Context:
        lives = self._present(name)
        ready = [life.reporter for life in lives if life.reporter is not None]
        return _Context(
            ENGINE_PREFIX + name,
            len(ready),
            len(lives),
            pool.least,
            pool.most,
            _aggregated(ready),
            total_queued_requests=self._wakes.waiting,
        )

    def _router_context(self) -> _Context:
        count = len(self._routers)
        return _Context(ROUTER, count, count, count, count, _aggregated(self._routers))

    def _scale(self, name: str, target: int) -> None:
        pool, lives = self._pools[name], self._present(name)
        for life in reversed(lives[target:]):
            self._end(life)
        for _ in range(target - len(lives)):
            life = _Life(self._loop.time())
            life.starting = asyncio.create_task(self._start(life, pool))
            self._lives[name].append(life)

    def _end(self, life: _Life) -> None:
        if life.replica is None:
            if life.starting is not None:
                life.starting.cancel()
            life.ended = self._loop.time()
            return
        task = asyncio.create_task(self._drain(life, life.replica))
        self._service.withdraw(life.replica)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _drain(self, life: _Life, replica: SimulatedReplica) -> None:
        await replica.server.drain(self._drain_seconds)
        await replica.server.stop()
        life.ended = self._loop.time()

    async def _start(self, life: _Life, pool: SimulatedPool) -> None:
        await asyncio.sleep(pool.start_seconds)
        await self._begin(life, pool.speed)
        self._wakes.ready()

    async def _begin(self, life: _Life, speed: Speed) -> None:
        life.replica = replica = await self._service.add(speed)
        load = EngineLoad(speed.chunk)
        server = replica.server
        life.reporter = _Reporter(lambda: load.figures(server.stats, server.steps))


class Wakes:
    """The calls by which routers wait for a first replica, and which Serve reports as queued.

    waiting: number of open calls.
    start_seconds: assumed seconds of a start; None: the model never sleeps.
    """

    def __init__(self, start_seconds: float | None) -> None:
        self.waiting = 0
        self._start_seconds = start_seconds
        self._there: asyncio.Event | None = None

    def waking(self) -> Waking:
        """Return a Waking for one router, whose calls are counted in `waiting`."""
        return Waking(MODEL, self._start_seconds, self._ask)

    def ready(self) -> None:
        """Answer all open calls, because a replica is ready."""
        if self._there is not None:
            self._there.set()
            self._there = None

    async def _ask(self) -> None:
        if self._there is None:
            self._there = asyncio.Event()
        self.waiting += 1
        try:
            await self._there.wait()
        finally:
            self.waiting -= 1


def _aggregated(reporters: Iterable[_Reporter]) -> dict[str, dict[int, float]]:
    """Return {metric: {index of a reporter: mean of its reports}}, the form that Serve passes to a
    policy.

    Reporters without the metric are left out.
    """
    metrics: dict[str, dict[int, float]] = {}
    for number, reporter in enumerate(reporters):
        for metric in {name: None for report in reporter.reports for name in report}:
            if (value := reporter.mean(metric)) is not None:
                metrics.setdefault(metric, {})[number] = value
    return metrics
