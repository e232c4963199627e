"""RouterMetrics: names, units and buckets of a router's metrics, and their Prometheus text.

Names follow vLLM's, with the prefix `manta_`. Times are in seconds. Labels come from closed sets
(served models, replica ids and names in the keys files), never from a request.

`families` yields a router's metrics, replica_metrics.py has those of a replica, and `render` writes
Prometheus' text. application_metrics.py merges the reports of all routers, and ray_exporter.py
passes metrics to Ray's exporter.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.backend import BackendState

PREFIX = "manta_"

_FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
)  # fmt: skip
_BETWEEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0,
    480.0, 960.0,
)  # fmt: skip
_TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip


class Counter:
    """A counter, with one sum for each combination of label values."""

    kind = "counter"

    def __init__(self, name: str, help: str, *labels: str) -> None:
        self.name = PREFIX + name
        self.help = help
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def inc(self, amount: float = 1, *values: str) -> None:
        self.values[values] = self.values.get(values, 0) + amount

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for values, amount in self.values.items():
            yield "", dict(zip(self.labels, values, strict=True)), amount


class Histogram:
    """A histogram: the number of observed values per bucket, and their sum.

    buckets: upper bounds, ascending; values above the last one are counted in an additional bucket.
    """

    kind = "histogram"

    def __init__(self, name: str, help: str, buckets: tuple[float, ...]) -> None:
        self.name = PREFIX + name
        self.help = help
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        total = 0
        for bound, count in zip((*self.buckets, float("inf")), self.counts, strict=True):
            total += count
            yield "_bucket", {"le": "+Inf" if bound == float("inf") else f"{bound:g}"}, total
        yield "_sum", {}, self.sum
        yield "_count", {}, total


def quantile(buckets: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Return the q-quantile of a histogram, interpolated linearly; None if it has no values.

    buckets: upper bounds, the last of which is returned for quantiles beyond it.
    counts: number of values by bucket.
    """
    wanted = q * sum(counts)
    if wanted <= 0:
        return None
    below, low = 0.0, 0.0
    for bound, count in zip(buckets, counts, strict=False):
        if below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        below, low = below + count, bound
    return low


