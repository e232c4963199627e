"""Searches for the highest load that keeps an SLO, and sweeps over loads.

A limit such as p99_ttft<500ms requires that 99 % of requests be faster; a failure counts as slower.
After a trial the Wilson interval of this share is above 99 % (kept), below it (broken), or contains
it (unclear). An unclear load is repeated with another seed and counts are added, up to `repeats`
times. Then the share itself decides, and the trial remains marked as unclear. So one lucky or
unlucky trial does not change the result.

    start ─ x2 ─ x2 ─ x2 broken        then bisection of the logarithm, until the kept and the
            kept  kept                 broken load are within `tolerance`

Trials are saved to search.json one by one, and an interrupted search resumes from there.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from loadtest.errors import RunError, ScenarioError
from loadtest.measure.figures import token_gaps, wilson
from loadtest.measure.records import Percentiles, RequestRecord, Summary

SCHEMA = "manta-loadtest-search/1"
SATURATED = 0.9  # a server is saturated if it serves less than this share of the offered load
STATE = "search.json"

_METRICS = ("ttft", "tpot", "itl", "e2e")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_LIMIT = re.compile(r"p(\d{2,4})_([a-z0-9]+)\s*<=?\s*(\d*\.?\d+)\s*(us|ms|s|m)")
_ERRORS = re.compile(r"error_rate\s*<=?\s*(\d*\.?\d+)\s*%")

RunOnce = Callable[[float, int], tuple[Summary, Sequence[RequestRecord]]]
"""(load, repeat) -> what came of it. The repeat chooses the seed."""

State = Literal["kept", "broken", "unclear"]


class Limit(msgspec.Struct, frozen=True):
    """A limit of the SLO: `share` of requests must keep `metric` below `seconds`.

    If the metric is "errors", `share` of requests must succeed.
    """

    text: str
    metric: str
    share: float
    seconds: float = math.inf


class Count(msgspec.Struct, frozen=True):
    """The number of requests that kept a limit, and of those to which it applies."""

    good: float = 0.0
    total: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.good + other.good, self.total + other.total)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one load, over all its repeats. counts: requests that kept each limit, by the
    limit's text."""

    load: float
    repeats: int = 0
    counts: dict[str, Count] = {}
    state: State = "unclear"
    kept: bool = False
    saturated: bool = False
    offered_per_s: float = 0.0
    served_per_s: float = 0.0
    tokens_per_s: float = 0.0
    ttft: Percentiles = Percentiles()
    tpot: Percentiles = Percentiles()
    e2e: Percentiles = Percentiles()


class Search(msgspec.Struct, kw_only=True):
    """A search for the highest load that keeps an SLO, or a sweep over loads.

    key: text of the settings that must be equal for resuming a stored search.
    ended: why the search stopped, "" if it has not.
    best: highest load that kept the SLO. first_broken: lowest load that did not.
    knee: see `knee`.
    """

    schema: str = SCHEMA
    key: str = ""
    name: str = ""
    unit: str = "requests/s"
    slo: list[Limit] = []
    trials: list[Trial] = []
    best: float | None = None
    first_broken: float | None = None
    knee: float | None = None
    ended: str = ""


def parse_slo(text: str) -> list[Limit]:
    """Parse an SLO such as `p99_ttft<500ms, p95_e2e<10s, error_rate<1%`. Raises ScenarioError."""
    trials = []
    for part in (part.strip() for part in text.split(",")):
        if match := _ERRORS.fullmatch(part):
            trials.append(Limit(part, "errors", 1 - float(match[1]) / 100))
        elif (match := _LIMIT.fullmatch(part)) and match[2] in _METRICS:
            digits = match[1]
            share = int(digits) / 10 ** len(digits)
            if not 0 < share < 1:
                raise ScenarioError(f"--slo: {part!r}: no such percentile")
            trials.append(Limit(part, match[2], share, float(match[3]) * _UNITS[match[4]]))
        else:
            raise ScenarioError(
                f"--slo: cannot read {part!r}; write p99_ttft<500ms, p95_tpot<50ms (also itl, "
                "e2e) or error_rate<1%"
            )
    return trials


def count(records: Sequence[RequestRecord], limit: Limit) -> Count:
    """Count the requests that kept a limit; failures keep none.

    Requests that the client cancelled or read slowly are left out.
    """
    good, total = 0.0, 0
    for record in records:
        if record.cancelled or record.warmup or record.slow_reader:
            continue
        share = _kept(record, limit) if record.ok else 0.0
        if share is not None:
            good += share
            total += 1
    return Count(good, total)


