"""Conditions for a run to pass, as in --assert "failed==0, p99_ttft<500ms, goodput>=99%".

Durations are compared in seconds and may have a unit (us, ms, s, m); fractions may be in per cent.
An assertion fails if the run does not have its metric (p99_ttft without streams, `different`
without compared answers).
"""

import difflib
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from loadtest.measure.records import ERROR_CLASSES, Percentiles, Summary

_LATENCIES = ("ttft", "tpot", "itl", "itl_chunk", "e2e", "queue", "lateness")
_POINTS = ("p50", "p90", "p95", "p99", "p999", "mean", "std", "min", "max")
_DURATIONS = ("longest_gap", "no_service", "duration")
_FRACTIONS = ("goodput", "goodput_low", "goodput_high", "error_rate", "cpu_share")
_PLAIN = (
    *("requests", "succeeded", "failed", "cancelled", "unsent"),
    *("offered_per_s", "served_per_s", "goodput_per_s", "tokens_per_s", "total_tokens_per_s"),
    *("tokens_per_s_per_gpu", "output_tokens", "prompt_tokens", "cached_tokens"),
    *("missing_tokens", "doubled_tokens", "lost_tokens", "migrations"),
    *("verified", "different", "fairness_tenants", "fairness_adapters"),
)
TIMES = frozenset({*_DURATIONS, *(f"{p}_{name}" for name in _LATENCIES for p in _POINTS)})
NAMES = (*_PLAIN, *_FRACTIONS, *sorted(TIMES))

_ERRORS = tuple(f"errors.{name}" for name in ERROR_CLASSES)

_PARTS = {"us": 1e6, "ms": 1e3, "s": 1.0, "m": 1 / 60, "%": 100.0}  # units per second; % per 1
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(
    r"\s*([a-z_0-9]+(?:\.[a-z_0-9]+)?)\s*(==|!=|<=|>=|<|>)\s*([0-9]*\.?[0-9]+)\s*(us|ms|s|m|%)?\s*"
)


class Assertion(NamedTuple):
    name: str
    sign: str
    value: float
    text: str


class AssertionResult(NamedTuple):
    """The outcome of an assertion. value: the run's metric; None if it has no such metric."""

    assertion: Assertion
    value: float | None
    holds: bool


def check_syntax(text: str) -> str:
    """Return the text if parse() accepts it. Raises ValueError."""
    parse(text)
    return text


def parse(text: str) -> list[Assertion]:
    """Parse comma-separated assertions.

    Raises ValueError that names the wrong part, or an unknown metric and the nearest known one, if
    any.
    """
    results = []
    for part in text.split(","):
        match = _FORM.fullmatch(part)
        if match is None:
            raise ValueError(f"{part.strip()!r} is no assertion; write p99_ttft<500ms or failed==0")
        name, sign, number, unit = match.groups()
        if name not in (*NAMES, *_ERRORS):
            near = difflib.get_close_matches(name, (*NAMES, *_ERRORS), 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown metric {name!r}{hint}")
        if unit == "%" and name not in _FRACTIONS:
            raise ValueError(f"{part.strip()!r}: {name} is not a fraction")
        if unit not in (None, "%") and name not in TIMES:
            raise ValueError(f"{part.strip()!r}: {name} is not a time")
        results.append(Assertion(name, sign, float(number) / _PARTS[unit or "s"], part.strip()))
    return results


def figures(summary: Summary) -> dict[str, float | None]:
    """Return every metric by name, in seconds, fractions or counts."""
    latencies: dict[str, Percentiles] = {
        **{name: getattr(summary, name) for name in _LATENCIES if name != "lateness"},
        "lateness": summary.client.lateness,
    }
    by_name: dict[str, float | None] = {}
    for name, values in latencies.items():
        for point, value in msgspec.structs.asdict(values).items():
            if point != "count":
                by_name[f"{point}_{name}"] = value if values.count else None
    for name in _PLAIN:
        by_name[name] = getattr(summary, name, None)
    good = summary.goodput
    total = summary.requests - summary.cancelled
    verified = summary.verified_ok + summary.verified_different
    by_name |= {
        "longest_gap": summary.longest_gap_s,
        "no_service": summary.no_service_s,
        "duration": summary.duration_s,
        "goodput": good.fraction if good.total else None,
        "goodput_low": good.low,
        "goodput_high": good.high,
        "goodput_per_s": good.per_s,
        "error_rate": summary.failed / total if total else None,
        "cpu_share": summary.client.cpu_share,
        "tokens_per_s": summary.output_tokens_per_s,
        "tokens_per_s_per_gpu": summary.output_tokens_per_s_per_gpu,
        "verified": verified,
        "different": summary.verified_different if verified else None,
    }
    return by_name


def evaluate(texts: list[str], summary: Summary) -> list[AssertionResult]:
    """Check assertions against a summary. Raises ValueError as parse() does."""
    values = figures(summary)
    outcomes = []
    for assertion in (a for text in texts for a in parse(text)):
        if assertion.name.startswith("errors."):
            value: float | None = summary.errors.get(assertion.name.removeprefix("errors."), 0)
        else:
            value = values[assertion.name]
        holds = value is not None and _OPERATORS[assertion.sign](value, assertion.value)
        outcomes.append(AssertionResult(assertion, value, holds))
    return outcomes
