"""What the command line writes with: results to stdout, everything else to stderr."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from deployments.gguf import Progress as Report

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def model_progress() -> Iterator[Report]:
    """A callback for resolve_model: bars on a terminal, elsewhere a line every ten seconds."""
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
