"""Searches, against a simulated queue whose answer is known."""

import heapq
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest.errors import RunError, ScenarioError
from loadtest.measure.figures import percentiles
from loadtest.measure.records import RequestRecord, RunInfo, Summary
from loadtest.search import (
    Count,
    Limit,
    Search,
    Trial,
    Trials,
    count,
    highest,
    is_saturated,
    judge,
    knee,
    loads_of,
    parse_slo,
    read_search,
    resume,
    sweep,
)

INFO = RunInfo(
    name="mmc", scenario="", seed=0, url="", model="", client_host="", started_at="2026-01-01"
)
Answer = tuple[Summary, Sequence[RequestRecord]]


class Queue:
    """A simulated M/M/c queue: Poisson arrivals, exponential service, c servers.

    Its ttft is the wait for a server.
    """

    def __init__(self, servers: int = 4, service: float = 0.1, seconds: float = 200.0) -> None:
        self.servers, self.service, self.seconds = servers, service, seconds
        self.runs: list[float] = []

    def __call__(self, rate: float, repeat: int) -> Answer:
        self.runs.append(rate)
        rng = random.Random(f"{rate}/{repeat}")
        free = [0.0] * self.servers
        t, records = 0.0, []
        while (t := t + rng.expovariate(rate)) < self.seconds:
            begin = max(t, heapq.heappop(free))
            end = begin + rng.expovariate(1 / self.service)
            heapq.heappush(free, end)
            chunks = [(begin, 1), (end, 1)]
            records.append(
                RequestRecord(
                    index=len(records),
                    phase="main",
                    intended_s=t,
                    sent_s=t,
                    end_s=end,
                    chunks=chunks,
                    chunks_exact=True,
                    output_tokens=2,
                    status=200,
                )
            )
        last = max(r.end_s for r in records)
        summary = Summary(
            run=INFO,
            requests=len(records),
            succeeded=len(records),
            duration_s=last,
            offered_per_s=len(records) / self.seconds,
            served_per_s=len(records) / last,
            output_tokens_per_s=2 * len(records) / last,
            ttft=percentiles(r.ttft_s or 0.0 for r in records),
            e2e=percentiles(r.e2e_s for r in records),
        )
        return summary, records

    def highest(self, share: float, limit: float) -> float:
        """Return the rate at which P(wait > limit) = 1 - share, by Erlang's C formula."""

        def tail(rate: float) -> float:
            load = rate * self.service
            if load >= self.servers:
                return 1.0
            terms = [load**k / math.factorial(k) for k in range(self.servers)]
            last = load**self.servers / math.factorial(self.servers)
            last *= self.servers / (self.servers - load)
            waits = last / (sum(terms) + last)
            return waits * math.exp(-(self.servers / self.service - rate) * limit)

        low, high = 0.01, self.servers / self.service
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if tail(middle) <= 1 - share else (low, middle)
        return low


def search(slo: str = "p95_ttft<100ms") -> Search:
    return Search(key=slo, slo=parse_slo(slo))


@pytest.mark.parametrize("start", [1.0, 30.0, 300.0])
def test_finds_the_highest_rate_of_a_known_queue(start: float) -> None:
    """A search that is off by a fifth buys a fifth too many GPUs, from wherever it starts."""
    queue = Queue()
    truth = queue.highest(0.95, 0.1)
    highest_load = highest(Trials(queue, search()), start=start)
    assert (
        highest_load.best is not None
        and highest_load.first_broken is not None
        and highest_load.ended == "found"
    )
    assert abs(highest_load.best / truth - 1) < 0.08, (highest_load.best, truth)
    assert highest_load.first_broken / highest_load.best <= 1.05


def test_short_runs_are_repeated_until_clear() -> None:
    """Twenty requests cannot tell 95 % from 99 %: deciding on them is a coin's toss."""
    queue = Queue(seconds=10.0)
    truth = queue.highest(0.95, 0.1)
    highest_load = highest(Trials(queue, search(), repeats=8), start=4.0)
    assert highest_load.best is not None and abs(highest_load.best / truth - 1) < 0.15
    near = [t for t in highest_load.trials if 0.8 < t.load / truth < 1.25]
    far = [t for t in highest_load.trials if t.load > 1.6 * truth]
    assert max(t.repeats for t in near) > 1 and all(t.repeats == 1 for t in far)


