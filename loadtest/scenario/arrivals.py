"""The times at which requests are sent: pure functions of their arguments and a seed.

An open-loop schedule is a process of unit rate (gaps of mean 1 and a given coefficient of
variation), mapped through the inverse of the cumulated rate. So every load shape is a list of
segments:

    constant   (inf, r, r)                      rate
    ramp       (duration, a, b)                  |    __
    steps      (d1, r1, r1), (d2, r2, r2), ...   |   /  |__
    bursts     (on, r, r), (off, q, q), again    |__/________ time

cv 0 is evenly spaced, cv 1 is Poisson, more is burstier. Times are rounded to a microsecond, so
that a seed gives the same bytes on any machine.
"""

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import chain, cycle, islice, repeat, takewhile
from pathlib import Path
from typing import NamedTuple

from loadtest.errors import ScenarioError

Segment = tuple[float, float, float]  # (seconds, requests/s at its start, requests/s at its end)


def rng_of(seed: int, *what: object) -> random.Random:
    """Return a random generator for one purpose, seeded by text.

    Python hashes text seeds with SHA-512, so results are the same on all machines.
    """
    return random.Random("/".join(map(str, (seed, *what))))


def unit_gaps(cv: float, rng: random.Random) -> Iterator[float]:
    """Yield gaps of mean 1 and standard deviation cv, without end.

    cv 1: exponential. cv 0: 0, then only 1.
    """
    if cv == 0:
        yield 0.0
        yield from repeat(1.0)
    elif cv == 1:
        while True:
            yield -math.log(1.0 - rng.random())
    else:
        shape = 1.0 / (cv * cv)
        while True:
            yield rng.gammavariate(shape, 1.0 / shape)


def through(segments: Iterable[Segment], gaps: Iterable[float]) -> Iterator[float]:
    """Yield the times at which the cumulated rate of `segments` reaches the cumulated `gaps`."""
    parts = iter(segments)
    start, mass = 0.0, 0.0  # where the current segment begins, in seconds and in requests
    seconds, low, high = next(parts)
    target = 0.0
    for gap in gaps:
        target += gap
        while mass + _mass(seconds, low, high) <= target:
            start, mass = start + seconds, mass + _mass(seconds, low, high)
            following = next(parts, None)
            if following is None:
                return
            seconds, low, high = following
        yield round(start + _invert(target - mass, seconds, low, high), 6)


def _mass(seconds: float, low: float, high: float) -> float:
    return math.inf if math.isinf(seconds) else seconds * (low + high) / 2


def _invert(mass: float, seconds: float, low: float, high: float) -> float:
    """Return the time at which the integral of a rate that goes from low to high in `seconds`
    reaches `mass`."""
    if mass <= 0:
        return 0.0
    slope = 0.0 if math.isinf(seconds) else (high - low) / seconds
    if slope == 0.0:
        return mass / low
    # Solve low t + slope t^2 / 2 = mass, in a form without cancellation for a small slope.
    return 2 * mass / (low + math.sqrt(max(0.0, low * low + 2 * slope * mass)))


def constant(rate: float) -> Iterator[Segment]:
    return iter([(math.inf, rate, rate)])


def ramp(first: float, last: float, seconds: float) -> Iterator[Segment]:
    """Return the segments of a rate that goes from first to last, and stays there."""
    return iter([(seconds, first, last), (math.inf, last, last)])


def steps(rates: Iterable[float], seconds: float) -> Iterator[Segment]:
    """Return segments with each of the rates for `seconds`."""
    return iter([(seconds, rate, rate) for rate in rates])


def bursts(rate: float, on: float, off: float, between: float = 0.0) -> Iterator[Segment]:
    """Return endless segments: `rate` for `on` seconds, then `between` for `off` seconds."""
    return cycle([(on, rate, rate), (off, between, between)])


def schedule(
    segments: Iterable[Segment],
    cv: float,
    rng: random.Random,
    *,
    duration: float | None,
    requests: int | None,
) -> list[float]:
    """Return send times, ascending from 0 s, until the duration, the number of requests or the
    segments end."""
    times = through(segments, unit_gaps(cv, rng))
    if duration is not None:
        times = takewhile(lambda t: t < duration, times)
    return list(islice(times, requests))