def _kept(record: RequestRecord, limit: Limit) -> float | None:
    """Return 1.0 if a request kept a limit, 0.0 if not, and None if the limit does not apply.

    For itl the result is the share of the request's tokens, since these are not independent
    samples.
    """
    if limit.metric == "errors":
        return 1.0
    if limit.metric == "itl":
        _, seconds, counts = token_gaps(record)
        if not counts:
            return None
        return float(np.average(np.array(seconds) <= limit.seconds, weights=counts))
    value: float | None = getattr(record, f"{limit.metric}_s")
    return None if value is None else float(value <= limit.seconds)


def judge(counts: dict[str, Count], slo: Sequence[Limit]) -> State:
    """Return "kept" if all limits are surely kept, "broken" if one is surely broken, else
    "unclear".

    counts: the requests that kept each limit, by the limit's text.
    """
    state: State = "kept"
    for limit in slo:
        count = counts[limit.text]
        low, high = wilson(round(count.good), count.total)
        if high < limit.share:
            return "broken"
        if low < limit.share:
            state = "unclear"
    return state


def is_saturated(records: Sequence[RequestRecord]) -> bool:
    """Whether requests arrive faster than they are served, so that latency grows with arrival time.

    A server that serves less than SATURATED of an open loop's load delays a request by another
    tenth of a second for each second of later arrival, however long answers take.
    """
    for metric in ("ttft_s", "e2e_s"):
        known = sorted(
            (r.intended_s, value)
            for r in records
            if r.ok and not r.warmup and (value := getattr(r, metric)) is not None
        )
        quarter = len(known) // 4
        if quarter < 5:
            continue
        first, last = np.median(known[:quarter], axis=0), np.median(known[-quarter:], axis=0)
        if last[1] - first[1] > (1 - SATURATED) * (last[0] - first[0]):
            return True
    return False


