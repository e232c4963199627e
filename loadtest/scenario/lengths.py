"""Distributions of token counts, as scenarios write them and named workloads use them.

128                            always
[100, 1024]                    uniform, both ends included
{lognormal: [4.3, 0.93], min: 4, max: 1024}
{cdf: [5, 24, 41, ...], mean: 322}       inverse CDF at even steps, scaled to a mean
{mix: [[0.7, [16, 64]], [0.3, [1024, 2048]]]}
"""

import random
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

MAX_LENGTH = 10_000_000


class LengthError(ValueError):
    """Raised for text that is not a distribution of lengths."""


@dataclass(frozen=True)
class Length:
    """A distribution of token counts.

    draw(rng): returns a count of at least 1. mean: the expected count, if there is a formula.
    """

    draw: Callable[[random.Random], int] = field(repr=False, compare=False)
    mean: float
    text: str


def parse_length(value: Any) -> Length:
    """Parse a distribution of token counts. Raises LengthError."""
    if isinstance(value, Length):
        return value
    if isinstance(value, bool):
        raise LengthError("a length is a number, [low, high] or a mapping")
    if isinstance(value, int):
        _check(value)
        return Length(lambda rng: value, value, str(value))
    if isinstance(value, list | tuple) and len(value) == 2:
        low, high = (_check(v) for v in value)
        if low > high:
            raise LengthError(f"[{low}, {high}]: the lower end comes first")
        return Length(lambda rng: rng.randint(low, high), (low + high) / 2, f"[{low}, {high}]")
    if isinstance(value, dict):
        for name, make in _KINDS.items():
            if name in value:
                return make(value)
    raise LengthError(
        "a length is a number of at least 1, [low, high], {lognormal: [mu, sigma]}, "
        "{cdf: [...]} or {mix: [[share, length], ...]}"
    )


def _check(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LENGTH:
        raise LengthError(f"{str(value)[:40]!r} is no length; whole numbers of at least 1")
    return value


def _only(value: dict[str, Any], *names: str) -> None:
    for name in value:
        if name not in names:
            raise LengthError(f"unknown key {name!r}; known: {', '.join(names)}")


def _numbers(value: Any, least: int) -> list[float]:
    if (
        not isinstance(value, list)
        or len(value) < least
        or any(isinstance(v, bool) or not isinstance(v, int | float) for v in value)
    ):
        raise LengthError(f"at least {least} numbers in a list")
    return [float(v) for v in value]


def _lognormal(value: dict[str, Any]) -> Length:
    _only(value, "lognormal", "min", "max")
    mu, sigma = _numbers(value["lognormal"], 2)[:2]
    low, high = _check(value.get("min", 1)), _check(value.get("max", MAX_LENGTH))
    if sigma < 0 or not -20 <= mu <= 20 or sigma > 10 or low > high:
        raise LengthError("lognormal: [mu, sigma] of the logarithm, min at most max")

    def draw(rng: random.Random) -> int:
        return max(low, min(high, int(rng.lognormvariate(mu, sigma))))

    sample = random.Random(0)
    mean = sum(draw(sample) for _ in range(2000)) / 2000
    return Length(draw, mean, f"lognormal({mu:g}, {sigma:g}) in {low}..{high}")


def _cdf(value: dict[str, Any]) -> Length:
    _only(value, "cdf", "mean")
    points = _numbers(value["cdf"], 2)
    if points != sorted(points) or points[0] < 1:
        raise LengthError("cdf: ascending lengths from 1 up, at even steps of probability")
    steps = len(points) - 1
    own = sum((a + b) / 2 for a, b in pairwise(points)) / steps
    mean = float(value.get("mean", own))
    scale = mean / own

    def draw(rng: random.Random) -> int:
        place = rng.random() * steps
        left = int(place)
        between = points[left] + (place - left) * (points[left + 1] - points[left])
        return max(1, round(between * scale))

    return Length(draw, mean, f"inverse CDF of {len(points)} points, mean {mean:g}")


def _mix(value: dict[str, Any]) -> Length:
    _only(value, "mix")
    parts = value["mix"]
    if not isinstance(parts, list) or not parts:
        raise LengthError("mix: [[share, length], ...]")
    for part in parts:
        if not isinstance(part, list) or len(part) != 2 or not isinstance(part[0], int | float):
            raise LengthError("mix: [[share, length], ...]")
        if isinstance(part[0], bool) or part[0] <= 0:
            raise LengthError("mix: shares above 0")
    lengths = [parse_length(part[1]) for part in parts]
    sums = list(accumulate(float(part[0]) for part in parts))

    def draw(rng: random.Random) -> int:
        return lengths[min(bisect(sums, rng.random() * sums[-1]), len(sums) - 1)].draw(rng)

    mean = sum(p[0] * length.mean for p, length in zip(parts, lengths, strict=True)) / sums[-1]
    text = ", ".join(f"{p[0]:g} x {length.text}" for p, length in zip(parts, lengths, strict=True))
    return Length(draw, mean, f"mix of {text}")


_KINDS = {"lognormal": _lognormal, "cdf": _cdf, "mix": _mix}