def test_failures_break_the_limit() -> None:
    """A server that refuses half of the load at once is quick with the rest."""
    queue = Queue()

    def refusing(rate: float, repeat: int) -> Answer:
        summary, records = queue(min(rate, 20.0), repeat)
        failed = [
            RequestRecord(
                index=0, phase="main", intended_s=0.0, end_s=0.0, error_class="http_503", status=503
            )
        ] * max(0, int((rate - 20) * 200))
        return summary, [*records, *failed]

    highest_load = highest(Trials(refusing, search()), start=1.0)
    assert highest_load.best is not None and highest_load.best < 22


def test_resumes_without_running_again(tmp_path: Path) -> None:
    """A search over a night that starts anew after a cut connection takes another night."""
    queue = Queue(seconds=50.0)

    class CutOff(Exception):
        pass

    def breaking(rate: float, repeat: int) -> Answer:
        if len(queue.runs) == 4:
            raise CutOff
        return queue(rate, repeat)

    with pytest.raises(CutOff):
        highest(Trials(breaking, resume(tmp_path, search()), folder=tmp_path), start=1.0)
    before = list(queue.runs)
    highest_load = highest(Trials(queue, resume(tmp_path, search()), folder=tmp_path), start=1.0)
    assert len(before) == 4 and not set(before) & set(queue.runs[4:])
    straight = highest(Trials(Queue(seconds=50.0), search()), start=1.0)
    assert (highest_load.best, highest_load.first_broken) == (straight.best, straight.first_broken)
    assert read_search(tmp_path).best == highest_load.best
    with pytest.raises(ScenarioError, match="another scenario"):
        resume(tmp_path, search("p95_ttft<1s"))
    (tmp_path / "search.json").write_text("{")
    with pytest.raises(ScenarioError, match="cannot read"):
        read_search(tmp_path)


def test_sweep_stops_when_saturated_and_finds_the_knee() -> None:
    """Beyond saturation every figure is about the queue's length, which is the run's length."""
    queue = Queue()  # saturates at 40/s; by Erlang's formula the SLO ends between 20 and 30
    assert 20 < queue.highest(0.95, 0.1) < 30
    highest_load = sweep(Trials(queue, search()), loads_of("10..100:10"))
    assert highest_load.ended.startswith("saturated at") and max(queue.runs) <= 60
    assert [t.saturated for t in highest_load.trials][:3] == [False] * 3
    assert highest_load.knee in (20.0, 30.0)
    assert highest_load.best == 20.0 and highest_load.first_broken == 30.0


def test_ends_of_the_range() -> None:
    """Without a bound a search on an idle or dead server never ends."""
    highest_load = highest(Trials(Queue(), search("p95_ttft<10s")), start=1.0, top=8.0)
    assert (
        highest_load.best == 8.0
        and highest_load.first_broken is None
        and "highest" in highest_load.ended
    )
    highest_load = highest(Trials(Queue(service=1e6, seconds=5000.0), search()), start=1.0)
    assert highest_load.best is None and "lowest" in highest_load.ended


def test_client_bottleneck_ends_the_search() -> None:
    """The client's own limit must not be reported as the server's."""
    queue = Queue()

    def slow_client(rate: float, repeat: int) -> Answer:
        summary, records = queue(rate, repeat)
        verdict = "client_bottleneck" if rate > 10 else "ok"
        return type(summary)(run=INFO, verdict=verdict, e2e=summary.e2e), records

    trials = Trials(slow_client, search("p95_ttft<10s"), repeats=2)
    with pytest.raises(RunError, match="client was the bottleneck"):
        highest(trials, start=1.0)
    assert queue.runs[-2:] == [16.0, 16.0]  # it may have been a neighbour's fault: once more
    assert [t.load for t in trials.search.trials] == [1, 2, 4, 8]


