"""Made-up runs for tests of reports: a server whose latencies and faults are chosen here."""

import random
from pathlib import Path

import msgspec

from loadtest.measure.records import (
    ClientLoad,
    FaultMark,
    Goodput,
    GroupSummary,
    Percentiles,
    RequestRecord,
    RunInfo,
    Summary,
    write_summary,
)


def percentiles(values: list[float]) -> Percentiles:
    ranked = sorted(values)
    if not ranked:
        return Percentiles()

    def at(q: float) -> float:
        return ranked[min(len(ranked) - 1, int(q * len(ranked)))]

    mean = sum(ranked) / len(ranked)
    points = {"p50": at(0.5), "p90": at(0.9), "p95": at(0.95), "p99": at(0.99), "p999": at(0.999)}
    return Percentiles(count=len(ranked), mean=mean, min=ranked[0], max=ranked[-1], **points)


def make_records(
    *,
    seed: int = 1,
    rate: float = 40.0,
    seconds: float = 60.0,
    slower: float = 1.0,
    faults: bool = False,
) -> list[RequestRecord]:
    """Return made-up records with Poisson arrivals.

    faults: whether all streams stand still from 20 s to 22.5 s, and some of them end.
    """
    rng = random.Random(seed)
    t, collected = 0.0, []

    def passed(moment: float) -> float:  # nothing moves during the fault
        return 22.5 + (moment - 20) * 0.02 if faults and 20 < moment < 22.5 else moment

    while (t := t + rng.expovariate(rate)) < seconds:
        index = len(collected)
        now = t + rng.lognormvariate(-3.0, 0.5) * slower
        chunks = []
        for _ in range(rng.randint(8, 60)):
            chunks.append((passed(now), 1))
            now += rng.lognormvariate(-4.2, 0.3) * slower
        cut = faults and t < 20 < now and rng.random() < 0.35
        if cut:
            chunks = [c for c in chunks if c[0] < 20]
        collected.append(
            RequestRecord(
                index=index,
                phase="main",
                intended_s=t,
                sent_s=t + 0.0002,
                end_s=20.05 if cut else chunks[-1][0] + 0.001,
                chunks=chunks,
                chunks_exact=True,
                output_tokens=len(chunks),
                status=200,
                error_class="cut" if cut else None,
                error_message="<script>alert(1)</script> & the stream ended" if cut else None,
                tenant=("gold", "silver")[index % 2],
                replica=("a", "b")[index % 2] if not 20 < t < 26 else "b",
            )
        )
    return collected


def summarise(records: list[RequestRecord], *, name: str, faults: bool = False) -> Summary:
    """Return a summary with the fields that a page shows."""
    good = [r for r in records if r.ok]
    ttft = [r.ttft_s for r in good if r.ttft_s is not None]
    tpot = [r.tpot_s for r in good if r.tpot_s is not None]
    itl = [b[0] - a[0] for r in good for a, b in zip(r.chunks, r.chunks[1:], strict=False)]
    end = max(r.end_s for r in records)
    tokens = sum(r.output_tokens for r in records)
    total = sum(t < 0.15 for t in ttft)
    groups = {
        tenant: GroupSummary(
            requests=len(mine),
            failed=sum(r.failed for r in mine),
            tokens_per_s=sum(r.output_tokens for r in mine) / end,
            ttft=percentiles([r.ttft_s for r in mine if r.ttft_s is not None]),
            tpot=percentiles([r.tpot_s for r in mine if r.tpot_s is not None]),
            e2e=percentiles([r.e2e_s for r in mine]),
        )
        for tenant in ("gold", "silver")
        if (mine := [r for r in records if r.tenant == tenant])
    }
    failed = len(records) - len(good)
    marks = [
        FaultMark(20.0, "kill replica (pid 4711)"),
        FaultMark(26.1, "replica process back after 6.1 s"),
    ]
    return Summary(
        run=RunInfo(
            name=name,
            scenario="phases: [{name: main}]  # <b>not bold</b>",
            seed=1,
            url="http://127.0.0.1:8000",
            model="SmolLM2-135M-Instruct",
            client_host="bench-1",
            started_at="2026-11-21T09:20:42Z",
            gpus=1,
            versions={"manta-serve": "0.1.0", "python": "3.11.7", "commit": "0123456789abcdef"},
            target={"device": "1 x H200"},
        ),
        duration_s=end,
        requests=len(records),
        succeeded=len(good),
        failed=failed,
        offered_per_s=len(records) / 60,
        served_per_s=len(good) / end,
        output_tokens=tokens,
        output_tokens_per_s=tokens / end,
        ttft=percentiles(ttft),
        tpot=percentiles(tpot),
        itl=percentiles(itl),
        e2e=percentiles([r.e2e_s for r in good]),
        goodput=Goodput(
            slo={"ttft": 0.15},
            good=total,
            total=len(records),
            fraction=total / len(records),
            low=total / len(records) - 0.01,
            high=total / len(records) + 0.01,
        ),
        errors={"cut": failed} if failed else {},
        finish_reasons={"length": len(good)},
        lost_tokens=sum(r.output_tokens for r in records if r.failed),
        verified_ok=len(good),
        longest_gap_s=2.5 if faults else 0.2,
        no_service_s=2.5 if faults else 0.0,
        tenants=groups,
        fairness_tenants=0.999,
        client=ClientLoad(lateness=Percentiles(count=1, p99=0.0002), cpu_share=0.31),
        faults=marks if faults else [],
    )


def make_run(folder: Path, *, name: str = "chat, 40/s", **how: float | bool) -> list[RequestRecord]:
    """Write a run's folder, and return its records. how: arguments of make_records."""
    folder.mkdir(parents=True, exist_ok=True)
    records = make_records(**how)  # type: ignore[arg-type]
    lines = b"".join(msgspec.json.encode(r) + b"\n" for r in records)
    (folder / "requests.jsonl").write_bytes(lines)
    summary = summarise(records, name=name, faults=bool(how.get("faults")))
    write_summary(summary, folder / "summary.json")
    return records
