"""Figures from records made by hand, worked out on paper."""

import math

import numpy as np
import pytest

from loadtest.measure.asserts import evaluate, parse
from loadtest.measure.figures import (
    is_good,
    jain,
    judge,
    percentiles,
    service_gaps,
    summarise,
    token_gaps,
    wilson,
)
from loadtest.measure.records import Percentiles, RequestRecord, RunInfo

RUN = RunInfo(
    name="x", scenario="", seed=0, url="", model="", client_host="", started_at="", gpus=2
)


def record(index=0, intended=0.0, chunks=(), end=None, **more):
    chunks = list(chunks)
    more.setdefault("output_tokens", sum(n for _, n in chunks))
    more.setdefault("status", 200)
    more.setdefault("sent_s", intended)
    more.setdefault("chunks_exact", True)
    return RequestRecord(
        index=index,
        phase=more.pop("phase", "load"),
        intended_s=intended,
        chunks=chunks,
        end_s=end if end is not None else chunks[-1][0],
        **more,
    )


def test_latencies_count_from_the_intended_time() -> None:
    """Coordinated omission: a client that was late by 2 s would show a TTFT of 1 s, not of 3."""
    late = record(intended=1, sent_s=3, chunks=[(4, 1), (5, 4)], end=5.5)
    assert (late.ttft_s, late.e2e_s, late.lateness_s, late.tpot_s) == (3, 4.5, 2, 0.25)
    assert token_gaps(late) == ([1], [0.25], [4])


def test_itl_where_chunks_do_not_tell() -> None:
    """Eight tokens in two chunks counted as two: the time a token is four times too long."""
    blind = record(chunks=[(1, 1), (2, 1)], chunks_exact=False, output_tokens=8)
    assert token_gaps(blind) == ([1], [0.25], [4])
    assert blind.tpot_s == pytest.approx(1 / 7)


def test_percentiles_are_numpys() -> None:
    """Nearest-rank percentiles disagree with every other tool on small runs."""
    values = [0.1 * i for i in range(1, 11)]
    percentiles_of = percentiles(values)
    assert percentiles_of.p90 == pytest.approx(np.percentile(values, 90))
    assert (percentiles_of.count, percentiles_of.min, percentiles_of.max) == (10, 0.1, 1.0)
    assert percentiles_of.std == pytest.approx(np.std(values), abs=1e-6)
    assert percentiles([]) == Percentiles()


def test_wilson() -> None:
    """The normal approximation says [1, 1] for 10 of 10."""
    assert wilson(10, 10) == (pytest.approx(0.7225, abs=1e-4), pytest.approx(1))
    assert wilson(50, 100) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert wilson(0, 0) == (0.0, 1.0)


def test_jain() -> None:
    """One of four tenants with everything is 1/4, all alike is 1."""
    assert jain([3, 3, 3]) == 1
    assert jain([5, 0, 0, 0]) == 0.25
    assert jain([1]) is None


def test_gap_from_the_last_chunk() -> None:
    """A gap while nobody waits is no fault of the server's."""
    first = record(0, 0, [(1, 1), (2, 1)], end=2)
    later = record(1, 10, [(10.5, 1)], end=10.5)
    assert service_gaps([first, later]) == [(0, 1), (1, 2), (10, 10.5)]


def test_refusals_do_not_end_a_gap() -> None:
    """A server that refuses at once for 5 s would show no outage at all."""
    good = record(0, 0, [(1, 1)])
    refused = [
        record(i, 1.5 + i, end=1.6 + i, error_class="connect", status=0) for i in range(1, 5)
    ]
    back = record(9, 6, [(6.5, 1)])
    gaps = service_gaps([good, *refused, back])
    assert gaps == [(0, 1), (2.5, 6.5)]
    lost = service_gaps([good, *refused])
    assert lost[-1] == (2.5, 5.6)


def test_no_more_is_served_than_was_offered() -> None:
    """A burst early in its phase: all answers are there before the phase is over, and dividing by
    the shorter time tells of a server faster than its load."""
    records = [record(n, 0.1 * n, [(0.1 * n + 0.05, 1)]) for n in range(10)]
    s = summarise(records, RUN, sending_s=4)
    assert (s.offered_per_s, s.served_per_s, s.output_tokens_per_s) == (2.5, 2.5, 2.5)


