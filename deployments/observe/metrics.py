"""The metrics: names, units and buckets in one table, and their Prometheus text.

Names follow vLLM's, with the prefix `manta_`. Times are in seconds. Labels come from closed sets
(served models, replica ids and names in the keys files), never from a request.

`families` lists a router's metrics, application_metrics.py merges those of all routers, and
`render` writes Prometheus' text. ray_exporter.py passes them to Ray's exporter.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from deployments.backend import BackendState
from engine.messages import EngineStats
from engine.speculation.settings import MAX_TOKENS

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
    """A sum that only grows, for each combination of label values."""

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
    """A histogram: counts by upper bound, and the sum of the values."""

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
    """Return the q-quantile of a histogram's counts, interpolated linearly; None without counts.

    buckets: upper bounds; a quantile beyond the last one is that bound.
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
        """Yield the metrics that are counted for all models together or name the model in a
        label."""
        counted = (self.http, self.key_requests, self.key_prompt_tokens, self.key_output_tokens)
        for metric in counted:
            yield MetricFamily(metric.name, metric.kind, metric.help, list(metric.samples()))

    def to_json(self) -> dict[str, Any]:
        """Return the counts that `manta status` reads.

        They are sums since the start, by label values if there are labels, and bucket counts of
        histograms.
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


@dataclass(frozen=True, slots=True)
class ReplicaMetric:
    """A metric of a replica, read from its EngineStats.

    position: the label `position`, "" for none; metrics of one name with different positions are
        one family.
    """

    name: str
    kind: str
    help: str
    read: Callable[[EngineStats], float]
    position: str = ""

    @property
    def key(self) -> str:
        """The name of this series in a reading of a replica."""
        return f"{self.position}/{self.name}" if self.position else self.name

    @property
    def labels(self) -> dict[str, str]:
        return {"position": self.position} if self.position else {}


def replica_readings(stats: EngineStats) -> dict[str, float]:
    """Return the value of each series by its key; positions without a count are left out."""
    values = ((figure, float(figure.read(stats))) for figure in REPLICA_METRICS)
    return {figure.key: value for figure, value in values if value or not figure.position}


def _accepted_at(position: int) -> ReplicaMetric:
    def read(stats: EngineStats) -> float:
        counts = stats.accepted_by_position
        return counts[position] if position < len(counts) else 0

    return ReplicaMetric(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft tokens that were accepted, by their position in the draft.",
        read,
        str(position),
    )


REPLICA_METRICS = (
    ReplicaMetric(
        "engine_asleep",
        "gauge",
        "1 while the replica sleeps, with its weights in host memory.",
        lambda s: s.asleep,
    ),
    ReplicaMetric(
        "engine_wakes_total", "counter", "Times that the replica woke.", lambda s: s.wakes
    ),
    ReplicaMetric(
        "engine_wake_seconds",
        "gauge",
        "Seconds that the last waking took until the replica could compute.",
        lambda s: s.wake_seconds,
    ),
    ReplicaMetric(
        "num_requests_running", "gauge", "Requests in the running batch.", lambda s: s.running
    ),
    ReplicaMetric(
        "num_requests_waiting", "gauge", "Requests that have not started.", lambda s: s.waiting
    ),
    ReplicaMetric(
        "num_tokens_waiting",
        "gauge",
        "Prompt tokens that have not been computed.",
        lambda s: s.waiting_tokens,
    ),
    ReplicaMetric(
        "kv_cache_usage_perc",
        "gauge",
        "Share of KV blocks in use, 0 to 1.",
        lambda s: 1 - s.free_blocks / s.total_blocks if s.total_blocks else 0.0,
    ),
    ReplicaMetric(
        "kv_cache_reserved_perc",
        "gauge",
        "Share of KV blocks in use if each running request reaches its limit.",
        lambda s: s.reserved_blocks / s.total_blocks if s.total_blocks else 0.0,
    ),
    ReplicaMetric(
        "num_preemptions_total",
        "counter",
        "Requests preempted for lack of KV blocks.",
        lambda s: s.preemptions,
    ),
    ReplicaMetric(
        "prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_queries,
    ),
    ReplicaMetric(
        "prefix_cache_hits_total",
        "counter",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.prefix_hits,
    ),
    ReplicaMetric(
        "state_slots_usage_perc",
        "gauge",
        "Share of recurrent state slots in use, 0 to 1; a running request has one.",
        lambda s: s.running / s.state_slots if s.state_slots else 0.0,
    ),
    ReplicaMetric(
        "state_snapshots",
        "gauge",
        "Snapshots of recurrent states that the prefix cache holds.",
        lambda s: s.snapshots,
    ),
    ReplicaMetric(
        "state_snapshots_usage_perc",
        "gauge",
        "Share of the snapshots' memory in use, 0 to 1.",
        lambda s: s.snapshots / s.snapshot_slots if s.snapshot_slots else 0.0,
    ),
    ReplicaMetric(
        "state_snapshots_taken_total",
        "counter",
        "Snapshots of recurrent states taken.",
        lambda s: s.snapshots_taken,
    ),
    ReplicaMetric(
        "state_snapshots_evicted_total",
        "counter",
        "Snapshots evicted to make room while their KV blocks were still cached.",
        lambda s: s.snapshots_evicted,
    ),
    ReplicaMetric(
        "images_encoded_total",
        "counter",
        "Images that the engine encoded.",
        lambda s: s.images_encoded,
    ),
    ReplicaMetric(
        "image_tokens_encoded_total",
        "counter",
        "Embeddings of images that the engine encoded: image tokens of prompts.",
        lambda s: s.image_tokens_encoded,
    ),
    ReplicaMetric(
        "image_encode_seconds_total",
        "counter",
        "Seconds that steps spent on encoding images.",
        lambda s: s.image_encode_seconds,
    ),
    ReplicaMetric(
        "image_cache_hits_total",
        "counter",
        "Images that were computed from embeddings in the image cache.",
        lambda s: s.image_cache_hits,
    ),
    ReplicaMetric(
        "images_received_total",
        "counter",
        "Images whose embeddings came from the encoder pool.",
        lambda s: s.images_received,
    ),
    ReplicaMetric(
        "images_not_received_total",
        "counter",
        "Images whose embeddings should have come from the encoder pool: the replica encodes them.",
        lambda s: s.images_not_received,
    ),
    ReplicaMetric(
        "image_cache_usage_perc",
        "gauge",
        "Share of the image cache in use, 0 to 1.",
        lambda s: s.image_cache_tokens / s.image_cache_size if s.image_cache_size else 0.0,
    ),
    ReplicaMetric(
        "host_kv_usage_perc",
        "gauge",
        "Share of the host tier's blocks in use, 0 to 1.",
        lambda s: s.host_kv_blocks / s.host_kv_slots if s.host_kv_slots else 0.0,
    ),
    ReplicaMetric(
        "host_kv_loaded_tokens_total",
        "counter",
        "Prompt tokens loaded from host memory instead of computed.",
        lambda s: s.host_kv_loaded_tokens,
    ),
    ReplicaMetric(
        "host_kv_loaded_bytes_total",
        "counter",
        "Bytes of KV blocks copied from host memory to the device.",
        lambda s: s.host_kv_loaded_bytes,
    ),
    ReplicaMetric(
        "host_kv_stored_bytes_total",
        "counter",
        "Bytes of KV blocks copied from the device to host memory.",
        lambda s: s.host_kv_stored_bytes,
    ),
    ReplicaMetric(
        "host_kv_load_seconds_total",
        "counter",
        "Seconds of copies of KV blocks from host memory.",
        lambda s: s.host_kv_load_seconds,
    ),
    ReplicaMetric(
        "host_kv_store_seconds_total",
        "counter",
        "Seconds of copies of KV blocks to host memory.",
        lambda s: s.host_kv_store_seconds,
    ),
    ReplicaMetric(
        "host_kv_wait_seconds_total",
        "counter",
        "Seconds that requests waited for KV blocks from host memory.",
        lambda s: s.host_kv_wait_seconds,
    ),
    ReplicaMetric(
        "host_kv_dropped_total",
        "counter",
        "KV blocks not copied to host memory, as too many copies were waiting.",
        lambda s: s.host_kv_dropped,
    ),
    ReplicaMetric(
        "host_kv_evicted_total",
        "counter",
        "KV blocks of host memory that made room for others.",
        lambda s: s.host_kv_evicted,
    ),
    ReplicaMetric(
        "host_kv_failed_loads_total",
        "counter",
        "Loads from host memory that failed; their tokens were computed.",
        lambda s: s.host_kv_failed_loads,
    ),
    ReplicaMetric(
        "disk_kv_used_bytes",
        "gauge",
        "Bytes of KV blocks in files of this replica's folder, by any engine.",
        lambda s: s.disk_kv_used_bytes,
    ),
    ReplicaMetric(
        "disk_kv_usage_perc",
        "gauge",
        "Share of the disk tier's bytes in use, 0 to 1.",
        lambda s: s.disk_kv_used_bytes / s.disk_kv_most_bytes if s.disk_kv_most_bytes else 0.0,
    ),
    ReplicaMetric(
        "disk_kv_read_tokens_total",
        "counter",
        "Prompt tokens read from disk instead of computed.",
        lambda s: s.disk_kv_read_tokens,
    ),
    ReplicaMetric(
        "disk_kv_read_bytes_total",
        "counter",
        "Bytes of KV blocks read from disk.",
        lambda s: s.disk_kv_read_bytes,
    ),
    ReplicaMetric(
        "disk_kv_written_bytes_total",
        "counter",
        "Bytes of KV blocks written to disk.",
        lambda s: s.disk_kv_written_bytes,
    ),
    ReplicaMetric(
        "disk_kv_read_seconds_total",
        "counter",
        "Seconds of reads of KV blocks from disk.",
        lambda s: s.disk_kv_read_seconds,
    ),
    ReplicaMetric(
        "disk_kv_write_seconds_total",
        "counter",
        "Seconds of writes of KV blocks to disk.",
        lambda s: s.disk_kv_write_seconds,
    ),
    ReplicaMetric(
        "disk_kv_wait_seconds_total",
        "counter",
        "Seconds that requests waited for KV blocks from disk.",
        lambda s: s.disk_kv_wait_seconds,
    ),
    ReplicaMetric(
        "disk_kv_dropped_total",
        "counter",
        "KV blocks not written to disk: a full queue, no room, or an error.",
        lambda s: s.disk_kv_dropped,
    ),
    ReplicaMetric(
        "disk_kv_evicted_total",
        "counter",
        "Files of KV blocks that made room for others.",
        lambda s: s.disk_kv_evicted,
    ),
    ReplicaMetric(
        "disk_kv_damaged_total",
        "counter",
        "Files of KV blocks that were short, foreign or damaged, and were deleted.",
        lambda s: s.disk_kv_damaged,
    ),
    ReplicaMetric(
        "disk_kv_failed_reads_total",
        "counter",
        "Reads of KV blocks from disk that failed; their tokens were computed.",
        lambda s: s.disk_kv_failed_reads,
    ),
    ReplicaMetric(
        "kv_moves_total",
        "counter",
        "Requests for which KV blocks were pulled from another replica.",
        lambda s: s.moves,
    ),
    ReplicaMetric(
        "kv_moves_failed_total",
        "counter",
        "Pulls of KV blocks that failed in part or as a whole; the rest was computed.",
        lambda s: s.failed_moves,
    ),
    ReplicaMetric(
        "kv_moved_tokens_total",
        "counter",
        "Prompt tokens whose KV blocks came from another replica.",
        lambda s: s.moved_tokens,
    ),
    ReplicaMetric(
        "kv_moved_bytes_total",
        "counter",
        "Bytes of KV blocks that came from other replicas.",
        lambda s: s.moved_bytes,
    ),
    ReplicaMetric(
        "kv_move_seconds_total",
        "counter",
        "Seconds of pulls of KV blocks from other replicas.",
        lambda s: s.move_seconds,
    ),
    ReplicaMetric(
        "kv_moves_shared_total",
        "counter",
        "Pulls of KV blocks that came by shared memory instead of TCP.",
        lambda s: s.shared_moves,
    ),
    ReplicaMetric(
        "kv_sent_bytes_total",
        "counter",
        "Bytes of KV blocks that other replicas pulled.",
        lambda s: s.sent_kv_bytes,
    ),
    ReplicaMetric(
        "kv_mapped_bytes",
        "gauge",
        "Bytes of memory that growing KV blocks have now.",
        lambda s: s.kv_mapped_bytes,
    ),
    ReplicaMetric(
        "kv_growths_total",
        "counter",
        "Times that KV memory grew.",
        lambda s: s.kv_growths,
    ),
    ReplicaMetric(
        "kv_shrinks_total",
        "counter",
        "Times that KV memory went to other engines of the device.",
        lambda s: s.kv_shrinks,
    ),
    ReplicaMetric(
        "kv_pause_seconds_total",
        "counter",
        "Seconds that steps waited for KV memory that grew or shrank.",
        lambda s: s.kv_pause_seconds,
    ),
    ReplicaMetric(
        "engine_prompt_tokens_total",
        "counter",
        "Prompt tokens computed by the engine.",
        lambda s: s.prompt_tokens,
    ),
    ReplicaMetric(
        "engine_generation_tokens_total",
        "counter",
        "Tokens sampled by the engine.",
        lambda s: s.output_tokens,
    ),
    ReplicaMetric("engine_steps_total", "counter", "Steps that the engine ran.", lambda s: s.step),
    ReplicaMetric(
        "engine_busy_seconds_total",
        "counter",
        "Seconds in which the engine had work; the rest of the time its device was idle.",
        lambda s: s.busy_seconds,
    ),
    ReplicaMetric(
        "engine_step_seconds", "gauge", "Duration of the last step.", lambda s: s.step_seconds
    ),
    ReplicaMetric(
        "engine_out_of_memory_total",
        "counter",
        "Steps that ran out of device memory and were run again in smaller ones.",
        lambda s: s.out_of_memory,
    ),
    ReplicaMetric(
        "num_adapters_loaded", "gauge", "LoRA adapters on the device.", lambda s: len(s.adapters)
    ),
    ReplicaMetric(
        "adapter_loads_total",
        "counter",
        "LoRA adapters copied to the device.",
        lambda s: s.adapter_loads,
    ),
    ReplicaMetric(
        "spec_decode_num_drafts_total",
        "counter",
        "Drafts that steps verified: one for each request and step with any.",
        lambda s: s.drafts,
    ),
    ReplicaMetric(
        "spec_decode_num_draft_tokens_total",
        "counter",
        "Draft tokens that steps verified.",
        lambda s: s.draft_tokens,
    ),
    ReplicaMetric(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "Draft tokens that were accepted: tokens beyond one for each request and step.",
        lambda s: sum(s.accepted_by_position),
    ),
    *map(_accepted_at, range(MAX_TOKENS)),
    ReplicaMetric(
        "replica_draining",
        "gauge",
        "1 while the replica drains and accepts no request.",
        lambda s: s.draining,
    ),
)

# Metrics of the autoscaling policy, which runs in Serve's controller: in Ray's exporter only.
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


Sample = tuple[str, dict[str, str], float]  # suffix of the name, labels, value


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric and its present samples. kind: "counter", "gauge" or "histogram"."""

    name: str
    kind: str
    help: str
    samples: list[Sample]


