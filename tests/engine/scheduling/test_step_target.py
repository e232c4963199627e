"""target_tpot_ms: gaps between tokens stay within the target, and what it costs in throughput."""

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from engine.batch import Batch, StepResult
from engine.scheduling.core import EngineCore
from engine.scheduling.pacing.step_target import StepTarget
from loadtest.scenario import workloads
from tests.fakes import make_config, make_request

STREAMS, TARGET = 1024, 0.05
HOST = 4e-6  # seconds a row: deltas, their frame, and the requests that come

Cost = Callable[[int, int, int], float]  # seconds by decodes, tokens of their contexts, of prompts


def products(decodes: int, context: int, tokens: int, *, slower: float = 1.0) -> float:
    """Return the seconds of a step of about an 8B model on an H200, in bfloat16.

    GEMMs read 16 GB of weights or compute, whichever takes longer; attention reads 131 kB a token.
    """
    matrices = (3.74e-3**4 + (23.7e-6 * (decodes + tokens)) ** 4) ** 0.25
    return slower * (0.3e-3 + matrices + 1e-6 * decodes + 31e-9 * context)


def lines(decodes: int, context: int, tokens: int, *, slower: float = 1.0) -> float:
    """Return the seconds of a step in which rows are cheaper than prompt tokens.

    At the end contexts are half of a row's cost.
    """
    return slower * (4e-3 + 8.2e-6 * decodes + 31e-9 * context + 23.7e-6 * tokens)


class Device:
    """A device in virtual time, which runs steps one after the other, as soon as they are
    launched."""

    def __init__(self, cost: Cost, noise: float, compiles: float, pauses: float) -> None:
        self.now = self.free = 0.0
        self.rng = random.Random(1)
        self._cost, self._noise, self._pauses = cost, noise, pauses
        self._compiles = compiles  # seconds of the first step beyond its cost

    def launch(self, batch: Batch) -> "Launched":
        decodes = batch.num_decodes
        took = self._cost(
            decodes, sum(batch.starts[:decodes]) + decodes, sum(batch.lengths[decodes:])
        )
        took = took * (1 + self._noise * self.rng.gauss()) + self._compiles
        self._compiles = 0.0
        self.now += 0.5e-3 + (0.5 if self.rng.random() < self._pauses else 0.0)
        self.free = max(self.free, self.now) + took
        return Launched(self, StepResult(batch.step, [7] * sum(batch.samples)), self.free)

    def recover(self) -> bool:
        raise AssertionError("no step has failed")

    def shrink(self, num_blocks: int) -> None:
        raise AssertionError("no step lacked memory")


@dataclass
class Launched:
    device: Device
    result: StepResult
    end: float

    def sample(self, masks: object) -> None:
        raise AssertionError("there are no grammars")

    def wait(self) -> StepResult:
        self.device.now = max(self.device.now, self.end)
        return self.result


@dataclass
class Served:
    gaps: "np.ndarray[tuple[int], np.dtype[np.float64]]"  # seconds between a request's tokens
    seconds: float
    tokens: int
    rows: list[int]  # as routers were told

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds

    def goodput(self, target: float) -> float:
        return (self.tokens - int((self.gaps > target).sum())) / self.seconds

    def percentile(self, part: float) -> float:
        return float(np.percentile(self.gaps, part))


def serve(
    monkeypatch: pytest.MonkeyPatch,
    target: float,
    cost: Cost,
    *,
    noise: float = 0.02,
    compiles: float = 0.0,
    pauses: float = 0.0,
    seed: int = 0,
    ahead: bool = True,
) -> Served:
    """Serve the workload `dialogue`, 1,024 streams at a time, until the last request is
    submitted."""
    device = Device(cost, noise, compiles, pauses)
    for module in ("core", "step", "pacing.step_timer"):
        clock = SimpleNamespace(perf_counter=lambda: device.now)
        monkeypatch.setattr(f"engine.scheduling.{module}.time", clock)
    config = make_config(
        max_num_batched_tokens=8192, max_num_seqs=STREAMS, max_model_len=2100, num_blocks=60_000,
        block_size=16, async_scheduling=ahead, prefix_caching=False, target_tpot=target,
    )  # fmt: skip
    core = EngineCore(config, device)
    for id, length in enumerate((5, 100, 100), 10_000):  # as an engine does before it is ready
        core.add_request(make_request(id, length, max_tokens=4, ignore_eos=True))
        while core.has_work():
            core.step()
    device.now += 1.0
    work = workloads.build("dialogue", seed) + workloads.build("dialogue", seed + 100)
    left = iter(enumerate(work))
    ended = STREAMS
    began, last, over = device.now, dict[int, float](), False
    gaps, tokens, rows = [], 0, []
    while not over:
        over = not _offer(core, left, ended)
        ended = 0
        deltas = core.step()
        device.now += HOST * len(deltas)
        for delta in deltas:
            assert delta.finish != "error", delta.error
            if delta.id in last:
                gaps.append(device.now - last[delta.id])
            last[delta.id] = device.now
            if delta.finish:
                del last[delta.id]
                ended += 1
        tokens += len(deltas)
        rows.append(core.stats().rows)
    return Served(np.array(gaps), device.now - began, tokens, rows)


def _offer(core: EngineCore, left: Iterator[tuple[int, workloads.Request]], more: int) -> bool:
    """Add `more` more requests; return whether there were as many."""
    for _ in range(more):
        id, (prompt, count) = next(left, (-1, ([], 0)))
        if id < 0:
            return False
        core.add_request(make_request(id, len(prompt), max_tokens=count, ignore_eos=True))
    return True


