"""The figures of the failure and overload suite: a row for each case, as JSON and as a table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtest.errors import RunError
from loadtest.measure.figures import percentiles
from loadtest.measure.records import RequestRecord
from loadtest.suite.poison import PoisonOutcome

SCHEMA = "manta-chaos/1"
_REFUSALS = ("http_429", "http_503", "http_4xx")


class CaseFigures(msgspec.Struct, kw_only=True):
    """The measured counts, latencies and pauses of one case of the suite.

    offered_per_s: requests sent a second.
    answered: requests with a whole answer. refused: with 429, 503 or another 4xx.
    begun: streams that got a token. lost: begun streams that broke or never ended.
    failed: requests that were neither answered, refused nor lost.
    first_p99_s: seconds to the first token. pause_p99_s: between two chunks of a stream.
    longest_pause_s: the longest of these pauses.
    no_token_s: longest time in which a request waited and no request got a token.
    good: answers whose first token came within the limit.
    goodput: good answers a second, as a share of the measured capacity.
    identical: answers with the text of the undisturbed server, among `compared` answers.
    marks: the actions that harmed the server, each with its second.
    """

    case: str
    seconds: float
    requests: int
    offered_per_s: float
    answered: int
    refused: int
    begun: int
    lost: int
    lost_share: float
    failed: int
    first_p99_s: float
    pause_p99_s: float
    longest_pause_s: float
    no_token_s: float
    good: int
    goodput: float
    identical: int
    compared: int
    errors: dict[str, int]
    marks: list[str] = []


class SuiteResult(msgspec.Struct, kw_only=True):
    """The result of the suite against one server. config: the options. client: the client's
    host."""

    schema: str = SCHEMA
    url: str
    model: str
    started_at: str
    client: str
    capacity_per_s: float
    config: dict[str, Any]
    cases: list[CaseFigures]
    poison: list[PoisonOutcome]
    warnings: list[str]


def figures_of(
    case: str,
    records: Sequence[RequestRecord],
    seconds: float,
    *,
    capacity: float,
    first_limit_s: float,
    marks: Sequence[str] = (),
) -> CaseFigures:
    """Return the figures of a case from its requests' records. Slow readers count only for losses.

    seconds: duration of sending.
    capacity: answers/s of the undisturbed server; 0: unknown.
    """
    from loadtest.measure.figures import service_gaps

    quick = [record for record in records if not record.slow_reader]
    answered = [record for record in quick if record.ok]
    begun = [record for record in records if record.chunks and not record.cancelled]
    lost = [record for record in begun if record.failed]
    refused = [r for r in quick if r.error_class in _REFUSALS and not r.chunks]
    others = [r for r in quick if r.failed and not r.chunks and r.error_class not in _REFUSALS]
    firsts = [first for r in answered if (first := r.ttft_s) is not None]
    pauses = [b[0] - a[0] for r in quick for a, b in zip(r.chunks, r.chunks[1:], strict=False)]
    good = sum(_soon(r, first_limit_s) for r in answered)
    # Answers may end after the last request was sent.
    span = max(seconds, max((r.end_s for r in quick), default=0.0))
    errors: dict[str, int] = {}
    for record in records:
        if record.error_class is not None:
            errors[record.error_class] = errors.get(record.error_class, 0) + 1
    compared = sum(r.verified != "not checked" for r in answered)
    return CaseFigures(
        case=case,
        seconds=round(span, 3),
        requests=len(quick),
        offered_per_s=round(len(quick) / seconds, 3) if seconds else 0.0,
        answered=len(answered),
        refused=len(refused),
        begun=len(begun),
        lost=len(lost),
        lost_share=round(len(lost) / len(begun), 4) if begun else 0.0,
        failed=len(others),
        first_p99_s=round(percentiles(firsts).p99, 4),
        pause_p99_s=round(percentiles(pauses).p99, 4),
        longest_pause_s=round(max(pauses, default=0.0), 4),
        no_token_s=round(max((b - a for a, b in service_gaps(quick)), default=0.0), 4),
        good=good,
        goodput=round(good / span / capacity, 4) if capacity and span else 0.0,
        identical=sum(r.verified == "ok" for r in answered),
        compared=compared,
        errors=errors,
        marks=list(marks),
    )


def _soon(record: RequestRecord, limit_s: float) -> bool:
    return record.ttft_s is not None and record.ttft_s <= limit_s


def write(result: SuiteResult, path: Path) -> None:
    """Write the result as one JSON file. Raises RunError."""
    text = json.dumps(msgspec.to_builtins(result), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None


_COLUMNS = (
    ("case", "case"),
    ("requests", "requests"),
    ("answered", "answered"),
    ("refused", "refused"),
    ("lost", "streams lost"),
    ("failed", "failed"),
    ("first_p99_s", "first token p99"),
    ("pause_p99_s", "pause p99"),
    ("longest_pause_s", "longest"),
    ("goodput", "goodput"),
    ("identical", "same text"),
)


def table(result: SuiteResult) -> str:
    """Return the cases as a table of text, and the outcomes of poison."""
    lines = [[title for _, title in _COLUMNS]]
    for figures in result.cases:
        lines.append([_cell(figures, name) for name, _ in _COLUMNS])
    widths = [max(len(line[at]) for line in lines) for at in range(len(_COLUMNS))]
    text = [
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.append(f"capacity {result.capacity_per_s:g} answers/s; goodput is a share of it")
    if result.poison:
        outcomes: dict[str, list[str]] = {}
        for item in result.poison:
            outcomes.setdefault(item.outcome, []).append(item.name)
        text += [f"poison {outcome}: {', '.join(names)}" for outcome, names in outcomes.items()]
    text += [f"warning: {warning}" for warning in result.warnings]
    return "\n".join(text)


def _cell(figures: CaseFigures, name: str) -> str:
    if name == "lost":
        return f"{figures.lost} of {figures.begun} ({figures.lost_share:.1%})"
    if name == "identical":
        return f"{figures.identical}/{figures.compared}" if figures.compared else "-"
    value = getattr(figures, name)
    if name.endswith("_s"):
        return f"{value:.3f} s"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