class RouterMetrics:
    """The counters and histograms of one router."""

    def __init__(self) -> None:
        self.first_token = Histogram(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.between = Histogram(
            "inter_token_latency_seconds",
            "Seconds between two tokens of one choice.",
            _BETWEEN_BUCKETS,
        )
        self.request = Histogram(
            "e2e_request_latency_seconds",
            "Seconds from a request's arrival to its end.",
            _REQUEST_BUCKETS,
        )
        self.queue = Histogram(
            "request_queue_time_seconds",
            "Seconds from a request's arrival until it was sent to a replica.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.prompt_size = Histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS
        )
        self.output_size = Histogram(
            "request_generation_tokens", "Output tokens of a choice.", _TOKEN_BUCKETS
        )
        self.prompt_tokens = Counter(
            "prompt_tokens_total", "Prompt tokens of requests that were accepted."
        )
        self.cached_tokens = Counter(
            "prompt_tokens_cached_total", "Prompt tokens found in a replica's prefix cache."
        )
        self.images = Counter("images_total", "Images of requests that were accepted.")
        self.output_tokens = Counter("generation_tokens_total", "Output tokens sent to clients.")
        self.vector = Histogram(
            "embedding_latency_seconds",
            "Seconds from a text's arrival to its embedding.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.vector_tokens = Counter(
            "embedding_tokens_total", "Prompt tokens of texts that were embedded."
        )
        self.finished = Counter(
            "request_success_total", "Choices that ended, by reason.", "finished_reason"
        )
        self.failed = Counter("request_failure_total", "Requests that failed, by code.", "code")
        self.migrations = Counter(
            "migrations_total", "Choices that continued on another replica after they lost theirs."
        )
        self.routed = Counter(
            "routed_total", "Requests routed, by the reason for the choice of replica.", "reason"
        )
        self.paused = Counter(
            "streams_paused_total", "Times that a stream paused because its client did not read."
        )
        self.key_requests = Counter(
            "key_requests_total", "Prompts that ended, by key and model.", "key", "model"
        )
        self.key_prompt_tokens = Counter(
            "key_prompt_tokens_total",
            "Prompt tokens of these prompts, by key and model.",
            "key",
            "model",
        )
        self.key_output_tokens = Counter(
            "key_generation_tokens_total",
            "Output tokens of these prompts, by key and model.",
            "key",
            "model",
        )
        self.http = Counter(
            "http_requests_total", "Answers by route and status.", "route", "status"
        )
        self.wakes = Counter("wakes_total", "Times that a sleeping model was woken by a request.")
        self.channels = Counter("channel_opened_total", "Connections made to replicas.")

    def all(self) -> tuple[Counter | Histogram, ...]:
        return tuple(vars(self).values())

    def of_no_model(self) -> Iterator["MetricFamily"]:
        """Yield the metrics that a router of several models has once: counted for all models
        together, or with a label for the model."""
        counted = (self.http, self.key_requests, self.key_prompt_tokens, self.key_output_tokens)
        for metric in counted:
            yield MetricFamily(metric.name, metric.kind, metric.help, list(metric.samples()))

    def to_json(self) -> dict[str, Any]:
        """Return {name of the attribute: its counts since the start}, for `manta status`.

        A counter's value is a sum, or sums by label values (joined by "/"). A histogram's value is
        the list of its bucket counts.
        """
        values: dict[str, Any] = {}
        for name, metric in vars(self).items():
            if isinstance(metric, Histogram):
                values[name] = list(metric.counts)
            elif metric.labels:
                values[name] = {"/".join(key): value for key, value in metric.values.items()}
            else:
                values[name] = metric.values[()]
        return values


# Metrics of the autoscaling policy. It runs in Serve's controller, so only Ray's exporter has these
# metrics.
SCALING_TARGET = "scaling_target_replicas"
SCALING_DECISIONS = "scaling_decisions_total"
SCALING_MINIMUM = "scaling_min_replicas"
SCALING_MAXIMUM = "scaling_max_replicas"
SCALING_CALM = "scaling_calm_seconds"
SCALING_IDLE = "scaling_idle_seconds"
SCALING_HELP = {
    SCALING_TARGET: "Replicas that a pool should have.",
    SCALING_DECISIONS: "Changes of a pool's target, by direction and reason.",
    SCALING_MINIMUM: "Replicas that a pool has at least.",
    SCALING_MAXIMUM: "Replicas that a pool has at most.",
    SCALING_CALM: "Seconds of lower demand before replicas are removed.",
    SCALING_IDLE: "Seconds without a request before a pool's last replica is removed.",
}


Sample = tuple[str, dict[str, str], float]  # (suffix of the name, labels, value)


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric with its present samples. kind: "counter", "gauge" or "histogram"."""

    name: str
    kind: str
    help: str
    samples: list[Sample]


def families(metrics: RouterMetrics, state: BackendState) -> Iterator[MetricFamily]:
    """Yield a router's counters and histograms, and gauges of requests in flight and of its queue.

    state: the values of the gauges.
    """
    for metric in metrics.all():
        yield MetricFamily(metric.name, metric.kind, metric.help, list(metric.samples()))
    for name, help, value in (
        ("router_requests_in_flight", "Requests that have not ended.", state.in_flight),
        ("router_choices_queued", "Choices that wait for a replica to have room.", state.queued),
        (
            "router_tokens_queued",
            "Tokens of queued choices: prompts and expected outputs.",
            state.queued_tokens,
        ),
    ):
        yield MetricFamily(PREFIX + name, "gauge", help, [("", {}, value)])


def of_model(figures: Iterable[MetricFamily], model: str) -> Iterator[MetricFamily]:
    """Yield metric families with the model's name as a label of each sample."""
    for family in figures:
        samples: list[Sample] = [
            (suffix, {"model_name": model, **labels}, value)
            for suffix, labels, value in family.samples
        ]
        yield MetricFamily(family.name, family.kind, family.help, samples)


def render(families: Iterable[MetricFamily], model: str) -> str:
    """Return the metrics in Prometheus' text format, version 0.0.4.

    model: label of samples that do not name their model.
    """
    return "".join(f"{line}\n" for family in families for line in _block(family, model))


def _block(family: MetricFamily, model: str) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} {family.kind}"
    for suffix, labels, value in family.samples:
        pairs = {"model_name": model, **labels}.items()
        text = ",".join(f'{key}="{_escape(label)}"' for key, label in pairs)
        number = str(int(value)) if value == int(value) else repr(float(value))
        yield f"{family.name}{suffix}{{{text}}} {number}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
