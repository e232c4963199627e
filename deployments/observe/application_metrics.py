"""ApplicationMetrics: the text of /metrics for a whole application, which any router can return.

A load balancer sends each scrape to another router. So the scraped router requests the counts of
all others, and each router's series are labelled with its name. So each series is counted in one
process and never decreases. The series of a router that has ended disappear.

A replica's metrics appear once, with the newest of all routers' readings. A router also remembers
readings from other routers, so that these series do not decrease either.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from deployments.observe.metrics import MetricFamily, render
from deployments.observe.replica_metrics import of_replicas, replica_readings
from engine.messages import EngineStats

T = TypeVar("T")

# The counter by which readings of a replica are compared: the one with more steps is newer.
_AGE = "engine_steps_total"


class RouterReport(msgspec.Struct, array_like=True):
    """A router's report to the other routers: its own metrics, and its readings of the replicas'
    metrics.

    replicas: {replica: {key of a metric: value}}; see `replica_readings`.
    """

    router: str
    families: list[MetricFamily]
    replicas: dict[str, dict[str, float]]


class ApplicationMetrics:
    """One router's source of the metrics text of the whole application.

    router: name of this router.
    model: name of the application's only model; "": it has several.
    own: returns this router's metrics.
    heard: returns the last stats of the replicas to which this router is connected, by name.
    others: returns the encoded reports of those other routers that answer in time.
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
        """Return this router's RouterReport for another router, as msgpack."""
        return msgspec.msgpack.encode(self._own_report())

    def _own_report(self) -> RouterReport:
        heard = {name: replica_readings(stats) for name, stats in self._heard().items()}
        # Only replicas to which this router is connected now are kept.
        self._replicas = {
            name: _newest(figures, self._replicas.get(name, figures))
            for name, figures in heard.items()
        }
        return RouterReport(self._router, list(self._own()), self._replicas)

    async def _gather(self) -> str:
        answers = [msgspec.msgpack.decode(raw, type=RouterReport) for raw in await self._others()]
        own = self._own_report()  # read last, so this router's figures are the newest
        reports = [own, *(report for report in answers if report.router != self._router)]
        replicas: dict[str, dict[str, float]] = {}
        for report in reports:
            for name, figures in report.replicas.items():
                replicas[name] = _newest(figures, replicas.get(name, figures))
        self._replicas |= {name: replicas[name] for name in own.replicas}
        return render([*_labelled(reports), *of_replicas(replicas, _replica_labels)], self._model)


class SingleFlight(Generic[T]):
    """A coroutine function whose concurrent calls are merged: callers that arrive during a run
    share the next run.

    So no caller gets the result of a run that began before its call, and simultaneous callers cause
    at most two runs.
    """

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


def _newest(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Return the newer of two readings of a replica's metrics, with the larger value of each
    counter.

    Some counters grow between steps, so readings after the same number of steps may differ.
    """
    newer, older = (one, other) if one[_AGE] >= other[_AGE] else (other, one)
    counters = {name for name in newer if name.endswith("_total")}
    return {
        name: max(value, older.get(name, value)) if name in counters else value
        for name, value in newer.items()
    }


def _labelled(reports: Iterable[RouterReport]) -> Iterable[MetricFamily]:
    """Merge the metric families of all routers, whose samples get the label `router`.

    Routers may have different families during an update.
    """
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


def _replica_labels(name: str) -> dict[str, str]:
    """Return the labels of a replica's series.

    name: name of the replica: `engine-POOL/ID`, or `MODEL/engine-POOL/ID` with several models.
    """
    model, _, replica = name.rpartition("/engine-")
    return {"model_name": model, "replica": f"engine-{replica}"} if model else {"replica": name}
