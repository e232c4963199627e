"""The reference answers for `run --verify`: each question of a scenario, sent one at a time."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bars

from loadtest.ask import first_model
from loadtest.client.load import LoadClient
from loadtest.errors import ScenarioError
from loadtest.measure.records import RequestRecord
from loadtest.measure.verify import ReceivedAnswer, Reference, reference_of, write_references
from loadtest.scenario.requests import RequestSpec
from loadtest.scenario.schedule import PhasePlan, Visit, lay_out
from loadtest.scenario.schema import Scenario


def make(
    scenario: Scenario, plans: list[PhasePlan], out: Path, console: Console
) -> tuple[int, int, bool]:
    """Write the reference file `out`. Returns (questions, answers, interrupted).

    Requests are sent one at a time, without cancellations and slow reading. Raises ScenarioError
    for a closed loop without a number of requests, whose questions are unknown, and for a scenario
    in which all questions are sampled without a seed.
    """
    for plan in plans:
        if plan.total is None:
            raise ScenarioError(
                f"phase {plan.phase.name!r} is a closed loop over a time; with requests instead of "
                "duration its questions are known"
            )
    return asyncio.run(_make(scenario, out, console))


def _specs(plan: PhasePlan) -> Iterator[tuple[int, RequestSpec]]:
    """Yield every request of a phase, without cancellations and slow reading."""
    visits = plan.visits or [Visit(0.0, number) for number in range(plan.requests or 0)]
    for visit in visits:
        for turn in range(1 + len(visit.thinks)):
            spec = plan.spec(visit, turn)
            quiet = spec._replace(cancel_chunks=None, cancel_after=None, slow_pause=None)
            yield visit.index + turn, quiet


async def _make(scenario: Scenario, out: Path, console: Console) -> tuple[int, int, bool]:
    model = scenario.target.model or await first_model(scenario.target)
    references: dict[str, Reference] = {}
    asked: set[str] = set()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)

    def keep(spec: RequestSpec, record: RequestRecord, answer: ReceivedAnswer) -> None:
        if record.ok:
            references[spec.key()] = reference_of(spec.key(), record, answer)

    client = LoadClient(scenario.target, lambda record: None, keep=keep)
    with Bars(console=console, disable=not console.is_terminal) as bars:
        for plan in lay_out(scenario, model):
            task = bars.add_task(plan.phase.name, total=plan.total)
            for number, spec in _specs(plan):
                bars.advance(task)
                key = spec.key()
                if not spec.repeatable or key in asked or stop.is_set():
                    continue
                asked.add(key)
                await client.ask(plan, number, spec)
    client.close()
    if not asked and not stop.is_set():
        raise ScenarioError(
            "no question has one right answer: sampling needs temperature 0 or a seed"
        )
    write_references(list(references.values()), out)
    return len(asked), len(references), stop.is_set()
