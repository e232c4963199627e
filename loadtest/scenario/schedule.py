"""A scenario's schedule: the times at which requests are sent, which are identical in every process
of a run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from loadtest.errors import ScenarioError
from loadtest.scenario import arrivals
from loadtest.scenario.requests import RequestGenerator, RequestSpec
from loadtest.scenario.schema import (
    AtOnce,
    Bursts,
    Closed,
    Constant,
    Gamma,
    Phase,
    Poisson,
    Ramp,
    Scenario,
    Sessions,
    Steps,
    Trace,
    read_key,
)


@dataclass(frozen=True, slots=True)
class Visit:
    """A simulated client, which sends one request or a conversation.

    t: second of the phase at which it sends request `index`.
    thinks: pauses between an answer and the next request.
    """

    t: float
    index: int
    thinks: tuple[float, ...] = ()


@dataclass(frozen=True)
class PhasePlan:
    """The requests of a phase and when they are sent.

    visits: the visits of an open loop, ascending in time; empty for a closed loop.
    seconds: duration of the phase; None for a closed loop that ends with its requests.
    """

    phase: Phase
    generator: RequestGenerator
    visits: list[Visit]
    seconds: float | None
    concurrency: int | None
    requests: int | None
    drain: bool
    first: int = 0  # in a closed loop: index of the first request, and step to the next
    step: int = 1

    def share(self, worker: int, procs: int) -> "PhasePlan":
        """Return the part of the plan for one of `procs` client processes."""
        if self.concurrency is None:
            return replace(self, visits=self.visits[worker::procs])
        requests = self.requests
        return replace(
            self,
            concurrency=len(range(worker, self.concurrency, procs)),
            requests=None if requests is None else len(range(worker, requests, procs)),
            first=worker,
            step=procs,
        )

    def spec(self, visit: Visit, turn: int = 0) -> RequestSpec:
        return self.generator.spec(visit.index + turn, visit.index if visit.thinks else None)

    @property
    def total(self) -> int | None:
        """The number of requests that the plan sends; None for a closed loop over a time."""
        if self.concurrency is not None:
            return self.requests
        return sum(1 + len(visit.thinks) for visit in self.visits)


def lay_out(scenario: Scenario, model: str) -> list[PhasePlan]:
    """Return the plan of each phase. Raises ScenarioError for a phase without requests."""
    plans: list[PhasePlan] = []
    measured = 0
    for phase in scenario.phases:
        work = scenario.work_of(phase)
        keys = {t.name: read_key(t.key_file) for t in work.tenants if t.key_file is not None}
        trace = []
        if isinstance(phase.arrivals, Trace):
            trace = arrivals.read_trace(phase.arrivals.file, phase.arrivals.speed)
        generator = RequestGenerator(
            work,
            scenario.seed,
            phase.name,
            model,
            keys=keys,
            trace=trace,
            first=not phase.warmup and not measured,
        )
        measured += not phase.warmup
        closed = phase.arrivals if isinstance(phase.arrivals, Closed) else None
        visits = [] if closed else list(_visits(phase, scenario.seed, trace))
        if not closed and not visits:
            raise ScenarioError(
                f"phase {phase.name!r} sends nothing: the first request would come after its end"
            )
        seconds = phase.duration
        if seconds is None and isinstance(phase.arrivals, Steps) and phase.requests is None:
            seconds = len(phase.arrivals.rates) * phase.arrivals.each
        if seconds is None and not closed:
            seconds = visits[-1].t
        plans.append(
            PhasePlan(
                phase=phase,
                generator=generator,
                visits=visits,
                seconds=seconds,
                concurrency=closed.concurrency if closed else None,
                requests=phase.requests,
                drain=phase.warmup if phase.drain is None else phase.drain,
            )
        )
    return plans


def _visits(phase: Phase, seed: int, trace: list[arrivals.TraceRow]) -> Iterator[Visit]:
    plan = phase.arrivals
    if isinstance(plan, AtOnce):
        assert phase.requests is not None
        yield from (Visit(0.0, i) for i in range(phase.requests))
        return
    if isinstance(plan, Trace):
        rows = [row for row in trace if phase.duration is None or row.t < phase.duration]
        yield from (Visit(row.t, i) for i, row in enumerate(rows[: phase.requests]))
        return
    cv = plan.cv if isinstance(plan, Gamma | Bursts | Ramp | Steps | Sessions) else 1.0
    if isinstance(plan, Constant):
        cv = 0.0
    times = arrivals.schedule(
        _segments(phase),
        cv,
        arrivals.rng_of(seed, phase.name, "arrivals"),
        duration=phase.duration,
        requests=phase.requests,
    )
    if not isinstance(plan, Sessions):
        yield from (Visit(t, i) for i, t in enumerate(times))
        return
    index = 0
    for number, t in enumerate(times):
        rng = arrivals.rng_of(seed, phase.name, "session", number)
        turns = plan.turns.draw(rng)
        pauses = arrivals.unit_gaps(1, rng)
        yield Visit(t, index, tuple(round(next(pauses) * plan.think, 6) for _ in range(turns - 1)))
        index += turns


def _segments(phase: Phase) -> Iterator[arrivals.Segment]:
    plan = phase.arrivals
    if isinstance(plan, Ramp):
        over = plan.over if plan.over is not None else phase.duration
        assert over is not None
        return arrivals.ramp(plan.first, plan.last, over)
    if isinstance(plan, Steps):
        return arrivals.steps(plan.rates, plan.each)
    if isinstance(plan, Bursts):
        return arrivals.bursts(plan.rate, plan.on, plan.off, plan.between)
    assert isinstance(plan, Constant | Poisson | Gamma | Sessions)
    return arrivals.constant(plan.rate)