class Trials:
    """A runner of trials: repeats each load until its verdict is clear, and saves results in a
    folder.

    A run in which the client was the bottleneck is repeated, up to `repeats` times. With `lenient`
    such a run counts instead.
    """

    def __init__(
        self,
        run_once: RunOnce,
        search: Search,
        *,
        folder: Path | None = None,
        repeats: int = 3,
        open_loop: bool = True,
        lenient: bool = False,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self._run_once = run_once
        self.search = search
        self._folder = folder
        self._repeats = repeats
        self._open_loop = open_loop
        self._lenient = lenient
        self._on_trial = on_trial

    def at(self, load: float) -> Trial:
        """Return the trial at a load, from the stored ones or by running it. Raises RunError if the
        client was too slow.
        """
        trial = next((t for t in self.search.trials if t.load == load), Trial(load=load))
        refused = 0
        while not self._done(trial):
            summary, records = self._run_once(trial.load, trial.repeats)
            if summary.verdict == "ok" or self._lenient:
                trial = self._with(trial, summary, records)
                self._store(trial)
                continue
            refused += 1
            if refused == self._repeats:
                raise RunError(
                    f"at {load:g} {self.search.unit} the client was the bottleneck, so nothing can "
                    "be measured; give it more --procs or another machine"
                )
        return trial

    def _done(self, trial: Trial) -> bool:
        clear = trial.state != "unclear" or not self.search.slo
        return trial.repeats > 0 and (clear or trial.repeats >= self._repeats)

    def _with(self, trial: Trial, summary: Summary, records: Sequence[RequestRecord]) -> Trial:
        """Return the trial with another run added."""
        slo = self.search.slo
        counts = {
            limit.text: trial.counts.get(limit.text, Count()) + count(records, limit)
            for limit in slo
        }
        state = judge(counts, slo)
        saturated = self._open_loop and is_saturated(records)
        shares = [counts[limit.text].good / max(1, counts[limit.text].total) for limit in slo]
        enough = all(share >= limit.share for share, limit in zip(shares, slo, strict=True))
        return Trial(
            load=trial.load,
            repeats=trial.repeats + 1,
            counts=counts,
            state="broken" if saturated else state,
            kept=not saturated and state != "broken" and enough,
            saturated=saturated,
            offered_per_s=summary.offered_per_s,
            served_per_s=summary.served_per_s,
            tokens_per_s=summary.output_tokens_per_s,
            ttft=summary.ttft,
            tpot=summary.tpot,
            e2e=summary.e2e,
        )

    def _store(self, trial: Trial) -> None:
        others = [t for t in self.search.trials if t.load != trial.load]
        self.search.trials = sorted([*others, trial], key=lambda t: t.load)
        self.save()
        if self._on_trial is not None:
            self._on_trial(trial)

    def save(self) -> None:
        """Save the search atomically, as it may be interrupted at any moment."""
        if self._folder is None:
            return
        data = msgspec.json.format(msgspec.json.encode(self.search), indent=2)
        fresh = self._folder / f"{STATE}.new"
        fresh.write_bytes(data + b"\n")
        os.replace(fresh, self._folder / STATE)


def highest(
    trials: Trials,
    *,
    start: float,
    top: float = 1e5,
    tolerance: float = 0.05,
    whole: bool = False,
) -> Search:
    """Search for the highest load that keeps the SLO.

    whole: loads are integers, as for concurrency.
    If `start` is too much, loads down to a thousandth of it are tried. Raises RunError.
    """
    search = trials.search
    low: float | None = None
    high: float | None = None
    load = start
    while high is None or low is None:
        if trials.at(load).kept:
            low = max(load, low or load)
            if load >= top:
                break
            load = min(top, load * 2) if high is None else math.sqrt(low * high)
        else:
            high = min(load, high or load)
            if low is None and (load <= start / 1000 or (whole and load <= 1)):
                break
            load = load / 2 if low is None else math.sqrt(low * high)
        load = _round(load, whole)
    while low is not None and high is not None and high / low > 1 + tolerance:
        load = _round(math.sqrt(low * high), whole)
        if load in (low, high):
            break
        if trials.at(load).kept:
            low = load
        else:
            high = load
    search.best, search.first_broken = low, high
    if low is None:
        search.ended = "even the lowest load broke the SLO"
    elif high is None:
        search.ended = "the highest load allowed kept the SLO"
    else:
        search.ended = "found"
    search.knee = knee(search.trials)
    trials.save()
    return search


def sweep(trials: Trials, loads: Sequence[float]) -> Search:
    """Run each load, from the lowest on, until the server is saturated."""
    search = trials.search
    search.ended = "all loads tried"
    for load in sorted(loads):
        if trials.at(load).saturated:
            search.ended = f"saturated at {load:g} {search.unit}"
            break
    kept_loads = [t.load for t in search.trials if t.kept] if search.slo else []
    broken = [t.load for t in search.trials if not t.kept] if search.slo else []
    search.best, search.first_broken = max(kept_loads, default=None), min(broken, default=None)
    search.knee = knee(search.trials)
    trials.save()
    return search


def knee(trials: Sequence[Trial]) -> float | None:
    """Return the load with the best ratio of throughput to latency (Kleinrock's power).

    Beyond it latency grows for little throughput. None with fewer than three loads.
    """
    known = [t for t in trials if t.e2e.count and t.e2e.mean > 0]
    if len(known) < 3:
        return None
    return max(known, key=lambda t: t.served_per_s / t.e2e.mean).load


def resume(folder: Path, fresh: Search) -> Search:
    """Return the folder's search if its key is that of `fresh`, or `fresh` if there is none.

    Raises ScenarioError if the folder's search has another key, because its trials must not be
    overwritten.
    """
    path = folder / STATE
    if not path.exists():
        return fresh
    search = read_search(folder)
    if search.key != fresh.key:
        raise ScenarioError(f"{path}: a search of another scenario or SLO; choose another --out")
    search.ended = ""
    return search


def read_search(folder: Path) -> Search:
    """Read a folder's search. Raises ScenarioError."""
    path = folder / STATE
    try:
        search = msgspec.json.decode(path.read_bytes(), type=Search)
    except (OSError, msgspec.MsgspecError) as error:
        raise ScenarioError(f"{path}: cannot read it: {error}") from error
    if search.schema != SCHEMA:
        raise ScenarioError(f"{path}: schema {search.schema!r}, this version reads {SCHEMA!r}")
    return search


def loads_of(text: str) -> list[float]:
    """Parse loads: `1,2,4`, `1..64` (doubling) or `10..50:10` (steps). Raises ScenarioError."""
    match = re.fullmatch(r"\s*([\d.]+)\s*\.\.\s*([\d.]+?)\s*(?::\s*([\d.]+)\s*)?", text)
    try:
        if match is None:
            loads = [float(part) for part in text.split(",")]
        else:
            loads = list(_between(float(match[1]), float(match[2]), match[3]))
    except ValueError:
        loads = []
    if not loads or not all(0 < load <= 1e6 for load in loads) or len(loads) > 1000:
        raise ScenarioError(f"cannot read the loads {text!r}; write 1,2,4 or 1..64 or 10..50:10")
    return sorted(set(loads))


def _between(first: float, last: float, step: str | None) -> Iterator[float]:
    if (step is not None and float(step) <= 0) or first <= 0:
        return
    load, number = first, 0
    while load <= last * 1.000001 and number <= 1000:
        yield load
        number += 1
        load = first + number * float(step) if step else first * 2**number


def _round(load: float, whole: bool) -> float:
    """Return a load rounded to few digits, for readability and as a key of trials. whole: round to
    an integer."""
    return float(max(1, round(load))) if whole else float(f"{load:.4g}")
