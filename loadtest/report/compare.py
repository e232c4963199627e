"""The comparison of two runs, or two sets of repeated runs, with confidence intervals.

Latencies: the 95 % interval of the relative change comes from a bootstrap. With fewer than three
runs on a side, requests are resampled, each with all its tokens, since tokens of a request are
correlated. With three or more runs on both sides, runs are resampled first and then their requests,
since requests of a run are correlated, too.
Throughput: runs are resampled; with few runs, twenty equal parts of each run's time.
Shares (error rate, goodput): Newcombe's interval of the difference.
A two-sided Mann-Whitney test with ties on the requests' values tells whether two distributions
differ at all.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.errors import ScenarioError
from loadtest.measure.figures import is_good, token_gaps, wilson
from loadtest.measure.records import RequestRecord
from loadtest.report.series import Floats, SavedRun, read_run

RESAMPLES = 1000
_STRETCHES = 20
_MANY = 3  # minimum number of runs on each side for which runs are resampled
_POINTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LATENCIES = ("ttft", "tpot", "itl", "e2e")
_RATES = ("tokens_per_s", "served_per_s")
_SHARES = ("error_rate", "goodput")
_HIGHER_IS_BETTER = (*_RATES, "goodput")


@dataclass(frozen=True, slots=True)
class Side:
    """A run, or repeated runs of one scenario."""

    name: str
    runs: tuple[SavedRun, ...]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A row of a comparison: a metric of both sides, and its change.

    change: b/a - 1, or b - a for shares; low, high: its 95 % interval.
    p: p-value of the Mann-Whitney test, in a metric's first row; None without a test.
    """

    metric: str
    a: float
    b: float
    change: float
    low: float
    high: float
    p: float | None = None

    @property
    def relative(self) -> bool:
        return self.metric not in _SHARES

    @property
    def shown(self) -> bool:
        """Whether the change is significant: its 95 % interval excludes zero."""
        return self.low > 0 or self.high < 0

    @property
    def verdict(self) -> str:
        if not self.shown:
            return "no difference shown"
        return "better" if (self.change > 0) == (self.metric in _HIGHER_IS_BETTER) else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of two sides.

    method: how the intervals were computed. warnings: reasons why the sides are hard to compare.
    """

    a: Side
    b: Side
    rows: list[ComparisonRow]
    method: str
    warnings: list[str]


def read_side(path: Path) -> Side:
    """Read a run's folder, or a folder of such folders. Raises ScenarioError."""
    if (path / "summary.json").exists():
        return Side(path.resolve().name, (read_run(path),))
    folders = sorted(inner.parent for inner in path.glob("*/summary.json"))
    if not folders:
        raise ScenarioError(f"{path}: neither a run's folder nor a folder of runs")
    return Side(path.resolve().name, tuple(read_run(inner) for inner in folders))


def compare(a: Side, b: Side, *, seed: int = 0, resamples: int = RESAMPLES) -> Comparison:
    """Compare every metric that both sides have."""
    rng = np.random.default_rng(seed)
    by_run = min(len(a.runs), len(b.runs)) >= _MANY
    rows: list[ComparisonRow] = []
    for metric in _LATENCIES:
        ours, theirs = (_Sample(side, metric, by_run) for side in (a, b))
        if ours.empty or theirs.empty:
            continue
        points = ours.at(None), theirs.at(None)
        draws = np.array([(ours.at(rng), theirs.at(rng)) for _ in range(resamples)])
        p = None if metric == "itl" else mann_whitney(ours.values, theirs.values)
        for index, name in enumerate(_POINTS):
            first, second = points[0][index], points[1][index]
            change = draws[:, 1, index] / np.maximum(draws[:, 0, index], 1e-12) - 1
            low, high = np.percentile(change, (2.5, 97.5))
            rows.append(
                ComparisonRow(
                    *(f"{name}_{metric}", first, second, second / max(first, 1e-12) - 1),
                    *(float(low), float(high), p if index == 0 else None),
                )
            )
    rows += [_rate_row(metric, a, b, rng, resamples) for metric in _RATES]
    rows += [row for metric in _SHARES if (row := _share_row(metric, a, b)) is not None]
    drawn = "runs, then requests in them," if by_run else "requests"
    method = f"bootstrap of {resamples} samples: {drawn} drawn again; intervals at 95 %"
    return Comparison(a, b, rows, method, _warnings(a, b))


