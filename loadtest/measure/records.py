"""The data of a load test's results: a record per request, facts of the run, and the summary.

Times are seconds since the run's start (`RunInfo.started_at`), of one monotonic clock that all
client processes of a host share. Latencies count from `intended_s`, when the schedule wanted the
request sent, not from when the client sent it. So a stalled server cannot improve its own latencies
by delaying the client (coordinated omission).

Files: requests.jsonl has a RequestRecord per line, summary.json one Summary. Readers ignore unknown
fields; a field that changes its meaning changes SCHEMA.
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
    """A request, as the client observed it.

    sent_s: when the client wrote the request to an open connection or began to connect; None if
    never.
    connect_s: duration of connecting, 0 on an open connection.
    first_byte_s: time of the first byte of the answer's head.
    chunks: (time, tokens) of each part of the answer with tokens; an answer without streaming
        (unary) is one chunk.
    chunks_exact: False if the server does not report tokens per chunk; each chunk then counts 1.
    end_s: time of the answer's last byte, of the failure, or of the client's own cancellation.

    output_tokens_expected: the requested number, None where the model may stop by itself.
    output_tokens: from the server's usage, otherwise counted.
    missing_tokens: number of tokens that were expected by usage, request or reference but not
        received.
    doubled_tokens: number of tokens that were received twice.

    status: the HTTP status, 0 without an answer.
    error_class: one of ERROR_CLASSES, None for success.
    error_code: the server's own code, as in {"error": {"code": ...}}.
    cancelled: whether the client disconnected on purpose; neither success nor failure. Received
        tokens count.
    slow_reader: whether the client read slowly on purpose; the latencies are in no percentile.
    queue_s: the server's own queueing time, if it reports one.
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
        """Whether the request succeeded. A wrong text (`verified`) is counted separately."""
        return self.error_class is None and not self.cancelled

    @property
    def failed(self) -> bool:
        return self.error_class is not None

    @property
    def lateness_s(self) -> float | None:
        """The seconds by which the client sent the request late, which is never the server's
        fault."""
        return None if self.sent_s is None else max(0.0, self.sent_s - self.intended_s)

    @property
    def ttft_s(self) -> float | None:
        """The seconds from intended send to first token. None without tokens, and for unary
        (unstreamed) answers.
        """
        if not self.stream or not self.chunks:
            return None
        return self.chunks[0][0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        """The seconds from intended send to the end."""
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """The mean seconds per token after the first chunk; None with fewer than two chunks."""
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
    """An event at t seconds of the run, such as a caused fault."""

    t: float
    what: str


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a run: what, where and when.

    started_at: RFC 3339 in UTC. scenario: the scenario's text.
    """

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
    """The percentiles of a metric in seconds, and its count. All are 0 without values."""

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
    """The requests that kept every limit of the SLO.

    total: all requests, failed ones included, without the client's own cancellations and slow
    reads.
    good: requests within the limits; a wrong answer (verified: different) is not good.
    low, high: Wilson's 95 % interval of fraction.
    per_s: good requests per second.
    slo: limits in seconds by metric: ttft, tpot, itl (the request's worst), e2e. Without limits
    every success is good.
    """

    slo: dict[str, float] = {}
    good: int = 0
    total: int = 0
    fraction: float = 0.0
    low: float = 0.0
    high: float = 1.0
    per_s: float = 0.0


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The client's own load.

    lateness: see RequestRecord.lateness_s. cpu_share: CPU share of the busiest client process; 1.0
    is one full core.
    """

    lateness: Percentiles = Percentiles()
    cpu_share: float = 0.0
    procs: int = 1


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of one tenant's, adapter's or phase's requests. settle_s: see Summary."""

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
    """The metrics of a run. Warm-up requests count in warmup_requests only.

    duration_s: from first intended send to last end.
    offered_per_s: scheduled requests per second of sending. served_per_s: successes per second of
    duration_s.
    ttft ... e2e: latencies of successful requests; ttft is empty without streams.
    queue: the server's own queueing time, empty if it reports none.
    itl: gap between two chunks divided by the second chunk's tokens, counted once per token.
    itl_chunk: the undivided gaps.
    longest_gap_s: longest time in which a request waited and no chunk of any request arrived.
    Failed requests do not end such a gap.
    no_service_s: sum of such gaps that are longer than `no_service_after_s`.
    lost_tokens: tokens received for requests that then failed.
    fairness_*: Jain's index (1 = all equal) of output tokens per second of waiting, by tenant and
    by adapter; None with fewer than two.
    settle_s of a phase: from its start to its last request that broke the SLO or failed, i.e. how
    long scaling up took; 0 if none did.
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
    """Yield the records of a requests.jsonl, line by line. Raises msgspec.DecodeError, OSError."""
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                yield _records.decode(line)


def read_summary(path: Path) -> Summary:
    """Read a summary.json. Raises msgspec.DecodeError, OSError; ValueError for another schema."""
    data = path.read_bytes()
    schema = json.loads(data).get("schema")
    if schema != SCHEMA:
        raise ValueError(f"{path}: schema {schema!r}, this version reads {SCHEMA!r}")
    return msgspec.json.decode(data, type=Summary)


def write_summary(summary: Summary, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
