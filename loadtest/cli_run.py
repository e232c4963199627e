"""Helpers of the load tester's commands: reading a scenario, running it with a live table, and
reporting failures as lines and exit codes.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from loadtest.runner import RunOptions, RunResult, Task
    from loadtest.scenario.schedule import PhasePlan
    from loadtest.scenario.schema import Scenario


def read(
    path: Path,
    url: str | None,
    model: str | None,
    settings: list[str] | None,
    dataset: Path | None = None,
) -> "tuple[Task, Scenario, list[PhasePlan]]":
    """Read a scenario, apply the command line's values, and check it. Raises ScenarioError."""
    from loadtest.errors import ScenarioError
    from loadtest.runner import Task
    from loadtest.scenario import yaml_text
    from loadtest.scenario.schedule import lay_out

    overrides: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ScenarioError(f"--set {setting}: write KEY=VALUE")
        overrides[key], _ = yaml_text.parse(value, f"--set {key}")
    if dataset is not None:
        overrides |= {"work.name": "dataset", "work.dataset": str(dataset.absolute())}
    if url is not None:
        overrides["target.url"] = url
    if model is not None:
        overrides["target.model"] = model
    task = Task.read(path, overrides)
    scenario = task.scenario()
    return task, scenario, lay_out(scenario, scenario.target.model or "(the first served)")


def execute(task: "Task", options: "RunOptions", plans: "list[PhasePlan]") -> "RunResult":
    """Run a load test with its live table.

    Ctrl-C ends it early and keeps the results so far; a second Ctrl-C aborts it.
    """
    import asyncio
    import signal
    from dataclasses import replace

    from loadtest.live import LiveProgress
    from loadtest.runner import run_async

    board = LiveProgress(plans, console_on(stderr=True))

    async def go() -> "RunResult":
        stop = options.stop or asyncio.Event()
        me = asyncio.current_task()
        assert me is not None

        def interrupt() -> None:
            if stop.is_set():
                me.cancel()
            stop.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        return await run_async(task, replace(options, stop=stop, on_progress=board.update))

    with board.shown():
        try:
            return asyncio.run(go())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """A context manager that turns expected failures into lines on stderr and an exit code."""
    from loadtest.errors import RunError, ScenarioError

    try:
        yield
    except ScenarioError as error:
        _fail(error.problems, 2)
    except RunError as error:
        _fail((str(error),), 1)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _fail(lines: "tuple[str, ...]", code: int) -> None:
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    raise typer.Exit(code)


def console_on(stderr: bool) -> Any:
    """Return a rich console for stdout or stderr that prints text without highlighting."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=not stderr)
