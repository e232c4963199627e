"""ApplicationMetrics: the text of /metrics, the same for all routers of an application, whichever
router is asked.

A load balancer gives each scrape to another router. So the router that gets it asks the others for
their counts, and each router's series carry its name: a series is counted in one process only and
never goes back. A router that ends takes its series along, as a target of Prometheus does.

Each replica has one series. Of the readings that the routers have of a replica, the newest counts.
A router passes on the readings that another router has sent it, so that these series do not go back
either.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from deployments.observe.metrics import PREFIX, REPLICA_METRICS, MetricFamily, render
from engine.messages import EngineStats

T = TypeVar("T")

_AGE = "engine_steps_total"  # of two readings of a replica, the one with more steps is newer


class RouterReport(msgspec.Struct, array_like=True):
    """A router's report to the others: its own metrics, and its reading of each replica."""

    router: str
    families: list[MetricFamily]
    replicas: dict[str, dict[str, float]]


class ApplicationMetrics:
    """A router's text of the application's metrics.

    own: metrics of this router.
    heard: last stats of the replicas that this router is connected to.
    others: call that asks the other routers to `tell`; routers that do not answer are missing.
    """

    def __init__(
        self,
        router: str,
        model: str,
        own: Callable[[], Iterable[MetricFamily]],
        heard: Callable[[], Mapping[str, EngineStats]],
        others: Callable[[], Awaitable[list[bytes]]],
    ) -> None:
        self._router = router
        self._model = model
        self._own = own
        self._heard = heard
        self._others = others
        self._replicas: dict[str, dict[str, float]] = {}
        self.text = SingleFlight(self._gather)

    def report(self) -> bytes:
        """Return this router's report for another router, encoded."""
        return msgspec.msgpack.encode(self._own_report())

    def _own_report(self) -> RouterReport:
        heard = {name: _read(stats) for name, stats in self._heard().items()}
        # Readings of a replica that has left are dropped.
        self._replicas = {
            name: _newest(figures, self._replicas.get(name, figures))
            for name, figures in heard.items()
        }
        return RouterReport(self._router, list(self._own()), self._replicas)

    async def _gather(self) -> str:
        answers = [msgspec.msgpack.decode(raw, type=RouterReport) for raw in await self._others()]
        own = self._own_report()  # after the others', so that it is the newest
        reports = [own, *(report for report in answers if report.router != self._router)]
        replicas: dict[str, dict[str, float]] = {}
        for report in reports:
            for name, figures in report.replicas.items():
                replicas[name] = _newest(figures, replicas.get(name, figures))
        self._replicas |= {name: replicas[name] for name in own.replicas}
        return render([*_labelled(reports), *_by_replica(replicas)], self._model)


class SingleFlight(Generic[T]):
    """Calls of one function, one at a time: all callers that come while a call runs share the next.
    So no caller gets a result that was begun before it asked, and any number of callers costs two
    calls."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._running))
        return await asyncio.shield(self._next)

    async def _after(self, before: "asyncio.Task[T] | None") -> T:
        if before is not None and not before.done():
            await asyncio.wait({before})
        self._running, self._next = self._next, None
        return await self._work()


def _read(stats: EngineStats) -> dict[str, float]:
    return {figure.name: float(figure.read(stats)) for figure in REPLICA_METRICS}


def _newest(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """The newest of two readings of a replica. A counter may move between two steps, too."""
    newer, older = (one, other) if one[_AGE] >= other[_AGE] else (other, one)
    counters = {name for name in newer if name.endswith("_total")}
    return {
        name: max(value, older.get(name, value)) if name in counters else value
        for name, value in newer.items()
    }


def _labelled(reports: Iterable[RouterReport]) -> Iterable[MetricFamily]:
    """The routers' families, each once, with all samples. During an update routers differ."""
    by_name: dict[str, MetricFamily] = {}
    for report in reports:
        for family in report.families:
            into = by_name.setdefault(
                family.name, MetricFamily(family.name, family.kind, family.help, [])
            )
            into.samples.extend(
                (suffix, {"router": report.router, **labels}, value)
                for suffix, labels, value in family.samples
            )
    return by_name.values()


def _by_replica(replicas: Mapping[str, Mapping[str, float]]) -> Iterable[MetricFamily]:
    for figure in REPLICA_METRICS:
        samples = [
            ("", _replica_labels(name), figures[figure.name])
            for name, figures in sorted(replicas.items())
            if figure.name in figures
        ]
        yield MetricFamily(PREFIX + figure.name, figure.kind, figure.help, samples)


def _replica_labels(name: str) -> dict[str, str]:
    """Return the labels of a replica's series.

    name: `engine-POOL/ID`, behind its model and a slash where there are several models.
    """
    model, _, replica = name.rpartition("/engine-")
    return {"model_name": model, "replica": f"engine-{replica}"} if model else {"replica": name}
