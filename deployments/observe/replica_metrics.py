"""REPLICA_METRICS: the metrics of a replica, each with the function that reads it from
EngineStats."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from deployments.observe.metrics import PREFIX, MetricFamily, Sample
from engine.messages import EngineStats
from engine.speculation.settings import MAX_TOKENS


@dataclass(frozen=True, slots=True)
class ReplicaMetric:
    """A metric of a replica, or the series of a metric with one value of the label `position`.

    kind: "counter" or "gauge".
    read: returns the metric's value.
    position: value of the label `position`; "": the metric has no such label.
    """

    name: str
    kind: str
    help: str
    read: Callable[[EngineStats], float]
    position: str = ""

    @property
    def key(self) -> str:
        """The key of this series in the result of `replica_readings`."""
        return f"{self.position}/{self.name}" if self.position else self.name

    @property
    def labels(self) -> dict[str, str]:
        return {"position": self.position} if self.position else {}


def replica_readings(stats: EngineStats) -> dict[str, float]:
    """Return the values of a replica's metrics (a reading): {`ReplicaMetric.key`: value}.

    Series with a position and the value 0 are left out.
    """
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
        "KV blocks not written to disk: a full queue, no room, evicted first, or an error.",
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
        "kv_moves_device_total",
        "counter",
        "Pulls of KV blocks that came from the memory of another replica's GPU.",
        lambda s: s.device_moves,
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


def replica_families(stats: EngineStats) -> Iterator[MetricFamily]:
    """Yield the metrics of one replica, without labels that name it."""
    return of_replicas({"": replica_readings(stats)}, lambda _: {})


def of_replicas(
    readings: Mapping[str, Mapping[str, float]], labels: Callable[[str], dict[str, str]]
) -> Iterator[MetricFamily]:
    """Yield each replica metric once, with the samples of all replicas.

    readings: result of `replica_readings`, by replica.
    labels: returns the labels of a replica's samples, given its name.
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
