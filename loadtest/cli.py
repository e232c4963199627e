"""`manta loadtest ...` and `python -m loadtest ...`. Each command imports its modules when it runs.

Exit codes: 0 success; 1 an assertion failed, the client was the bottleneck, or the server could not
be reached; 2 the command line, the scenario or a file is wrong and nothing was sent; 130 Ctrl-C.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadtest import cli_chaos, cli_results
from loadtest.cli_run import console_on, execute, failing, read

if TYPE_CHECKING:
    from loadtest.scenario.schedule import PhasePlan
    from loadtest.scenario.schema import Scenario

app = typer.Typer(
    name="loadtest",
    help="Load an OpenAI-compatible server, measure it, and check its answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO.yaml")]
Url = Annotated[str | None, typer.Option(help="Server, instead of the scenario's target.url.")]
Model = Annotated[str | None, typer.Option(help="Model; default: the first that it serves.")]
Procs = Annotated[int, typer.Option(min=1, max=4096, help="Client processes.")]
Ray = Annotated[
    str | None,
    typer.Option(help="Client processes on a Ray cluster's nodes: its address, or auto."),
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A scenario value: phases.0.arrivals.rate=20"),
]


@app.command(
    epilog="Examples:  loadtest run chat.yaml --url http://host:8000  |  "
    'loadtest run chat.yaml --assert "failed==0, p99_ttft<500ms"'
)
def run(
    scenario: ScenarioFile,
    url: Url = None,
    model: Model = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results. Default: loadtest-results/NAME-TIME.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="Send the chats of this file in ShareGPT's format.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="Compare answers with this file of `loadtest reference`.")
    ] = None,
    assertions: Annotated[
        list[str] | None, typer.Option("--assert", help="What must hold; else exit code 1.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Show what would be sent; send nothing.")] = False,
    chaos: Annotated[
        list[str] | None, typer.Option(help='Faults: "kill-replica@30s, kill-engine every 20s".')
    ] = None,
    procs: Procs = 1,
    ray: Ray = None,
    setting: Setting = None,
    lenient: Annotated[
        bool, typer.Option(help="Exit code 0 even if the client was the bottleneck.")
    ] = False,
) -> None:
    """Run a scenario: open loop, latency from the intended send time."""
    with failing():
        from loadtest.chaos.faults import beside, needs_proxies, parse_chaos
        from loadtest.errors import ScenarioError
        from loadtest.live import show_outcomes, show_summary
        from loadtest.measure import asserts, outputs
        from loadtest.measure.verify import read_references
        from loadtest.report import write_report
        from loadtest.runner import RunOptions

        task, checked, plans = read(scenario, url, model, setting, dataset)
        wanted = [*checked.asserts, *(assertions or [])]
        for text in assertions or []:
            try:
                asserts.parse(text)
            except ValueError as error:
                raise ScenarioError(f"--assert: {error}") from None
        faults = [*checked.chaos, *(chaos or [])]
        for text in faults:
            parse_chaos(text)
        if verify is not None:
            read_references(verify)
        if dry_run:
            _show_plan(checked, plans)
            return
        folder = out or checked.out or _default_folder(checked, scenario)
        harm = beside(faults, checked.target.urls[0], checked.seed)
        outputs.prepare(folder)
        options = RunOptions(
            procs=procs, ray=ray, verify=verify, proxied=needs_proxies(faults), beside=harm
        )
        result = execute(task, options, plans)
        outputs.write(folder, result.summary, result.records)
        write_report(folder)
        console = console_on(stderr=False)
        show_summary(result.summary, console)
        compared = result.summary.verified_ok + result.summary.verified_different
        unverified = verify is not None and not compared
        if unverified:
            verdict = "REFUSED: no answer was compared: the reference has none of these questions"
            console.print(verdict, markup=False)
        outcomes = asserts.evaluate(wanted, result.summary)
        show_outcomes(outcomes, console)
        console.print(f"results: {folder}, to look at: {folder / 'report.html'}", markup=False)
        if result.interrupted:
            raise typer.Exit(130)
        refused = (result.summary.verdict != "ok" or unverified) and not lenient
        if refused or not all(outcome.holds for outcome in outcomes):
            raise typer.Exit(1)


@app.command(epilog="Example:  loadtest reference chat.yaml --out chat.reference.jsonl")
def reference(
    scenario: ScenarioFile,
    out: Annotated[Path, typer.Option(help="File to write.")],
    url: Url = None,
    model: Model = None,
    setting: Setting = None,
) -> None:
    """Ask a quiet server each question of a scenario, one at a time, for `run --verify`."""
    with failing():
        from loadtest.errors import RunError, ScenarioError
        from loadtest.reference_answers import make

        if out.exists():
            raise ScenarioError(f"{out}: exists already")
        try:
            out.touch()
            out.unlink()
        except OSError as error:
            raise ScenarioError(f"{out}: cannot be written: {error.strerror or error}") from None
        _, checked, plans = read(scenario, url, model, setting)
        asked, answered, interrupted = make(checked, plans, out, console_on(stderr=True))
        if interrupted:
            raise typer.Exit(130)
        print(f"{answered} answers to {asked} questions: {out}")
        if answered < asked:
            raise RunError(f"{asked - answered} questions failed; the reference lacks them")


@app.command("list")
def list_() -> None:
    """List the built-in workloads, and the metrics for --assert."""
    from loadtest.measure.asserts import NAMES as METRICS
    from loadtest.scenario.requests import NAMES

    width = max(map(len, NAMES))
    for name, named in NAMES.items():
        lengths = ""
        if named.input is not None and named.output is not None:
            lengths = f" ({named.input.text} in, {named.output.text} out)"
        print(f"{name:{width}}  {named.about}{lengths}")
    print(f"\nmetrics: {', '.join(METRICS)}, errors.CLASS")


app.command(epilog="Example:  loadtest report loadtest-results/chat")(cli_results.report)
app.command(
    epilog='Example:  loadtest compare before after --html diff.html --fail-if "p99_ttft>+10%"'
)(cli_results.compare)
app.command(
    epilog='Example:  loadtest search chat.yaml --slo "p99_ttft<500ms, p99_tpot<50ms"  |  '
    "loadtest search chat.yaml --sweep 1..64"
)(cli_results.search)
app.command(
    epilog="Example:  loadtest chaos --url http://127.0.0.1:8000 --users 16 --kill-pid 1234"
)(cli_chaos.chaos)


def _default_folder(scenario: "Scenario", path: Path) -> Path:
    import re
    from datetime import UTC, datetime

    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", scenario.name or path.stem).strip("-.") or "run"
    return Path("loadtest-results") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _show_plan(scenario: "Scenario", plans: "list[PhasePlan]") -> None:
    for plan in plans:
        count = "as many as are answered" if plan.total is None else f"{plan.total} requests"
        seconds = "" if plan.seconds is None else f" in {plan.seconds:g} s"
        words = [plan.phase.arrivals.kind, scenario.work_of(plan.phase).name]
        words += ["warm-up"] if plan.phase.warmup else []
        words += [f"{plan.concurrency} at a time"] if plan.concurrency is not None else []
        print(f"{plan.phase.name}: {count}{seconds} ({', '.join(words)})")
        visits = plan.visits[:3]
        specs = [(v.t, plan.spec(v)) for v in visits] or [(0.0, plan.generator.spec(0))]
        for t, spec in specs:
            body = spec.body().decode()
            shown = body if len(body) <= 300 else f"{body[:200]} ... {body[-90:]}"
            print(f"  {t:9.3f} s  POST {spec.path}  {shown}")


def main() -> None:
    """Run the command line of `python -m loadtest`."""
    app()
