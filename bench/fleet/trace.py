"""A day's load compressed to minutes: a seeded trace, and the scenario that replays it."""

import json
import math
from pathlib import Path

from loadtest.scenario.arrivals import TraceRow, rng_of, schedule

# Number of different questions, few enough that a quiet server can answer all of them first.
QUESTIONS = 16
PROMPTS, OUTPUTS = (32, 400), (16, 64)  # tokens
_SLICES = 96  # quarters of an hour
_NIGHT, _NOON = 0.03, 0.6  # rates as shares of the peak rate, which only bursts have
_BURSTS, _BURST = 2, 3  # number of bursts, and quarters of an hour of each
_STEADY = 0.5  # rate of the steady shape, as a share of the peak rate
SHAPES = ("day", "diurnal", "bursts", "steady")


def rates_of(shape: str, peak: float, seed: int) -> list[float]:
    """Return the request rate of each slice of a day. shape: one of SHAPES."""
    if shape in ("day", "diurnal"):
        return day(peak, seed, _BURSTS if shape == "day" else 0)
    if shape == "steady":
        return [_STEADY * peak] * _SLICES
    rates = [_NIGHT * peak] * _SLICES
    _add_bursts(rates, peak, seed, 2 * _BURSTS)
    return rates


def day(peak: float, seed: int, bursts: int = _BURSTS) -> list[float]:
    """Return the rate of each slice of a day: a curve, highest at noon, and bursts at `peak`."""
    waves = ((1 - math.cos(2 * math.pi * n / _SLICES)) / 2 for n in range(_SLICES))
    rates = [peak * (_NIGHT + (_NOON - _NIGHT) * wave**1.5) for wave in waves]
    _add_bursts(rates, peak, seed, bursts)
    return rates


def _add_bursts(rates: list[float], peak: float, seed: int, count: int) -> None:
    """Raise some slices between 6 and 18 o'clock to the peak."""
    rng = rng_of(seed, "bursts")
    for _ in range(count):
        start = rng.randrange(_SLICES // 4, 3 * _SLICES // 4)
        rates[start : start + _BURST] = [peak] * _BURST


def trace_of(seconds: float, peak: float, seed: int, shape: str = "day") -> list[TraceRow]:
    """Return a day's requests, each with one of QUESTIONS questions. shape: see `rates_of`."""
    rng = rng_of(seed, "questions")
    questions = [(rng.randint(*PROMPTS), rng.randint(*OUTPUTS)) for _ in range(QUESTIONS)]
    segments = [(seconds / _SLICES, rate, rate) for rate in rates_of(shape, peak, seed)]
    times = schedule(segments, 1.0, rng_of(seed, "times"), duration=seconds, requests=None)
    numbers = [rng.randrange(QUESTIONS) for _ in times]
    rows = zip(times, numbers, strict=True)
    return [TraceRow(t - times[0], *questions[n], (n,)) for t, n in rows]


def scenario(url: str, trace: list[TraceRow], seed: int, file: Path) -> str:
    """Return the load tester's scenario of a trace, and write the trace in Mooncake's format."""
    names = "timestamp", "input_length", "output_length", "hash_ids"
    rows = [(1000 * t, *fields) for t, *fields in trace]
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    phase = {"name": "day", "arrivals": {"kind": "trace", "file": str(file)}}
    target = {"url": url, "model": "m", "timeout": 300, "chunk_timeout": 200}
    work = {"name": "trace", "sampling": {"temperature": 0}}
    return json.dumps({"seed": seed, "target": target, "work": work, "phases": [phase]})