class _Sample:
    """The values of a metric in ascending order, each with its request and run."""

    def __init__(self, side: Side, metric: str, by_run: bool) -> None:
        parts, units = [], []
        self._requests: list[int] = []  # requests with values in each run
        count = 0
        for run in side.runs:
            before = count
            for record in run.records:
                if not record.ok or record.slow_reader:
                    continue
                mine = _values(record, metric)
                if len(mine):
                    parts.append(mine)
                    units.append(np.full(len(mine), count))
                    count += 1
            self._requests.append(count - before)
        self.empty = count == 0
        if self.empty:
            return
        values = np.concatenate(parts)
        order = np.argsort(values, kind="stable")
        self.values: Floats = values[order]
        self._unit = np.concatenate(units)[order]
        self._by_run = by_run
        self._count = count

    def at(self, rng: np.random.Generator | None) -> list[float]:
        """Return the percentiles: of the values or, with a generator, of a bootstrap sample."""
        if rng is None:
            return [float(v) for v in np.quantile(self.values, list(_POINTS.values()))]
        weights = self._draw(rng)[self._unit]
        sums = np.cumsum(weights)
        at = np.searchsorted(sums, np.array(list(_POINTS.values())) * sums[-1])
        return [float(v) for v in self.values[np.minimum(at, len(self.values) - 1)]]

    def _draw(self, rng: np.random.Generator) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return the number of times that each request occurs in a random bootstrap sample."""
        if not self._by_run:
            picks = rng.integers(0, self._count, self._count)
            return np.bincount(picks, minlength=self._count)
        starts = np.concatenate([[0], np.cumsum(self._requests)])
        picked = rng.integers(0, len(self._requests), len(self._requests))
        drawn = [
            starts[run] + rng.integers(0, self._requests[run], self._requests[run])
            for run in picked
            if self._requests[run]
        ]
        if not drawn:  # the sampled runs have no values
            return np.ones(self._count, dtype=np.int64)
        return np.bincount(np.concatenate(drawn), minlength=self._count)


def _values(record: RequestRecord, metric: str) -> Floats:
    if metric == "itl":
        _, seconds, counts = token_gaps(record)
        return np.repeat(np.array(seconds, dtype=np.float64), np.array(counts, dtype=np.int64))
    value: float | None = getattr(record, f"{metric}_s")
    if value is None or (metric == "e2e" and not record.stream and not record.chunks):
        return np.zeros(0)
    return np.array([value])


def _rate_row(
    metric: str, a: Side, b: Side, rng: np.random.Generator, resamples: int
) -> ComparisonRow:
    """Return the comparison of throughput, with one value per run, or one per part of each run."""
    points, draws = [], []
    for side in (a, b):
        totals = [_per_second(run, metric) for run in side.runs]
        points.append(float(np.mean(totals)))
        if len(side.runs) >= _MANY:
            pool = np.array(totals)
        else:
            pool = np.concatenate([_stretches(run, metric) for run in side.runs])
        draws.append(pool[rng.integers(0, len(pool), (resamples, len(pool)))].mean(axis=1))
    change = draws[1] / np.maximum(draws[0], 1e-12) - 1
    low, high = np.percentile(change, (2.5, 97.5))
    before, after = points
    point = after / max(before, 1e-12) - 1
    return ComparisonRow(metric, before, after, point, float(low), float(high))


def _per_second(run: SavedRun, metric: str) -> float:
    summary = run.summary
    return summary.output_tokens_per_s if metric == "tokens_per_s" else summary.served_per_s


def _stretches(run: SavedRun, metric: str) -> Floats:
    """Return the rate in each of several equal parts of the run's time."""
    if not run.records:
        return np.zeros(1)
    start = min(r.intended_s for r in run.records)
    end = max(max(r.end_s for r in run.records), start + 1e-3)
    if metric == "tokens_per_s":
        pairs = [pair for r in run.records for pair in r.chunks]
        times, weights = [t for t, _ in pairs], [float(n) for _, n in pairs]
    else:
        times = [r.end_s for r in run.records if r.ok]
        weights = [1.0] * len(times)
    counts = np.histogram(times, _STRETCHES, (start, end), weights=weights)[0]
    rates: Floats = counts / ((end - start) / _STRETCHES)
    return rates


