"""A step that raises costs the requests that are to blame, and nobody else anything."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.batch import Batch, StepResult
from engine.messages import EngineRequest
from engine.scheduling.core import EngineCore
from tests.engine.scheduling.driver import random_run
from tests.fakes import (
    FakeRunner,
    Inline,
    Output,
    _Step,
    collect,
    expected,
    make_config,
    make_request,
    make_store,
    run,
)


class DeviceError(Exception):
    """An error of the faulty device."""


class FaultyRunner(FakeRunner):
    """A fake runner that raises in `where` ("launch" or "wait") for steps with `bad(entries)`.

    entries: (seed, first position, end) of each.
    failures: for each seed, the number of failed steps that it was in.
    """

    def __init__(self, where: str, bad: Callable[[list[tuple[int, int, int]]], bool], **c: Any):
        super().__init__(make_config(**c))
        self.where, self.bad = where, bad
        self.lost = False
        self.failed_steps = 0
        self.failures: Counter[int] = Counter()

    def recover(self) -> bool:
        return super().recover() and not self.lost

    def launch(self, batch: Batch) -> _Step:
        seeds = {row: new.seed for row, new in self.news.items()}
        for step in self.in_flight:
            seeds |= {new.row: new.seed for new in step.rows}
        seeds |= {new.row: new.seed for new in batch.new_rows}
        steps = zip(batch.rows, batch.starts, batch.lengths, strict=True)
        self._entries = [(seeds[row], start, start + length) for row, start, length in steps]
        if self.where == "launch":
            self._raise(self._entries)
        step = super().launch(batch)
        step.seeds = self._entries  # type: ignore[attr-defined]
        return step

    def execute(self, step: _Step) -> StepResult:
        if self.where == "wait":
            self._raise(step.seeds)  # type: ignore[attr-defined]
        return super().execute(step)

    def _raise(self, entries: list[tuple[int, int, int]]) -> None:
        if self.bad(entries):
            self.failed_steps += 1
            self.failures.update(seed for seed, _, _ in entries)
            raise DeviceError("the device has failed")


def poison(
    *seeds: int, position: int | None = None
) -> Callable[[list[tuple[int, int, int]]], bool]:
    """Return a predicate of steps that compute a position of one of these requests.

    position: None stands for the last token of a prompt in `crowd`.
    """

    def bad(entries: list[tuple[int, int, int]]) -> bool:
        return any(
            seed in seeds and start <= (8 + seed % 16 if position is None else position) < end
            for seed, start, end in entries
        )

    return bad


def first(count: int) -> Callable[[list[tuple[int, int, int]]], bool]:
    """Return a predicate of the first `count` steps, whatever is in them."""
    left = [count]

    def bad(entries: list[tuple[int, int, int]]) -> bool:
        left[0] -= 1
        return left[0] >= 0

    return bad


def crowd(count: int, **fields: Any) -> list[EngineRequest]:
    """Return requests of different lengths, some of which share a prefix; request i has seed i."""
    stem = [2 + i * i % 47 for i in range(24)]
    return [
        make_request(
            i, [*stem[: 8 + i % 16], 2 + i % 40], **({"max_tokens": 12, "seed": i} | fields)
        )
        for i in range(count)
    ]


def check(
    core: EngineCore, requests: list[EngineRequest], poison: set[int]
) -> dict[int, tuple[list[int], str]]:
    """Assert that all but the poison requests have the outputs that they have alone; return
    outputs."""
    wanted = {r.id: expected(r, core.config) for r in requests}
    outputs = run(core, requests)
    assert {id for id, output in outputs.items() if output.finish == "error"} == poison
    for id in poison:
        assert outputs[id].deltas[-1].error.startswith("engine_error: ")
    said = {id: (output.tokens, output.finish) for id, output in outputs.items()}
    assert {id: text for id, text in said.items() if id not in poison} == {
        id: text for id, text in wanted.items() if id not in poison
    }
    for id in poison:
        assert said[id][0] == wanted[id][0][: len(said[id][0])]
    return said


WIDE = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "num_blocks": 1024}


@pytest.mark.parametrize("where", ["launch", "wait"])
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("position", [17, 18, 25])
def test_one_poison_among_64_fails_alone(where: str, async_scheduling: bool, position: int) -> None:
    """Bug: one request that the model cannot compute ends 63 others, in its prompt, at its first
    token or while it decodes; or they are tried without end."""
    runner = FaultyRunner(
        where, poison(41, position=position), async_scheduling=async_scheduling, **WIDE
    )
    core = EngineCore(runner.config, runner)
    requests = crowd(64, ignore_eos=True)
    said = check(core, requests, {41})
    # The first failure, and what the search needs.
    assert runner.failures[41] <= 1 + math.log2(64)
    assert runner.failed_steps <= 1 + math.log2(64)
    assert len(said[41][0]) == position - 17, "what came before the poison is kept"
    assert core.stats().waiting_tokens == 0
    # The engine is as good as new.
    check(core, [make_request(100 + i, 9, max_tokens=8) for i in range(20)], set())


def test_three_poisons_fail_and_nobody_with_them() -> None:
    """Bug: the search ends with the first one found."""
    runner = FaultyRunner("wait", poison(3, 4, 60), **WIDE)
    check(EngineCore(runner.config, runner), crowd(64), {3, 4, 60})


@pytest.mark.parametrize("where", ["launch", "wait"])
@pytest.mark.parametrize("count", [1, 64])
def test_a_fault_that_passes_costs_nobody(where: str, count: int) -> None:
    """Bug: a hiccup of the device ends the requests of its step."""
    runner = FaultyRunner(where, first(1), **WIDE)
    check(EngineCore(runner.config, runner), crowd(count), set())
    assert runner.failed_steps == 1


@pytest.mark.parametrize("where", ["launch", "wait"])
@pytest.mark.parametrize("position", [3, 70, 99])
def test_poison_in_a_chunk_of_a_long_prompt(where: str, position: int) -> None:
    """Bug: a chunk has no token to fail with; or those who decode beside it are blamed."""
    runner = FaultyRunner(where, poison(77, position=position), max_num_batched_tokens=16)
    core = EngineCore(runner.config, runner)
    long = make_request(77, 100, max_tokens=8, seed=77)
    check(core, [*crowd(8), long, *crowd(24)[8:]], {77})
    check(core, [make_request(200, 100, max_tokens=8)], set())


def test_what_a_failed_step_computed_is_never_found_again() -> None:
    """Bug: blocks of a failed step stay in the prefix cache, with keys that were never written."""
    runner = FaultyRunner("wait", first(1), **WIDE)
    core = EngineCore(runner.config, runner)
    stem = list(range(2, 34))
    requests = [make_request(i, stem, seed=i) for i in range(4)]
    for request in requests:
        core.add_request(request)
    while not runner.failed_steps:
        core.step()
    runner.kv[:] = -1  # whatever was there
    while core.has_work():
        core.step()
    check(core, [make_request(9, stem, max_tokens=9)], set())


def test_too_much_at_once_goes_on_in_smaller_steps() -> None:
    """Bug: a step that fails only for its size (out of memory) fails requests, or never ends."""
    runner = FaultyRunner("launch", lambda entries: len(entries) > 20, **WIDE)
    check(EngineCore(runner.config, runner), crowd(32, max_tokens=4), set())


def test_a_lost_device_and_one_that_always_fails_end_the_engine() -> None:
    """Bug: a replica that answers every request with an error instead of being replaced, or that
    goes on with a CUDA context that is gone."""
    lost = FaultyRunner("wait", poison(3), **WIDE)
    lost.lost = True
    with pytest.raises(DeviceError):
        run(EngineCore(lost.config, lost), crowd(8))
    assert lost.failed_steps == 1

    broken = FaultyRunner("wait", lambda entries: True, **WIDE)
    with pytest.raises(DeviceError):
        run(EngineCore(broken.config, broken), crowd(8))

    alone = FaultyRunner("wait", lambda entries: True, **WIDE)
    core = EngineCore(alone.config, alone)
    check(core, crowd(1), {0})  # it may have been its fault
    with pytest.raises(DeviceError):
        run(core, [make_request(5)])


def test_requests_come_and_go_during_the_search() -> None:
    """Bug: an abort, or a new request, in the middle of the search leaves it without an end."""
    runner = FaultyRunner("wait", poison(5), **WIDE)
    core = EngineCore(runner.config, runner)
    for request in crowd(16):
        core.add_request(request)
    ends: dict[int, str] = {}
    for number in range(200):
        if not core.has_work():
            break
        ends |= {delta.id: delta.finish for delta in core.step() if delta.finish}
        core.check_integrity()
        if runner.failed_steps and number < 12:
            core.abort([number])
            core.add_request(make_request(50 + number))
    assert not core.has_work()
    assert all(ends[id] in ("stop", "length") for id in (12, 13, 14, 15))
    assert all(ends[id] in ("stop", "length") for id in ends if id >= 50)
    assert ends[5] in ("abort", "error")


def test_a_group_waits_for_its_adapter_without_turning() -> None:
    """Bug: a slot goes to another adapter when a step fails, and until the group's own is back the
    loop turns as fast as it can, for others that may not run now."""
    device = Inline()
    runner = FaultyRunner("wait", first(1))
    store = make_store(["a", "b"], max_loras=1, device=device)
    core = EngineCore(runner.config, runner, store)
    requests = [make_request(i, adapter=name) for i, name in enumerate(["a", "a", "b", ""])]
    wanted = {r.id: expected(r, core.config) for r in requests}
    outputs: dict[int, Output] = {}
    core.add_request(requests[0])
    core.add_request(requests[1])
    while not core.scheduler.running:
        core.step()
    core.add_request(requests[2])
    core.add_request(requests[3])
    device.hold = True
    turns = waits = 0
    while core.has_work() or device.held:
        if not core.has_work():
            waits += 1
            device.release()
        collect(core.step(), outputs)
        core.check_integrity()
        turns += 1
        assert turns < 100, "it turns while the adapter loads"
    assert runner.failed_steps == 1 and waits == 3
    assert {id: (output.tokens, output.finish) for id, output in outputs.items()} == wanted


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_with_failing_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: any leak or wrong text after failures at random moments, with preemptions and shared
    blocks."""
    execute = FakeRunner.execute
    count = [0]

    def sometimes(self: FakeRunner, step: _Step) -> StepResult:
        count[0] += 1
        if count[0] % 11 == 5:
            raise DeviceError("now and then")
        return execute(self, step)

    monkeypatch.setattr(FakeRunner, "execute", sometimes)
    ahead, micro_batches = [(True, 1), (False, 1), (False, 3), (True, 2)][seed % 4]
    random_run(seed, async_scheduling=ahead, micro_batches=micro_batches)
    assert count[0] > 11
