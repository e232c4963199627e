"""The consoles of the command line: `out` for results on stdout, `err` for all other output."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.status import Status as RichStatus

from deployments.checkpoints.weights_file import Progress as Report

_EACH_S = 5.0  # seconds between lines with a phase's progress, without a terminal

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def model_progress() -> Iterator[Report]:
    """Yield a progress callback for resolve_model.

    The callback draws progress bars on a terminal. Without a terminal it prints a line every ten
    seconds.
    """
    if err.is_terminal:
        with _bars() as report:
            yield report
    else:
        yield _lines()


@contextlib.contextmanager
def _bars() -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=err) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done, total=total or None)

        yield report


def _lines() -> Report:
    shown: dict[str, float] = {}

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what in shown and now - shown[what] < 10 and done < total:
            return
        first, shown[what] = what not in shown, now
        percent = f" {100 * done // total}%" if total and not first else ""
        print(f"{what}{percent}", file=sys.stderr, flush=True)

    return report


class StatusLine:
    """The display of the present phase: a spinner on a terminal, otherwise one line per phase.

    Without a terminal, progress within a phase ("phase: progress") is printed every few seconds. On
    a terminal, the phase's duration is printed at its end.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._started = self._printed = time.monotonic()
        self._live: RichStatus | None = None

    def __enter__(self) -> "StatusLine":
        if err.is_terminal:
            self._live = err.status(escape(self._text))
            self._live.start()
        else:
            print(self._text, file=sys.stderr, flush=True)
        return self

    def update(self, text: str) -> None:
        if text == self._text:
            return
        same = text.split(":")[0] == self._text.split(":")[0]
        self._text = text
        if self._live is not None:
            self._live.update(escape(text))
        elif not same or time.monotonic() > self._printed + _EACH_S:
            self._printed = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, kind: object, *rest: object) -> None:
        took = time.monotonic() - self._started
        if self._live is not None:
            self._live.stop()
            if kind is None:
                err.print(f"{escape(self._text.split(':')[0])}: {took:.1f} s")