class TraceRow(NamedTuple):
    """A request of a recorded load.

    t: seconds since the trace's first request. blocks: ids of 512-token prefix blocks.
    """

    t: float
    input: int
    output: int
    blocks: tuple[int, ...]


TRACE_BLOCK = 512


def read_trace(path: Path, speed: float = 1.0) -> list[TraceRow]:
    """Read a recorded load, in order of time.

    speed: 2 plays it in half the time.
    Formats: JSONL as written by Mooncake (timestamp in ms, input_length, output_length, hash_ids)
    or Azure (TIMESTAMP, ContextTokens, GeneratedTokens), Azure's CSV, or the requests.jsonl of a
    load test, without its warm-up. Raises ScenarioError with line and field.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            lines = chain([first], file)
            if first.lstrip().startswith("{"):
                numbered = (
                    (number, _json(path, number, line))
                    for number, line in enumerate(lines, 1)
                    if line.strip()
                )
                rows = [_trace_row(path, n, row) for n, row in numbered if not row.get("warmup")]
            else:
                table = csv.DictReader(lines)
                rows = [_trace_row(path, number, row) for number, row in enumerate(table, 2)]
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not rows and first.strip() and "," not in first:
        raise ScenarioError(f"{path}:1: neither a row of JSONL nor the names of a CSV's columns")
    if not rows:
        raise ScenarioError(f"{path}: an empty trace; there is nothing to send")
    rows.sort(key=lambda row: row.t)
    begin = rows[0].t
    return [row._replace(t=round((row.t - begin) / speed, 6)) for row in rows]


def _json(path: Path, number: int, line: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ScenarioError(f"{path}:{number}: not a JSON object")
    return row


def _trace_row(path: Path, number: int, row: dict[str, object]) -> TraceRow:
    def field(name: str, least: int = 1) -> int:
        try:
            value = int(str(row[name]))
        except ValueError:
            value = least - 1
        if value < least:
            raise ScenarioError(
                f"{path}:{number}: {name} is {row[name]!r}, and must be a whole number, at least "
                f"{least}"
            )
        return value

    try:
        if "intended_s" in row:
            t = _seconds(path, number, row, "intended_s")
            expected = row.get("output_tokens_expected") is not None
            lengths = (
                field("prompt_tokens"),
                field("output_tokens_expected" if expected else "output_tokens"),
            )
        elif "timestamp" in row:
            t = _seconds(path, number, row, "timestamp") / 1000
            lengths = field("input_length"), field("output_length")
        else:
            t = _azure_seconds(path, number, row["TIMESTAMP"])
            lengths = field("ContextTokens"), field("GeneratedTokens")
    except KeyError as error:
        raise ScenarioError(
            f"{path}:{number}: no {error.args[0]}; a row has timestamp, input_length and "
            "output_length, or TIMESTAMP, ContextTokens and GeneratedTokens, or is of a load "
            "test's requests.jsonl"
        ) from None
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ScenarioError(f"{path}:{number}: hash_ids must be a list of whole numbers")
    return TraceRow(t, *lengths, tuple(ids))


def _seconds(path: Path, number: int, row: dict[str, object], name: str) -> float:
    try:
        value = float(str(row[name]))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ScenarioError(f"{path}:{number}: {name} is {row[name]!r}, and must be a number")
    return value


def _azure_seconds(path: Path, number: int, stamp: object) -> float:
    # Azure writes seven digits, and sometimes a time zone
    head, _, fraction = str(stamp).partition(".")
    try:
        t = datetime.fromisoformat(f"{head[:19]}+00:00").timestamp()
    except ValueError:
        raise ScenarioError(
            f"{path}:{number}: TIMESTAMP is {stamp!r}, and must be a time such as "
            "2024-05-10 00:00:01.25"
        ) from None
    return t + (float(f"0.{fraction[:6]}") if fraction[:6].isdigit() else 0.0)
