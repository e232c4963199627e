"""The commands report, compare and search, which read results or produce many."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadtest.cli_run import execute, failing, read

if TYPE_CHECKING:
    from loadtest.measure.records import RequestRecord, Summary
    from loadtest.report.compare import Comparison
    from loadtest.runner import RunOptions, Task
    from loadtest.scenario.schema import Scenario
    from loadtest.search import RunOnce, Trial


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="A run's or a search's folder.")
    ],
    out: Annotated[Path | None, typer.Option(help="Default: report.html in the folder.")] = None,
) -> None:
    """Write the HTML page of a run or a search: one file, no network needed."""
    with failing():
        print(_write_page(folder, out))


def compare(
    a: Annotated[Path, typer.Argument(help="A run's folder, or a folder of repeats.")],
    b: Annotated[Path, typer.Argument(help="The other.")],
    html: Annotated[Path | None, typer.Option(help="Also write the page PATH.")] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help='Exit code 1 if "p99_ttft>+10%" and it is not chance.'),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the bootstrap.")] = 0,
) -> None:
    """Compare two runs side by side, with 95 % intervals of what changed."""
    with failing():
        from loadtest.errors import RunError
        from loadtest.report.compare import compare as compared
        from loadtest.report.compare import parse_conditions, read_side
        from loadtest.report.comparison import comparison_page

        conditions = [c for text in fail_if or [] for c in parse_conditions(text)]
        comparison = compared(read_side(a), read_side(b), seed=seed)
        _show(comparison)
        if html is not None:
            _save(html, comparison_page(comparison))
        met = [condition.text for condition in conditions if condition.met(comparison)]
        if met:
            raise RunError(f"--fail-if: {', '.join(met)}")


def search(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.yaml")],
    slo: Annotated[
        str | None, typer.Option(help='"p99_ttft<500ms, p99_tpot<50ms, error_rate<1%"')
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Run these loads instead of a search: 1,2,4 or 1..64 or 10..50:10."),
    ] = None,
    start: Annotated[float, typer.Option(min=0.001, help="First load of the search.")] = 1.0,
    top: Annotated[float, typer.Option(min=0.001, help="Never above this load.")] = 10_000.0,
    tolerance: Annotated[
        float, typer.Option(min=0.001, max=1, help="How close kept and broken loads must be.")
    ] = 0.05,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, max=100, help="The maximum number of runs of a load; default: 3, in a sweep 1."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder; one with this search in it goes on. Default: NAME-search."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Server, instead of target.url.")] = None,
    model: Annotated[str | None, typer.Option(help="Model; default: the first.")] = None,
    procs: Annotated[int, typer.Option(min=1, max=4096, help="Client processes.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(help="Client processes on a Ray cluster's nodes: its address, or auto."),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A scenario value.")
    ] = None,
    lenient: Annotated[
        bool, typer.Option(help="Take runs in which the client was the bottleneck, too.")
    ] = False,
) -> None:
    """Search for the highest load that keeps an SLO, or sweep over loads: rates, or concurrency."""
    with failing():
        from loadtest import search as searching
        from loadtest.errors import ScenarioError
        from loadtest.runner import RunOptions

        task, checked, _ = read(scenario, url, model, setting)
        if (slo is None) == (sweep is None):
            raise ScenarioError("search: give --slo to search, or --sweep for given loads")
        limits = searching.parse_slo(slo) if slo is not None else _limits(checked)
        keys, unit = _load_keys(checked)
        whole = unit == "at a time"
        loads = searching.loads_of(sweep) if sweep is not None else []
        name = checked.name or scenario.stem
        folder = out if out is not None else Path(f"{name}-search")
        fresh = searching.Search(
            key=_key(task, [limit.text for limit in limits]), name=name, unit=unit, slo=limits
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ScenarioError(f"{folder}: {error.strerror or error}") from None
        trials = searching.Trials(
            _run_once(task, checked, RunOptions(procs=procs, ray=ray), keys, folder, whole),
            searching.resume(folder, fresh),
            folder=folder,
            repeats=repeats or (1 if sweep is not None else 3),
            open_loop=not whole,
            lenient=lenient,
            on_trial=_trial_printer(unit),
        )
        if sweep is not None:
            search = searching.sweep(trials, loads)
        else:
            search = searching.highest(
                trials, start=start, top=top, tolerance=tolerance, whole=whole
            )
        print(_write_page(folder, None))
        if search.slo:
            best = "none" if search.best is None else f"{search.best:g} {unit}"
            print(f"highest load that keeps the SLO: {best} ({search.ended})")
            unclear = sum(trial.state == "unclear" for trial in search.trials)
            if unclear:
                print(f"unclear: {unclear} of {len(search.trials)} trials; longer ones decide")
        if search.knee is not None:
            print(f"knee: {search.knee:g} {unit}")
        if search.slo and search.best is None:
            raise typer.Exit(1)


def _load_keys(scenario: "Scenario") -> tuple[list[str], str]:
    """Return the keys of the scenario's load, and the load's unit. Raises ScenarioError."""
    from loadtest.errors import ScenarioError

    keys, units = [], set()
    for number, phase in enumerate(scenario.phases):
        if phase.warmup:
            continue
        for name, unit in (("rate", "requests/s"), ("concurrency", "at a time")):
            if hasattr(phase.arrivals, name):
                keys.append(f"phases.{number}.arrivals.{name}")
                units.add("sessions/s" if phase.arrivals.kind == "sessions" else unit)
                break
        else:
            raise ScenarioError(
                f"phase {phase.name}: arrivals {phase.arrivals.kind} have neither rate nor "
                "concurrency, so there is nothing to search"
            )
    if len(units) > 1:
        raise ScenarioError("phases with a rate and others with a concurrency: one load only")
    return keys, units.pop()


def _limits(scenario: "Scenario") -> "list[Any]":
    """Return the scenario's own SLO as limits for 99 % of requests, by which a sweep judges its
    loads."""
    from loadtest.search import parse_slo

    texts = [f"p99_{name}<{seconds:g}s" for name, seconds in scenario.slo.limits().items()]
    return parse_slo(", ".join(texts)) if texts else []


def _key(task: "Task", limits: list[str]) -> str:
    import hashlib
    import json

    parts = [task.text, json.dumps(task.overrides, sort_keys=True, default=str), *limits]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _run_once(
    task: "Task",
    scenario: "Scenario",
    options: "RunOptions",
    keys: Sequence[str],
    folder: Path,
    whole: bool,
) -> "RunOnce":
    """Return a function that runs one trial into its own folder, readable by `report` and
    `compare`.
    """

    def once(load: float, repeat: int) -> "tuple[Summary, Sequence[RequestRecord]]":
        from dataclasses import replace

        from loadtest.measure import outputs
        from loadtest.scenario.schedule import lay_out

        values = dict.fromkeys(keys, int(load) if whole else load)
        changed = replace(
            task, overrides={**task.overrides, **values, "seed": scenario.seed + repeat}
        )
        checked = changed.scenario()
        plans = lay_out(checked, checked.target.model or "(the first served)")
        result = execute(changed, options, plans)
        if result.interrupted:
            raise KeyboardInterrupt
        place = folder / f"{load:g}-{repeat + 1}"
        place.mkdir(parents=True, exist_ok=True)
        outputs.write(place, result.summary, result.records)
        return result.summary, result.records

    return once


def _trial_printer(unit: str) -> "Callable[[Trial], None]":
    def show(trial: "Trial") -> None:
        word = "saturated" if trial.saturated else trial.state
        served = f"served {trial.served_per_s:.4g}/s, {trial.tokens_per_s:.4g} tokens/s"
        print(f"{trial.load:g} {unit}, run {trial.repeats}: {word}; {served}", flush=True)

    return show


def _write_page(folder: Path, out: Path | None) -> Path:
    """Write the HTML page of the search or run in a folder, and return the page's path."""
    from loadtest.report import write_report
    from loadtest.report.search_page import search_page
    from loadtest.search import STATE, read_search

    if not (folder / STATE).exists():
        return write_report(folder, out)
    path = out if out is not None else folder / "report.html"
    _save(path, search_page(read_search(folder)))
    return path


def _save(path: Path, text: str) -> None:
    from loadtest.errors import ScenarioError

    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror or error}") from None


def _show(comparison: "Comparison") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from loadtest.report.compare import tidy

    console = Console(highlight=False)
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    heads = (
        "",
        comparison.a.name,
        comparison.b.name,
        "change",
        "95 % interval",
        "p",
        "",
    )  # to fit into 80 columns
    for index, head in enumerate(heads):
        table.add_column(escape(head), justify="left" if index in (0, 6) else "right", no_wrap=True)
    colours = {"better": "green", "worse": "red", "no difference shown": "dim"}
    for row in tidy(comparison.rows):
        word = row[-1] if row[-1] in ("better", "worse") else "–"
        table.add_row(*row[:-1], f"[{colours[row[-1]]}]{word}[/]")
    console.print(table)
    console.print(comparison.method, markup=False)
    console.print("p: Mann-Whitney's test, two-sided, on the values of requests", markup=False)
    for warning in comparison.warnings:
        console.print(f"note: {warning}", style="yellow", markup=False)
