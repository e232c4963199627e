"""The arrays that reports plot and compare, computed from request records, all in seconds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtest.errors import ScenarioError
from loadtest.measure.figures import service_gaps, token_gaps
from loadtest.measure.records import RequestRecord, Summary, read_records, read_summary

Floats = NDArray[np.float64]

METRICS = ("ttft", "tpot", "itl", "e2e")
TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2e": "End to end",
}


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run as read from its folder. records: without warm-up."""

    path: Path
    summary: Summary
    records: list[RequestRecord]

    @property
    def name(self) -> str:
        return self.summary.run.name or self.path.name


def read_run(folder: Path) -> SavedRun:
    """Read a run's folder. Raises ScenarioError if it is damaged or holds no run."""
    try:
        summary = read_summary(folder / "summary.json")
        records = [r for r in read_records(folder / "requests.jsonl") if not r.warmup]
    except FileNotFoundError as error:
        raise ScenarioError(f"{folder}: not a run's folder, {error.filename} is missing") from error
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ScenarioError(f"{folder}: cannot read it: {error}") from error
    return SavedRun(folder, summary, records)


def values(records: Iterable[RequestRecord], metric: str) -> Floats:
    """Return a metric's values for percentiles: one per success, or one per token for itl."""
    good = (r for r in records if r.ok and not r.slow_reader)
    if metric == "itl":
        parts = [_per_token(r) for r in good]
        return np.concatenate(parts) if parts else np.zeros(0)
    values = (getattr(r, f"{metric}_s") for r in good)
    return np.array([v for v in values if v is not None], dtype=np.float64)


def _per_token(record: RequestRecord) -> Floats:
    _, seconds, counts = token_gaps(record)
    return np.repeat(np.array(seconds, dtype=np.float64), np.array(counts, dtype=np.int64))


def cdf(sample: Floats) -> tuple[list[float], list[float]]:
    """Return (values, share of the sample up to each value), with more points at the tail.

    Points begin at 0.4 %, because near-zero gaps of tokens that arrive together would stretch the
    axis.
    """
    if not len(sample):
        return [], []
    shares = np.unique(
        np.concatenate([np.linspace(0.004, 1, 240), 1 - np.geomspace(1e-4, 0.1, 60)])
    )
    return np.quantile(sample, shares).tolist(), shares.tolist()


@dataclass(frozen=True, slots=True)
class Timeline:
    """The rates, latencies and errors of a run over time, in bins.

    edges: [n] starts of bins.
    offered, served, tokens, errors: rates per second, of requests or tokens; errors by class.
    in_flight: mean number of requests in flight.
    ttft: {percentile: (seconds, values)} by intended send time.
    replicas: number of replicas that answered in a bin; empty if the server does not report them.
    """

    width: float
    edges: list[float]
    offered: list[float]
    served: list[float]
    tokens: list[float]
    in_flight: list[float]
    errors: dict[str, list[float]]
    ttft: dict[int, tuple[list[float], list[float]]]
    replicas: list[float] = field(default_factory=list)
    end: float = 0.0


def timeline_of(records: Sequence[RequestRecord], bins: int = 150) -> Timeline:
    """Return the run's events counted in at most `bins` time bins of a round length."""
    end = max((r.end_s for r in records), default=1.0)
    width = next(
        (w for w in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600) if end / w <= bins), 3600.0
    )
    count = max(1, int(np.ceil(end / width)))
    edges = np.arange(count + 1, dtype=np.float64) * width

    def rate(times: Iterable[float], weights: Iterable[float] | None = None) -> list[float]:
        at = np.fromiter(times, dtype=np.float64)
        heavy = None if weights is None else np.fromiter(weights, dtype=np.float64)
        rates: list[float] = (np.histogram(at, edges, weights=heavy)[0] / width).tolist()
        return rates

    failed = [r for r in records if r.failed]
    classes = sorted({r.error_class or "" for r in failed})
    ttft: dict[int, tuple[list[float], list[float]]] = {}
    firsts = [(r.intended_s, r.ttft_s) for r in records if r.ok and r.ttft_s is not None]
    if firsts:
        table = np.array(firsts)
        which = np.minimum((table[:, 0] / width).astype(int), count - 1)
        groups = [(i, table[which == i, 1]) for i in np.unique(which)]
        for q in (50, 99):
            ttft[q] = (
                [float((i + 0.5) * width) for i, _ in groups],
                [float(np.percentile(sample, q)) for _, sample in groups],
            )
    return Timeline(
        width=width,
        edges=edges.tolist(),
        offered=rate(r.intended_s for r in records),
        served=rate(r.end_s for r in records if r.ok),
        tokens=rate(
            (t for r in records for t, _ in r.chunks),
            (float(n) for r in records for _, n in r.chunks),
        ),
        in_flight=_in_flight(records, edges),
        errors={name: rate(r.end_s for r in failed if r.error_class == name) for name in classes},
        ttft=ttft,
        replicas=_replicas(records, edges),
        end=end,
    )


def _in_flight(records: Sequence[RequestRecord], edges: Floats) -> list[float]:
    """Return the mean number of requests in flight in each bin."""
    sent = np.sort([r.sent_s for r in records if r.sent_s is not None])
    ended = np.sort([r.end_s for r in records if r.sent_s is not None])

    def passed(times: Floats) -> Floats:  # integral of the number of events so far
        sums = np.concatenate([[0.0], np.cumsum(times)])
        before = np.searchsorted(times, edges, side="right")
        return before * edges - sums[before]

    levels: list[float] = (np.diff(passed(sent) - passed(ended)) / np.diff(edges)).tolist()
    return levels


def _replicas(records: Sequence[RequestRecord], edges: Floats) -> list[float]:
    names = {r.replica for r in records if r.replica}
    total = np.zeros(len(edges) - 1)
    for name in names:
        times = [t for r in records if r.replica == name for t, _ in r.chunks]
        total += np.histogram(times, edges)[0] > 0
    return total.tolist() if names else []


def silences(records: Iterable[RequestRecord], longer_than: float) -> list[tuple[float, float]]:
    """Return (start, end) of intervals longer than `longer_than` seconds in which requests waited
    and none got a chunk.
    """
    return [(start, end) for start, end in service_gaps(records) if end - start > longer_than]
