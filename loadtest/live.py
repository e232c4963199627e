"""The terminal's display: a bar for each phase and a table during the load, a summary at its
end.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from loadtest.client.load import ClientProgress
from loadtest.measure.asserts import TIMES, AssertionResult
from loadtest.measure.figures import percentiles
from loadtest.measure.records import Percentiles, Summary
from loadtest.scenario.schedule import PhasePlan

_LINE_S = 10.0  # seconds between lines of output without a terminal
_WINDOW = 2000  # number of latest requests whose latencies are shown


class LiveProgress:
    """The progress of all client processes, as a live display."""

    def __init__(self, plans: Sequence[PhasePlan], console: Console) -> None:
        self._console = console
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks = {
            plan.phase.name: self._bars.add_task(
                escape(plan.phase.name), total=plan.total, start=False
            )
            for plan in plans
        }
        self._ttft: deque[float] = deque(maxlen=_WINDOW)
        self._late: deque[float] = deque(maxlen=_WINDOW)
        self._history: deque[tuple[float, int, int]] = deque(maxlen=21)
        self._live: Live | None = None
        self._line_at = time.monotonic()

    @contextlib.contextmanager
    def shown(self) -> Iterator["LiveProgress"]:
        if not self._console.is_terminal:
            yield self
            return
        with Live(self._bars, console=self._console, refresh_per_second=4) as self._live:
            yield self

    def update(self, all_: Sequence[ClientProgress]) -> None:
        done: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for progress in all_:
            done.update(progress.done)
            sent.update(progress.sent)
            self._ttft.extend(progress.ttft)
            self._late.extend(progress.late)
            progress.ttft, progress.late = [], []  # these values were displayed
        for name, task in self._tasks.items():
            if sent[name]:
                self._bars.start_task(task)
                self._bars.update(task, completed=done[name])
        tokens = sum(progress.tokens for progress in all_)
        self._history.append((time.monotonic(), done.total(), tokens))
        if self._live is not None:
            table = self._table(all_, sent.total(), done.total())
            self._live.update(Group(self._bars, table))
        elif time.monotonic() - self._line_at >= _LINE_S:
            self._line_at = time.monotonic()
            failed = sum(progress.failed for progress in all_)
            under_way = sent.total() - done.total()
            self._console.print(
                f"{all_[0].phase}: {sent.total()} sent, {under_way} under way, {failed} failed",
                markup=False,
            )

    def _table(self, all_: Sequence[ClientProgress], sent: int, done: int) -> Table:
        (t0, done0, tokens0), (t1, done1, tokens1) = self._history[0], self._history[-1]
        seconds = max(t1 - t0, 1e-9)
        ttft, late = percentiles(self._ttft), percentiles(self._late)
        failed = sum(progress.failed for progress in all_)
        errors: Counter[str] = Counter()
        for progress in all_:
            errors.update(progress.errors)
        table = Table(box=None, show_header=False, pad_edge=False)
        rows = [
            ("under way", f"{sent - done}", "failed", f"{failed}"),
            (
                "answers/s",
                f"{(done1 - done0) / seconds:.1f}",
                "tokens/s",
                f"{(tokens1 - tokens0) / seconds:.0f}",
            ),
            ("TTFT p50", ms(ttft.p50), "TTFT p99", ms(ttft.p99)),
            (
                "client late p99",
                ms(late.p99),
                "client CPU",
                f"{max(p.cpu_share for p in all_):.0%}",
            ),
        ]
        different = sum(progress.different for progress in all_)
        if different:
            rows.append(("wrong answers", f"{different}", "", ""))
        for name, number in errors.most_common(4):
            rows.append((f"  {name}", f"{number}", "", ""))
        for row in rows:
            table.add_row(*row)
        return table


def ms(seconds: float) -> str:
    """Format a time with three digits: 0.42 ms, 41.7 ms, 1.32 s."""
    value = seconds * 1000
    if value >= 10_000:
        return f"{seconds:.1f} s"
    if value >= 1000:
        return f"{seconds:.2f} s"
    return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 2}f} ms"


def show_summary(summary: Summary, console: Console) -> None:
    """Print a run's results as plain text."""
    good, run = summary.goodput, summary.run
    lines = [
        f"{run.name}: {run.model} at {run.url}, seed {run.seed}",
        f"{summary.requests} requests in {summary.duration_s:.1f} s: "
        f"{summary.succeeded} answered, {summary.failed} failed, {summary.cancelled} cancelled"
        + (f", {summary.unsent} not sent" if summary.unsent else ""),
        f"offered {summary.offered_per_s:.2f}/s, answered {summary.served_per_s:.2f}/s; "
        f"{summary.output_tokens_per_s:.0f} tokens/s out, "
        f"{summary.total_tokens_per_s:.0f} in and out"
        + (
            f", {summary.output_tokens_per_s_per_gpu:.0f} out a GPU"
            if summary.output_tokens_per_s_per_gpu is not None
            else ""
        ),
    ]
    for line in lines:
        console.print(line, markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("", "p50", "p90", "p99", "mean", "max"):
        table.add_column(name, justify="left" if not name else "right")
    for label, values in (
        ("TTFT", summary.ttft),
        ("TPOT", summary.tpot),
        ("ITL, a token", summary.itl),
        ("ITL, a chunk", summary.itl_chunk),
        ("end to end", summary.e2e),
        ("queue", summary.queue),
        ("client late", summary.client.lateness),
    ):
        if values.count:
            table.add_row(label, *_row(values))
    console.print(table)
    if good.slo:
        limits = ", ".join(f"{name} {ms(limit)}" for name, limit in good.slo.items())
        console.print(
            f"goodput ({limits}): {good.fraction:.1%} "
            f"[{good.low:.1%}, {good.high:.1%}], {good.per_s:.2f}/s",
            markup=False,
        )
    for text in _remarks(summary):
        console.print(text, markup=False)


def _row(values: Percentiles) -> list[str]:
    return [ms(v) for v in (values.p50, values.p90, values.p99, values.mean, values.max)]


def _remarks(summary: Summary) -> Iterator[str]:
    for name, number in summary.errors.items():
        yield f"failed, {name}: {number}"
    checked = summary.verified_ok + summary.verified_different
    if checked:
        yield f"answers compared: {checked}, different: {summary.verified_different}"
    if summary.missing_tokens or summary.doubled_tokens or summary.lost_tokens:
        yield (
            f"tokens missing: {summary.missing_tokens}, doubled: {summary.doubled_tokens}, "
            f"lost with failures: {summary.lost_tokens}"
        )
    if summary.migrations is not None:
        yield f"migrations: {summary.migrations}"
    yield (
        f"longest gap {ms(summary.longest_gap_s)}, without service {ms(summary.no_service_s)}"
        + (
            f", fairness over tenants {summary.fairness_tenants:.3f}"
            if summary.fairness_tenants is not None
            else ""
        )
        + (
            f", over adapters {summary.fairness_adapters:.3f}"
            if summary.fairness_adapters is not None
            else ""
        )
    )
    for mark in summary.faults:
        yield f"{mark.t:8.2f} s  {mark.what}"
    for reason in summary.reasons:
        yield f"REFUSED: {reason}"


def show_outcomes(outcomes: Sequence[AssertionResult], console: Console) -> None:
    for assertion, value, holds in outcomes:
        if value is None:
            value_text = "there is no such figure"
        else:
            value_text = ms(value) if assertion.name in TIMES else f"{value:g}"
        word = "holds" if holds else "FAILS"
        console.print(f"{word}: {assertion.text} ({value_text})", markup=False)
