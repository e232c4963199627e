"""The router's metrics through Ray's own exporter, beside /metrics: for clusters that scrape Ray's
nodes."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from ray.serve import metrics as ray_metrics

from deployments.metrics import Counter, Histogram, RouterMetrics

_PERIOD = 5.0  # seconds between exports: what a scraper sees, at a cost that does not show


class ServeExport:
    """Copies counters every few seconds and forwards what is observed once a request. Ray adds
    deployment and replica.

    Time between tokens stays out: one call of Ray's histogram costs as much as relaying a token.
    """

    def __init__(self, metrics: RouterMetrics, in_flight: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self._loop = asyncio.get_running_loop()
        self._gauge = ray_metrics.Gauge(
            "manta_router_requests_in_flight", "Requests of this router that have not ended."
        )
        self._counters: list[tuple[Counter, ray_metrics.Counter, dict[tuple[str, ...], float]]] = []
        for metric in metrics.all():
            if isinstance(metric, Counter):
                exported = ray_metrics.Counter(
                    metric.name.removesuffix("_total"),
                    metric.help,
                    tag_keys=cast(Any, metric.labels),
                )
                self._counters.append((metric, exported, {}))
            elif metric is not metrics.between:
                self._forward(metric)
        self._timer = self._loop.call_later(_PERIOD, self._export)

    def stop(self) -> None:
        self._timer.cancel()

    def _forward(self, metric: Histogram) -> None:
        exported = ray_metrics.Histogram(metric.name, metric.help, boundaries=list(metric.buckets))
        metric.listener = exported.observe

    def _export(self) -> None:
        self._gauge.set(self._in_flight())
        for metric, exported, sent in self._counters:
            for values, amount in metric.values.items():
                new = amount - sent.get(values, 0)
                if new > 0:
                    exported.inc(new, tags=dict(zip(metric.labels, values, strict=True)))
                    sent[values] = amount
        self._timer = self._loop.call_later(_PERIOD, self._export)
