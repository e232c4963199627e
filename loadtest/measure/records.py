"""The records of a load test: one for each request, the run's facts, the summary.

Times are seconds since the run's start (`RunInfo.started_at`), read from one monotonic clock that
all client processes of a host share. A latency is counted from `intended_s`, the moment at which
the schedule wanted the request on its way, not from when the client got round to it: a stalled
server cannot make its own numbers better by holding up the client (coordinated omission).

Files: requests.jsonl has a RequestRecord a line, summary.json one Summary. A reader ignores fields
that it does not know; a field that changes its meaning changes SCHEMA.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

SCHEMA = "manta-loadtest/1"

Verified = Literal["ok", "different", "not checked"]
Verdict = Literal["ok", "client_bottleneck"]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request, as the client saw it.

    sent_s: the client wrote the request to an open connection, or began to connect; None if it
    never did. connect_s: how long connecting took, 0 on a connection that was open.
    first_byte_s: the first byte of the answer's head. chunks: (time, tokens) of each part of the
    answer that carried tokens; a unary answer is one chunk. Where the server does not tell how many
    tokens a chunk has, tokens is 1 and chunks_exact is False. end_s: the answer's last byte, the
    failure, or our own cancellation.

    output_tokens_expected: what was asked for, None where the model may stop by itself.
    output_tokens: what the server's usage says, else what was counted. missing_tokens: promised by
    the usage, the request or the reference and not received; doubled_tokens: received once more.

    status: the HTTP status, 0 if there was no answer. error_class: None for success, else one of
    ERROR_CLASSES. error_code: the server's own code, as in {"error": {"code": ...}}.
    cancelled: we hung up on purpose; neither a success nor a failure. Its chunks count as tokens.
    slow_reader: we read slowly on purpose, so its latencies are in no percentile.
    queue_s: the server's own figure for its queue, where a header tells it.
    """

    index: int
    phase: str
    intended_s: float
    end_s: float
    sent_s: float | None = None
    connect_s: float = 0.0
    first_byte_s: float | None = None
    chunks: list[tuple[float, int]] = []
    chunks_exact: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens_expected: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    status: int = 0
    error_class: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    request_id: str | None = None
    tenant: str = ""
    adapter: str = ""
    session: int | None = None
    stream: bool = True
    cancelled: bool = False
    slow_reader: bool = False
    warmup: bool = False
    migrations: int | None = None
    queue_s: float | None = None
    replica: str | None = None
    missing_tokens: int = 0
    doubled_tokens: int = 0
    verified: Verified = "not checked"

    @property
    def ok(self) -> bool:
        """Ended as it should. A different text (verified) is a success here and counted apart."""
        return self.error_class is None and not self.cancelled

    @property
    def failed(self) -> bool:
        return self.error_class is not None

    @property
    def lateness_s(self) -> float | None:
        """The delay of the client, in seconds: its own fault, never the server's."""
        return None if self.sent_s is None else max(0.0, self.sent_s - self.intended_s)

    @property
    def ttft_s(self) -> float | None:
        """Intended send to the first token. None without one, and for unary answers."""
        if not self.stream or not self.chunks:
            return None
        return self.chunks[0][0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        """Intended send to the end."""
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first chunk; None if there was only one chunk."""
        if not self.stream or len(self.chunks) < 2:
            return None
        first, last = self.chunks[0], self.chunks[-1]
        tokens = self.output_tokens - self.chunks[0][1]
        return (last[0] - first[0]) / tokens if tokens > 0 else None


ERROR_CLASSES: dict[str, str] = {
    "connect": "no connection: refused, unreachable, TLS",
    "disconnect": "the connection ended before any answer",
    "cut": "the stream ended without [DONE], or the body was shorter than announced",
    "timeout": "no answer, or no next chunk, within the scenario's timeout",
    "http_4xx": "the server refused the request",
    "http_429": "refused: rate limit or overload",
    "http_5xx": "the server failed",
    "http_503": "the server has no place, or is going away",
    "stream_error": "an error event inside the stream",
    "bad_answer": "not HTTP, not JSON, or not an OpenAI answer",
}


class FaultMark(msgspec.Struct, frozen=True):
    """Something that was done to the cluster, or happened to it, at t seconds."""

    t: float
    what: str


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a run: what, where and when. started_at: RFC 3339 in UTC. scenario: its text."""

    name: str
    scenario: str
    seed: int
    url: str
    model: str
    client_host: str
    started_at: str
    procs: int = 1
    gpus: int | None = None
    versions: dict[str, str] = {}
    target: dict[str, str] = {}


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """The percentiles of a metric, in seconds but for count. All zero for an empty set (count
    0)."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    min: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    max: float = 0.0


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that kept every limit of the SLO. low, high: Wilson interval of fraction at 95 %.

    total: all requests that were to be answered, with failures, without our own cancellations and
    slow reads.
    A wrong answer (verified: different) is not good. per_s: good requests a second. slo:
    limits in seconds, by metric: ttft, tpot, itl (its worst), e2e; empty: every success is good.
    """

    slo: dict[str, float] = {}
    good: int = 0
    total: int = 0
    fraction: float = 0.0
    low: float = 0.0
    high: float = 1.0
    per_s: float = 0.0


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The client's own part. cpu_share: the busiest client process, 1.0 = one core all the time."""

    lateness: Percentiles = Percentiles()
    cpu_share: float = 0.0
    procs: int = 1


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of one tenant, adapter or phase. settle_s: see Summary."""

    requests: int = 0
    failed: int = 0
    output_tokens: int = 0
    tokens_per_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    ttft: Percentiles = Percentiles()
    tpot: Percentiles = Percentiles()
    e2e: Percentiles = Percentiles()
    good: int = 0
    settle_s: float = 0.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures. Warm-up requests are in no figure but warmup_requests.

    duration_s: first intended send to last end. offered_per_s: the schedule's rate over the time in
    which requests were to be sent; served_per_s: successes over duration_s. Latencies are of
    successes; queue is the server's own figure, empty where it tells none; ttft without streams is
    empty. itl: gap between chunks divided by the tokens that came, once a token. itl_chunk: those
    gaps undivided.
    longest_gap_s: longest time in which not one chunk arrived while a request waited.
    A refused or failed request keeps such a gap open until the next chunk. no_service_s: the sum of
    the gaps that lasted longer than `no_service_after_s`.
    lost_tokens: tokens received for requests that then failed.
    fairness_*: Jain's index, 1 = all alike, of output tokens received a second of waiting, by
    tenant and by adapter; None with fewer than two.
    settle_s of a phase: from its start to its last request that broke the SLO or failed, which is
    how long scaling up took; 0 if none did.
    reasons: why the verdict is not "ok".
    """

    schema: str = SCHEMA
    run: RunInfo
    verdict: Verdict = "ok"
    reasons: list[str] = []
    duration_s: float = 0.0
    requests: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    warmup_requests: int = 0
    unsent: int = 0
    offered_per_s: float = 0.0
    served_per_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    output_tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    output_tokens_per_s_per_gpu: float | None = None
    ttft: Percentiles = Percentiles()
    tpot: Percentiles = Percentiles()
    itl: Percentiles = Percentiles()
    itl_chunk: Percentiles = Percentiles()
    tokens_per_chunk: float = 0.0
    e2e: Percentiles = Percentiles()
    queue: Percentiles = Percentiles()
    goodput: Goodput = Goodput()
    errors: dict[str, int] = {}
    error_codes: dict[str, int] = {}
    finish_reasons: dict[str, int] = {}
    migrations: int | None = None
    missing_tokens: int = 0
    doubled_tokens: int = 0
    lost_tokens: int = 0
    verified_ok: int = 0
    verified_different: int = 0
    longest_gap_s: float = 0.0
    no_service_s: float = 0.0
    no_service_after_s: float = 1.0
    fairness_tenants: float | None = None
    fairness_adapters: float | None = None
    tenants: dict[str, GroupSummary] = {}
    adapters: dict[str, GroupSummary] = {}
    phases: dict[str, GroupSummary] = {}
    client: ClientLoad = ClientLoad()
    faults: list[FaultMark] = []


_records = msgspec.json.Decoder(RequestRecord)


def read_records(path: Path) -> Iterator[RequestRecord]:
    """requests.jsonl, a line at a time. Raises msgspec.DecodeError, OSError."""
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                yield _records.decode(line)


def read_summary(path: Path) -> Summary:
    """summary.json. Raises msgspec.DecodeError, OSError; ValueError for another schema."""
    data = path.read_bytes()
    schema = json.loads(data).get("schema")
    if schema != SCHEMA:
        raise ValueError(f"{path}: schema {schema!r}, this version reads {SCHEMA!r}")
    return msgspec.json.decode(data, type=Summary)


def write_summary(summary: Summary, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