@pytest.mark.parametrize(
    ("cost", "target", "ahead"),
    [
        pytest.param(products, TARGET, True, id="h200"),
        pytest.param(products, TARGET, False, id="not-ahead", marks=pytest.mark.slow),
        pytest.param(
            functools.partial(products, slower=0.5), 0.025, True, id="fast", marks=pytest.mark.slow
        ),
        pytest.param(functools.partial(lines, slower=2.0), TARGET, True, id="slow"),
        pytest.param(lines, 0.03, True, id="30-ms", marks=pytest.mark.slow),
    ],
)
def test_target_and_throughput(
    monkeypatch: pytest.MonkeyPatch, cost: Cost, target: float, ahead: bool
) -> None:
    """Bugs: the seconds of the host between steps are not counted; contexts grow, and rows are
    taken to cost more instead; the target is met by serving few."""
    free = serve(monkeypatch, 0.0, cost, ahead=ahead)
    assert free.percentile(99) > 1.5 * target and set(free.rows) == {STREAMS}
    paced = serve(monkeypatch, target, cost, ahead=ahead)
    assert paced.percentile(99) <= target
    assert paced.goodput(target) >= 0.93 * free.throughput
    assert min(paced.rows[50:]) < STREAMS, "the routers see fewer rows"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_other_requests(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Bug: the target is met only by the requests that the costs were fitted to."""
    free = serve(monkeypatch, 0.0, products, seed=seed)
    paced = serve(monkeypatch, TARGET, products, seed=seed)
    assert paced.percentile(99) <= TARGET
    assert paced.goodput(TARGET) >= 0.93 * free.throughput


@pytest.mark.slow
def test_with_noise_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: one pause of the process makes the cap one row for good; steps that vary more need more
    room, and have none."""
    free = serve(monkeypatch, 0.0, products, noise=0.05, pauses=0.004)
    paced = serve(monkeypatch, TARGET, products, noise=0.05, pauses=0.004)
    assert paced.percentile(99) <= TARGET
    assert paced.goodput(TARGET) >= 0.93 * free.throughput


def test_a_first_step_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a first step of seconds makes all steps dear and prompt tokens free. So the first
    prompts come whole beside decodes, and for the next hundred steps hardly any."""
    paced = serve(monkeypatch, TARGET, products, compiles=2.0)
    assert paced.gaps.max() <= 1.2 * TARGET
    assert paced.percentile(99) <= TARGET


def test_a_target_that_no_step_holds() -> None:
    """Bug: nothing runs, since no step is short enough."""
    target = StepTarget(0.001)
    for decodes in (1, 2, 1, 3) * 5:
        target.observe(decodes, 0, 0, 0.02 + 0.001 * decodes)
        target.observe(decodes, 0, 50, 0.03 + 0.001 * decodes)
    assert target.rows(64) == 1 and target.limit(512, 1, 0) == 8
    assert target.limit(512, 0, 0) > 100, "beside no decodes there is no target to meet"


def test_before_anything_is_known() -> None:
    """Bug: the first prompts beside decodes fill a step, as nobody knows what they take."""
    target = StepTarget(0.05)
    assert target.limit(8192, 1, 100) == 32
    target.observe(1, 100, 32, 0.01)
    assert target.limit(8192, 1, 100) == 160


def test_costs_are_found() -> None:
    """Bug: costs of rows, of their contexts and of prompt tokens are taken for one another."""
    target = StepTarget(0.1)
    rng = random.Random(2)
    for _ in range(300):
        decodes, tokens = rng.randrange(1, 100), rng.choice([0, 0, 100, 300])
        context = decodes * rng.randrange(100, 300)
        took = 0.01 + 0.0003 * decodes + 1e-6 * context + 0.0001 * tokens
        target.observe(decodes, context, tokens, took)
    target.observe(50, 50 * 200, 0, 0.01 + 0.0005 * 50)
    # Steps are as expected, so 0.097 s are aimed at, of which decodes may take three quarters.
    assert target.rows(1000) == pytest.approx(125, abs=2)
    assert target.limit(4096, 60, 60 * 200) == pytest.approx(570, abs=5)
    assert target.limit(4096, 60, 60 * 400) == pytest.approx(450, abs=5)


def test_room_for_steps_that_vary() -> None:
    """Bug: steps that take a fifth more than others of the same work are aimed at the target."""
    steady, varying = StepTarget(0.1), StepTarget(0.1)
    for step in range(200):
        decodes = 10 + step % 50
        took = 0.01 + 0.001 * decodes
        steady.observe(decodes, 0, 0, took)
        varying.observe(decodes, 0, 0, took * (1.2 if step % 20 == 0 else 1.0))
    assert steady.rows(1000) == pytest.approx(62, abs=2)
    assert 40 <= varying.rows(1000) <= 52


def test_joined_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a group's sum of contexts drifts from its members' as requests join and leave."""
    seen: list[tuple[int, int]] = []
    launch = Device.launch

    def compared(device: Device, batch: Batch) -> Launched:
        decodes = batch.num_decodes
        seen.append((core.scheduler.in_flight[-1].context, sum(batch.starts[:decodes]) + decodes))
        return launch(device, batch)

    monkeypatch.setattr(Device, "launch", compared)
    device = Device(products, 0.0, 0.0, 0.0)
    config = make_config(max_num_seqs=8, num_blocks=40, block_size=4, max_num_batched_tokens=64)
    core = EngineCore(config, device)
    rng = random.Random(3)
    for id in range(60):
        core.add_request(make_request(id, rng.randrange(1, 20), max_tokens=rng.randrange(1, 30)))
        if id % 7 == 0:
            core.abort([rng.randrange(id + 1)])
        core.step()
    while core.has_work():
        core.step()
    assert core.scheduler.counters.preemptions and len(seen) > 100
    assert all(context == read for context, read in seen)
