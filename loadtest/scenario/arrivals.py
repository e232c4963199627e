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

Segment = tuple[float, float, float]  # seconds, requests/s at its start, requests/s at its end


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
    """Yield the times at which the cumulated rate of `segments` reaches the sums of `gaps`."""
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
    """Return when the integral of a rate that goes from low to high in `seconds` reaches `mass`."""
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
    """Return segments with each rate for `seconds`, then end."""
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
    """Return send times, ascending from 0 s, until the duration, the count or the segments end."""
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
    or Azure (TIMESTAMP, ContextTokens, GeneratedTokens), or Azure's CSV. Raises ScenarioError with
    the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            lines = chain([first], file)
            if first.lstrip().startswith("{"):
                rows = [
                    _trace_row(path, number, _json(path, number, line))
                    for number, line in enumerate(lines, 1)
                    if line.strip()
                ]
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
    try:
        if "timestamp" in row:
            t = float(str(row["timestamp"])) / 1000
            lengths = row["input_length"], row["output_length"]
        else:
            stamp = str(row["TIMESTAMP"])
            # Azure writes seven digits, and sometimes a time zone
            head, _, fraction = stamp.partition(".")
            t = datetime.fromisoformat(f"{head[:19]}+00:00").timestamp()
            t += float(f"0.{fraction[:6]}") if fraction[:6].isdigit() else 0.0
            lengths = row["ContextTokens"], row["GeneratedTokens"]
        length_in, length_out = (int(str(length)) for length in lengths)
        ids = row.get("hash_ids") or []
        blocks = tuple(int(i) for i in ids) if isinstance(ids, list) else ()
    except KeyError as error:
        raise ScenarioError(
            f"{path}:{number}: no {error.args[0]}; a row has timestamp, input_length and "
            "output_length, or TIMESTAMP, ContextTokens and GeneratedTokens"
        ) from None
    except ValueError as error:
        raise ScenarioError(f"{path}:{number}: {error}") from None
    if not math.isfinite(t) or length_in < 1 or length_out < 1:
        raise ScenarioError(f"{path}:{number}: times must be finite and lengths at least 1")
    return TraceRow(t, length_in, length_out, blocks)
