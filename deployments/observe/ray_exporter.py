"""ServeExport, ScalingExport: export our metrics through Ray's exporter, in addition to /metrics.

This is for clusters that scrape Ray's nodes, and for the dashboard in deploy/grafana.json. Ray
prefixes the names with `ray_`, and adds labels for deployment, replica and application.

Values are copied every few seconds, because one call of Ray's API costs as much as relaying a
token. So histogram buckets are exported as gauges with a histogram's names, which queries cannot
distinguish.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, cast

from ray.serve import metrics as ray_metrics

from deployments.observe.metrics import (
    PREFIX,
    SCALING_CALM,
    SCALING_DECISIONS,
    SCALING_HELP,
    SCALING_IDLE,
    SCALING_MAXIMUM,
    SCALING_MINIMUM,
    SCALING_TARGET,
    MetricFamily,
)

_PERIOD = 5.0  # seconds between exports: fresh enough for a scraper, and of negligible cost


class ServeExport:
    """A periodic export of metrics to Ray's exporter, every _PERIOD seconds until `stop`.

    All methods must be called on one event loop.

    families: returns the metrics.
    """

    def __init__(self, families: Callable[[], Iterable[MetricFamily]]) -> None:
        self._families = families
        self._metrics: dict[str, ray_metrics.Counter | ray_metrics.Gauge] = {}
        self._sent: dict[tuple[str, tuple[str, ...]], float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_PERIOD, self._export)

    def stop(self) -> None:
        self._timer.cancel()

    def _export(self) -> None:
        for family in self._families():
            for suffix, labels, value in family.samples:
                name = family.name + suffix
                metric = self._metrics.get(name)
                if metric is None:
                    metric = self._metrics[name] = _make(family, name, tuple(labels))
                if isinstance(metric, ray_metrics.Gauge):
                    metric.set(value, tags=labels)
                    continue
                key = (name, tuple(labels.values()))
                new = value - self._sent.get(key, 0.0)
                if new > 0:
                    metric.inc(new, tags=labels)
                    self._sent[key] = value
        self._timer = self._loop.call_later(_PERIOD, self._export)


def _make(
    family: MetricFamily, name: str, labels: tuple[str, ...]
) -> ray_metrics.Counter | ray_metrics.Gauge:
    keys = cast(Any, labels)
    if family.kind == "counter":  # Ray appends `_total` to the name
        return ray_metrics.Counter(name.removesuffix("_total"), family.help, tag_keys=keys)
    return ray_metrics.Gauge(name, family.help, tag_keys=keys)


@cache
def scaling_export(app: str) -> "ScalingExport":
    """Return the exporter of an application's scaling metrics; there is one per process."""
    return ScalingExport(app)


class ScalingExport:
    """The exporter of the autoscaling policy's metrics.

    The policy runs in Serve's controller, without an event loop or a replica of its own.
    """

    def __init__(self, app: str) -> None:
        keys = ("application", "pool")
        self._app = app
        self._targets: dict[str, int] = {}
        self._target = _make(
            MetricFamily(SCALING_TARGET, "gauge", SCALING_HELP[SCALING_TARGET], []),
            PREFIX + SCALING_TARGET,
            keys,
        )
        self._decisions = _make(
            MetricFamily(SCALING_DECISIONS, "counter", SCALING_HELP[SCALING_DECISIONS], []),
            PREFIX + SCALING_DECISIONS,
            (*keys, "direction", "reason"),
        )
        self._bounds = [
            _make(MetricFamily(name, "gauge", SCALING_HELP[name], []), PREFIX + name, keys)
            for name in (SCALING_MINIMUM, SCALING_MAXIMUM, SCALING_CALM, SCALING_IDLE)
        ]

    def report(
        self,
        targets: Mapping[str, int],
        causes: Mapping[str, str],
        limits: Mapping[str, tuple[int, int]],
        cooldowns: tuple[float, float],
    ) -> None:
        """Set the metrics of the pools, and count each change of a target.

        targets: target number of replicas, by pool.
        causes: `ScalingReason.cause`, by pool.
        limits: minimum and maximum number of replicas, by pool.
        cooldowns: seconds of low demand after which replicas are removed, and of idleness after
            which the last one is.
        """
        for pool, target in targets.items():
            tags = {"application": self._app, "pool": pool}
            before = self._targets.get(pool, target)
            cast(ray_metrics.Gauge, self._target).set(target, tags=tags)
            for gauge, bound in zip(self._bounds, (*limits[pool], *cooldowns), strict=True):
                cast(ray_metrics.Gauge, gauge).set(bound, tags=tags)
            if target != before:
                direction = "up" if target > before else "down"
                counter = cast(ray_metrics.Counter, self._decisions)
                counter.inc(1, tags={**tags, "direction": direction, "reason": causes[pool]})
        self._targets.update(targets)