def families(metrics: RouterMetrics, state: BackendState) -> Iterator[MetricFamily]:
    """Yield a router's counters and histograms, and gauges of its requests in flight and queued."""
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
    """Yield a router's metrics with the model as a label of each sample."""
    for family in figures:
        samples: list[Sample] = [
            (suffix, {"model_name": model, **labels}, value)
            for suffix, labels, value in family.samples
        ]
        yield MetricFamily(family.name, family.kind, family.help, samples)


def replica_families(stats: EngineStats) -> Iterator[MetricFamily]:
    """Yield the metrics of a replica from its stats."""
    return of_replicas({"": replica_readings(stats)}, lambda _: {})


def of_replicas(
    readings: Mapping[str, Mapping[str, float]], labels: Callable[[str], dict[str, str]]
) -> Iterator[MetricFamily]:
    """Yield the metrics of replicas.

    readings: for each replica what `replica_readings` returned.
    labels: function that returns the labels of a replica's series, by the replica's name.
    """
    for name, figures in groupby(REPLICA_METRICS, key=lambda figure: figure.name):
        series = list(figures)
        samples: list[Sample] = [
            ("", {**labels(replica), **figure.labels}, values[figure.key])
            for replica, values in sorted(readings.items())
            for figure in series
            if figure.key in values
        ]
        yield MetricFamily(PREFIX + name, series[0].kind, series[0].help, samples)


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
