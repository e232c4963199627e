"""Computes a run's metrics from its records. Latencies are over successful requests, and count
from the intended send time.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from loadtest.measure.records import (
    ClientLoad,
    FaultMark,
    Goodput,
    GroupSummary,
    Percentiles,
    RequestRecord,
    RunInfo,
    Summary,
    Verdict,
)

MAX_LATENESS_S = 0.005  # highest p99 lateness of a client that sends in time
MAX_CPU_SHARE = 0.8
_Z = 1.959963984540054  # normal quantile of a two-sided 95 % interval


def percentiles(values: Iterable[float]) -> Percentiles:
    """Return percentiles with linear interpolation, which is numpy's default."""
    array = np.fromiter(values, float)
    return _percentiles(array)


def _percentiles(array: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Percentiles:
    if not len(array):
        return Percentiles()
    p50, p90, p95, p99, p999 = np.percentile(array, (50, 90, 95, 99, 99.9))
    return Percentiles(
        count=len(array),
        mean=_figure(array.mean()),
        std=_figure(array.std()),
        min=_figure(array.min()),
        p50=_figure(p50),
        p90=_figure(p90),
        p95=_figure(p95),
        p99=_figure(p99),
        p999=_figure(p999),
        max=_figure(array.max()),
    )


def sample_at(values: Iterable[float], share: float) -> float:
    """Return the value at a share (quantile) of the sorted values, not interpolated; 0.0 without
    values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _figure(value: float) -> float:
    return round(float(value), 6)


def wilson(good: int, total: int) -> tuple[float, float]:
    """Return Wilson's interval, which contains the true fraction with 95 % confidence; (0, 1)
    without data.
    """
    if not total:
        return 0.0, 1.0
    share, z2 = good / total, _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    half /= 1 + z2 / total
    return max(0.0, middle - half), min(1.0, middle + half)


def jain(values: Sequence[float]) -> float | None:
    """Return Jain's fairness index, (sum x)^2 / (n sum x^2), or None for fewer than two values.

    The index is 1 if all values are equal, and 1/n if all but one are 0.
    """
    if len(values) < 2:
        return None
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def token_gaps(record: RequestRecord) -> tuple[list[float], list[float], list[int]]:
    """Return (gaps between chunks, seconds per token in each gap, tokens in each chunk) of a
    stream.

    If the server does not report tokens per chunk, the total is spread evenly over the chunks.
    """
    chunks = record.chunks
    if not record.stream or len(chunks) < 2:
        return [], [], []
    gaps = [b[0] - a[0] for a, b in pairwise(chunks)]
    if record.chunks_exact:
        counts = [tokens for _, tokens in chunks[1:]]
        return gaps, [gap / tokens for gap, tokens in zip(gaps, counts, strict=True)], counts
    per_chunk = max(1.0, record.output_tokens / len(chunks))
    return gaps, [gap / per_chunk for gap in gaps], [max(1, round(per_chunk))] * len(gaps)


def is_good(record: RequestRecord, slo: dict[str, float]) -> bool:
    """Whether a request kept every limit of `slo` that applies to it.

    ttft does not apply to unary (unstreamed) answers.
    """
    if not record.ok or record.verified == "different":
        return False
    if record.e2e_s > slo.get("e2e", math.inf):
        return False
    ttft, tpot = record.ttft_s, record.tpot_s
    if ttft is not None and ttft > slo.get("ttft", math.inf):
        return False
    if tpot is not None and tpot > slo.get("tpot", math.inf):
        return False
    limit = slo.get("itl")
    return limit is None or not record.stream or max(token_gaps(record)[0], default=0) <= limit


def service_gaps(records: Iterable[RequestRecord]) -> list[tuple[float, float]]:
    """Return (start, end) of intervals in which a request waited and no chunk arrived, in order.

    An interval starts with the last chunk, or with the first request after a time without waiting
    requests. Failed requests do not end an interval: a server that refuses immediately gives no
    service.
    """
    start, chunk, end = 0, 1, 2
    events: list[tuple[float, int, bool]] = []
    for record in records:
        events.append((record.intended_s, start, False))
        events += [(t, chunk, False) for t, _ in record.chunks]
        events.append((record.end_s, end, record.failed))
    events.sort()
    gaps: list[tuple[float, float]] = []
    waiting, failed_since, since = 0, False, 0.0
    for t, kind, failed in events:
        idle = not waiting and not failed_since
        if kind == start:
            if idle:
                since = t
            waiting += 1
        elif kind == chunk:
            gaps.append((since, t))
            since, failed_since = t, False
        else:
            waiting -= 1
            failed_since = failed_since or failed
            if not waiting and not failed_since:
                gaps.append((since, t))
    if failed_since and events:
        gaps.append((since, events[-1][0]))
    return [gap for gap in gaps if gap[1] > gap[0]]


def summarise(
    records: Sequence[RequestRecord],
    run: RunInfo,
    *,
    slo: dict[str, float] | None = None,
    sending_s: float | None = None,
    no_service_after: float = 1.0,
    unsent: int = 0,
    cpu_share: float = 0.0,
    at_once: frozenset[str] = frozenset(),
    faults: Sequence[FaultMark] = (),
    reasons: Sequence[str] = (),
) -> Summary:
    """Return the summary of a run.

    sending_s: seconds in which requests were to be sent; None: from the first to the last request.
    at_once: phases whose requests are all due at one moment, so that the client is necessarily
    late.
    reasons: further reasons why the client invalidates the run.
    """
    slo = slo or {}
    measured = [record for record in records if not record.warmup]
    succeeded = [record for record in measured if record.ok]
    timed = [record for record in succeeded if not record.slow_reader]
    failed = [record for record in measured if record.failed]
    judged = [r for r in measured if not r.cancelled and not r.slow_reader]
    begin = min((record.intended_s for record in measured), default=0.0)
    duration = max((record.end_s for record in measured), default=0.0) - begin
    last = max((record.intended_s for record in measured), default=0.0)
    sending = sending_s or (last - begin)
    # The last answer may come before the phase's end, which must not raise the rate.
    span = max(duration, sending)
    # Tokens of failed requests count as lost: no client could use them.
    tokens = sum(r.output_tokens for r in measured if not r.failed)
    prompt = sum(r.prompt_tokens or 0 for r in measured if not r.failed)

    def rate(count: float) -> float:
        return _figure(count / span) if span > 0 else 0.0

    per_chunk: list[float] = []
    per_token: list[float] = []
    counts: list[int] = []
    for record in timed:
        gaps, weights, number = token_gaps(record)
        per_chunk += gaps
        per_token += weights
        counts += number
    chunk_tokens = sum(r.output_tokens for r in timed if r.stream and r.chunks)
    chunks = sum(len(r.chunks) for r in timed if r.stream)
    goods = sum(is_good(record, slo) for record in judged)
    low, high = wilson(goods, len(judged))
    gaps_without = service_gaps(measured)
    lengths = [end - start for start, end in gaps_without]
    lateness = percentiles(
        late for r in measured if r.phase not in at_once and (late := r.lateness_s) is not None
    )
    verdict, causes = judge(lateness, cpu_share)
    tenants = _groups(measured, lambda r: r.tenant, slo)
    adapters = _groups(measured, lambda r: r.adapter, slo)
    migrations = [r.migrations for r in measured if r.migrations is not None]
    return Summary(
        run=run,
        verdict="client_bottleneck" if reasons else verdict,
        reasons=[*reasons, *causes],
        duration_s=_figure(duration),
        requests=len(measured),
        succeeded=len(succeeded),
        failed=len(failed),
        cancelled=sum(record.cancelled for record in measured),
        warmup_requests=len(records) - len(measured),
        unsent=unsent,
        offered_per_s=_figure(len(measured) / sending) if sending > 0 else 0.0,
        served_per_s=rate(len(succeeded)),
        prompt_tokens=prompt,
        cached_tokens=sum(r.cached_tokens or 0 for r in measured if not r.failed),
        output_tokens=tokens,
        output_tokens_per_s=rate(tokens),
        total_tokens_per_s=rate(tokens + prompt),
        output_tokens_per_s_per_gpu=rate(tokens / run.gpus) if run.gpus else None,
        ttft=percentiles(t for r in timed if (t := r.ttft_s) is not None),
        tpot=percentiles(t for r in timed if (t := r.tpot_s) is not None),
        itl=_percentiles(np.repeat(per_token, counts) if counts else np.empty(0)),
        itl_chunk=percentiles(per_chunk),
        tokens_per_chunk=_figure(chunk_tokens / chunks) if chunks else 0.0,
        e2e=percentiles(record.e2e_s for record in timed),
        queue=percentiles(r.queue_s for r in timed if r.queue_s is not None),
        goodput=Goodput(
            slo=slo,
            good=goods,
            total=len(judged),
            fraction=_figure(goods / len(judged)) if judged else 0.0,
            low=_figure(low),
            high=_figure(high),
            per_s=rate(goods),
        ),
        errors=_count(r.error_class for r in failed),
        error_codes=_count(r.error_code for r in failed),
        finish_reasons=_count(r.finish_reason for r in succeeded),
        migrations=sum(migrations) if migrations else None,
        missing_tokens=sum(record.missing_tokens for record in measured),
        doubled_tokens=sum(record.doubled_tokens for record in measured),
        lost_tokens=sum(record.output_tokens for record in failed),
        verified_ok=sum(record.verified == "ok" for record in measured),
        verified_different=sum(record.verified == "different" for record in measured),
        longest_gap_s=_figure(max(lengths, default=0.0)),
        no_service_s=_figure(sum(gap for gap in lengths if gap > no_service_after)),
        no_service_after_s=no_service_after,
        fairness_tenants=_fairness(measured, lambda r: r.tenant),
        fairness_adapters=_fairness(measured, lambda r: r.adapter),
        tenants=tenants if set(tenants) != {""} else {},
        adapters=adapters if set(adapters) != {""} else {},
        phases=_groups(records, lambda r: r.phase, slo),
        client=ClientLoad(lateness=lateness, cpu_share=_figure(cpu_share), procs=run.procs),
        faults=list(faults),
    )


def judge(lateness: Percentiles, cpu_share: float) -> tuple[Verdict, list[str]]:
    """Return whether the client was fast enough to measure the server, and the reasons if it was
    not."""
    reasons = []
    if lateness.p99 > MAX_LATENESS_S:
        reasons.append(
            f"the client sent late: p99 {lateness.p99 * 1000:.1f} ms, "
            f"at most {MAX_LATENESS_S * 1000:g} ms are accepted"
        )
    if cpu_share > MAX_CPU_SHARE:
        reasons.append(
            f"a client process used {cpu_share:.0%} of its core, "
            f"at most {MAX_CPU_SHARE:.0%} are accepted; raise --procs"
        )
    return ("client_bottleneck" if reasons else "ok"), reasons


def _count(values: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(value for value in values if value is not None).most_common())


def _groups(
    records: Iterable[RequestRecord], name: Callable[[RequestRecord], str], slo: dict[str, float]
) -> dict[str, GroupSummary]:
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        groups[name(record)].append(record)
    return {key: _group(groups[key], slo) for key in sorted(groups)}


def _group(records: list[RequestRecord], slo: dict[str, float]) -> GroupSummary:
    begin, end = min(r.intended_s for r in records), max(r.end_s for r in records)
    timed = [r for r in records if r.ok and not r.slow_reader]
    tokens = sum(r.output_tokens for r in records if not r.failed)
    judged = [r for r in records if not r.cancelled and not r.slow_reader]
    bad = [r.intended_s for r in judged if not is_good(r, slo)]
    return GroupSummary(
        requests=len(records),
        failed=sum(r.failed for r in records),
        output_tokens=tokens,
        tokens_per_s=_figure(tokens / (end - begin)) if end > begin else 0.0,
        start_s=begin,
        end_s=end,
        ttft=percentiles(t for r in timed if (t := r.ttft_s) is not None),
        tpot=percentiles(t for r in timed if (t := r.tpot_s) is not None),
        e2e=percentiles(r.e2e_s for r in timed),
        good=len(judged) - len(bad),
        settle_s=_figure(max(bad) - begin) if bad else 0.0,
    )


def _fairness(
    records: Iterable[RequestRecord], name: Callable[[RequestRecord], str]
) -> float | None:
    tokens: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    for record in records:
        if not record.cancelled and not record.slow_reader:
            tokens[name(record)] += 0 if record.failed else record.output_tokens
            waited[name(record)] += record.e2e_s
    index = jain([tokens[key] / waited[key] for key in tokens if waited[key] > 0])
    return None if index is None else _figure(index)