def test_summary_by_hand() -> None:
    """Warm-up in the figures, cancellations as failures, tokens of failures as throughput."""
    records = [
        record(0, 0, [(1, 1)], phase="warm", warmup=True),
        record(1, 10, [(10.1, 1), (10.2, 1), (10.3, 2)], prompt_tokens=5, tenant="a"),
        record(2, 11, [(11.5, 2), (12.0, 2)], prompt_tokens=5, tenant="b", migrations=1),
        record(3, 12, [(12.1, 1)], end=12.4, error_class="cut", error_code="x", tenant="b"),
        record(4, 13, [(13.1, 1)], end=13.2, cancelled=True, tenant="a"),
        record(5, 14, [(20, 9)], slow_reader=True, tenant="a"),
    ]
    s = summarise(records, RUN, slo={"ttft": 0.2, "itl": 0.3}, sending_s=5, no_service_after=0.45)
    assert (s.requests, s.succeeded, s.failed, s.cancelled, s.warmup_requests) == (5, 3, 1, 1, 1)
    assert (s.duration_s, s.offered_per_s, s.served_per_s) == (10, 1.0, 0.3)
    assert (s.output_tokens, s.lost_tokens, s.prompt_tokens) == (4 + 4 + 1 + 9, 1, 10)
    assert s.output_tokens_per_s_per_gpu == pytest.approx(0.9)
    assert (s.ttft.count, s.ttft.max) == (2, 0.5)
    assert s.itl.count == 1 + 2 + 2 and s.itl.p50 == pytest.approx(0.1)
    assert s.itl_chunk.count == 3 and s.itl_chunk.max == pytest.approx(0.5)
    assert (s.goodput.good, s.goodput.total) == (1, 3)
    assert s.errors == {"cut": 1} and s.error_codes == {"x": 1}
    assert s.migrations == 1
    assert s.longest_gap_s == pytest.approx(6) and s.no_service_s == pytest.approx(6 + 1 + 0.5 * 2)
    assert set(s.tenants) == {"a", "b"} and s.adapters == {}
    assert s.phases["load"].settle_s == pytest.approx(2)  # the failure of request 3
    rates = [4 / 0.3, 4 / (1.0 + 0.4)]
    assert s.fairness_tenants == pytest.approx(jain(rates), abs=1e-5)


def test_wrong_answers_are_not_good() -> None:
    """Goodput that counts garbage rewards a server for being fast and wrong."""
    right = record(0, 0, [(0.1, 1)], verified="ok")
    assert is_good(right, {"ttft": 1})
    assert not is_good(record(0, 0, [(0.1, 1)], verified="different"), {"ttft": 1})
    unary = record(0, 0, [(0.5, 5)], stream=False)
    assert is_good(unary, {"ttft": 0.1}) and not is_good(unary, {"e2e": 0.4})


def test_verdict() -> None:
    """A client that cannot keep up measures itself; at_once is late by its nature."""
    late = [record(i, 0, [(1, 1)], sent_s=0.02) for i in range(10)]
    refused = summarise(late, RUN, cpu_share=0.2)
    assert refused.verdict == "client_bottleneck" and "late" in refused.reasons[0]
    accepted = summarise(late, RUN, at_once=frozenset({"load"}))
    assert accepted.verdict == "ok"
    assert judge(Percentiles(), 0.81)[0] == "client_bottleneck"
    assert judge(Percentiles(p99=0.0049), 0.79) == ("ok", [])


def test_nothing_at_all() -> None:
    """A run that was stopped before its first request divides by zero."""
    empty = summarise([], RUN)
    assert empty.requests == 0 and empty.goodput.high == 1.0
    assert not math.isnan(empty.served_per_s)


def test_assertions() -> None:
    """A unit that is ignored makes 500ms half a kilosecond; an absent figure must not pass."""
    s = summarise([record(0, 0, [(0.4, 1), (0.5, 1)])], RUN, slo={"e2e": 1})

    def holds(text):
        return [outcome.holds for outcome in evaluate([text], s)]

    assert holds("failed==0, p99_ttft<500ms,p99_ttft<0.5, p50_ttft<=400000us") == [True] * 4
    assert holds("p99_ttft<390ms, goodput>=99%, errors.cut==0") == [False, True, True]
    assert holds("p99_queue<1s, migrations==0, fairness_tenants>0.5") == [False] * 3
    assert [a.value for a in parse("no_service<2m, error_rate<1%, requests>1")] == [120, 0.01, 1]
    fields = {
        "p99_tft<1s": "did you mean 'p99_ttft'",
        "failed=0": "no assertion",
        "failed==0ms": "not a time",
        "p99_ttft<5%": "not a fraction",
        "p99_ttft<-1": "no assertion",
        "": "no assertion",
        "ttft<1s": "unknown metric",
    }
    for text, message in fields.items():
        with pytest.raises(ValueError, match=message):
            parse(text)


def test_nothing_compared_is_not_right() -> None:
    """A reference of other questions, or none, passes different==0; so does a misspelt class."""
    run = summarise([record(0, 0, [(0.1, 1)])], RUN)
    assert [o.holds for o in evaluate(["different==0, verified==0, errors.cut==0"], run)] == [
        False,
        True,
        True,
    ]
    with pytest.raises(ValueError, match=r"errors\.cuts.*errors\.cut"):
        parse("errors.cuts==0")