def _share_row(metric: str, a: Side, b: Side) -> ComparisonRow | None:
    """Return the comparison of a share: the difference b - a with Newcombe's interval.

    Returns None if a side has no requests, and for goodput without an SLO.
    """
    shares, spans = [], []
    for side in (a, b):
        slo = a.runs[0].summary.goodput.slo
        if metric == "goodput" and not slo:
            return None
        records = [r for run in side.runs for r in run.records if not r.cancelled]
        hits = sum(r.failed if metric == "error_rate" else is_good(r, slo) for r in records)
        if not records:
            return None
        shares.append(hits / len(records))
        spans.append(wilson(hits, len(records)))
    (share_a, share_b), ((low_a, high_a), (low_b, high_b)) = shares, spans
    change = share_b - share_a
    low = change - math.hypot(share_b - low_b, high_a - share_a)
    high = change + math.hypot(high_b - share_b, share_a - low_a)
    return ComparisonRow(metric, share_a, share_b, change, low, high)


def mann_whitney(a: Floats, b: Floats) -> float:
    """Return the two-sided p of the Mann-Whitney test, 1.0 if all values are equal.

    The normal approximation is used, with correction for ties and continuity.
    """
    both = np.concatenate([a, b])
    _, inverse, counts = np.unique(both, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]
    n, m = float(len(a)), float(len(b))
    total = n + m
    u = float(ranks[: len(a)].sum()) - n * (n + 1) / 2
    ties = float((counts.astype(np.float64) ** 3 - counts).sum())
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1))) if total > 1 else 0.0
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def _warnings(a: Side, b: Side) -> list[str]:
    differences = []
    for side in (a, b):
        late = sum(run.summary.verdict == "client_bottleneck" for run in side.runs)
        if late:
            differences.append(f"{side.name}: the client was the bottleneck in {late} of its runs")
        wrong = sum(run.summary.verified_different for run in side.runs)
        if wrong:
            of = wrong + sum(run.summary.verified_ok for run in side.runs)
            differences.append(f"{side.name}: {wrong} of {of} answers that were compared are wrong")
        lost = sum(run.summary.missing_tokens for run in side.runs)
        doubled = sum(run.summary.doubled_tokens for run in side.runs)
        if lost or doubled:
            differences.append(f"{side.name}: {lost} tokens are missing, {doubled} came twice")
    for what in ("scenario", "model", "gpus"):
        values = {getattr(run.summary.run, what) for side in (a, b) for run in side.runs}
        if len(values) > 1:
            differences.append(f"not the same {what} in all runs")
    if min(len(a.runs), len(b.runs)) < _MANY:
        differences.append("fewer than 3 runs a side: differences between runs are in no interval")
    return differences


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a change. limit: a fraction, so +10 % is 0.1; for shares it is a
    difference.
    """

    metric: str
    above: bool
    limit: float
    text: str

    def met(self, comparison: Comparison) -> bool:
        """Whether the change is beyond the limit and significant. Raises ScenarioError."""
        row = next((row for row in comparison.rows if row.metric == self.metric), None)
        if row is None:
            names = ", ".join(row.metric for row in comparison.rows)
            raise ScenarioError(f"--fail-if {self.text!r}: the runs have no such figure; {names}")
        beyond = row.change > self.limit if self.above else row.change < self.limit
        return beyond and row.shown


def parse_conditions(text: str) -> list[Condition]:
    """Parse conditions such as `p99_ttft>+10%, tokens_per_s<-5%`. Raises ScenarioError."""
    known = [f"{point}_{metric}" for metric in _LATENCIES for point in _POINTS]
    known += [*_RATES, *_SHARES]
    lines = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*", part)
        if match is None:
            raise ScenarioError(f"--fail-if: cannot read {part.strip()!r}; write p99_ttft>+10%")
        if match[1] not in known:
            raise ScenarioError(f"--fail-if: no figure {match[1]!r}; there are: {', '.join(known)}")
        lines.append(Condition(match[1], match[2] == ">", float(match[3]) / 100, part.strip()))
    return lines


def tidy(metrics: Sequence[ComparisonRow]) -> list[tuple[str, str, str, str, str, str, str]]:
    """Return rows as text: metric, a, b, change, interval, p, verdict."""
    from loadtest.report.charts import duration, number, percent

    lines = []
    for row in metrics:
        form = percent if not row.relative else number if row.metric in _RATES else duration
        unit = "%" if row.relative else " pt"
        p = "" if row.p is None else "<0.001" if row.p < 0.001 else f"{row.p:.3f}"
        span = f"{row.low * 100:+.1f} to {row.high * 100:+.1f}{unit}"
        change = f"{row.change * 100:+.1f}{unit}"
        lines.append((row.metric, form(row.a), form(row.b), change, span, p, row.verdict))
    return lines