def test_whole_loads() -> None:
    """There is no concurrency of 2.83."""
    tried: list[float] = []

    def closed(load: float, repeat: int) -> Answer:
        tried.append(load)
        limit = 0.05 if load <= 11 else 0.5
        chunks = [(limit, 1)]
        record = RequestRecord(index=0, phase="m", intended_s=0.0, end_s=limit, chunks=chunks)
        return Summary(run=INFO), [record] * 200

    trials = Trials(closed, search(), open_loop=False)
    highest_load = highest(trials, start=1.0, whole=True)
    assert highest_load.best == 11 and highest_load.first_broken == 12
    assert all(load == int(load) for load in tried)


def test_long_answers_are_no_saturation() -> None:
    """Where answers take as long as the run, few are served in it by a server that is idle."""

    def record(t: float, wait: float) -> RequestRecord:
        chunks = [(t + wait, 1), (t + wait + 30.0, 1)]
        return RequestRecord(index=0, phase="", intended_s=t, end_s=chunks[1][0], chunks=chunks)

    assert not is_saturated([record(t / 10, 0.1) for t in range(600)])
    assert is_saturated([record(t / 10, 0.1 + 0.2 * t / 10) for t in range(600)])
    assert not is_saturated([])


def test_judgement_uses_the_interval() -> None:
    """99 of 100 is not yet 99 %."""
    slo = [Limit("x", "ttft", 0.99, 1.0)]
    assert judge({"x": Count(99, 100)}, slo) == "unclear"
    assert judge({"x": Count(9990, 10_000)}, slo) == "kept"
    assert judge({"x": Count(90, 100)}, slo) == "broken"
    assert judge({"x": Count()}, slo) == "unclear"


def test_counts_by_request() -> None:
    """Ten thousand tokens of one slow request are one sample, not ten thousand."""

    def record(**more: object) -> RequestRecord:
        base = {"index": 0, "phase": "m", "intended_s": 0.0, "end_s": 4.0, "chunks_exact": True}
        chunks = [(1.0, 1), (1.1, 1), (1.2, 1), (1.9, 1), (2.0, 1)]
        return RequestRecord(  # type: ignore[arg-type]
            **{**base, "chunks": chunks, "output_tokens": 5, **more}
        )

    records = [record(), record(error_class="cut"), record(cancelled=True), record(stream=False)]
    by_text = {text: count(records, parse_slo(text)[0]) for text in ("p50_itl<0.2s", "p50_ttft<2s")}
    assert by_text["p50_itl<0.2s"].total == 2 and by_text["p50_itl<0.2s"].good == pytest.approx(
        0.75
    )
    assert by_text["p50_ttft<2s"] == Count(1.0, 2)
    assert count(records, parse_slo("error_rate<1%")[0]) == Count(2.0, 3)


def test_parsing() -> None:
    """A limit that is misread is a search for something else."""
    limits = parse_slo("p99_ttft<500ms, p999_itl<=1.5s,error_rate<1%")
    assert [(x.metric, round(x.share, 6), x.seconds) for x in limits] == [
        ("ttft", 0.99, 0.5),
        ("itl", 0.999, 1.5),
        ("errors", 0.99, math.inf),
    ]
    for text in (
        "p99_ttft",
        "p99_ttft>5s",
        "ttft<5s",
        "p99_foo<5s",
        "p00_ttft<5s",
        "p99_ttft<5",
        "",
    ):
        with pytest.raises(ScenarioError, match="--slo"):
            parse_slo(text)
    assert loads_of("4,1,2") == [1, 2, 4]
    assert loads_of("1..9") == [1, 2, 4, 8]
    assert loads_of("10..30:10") == [10, 20, 30]
    for text in ("", "0..4", "a", "5..1", "1..5:0"):
        with pytest.raises(ScenarioError, match="loads"):
            loads_of(text)


def test_knee_needs_points() -> None:
    """Two points have no bend."""
    assert knee([Trial(load=1.0), Trial(load=2.0)]) is None
