"""Comparisons: differences that are there are found, chance is not reported as one."""

import math
import random
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest.errors import ScenarioError
from loadtest.report.compare import Side, compare, mann_whitney, parse_conditions, read_side, tidy
from loadtest.report.comparison import comparison_page
from loadtest.report.series import SavedRun
from tests.loadtest.made_run import make_records, make_run, summarise


def side(name: str, *seeds: int, slower: float = 1.0, faults: bool = False) -> Side:
    runs = []
    for seed in seeds:
        records = make_records(seed=seed, seconds=20.0, slower=slower, faults=faults)
        runs.append(SavedRun(Path(name), summarise(records, name=name, faults=faults), records))
    return Side(name, tuple(runs))


def test_slower_server_is_found() -> None:
    """A fifth more latency is what a comparison is there for."""
    comparison = compare(side("a", 1), side("b", 2, slower=1.2), resamples=300)
    rows = {row.metric: row for row in comparison.rows}
    for name in ("p50_ttft", "p50_tpot", "p50_itl", "p90_ttft", "p50_e2e"):
        assert rows[name].verdict == "worse", rows[name]
        assert rows[name].low < 0.2 < rows[name].high, rows[name]
    assert rows["p50_ttft"].p is not None and rows["p50_ttft"].p < 1e-6
    assert rows["error_rate"].verdict == "no difference shown"


def test_chance_is_no_difference() -> None:
    """Two runs of one server differ; a tool that then cries wolf is turned off."""
    wrong = total = 0
    for seed in range(4):
        comparison = compare(side("a", 10 + seed), side("b", 30 + seed), resamples=100)
        latencies = [row for row in comparison.rows if row.metric.split("_")[0] in ("p50", "p90")]
        wrong += sum(row.shown for row in latencies)
        total += len(latencies)
    assert wrong <= 0.15 * total


def test_repeats_are_drawn_as_runs() -> None:
    """Requests of one run are alike: taken as independent, every day's weather is significant."""

    def days(name: str, factors: list[float], first: int) -> Side:
        runs = [side(name, first + i, slower=f).runs[0] for i, f in enumerate(factors)]
        return Side(name, tuple(runs))

    a = days("a", [1.0, 1.15, 0.9, 1.05], 1)
    b = days("b", [1.1, 0.95, 1.2, 1.0], 11)
    comparison = compare(a, b, resamples=300)
    assert "runs, then requests" in comparison.method
    row = next(row for row in comparison.rows if row.metric == "p50_tpot")
    assert not row.shown
    single = compare(Side("a", a.runs[:1]), Side("b", b.runs[:1]), resamples=300)
    assert next(r for r in single.rows if r.metric == "p50_tpot").shown
    assert any("fewer than 3 runs" in w for w in single.warnings)


def test_mann_whitney_against_known_values() -> None:
    """A wrong tie correction moves p by a factor where many latencies are equal."""
    # By hand: u = 1 of n m = 9, no ties: z = (3.5 - 0.5) / sqrt(9 * 7 / 12)
    p = mann_whitney(np.array([1.0, 2, 4]), np.array([3.0, 5, 6]))
    assert math.isclose(p, math.erfc(3.0 / math.sqrt(5.25) / math.sqrt(2)), rel_tol=1e-12)
    assert mann_whitney(np.ones(5), np.ones(7)) == 1.0
    rng = np.random.default_rng(0)
    ps = [mann_whitney(rng.integers(0, 5, 80), rng.integers(0, 5, 90)) for _ in range(400)]
    assert 0.02 <= float(np.mean(np.array(ps) < 0.05)) <= 0.08


def test_error_rate_difference() -> None:
    """Failures are counted in points: twice nothing is still nothing."""
    comparison = compare(side("a", 1), side("b", 2), resamples=50)
    row = next(row for row in comparison.rows if row.metric == "error_rate")
    assert (row.a, row.b, row.change, row.shown) == (0, 0, 0, False)
    many = side("b", 2)
    rng = random.Random(0)
    records = [
        r
        if rng.random() > 0.1
        else type(r)(index=r.index, phase="", intended_s=0.0, end_s=1.0, error_class="cut")
        for r in many.runs[0].records
    ]
    bad = Side("b", (SavedRun(Path("b"), summarise(records, name="b"), records),))
    row = next(r for r in compare(side("a", 1), bad, resamples=50).rows if r.metric == "error_rate")
    assert row.verdict == "worse" and 0.05 < row.low < row.change < row.high < 0.2


def test_wrong_answers_are_told() -> None:
    """The faster of two servers, and nobody says that its answers are wrong."""
    good, fast = side("a", 1), side("b", 2)
    summary = msgspec.structs.replace(
        fast.runs[0].summary, verified_ok=1, verified_different=19, missing_tokens=3
    )
    wrong = Side("b", (SavedRun(Path("b"), summary, fast.runs[0].records),))
    warnings = compare(good, wrong, resamples=50).warnings
    assert "b: 19 of 20 answers that were compared are wrong" in warnings
    assert "b: 3 tokens are missing, 0 came twice" in warnings
    assert not any("compared" in text for text in compare(good, fast, resamples=50).warnings)


def test_conditions() -> None:
    """A gate that fails by chance is removed; one that misreads its limit guards nothing."""
    comparison = compare(side("a", 1), side("b", 2, slower=1.2), resamples=200)
    by_text = {
        text: parse_conditions(text)[0].met(comparison)
        for text in ("p50_ttft>+10%", "p50_ttft>+40%", "p50_ttft<-5%", "error_rate>+0%")
    }
    assert list(by_text.values()) == [True, False, False, False]
    assert len(parse_conditions("p99_ttft>+10%, tokens_per_s<-5%")) == 2
    for text, what in (("p99_ttft>10", "cannot read"), ("p98_ttft>1%", "no figure"), ("", "read")):
        with pytest.raises(ScenarioError, match=what):
            parse_conditions(text)


def test_folders(tmp_path: Path) -> None:
    """A folder of repeats is one side; an empty one is an error, not a comparison of nothing."""
    for name in ("a/1", "a/2", "b"):
        (tmp_path / name).mkdir(parents=True)
        make_run(tmp_path / name, seconds=3.0)
    assert len(read_side(tmp_path / "a").runs) == 2
    assert len(read_side(tmp_path / "b").runs) == 1
    with pytest.raises(ScenarioError, match="neither"):
        read_side(tmp_path / "c")


def test_page_and_table() -> None:
    """The page and the terminal must tell the same story."""
    comparison = compare(side("<a>", 1), side("b", 2, slower=1.2), resamples=50)
    text = comparison_page(comparison)
    assert "<a>" not in text and "&lt;a&gt;" in text
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(drawing)
    for row in tidy(comparison.rows):
        assert row[0] in text and row[3] in text and row[6] in text
