"""EngineCore on the fake device: the same text whatever runs beside it, in an engine that lasts."""

import gc
import random
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from deployments.observe.replica_metrics import REPLICA_METRICS
from engine.batch import Batch, StepResult
from engine.messages import EngineRequest, UpdateWeights
from engine.scheduling.core import EngineCore
from engine.scheduling.pacing.chunking import PromptPace
from engine.scheduling.pacing.step_timer import StepTimer
from engine.scheduling.request import Request
from tests.fakes import (
    VOCAB,
    FakeRunner,
    collect,
    expected,
    make_config,
    make_core,
    make_request,
    run,
)

ENGINE = str(Path(EngineCore.step.__code__.co_filename).parents[1])
STEM = [2 + i * i % 47 for i in range(40)]


def requests() -> list[EngineRequest]:
    """Return 32 requests of many shapes, half of which have a common beginning."""
    rng = random.Random(3)
    messages = []
    for id in range(32):
        own = [2 + rng.randrange(VOCAB - 2) for _ in range(rng.randrange(1, 30))]
        messages.append(
            make_request(
                id,
                STEM[: rng.randrange(8, 40)] + own if id % 2 else own,
                max_tokens=rng.choice([1, 4, 20, 50]),
                min_tokens=rng.choice([0, 0, 1]),
                ignore_eos=id % 5 == 0,
                seed=id % 3,
                choice=id % 4,
            )
        )
    return messages


def texts(core: EngineCore, wanted: Iterable[EngineRequest]) -> dict[int, tuple[list[int], str]]:
    outputs = run(core, list(wanted))
    return {id: (output.tokens, output.finish) for id, output in outputs.items()}


def truth() -> dict[int, tuple[list[int], str]]:
    return {request.id: expected(request, make_config()) for request in requests()}


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 4096},
        {"max_num_seqs": 1},
        {"prefix_caching": False},
        {"block_size": 1},
        {"block_size": 16},
        {"num_blocks": 32},
    ],
    ids=str,
)
def test_text_is_the_same_under_all_conditions(
    changes: dict[str, Any], async_scheduling: bool
) -> None:
    """Bug: neighbours, chunks, cache, preemption or running ahead change what a request says."""
    core, runner = make_core(async_scheduling=async_scheduling, **changes)
    assert texts(core, requests()) == truth()
    assert runner.max_in_flight == (2 if async_scheduling else 1)
    if "num_blocks" in changes:
        assert core.stats().preemptions > 0, "this case is meant to preempt"
    if core.config.prefix_caching and changes.get("block_size", 0) < 16:
        assert core.stats().prefix_hits > 0


def test_text_is_the_same_alone_and_from_a_warm_cache() -> None:
    """Bug: a prefix hit gives other keys than computing them would."""
    wanted = truth()
    core, _ = make_core()
    hits = []
    for _ in range(2):
        for request in requests():
            assert texts(core, [request]) == {request.id: wanted[request.id]}
        hits.append(core.stats().prefix_hits)
    assert hits[1] > 2 * hits[0] > 0


def test_text_depends_on_what_it_should() -> None:
    """Bug: a fake device that says the same whatever it reads proves nothing."""
    said = [
        expected(make_request(1, prompt, seed=seed, choice=choice, ignore_eos=True), make_config())
        for prompt, seed, choice in [
            (STEM[:8], 1, 0),
            (STEM[:8], 2, 0),
            (STEM[:8], 1, 1),
            ([3, *STEM[1:8]], 1, 0),
            (STEM[:9], 1, 0),
        ]
    ]
    assert len({tuple(tokens) for tokens, _ in said}) == len(said)


def test_who_comes_in_the_middle_of_an_answer_is_first_in_the_queue() -> None:
    """Bug: a stream that lost its replica waits behind requests that have not begun."""
    core, _ = make_core(max_num_seqs=1)
    for id in range(4):
        core.add_request(make_request(id, 8, ignore_eos=True))
    core.step()
    core.add_request(make_request(9, 12, num_prompt_tokens=8, ignore_eos=True))
    ends: list[int] = []
    while core.has_work():
        ends += [delta.id for delta in core.step() if delta.finish]
    assert ends == [0, 9, 1, 2, 3]


def test_a_resumed_request_goes_on_as_if_nothing_had_happened() -> None:
    """Bug: after a failover max_tokens counts anew, min_tokens bans again, or the text differs."""
    whole = make_request(1, STEM[:10], max_tokens=20, min_tokens=8, seed=4)
    tokens, finish = expected(whole, make_config())
    for emitted in (1, 7, len(tokens) - 1):
        core, _ = make_core()
        resumed = make_request(
            1,
            STEM[:10] + tokens[:emitted],
            num_prompt_tokens=10,
            max_tokens=20,
            min_tokens=8,
            seed=4,
        )
        assert texts(core, [resumed]) == {1: (tokens[emitted:], finish)}
    core, _ = make_core()
    full = make_request(1, [*STEM[:10], 5, 6], num_prompt_tokens=10, max_tokens=2)
    assert texts(core, [full]) == {1: ([], "length")}


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (make_request(1, 128), "context_length_exceeded"),
        (make_request(1, 129, max_tokens=0), "context_length_exceeded"),
        (make_request(1, []), "invalid_value"),
        (make_request(1, 8, num_prompt_tokens=9), "invalid_value"),
        (make_request(1, 8, num_prompt_tokens=0), "invalid_value"),
        (make_request(1, 8, num_prompt_tokens=2, max_tokens=3), "invalid_value"),
        (make_request(1, [3, VOCAB]), "token_out_of_range"),
        (make_request(1, [3, -1]), "token_out_of_range"),
        (make_request(1, 8, logit_bias={VOCAB: 1.0}), "token_out_of_range"),
        (make_request(1, 8, stop_token_ids=(VOCAB,)), "token_out_of_range"),
    ],
)
def test_an_impossible_request_ends_with_an_error(request_: EngineRequest, code: str) -> None:
    """Bug: one bad request raises in the step loop and ends the engine for all."""
    core, _ = make_core()
    outputs = run(core, [request_, make_request(2)])
    assert outputs[1].finish == "error" and outputs[1].deltas[0].error.startswith(f"{code}: ")
    assert outputs[2].finish in ("length", "stop")


def test_a_used_id_and_a_draining_engine_refuse() -> None:
    """Bug: a second request under one id mixes two texts; a draining replica takes new work."""
    core, _ = make_core()
    core.add_request(make_request(1, max_tokens=3, ignore_eos=True))
    core.add_request(make_request(1))
    assert [d.error.partition(":")[0] for d in core.step()] == ["duplicate_id"]
    core.drain()
    core.add_request(make_request(2))
    outputs = run(core)
    assert outputs[2].deltas[0].error.startswith("draining: ") and outputs[1].finish == "length"
    assert core.stats().draining


def test_max_tokens_zero_needs_no_step() -> None:
    """Bug: a request for nothing never ends, or a full context is refused although it fits."""
    core, runner = make_core()
    assert texts(core, [make_request(1, 128, max_tokens=0)]) == {1: ([], "length")}
    assert runner.num_steps == 0
    outputs = run(core, [make_request(2, 128, max_tokens=0, prompt_logprobs=0)])
    logprobs = outputs[2].deltas[0].prompt_logprobs
    assert logprobs is not None and len(logprobs) == 128 and runner.num_steps > 0


def test_prompt_logprobs_come_whole_under_preemption() -> None:
    """Bug: prompt log-probabilities with holes or repeats after chunks were computed twice."""
    core, _ = make_core(num_blocks=32, max_num_batched_tokens=7)
    messages = [make_request(id, 30, prompt_logprobs=0, max_tokens=40) for id in range(10)]
    prompts = {request.id: list(request.token_ids) for request in messages}
    outputs = run(core, messages)
    assert core.stats().preemptions > 0
    for id, prompt in prompts.items():
        first = outputs[id].deltas[0].prompt_logprobs
        assert first is not None and first[0] is None
        assert [item.token_id for item in first[1:] if item] == prompt[1:]
        assert all(delta.prompt_logprobs is None for delta in outputs[id].deltas[1:])


def test_abort_frees_within_one_step() -> None:
    """Bug: a client that left holds memory until the next request comes."""
    core, _ = make_core()
    for id in range(8):
        core.add_request(make_request(id, 20, max_tokens=None, ignore_eos=True))
    for _ in range(5):
        core.step()
    core.abort(range(8))
    assert [delta.finish for delta in core.step()] == ["abort"] * 8
    assert not core.has_work()
    assert core.stats().free_blocks == core.config.num_blocks
    core.check_integrity()


def test_what_is_reserved_and_what_is_used() -> None:
    """Bug: a shorter max_tokens lets no more requests in where length is reserved; or what is
    reserved is told as what is used, and nobody sees that max_tokens is what holds others up."""
    seen = {}
    for max_tokens in (33, 9):
        core, _ = make_core(num_blocks=48, admission="reserved", max_num_batched_tokens=256)
        for id in range(32):
            core.add_request(make_request(id, 16, max_tokens=max_tokens, ignore_eos=True))
        while not core.scheduler.running:
            core.step()
        stats = core.stats()
        assert stats.reserved_blocks == stats.running * (15 + max_tokens) // 4 == 48
        assert stats.total_blocks - stats.free_blocks < 48
        metrics = {metric.key: metric.read(stats) for metric in REPLICA_METRICS}
        assert metrics["kv_cache_usage_perc"] < metrics["kv_cache_reserved_perc"] == 1
        seen[max_tokens] = stats.running
        run(core)
        assert core.stats().reserved_blocks == 0
    assert seen == {33: 4, 9: 8}, "48 and 24 tokens each, of 192"
    core, _ = make_core(num_blocks=48)
    for id in range(8):
        core.add_request(make_request(id, 8, max_tokens=33, ignore_eos=True))
    core.step()
    assert core.stats().reserved_blocks == 8 * 10, "an optimistic policy lets in more than may fit"
    run(core)


def test_a_reset_cache_is_not_read() -> None:
    """Bug: after new weights a running request registers, or a new one finds, keys of the old."""
    core, _ = make_core()
    prompt = STEM[:20]
    core.add_request(make_request(1, prompt, max_tokens=None, ignore_eos=True))
    said = [token for _ in range(5) for delta in core.step() for token in delta.token_ids]
    core.reset_prefix_cache()
    core.add_request(make_request(2, prompt))
    outputs = run(core)
    assert outputs[2].cached == 0
    # The prompt's blocks are request 2's by now; those of request 1's text are of the old weights.
    follow = make_request(5, [*prompt, *said, *outputs[1].tokens[:30]])
    assert run(core, [follow])[5].cached == 20
    core.reset_prefix_cache()
    assert run(core, [make_request(3, prompt)])[3].cached == 0
    assert run(core, [make_request(4, prompt)])[4].cached == 16


def test_priority_and_salt_reach_the_scheduler() -> None:
    """Bug: a message's field that nobody reads."""
    core, _ = make_core(max_num_seqs=1)
    first = make_request(1, STEM[:20], max_tokens=1)
    salted = make_request(2, STEM[:20], max_tokens=1, cache_salt="tenant")
    urgent = make_request(3, STEM[:20], max_tokens=1, priority=-1)
    outputs = run(core, [first, salted, urgent])
    assert list(outputs) == [3, 1, 2]
    assert [outputs[id].cached for id in (3, 1, 2)] == [0, 16, 0]


def test_capacity_bounds_the_context() -> None:
    """Bug: a request that no amount of preemption makes room for blocks the queue for ever."""
    core, _ = make_core(num_blocks=8, max_model_len=1000)
    assert core.config.max_model_len == 32
    outputs = run(
        core, [make_request(1, 30, max_tokens=None, ignore_eos=True), make_request(2, 40)]
    )
    assert len(outputs[1].tokens) == 2 and outputs[2].finish == "error"


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    """Bug: an engine that grows with every request it has served."""
    core, runner = make_core(num_blocks=256, max_num_batched_tokens=256)
    rng = random.Random(0)
    objects = {}
    total, finished = 10_000, 0
    for id in range(total):
        core.add_request(make_request(id, rng.randrange(1, 12), max_tokens=rng.randrange(1, 5)))
        if id % 7 == 0:
            core.abort([id - 3])
        while len(core.scheduler.requests) >= 48 or (id == total - 1 and core.has_work()):
            finished += sum(bool(delta.finish) for delta in core.step())
        if id in (2_000, total - 1):
            runner.batches.clear()
            gc.collect()
            objects[id] = len(gc.get_objects())
    assert finished == total
    assert objects[total - 1] - objects[2_000] < 500
    core.check_integrity()
    assert sum(isinstance(item, Request) for item in gc.get_objects()) < 20
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
    assert stats.free_blocks == stats.total_blocks and stats.finished == total


class InstantRunner:
    """A model runner whose samples are token 7, without a wait."""

    def launch(self, batch: Batch) -> "InstantRunner":
        self.batch = replace(batch)
        self.results = [
            *getattr(self, "results", []),
            StepResult(batch.step, [7] * sum(batch.samples)),
        ]
        return self

    def wait(self) -> StepResult:
        return self.results.pop(0)

    def recover(self) -> bool:
        return False


def test_a_step_of_many_decodes_is_cheap() -> None:
    """Bug: work per request and step on the host that starves the device. The bound is loose, for
    busy machines: about 0.6 us a request were measured."""
    count = 512
    config = make_config(
        max_num_seqs=count,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        num_blocks=count * 32,
        block_size=16,
    )
    core = EngineCore(config, InstantRunner())
    for id in range(count):
        core.add_request(make_request(id, 16 + id % 16, max_tokens=None, ignore_eos=True))
    while len(core.scheduler.decoding) < count:
        core.step()
    seconds = []
    for _ in range(64):
        began = time.thread_time()
        deltas = core.step()
        seconds.append(time.thread_time() - began)
        assert len(deltas) == count
    assert sorted(seconds)[32] / count < 4e-6


def test_end_tokens_of_others_do_not_end_a_request() -> None:
    """Bug: one request's stop id, remembered for speed, ends its neighbour."""
    core, _ = make_core()
    stops = tuple(range(VOCAB))
    outputs = run(
        core,
        [make_request(1, stop_token_ids=stops), make_request(2, ignore_eos=True, max_tokens=30)],
    )
    assert len(outputs[1].tokens) == 1 and outputs[1].finish == "stop"
    assert len(outputs[2].tokens) == 30


def test_prompt_tokens_count_when_they_are_computed() -> None:
    """Bug: they count when their step is launched, so that routers, which compare counts with the
    time between frames, put a prompt's time down to the step before it."""
    core, _ = make_core(async_scheduling=True)
    core.add_request(make_request(1, 10, max_tokens=3, ignore_eos=True))
    seen, busy = [], []
    while core.has_work():
        core.step()
        stats = core.stats()
        seen.append((stats.step, stats.prompt_tokens, stats.output_tokens))
        busy.append(stats.busy_seconds)
    assert seen == [(0, 0, 0), (1, 10, 1), (2, 10, 2), (3, 10, 3)]
    assert busy[0] == 0 and sorted(set(busy)) == busy, "seconds go with the steps that took them"


def test_seconds_without_work_are_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the pause between two requests makes the second one's step look slow; or the time
    between two steps is lost."""
    monkeypatch.setattr(
        "engine.scheduling.pacing.step_timer.time", SimpleNamespace(perf_counter=lambda: now)
    )
    busy, now = StepTimer(), 12.0
    busy.stepped(10.0, result=False, more=True)  # launched; its result is the next step's
    assert (busy.step, busy.total) == (2.0, 0.0)
    now = 15.0
    busy.stepped(14.0, result=True, more=False)
    assert (busy.step, busy.total) == (1.0, 5.0)
    now = 101.0
    busy.stepped(100.0, result=True, more=True)
    assert busy.total == 6.0


@pytest.mark.parametrize("ahead", [False, True])
def test_seconds_in_which_no_step_may_run_are_not_busy(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the five minutes of a trainer's pause, or of an update, were seconds of the next step. A
    router took the replica for a slow one, and refused requests."""
    clock = [100.0]
    for module in ("core", "pacing.step_timer"):
        name = f"engine.scheduling.{module}.time"
        monkeypatch.setattr(name, SimpleNamespace(perf_counter=lambda: clock[0]))

    class SlowWeights:
        def holds(self, folder: str) -> bool:
            return True

        def check(self, folder: str) -> None:
            pass

        def load(self, folder: str) -> None:
            clock[0] += 300.0

    config = make_config(async_scheduling=ahead)
    runner = FakeRunner(config)
    core = EngineCore(config, runner, weights=SlowWeights())
    checked = threading.Event()
    core.on_loaded(checked.set)
    launch = runner.launch

    def slow(batch: Batch) -> Any:
        clock[0] += 0.5
        return launch(batch)

    monkeypatch.setattr(runner, "launch", slow)
    core.add_request(make_request(1, max_tokens=12, ignore_eos=True))
    for _ in range(4):
        core.step()
    for go_on in (core.resume, lambda: core.pause("wait", 2)):
        core.pause("keep", 1)
        while core.has_work():
            core.step()
        clock[0] += 300.0
        go_on()
        core.step()
    core.update_weights(UpdateWeights(2, "folder", "1"))
    assert checked.wait(5.0)
    while core.has_work():
        core.step()
    stats = core.stats()
    assert stats.weight_updates == 1 and stats.output_tokens == 12
    assert stats.busy_seconds == pytest.approx(0.5 * stats.step, abs=1.0)


def test_has_work_until_the_last_result_is_in() -> None:
    """Bug: the loop sleeps while a step is in flight, and blocks stay taken."""
    core, runner = make_core()
    assert not core.has_work() and core.step() == []
    core.add_request(make_request(1, max_tokens=1))
    assert core.step() == [] and core.has_work() and len(runner.in_flight) == 1
    outputs = collect(core.step())
    assert outputs[1].finish in ("length", "stop") and not core.has_work()


def test_a_slow_device_computes_prompts_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: beside a prompt of 7,000 tokens the streams of a CPU replica paused for 3 to 6 s: a
    16th of the budget took that long. Or one hiccup makes the steps small for good."""
    clock = [0.0]
    monkeypatch.setattr("engine.scheduling.core.time.perf_counter", lambda: clock[0])
    core, runner = make_core(
        max_num_batched_tokens=512,
        max_model_len=4096,
        num_blocks=4096,
        async_scheduling=False,  # a launch returns when the work is done
    )
    chunks: list[int] = []
    launch = runner.launch

    def slow(batch: Batch) -> Any:
        chunks.append(batch.num_tokens - batch.num_decodes)
        # What a token costs grows with its position: 1 ms to 4 ms.
        took = sum(n * (1 + s / 1000) for s, n in zip(batch.starts, batch.lengths, strict=True))
        hiccup = 3.0 if len(chunks) == 9 else 0.0
        clock[0] += took / 1000 + hiccup
        return launch(batch)

    monkeypatch.setattr(runner, "launch", slow)
    core.add_request(make_request(1, 20, max_tokens=400, ignore_eos=True))
    core.step(), core.step()
    core.add_request(make_request(2, 3000, max_tokens=1))
    seconds = []
    while core.has_work():
        before = clock[0]
        core.step()
        seconds.append(clock[0] - before)
    assert max(sorted(seconds)[:-1]) < 0.45, "but for the hiccup"
    long = [n for n in chunks if n > 1]
    assert sum(chunks) == 3020 and max(long[1:]) > 200 and long[-6] > 60
    assert len(long) < 40, "a hiccup is forgotten"


def test_slow_decodes_leave_prompts_half_of_the_time() -> None:
    """Bug: where a step of decodes takes longer than the bound, prompts get eight tokens a step,
    and a device that could serve 32 rows serves three."""
    pace = PromptPace()
    for seconds in (1.0, 9.0):  # a hiccup too
        pace.observe(4, 0, 0, seconds)
    pace.observe(4, 0, 100, 1.5)
    assert pace.limit(4096, 4, 0) == 200, "5 ms a token beside decodes of 1 s"
    pace.observe(32, 0, 8, 5.0)
    assert pace.limit(4096, 32, 0) == 32, "never fewer than decodes"
    for _ in range(2):
        pace.observe(4, 0, 0, 0.1)
    pace.observe(4, 0, 100, 0.5)
    assert pace.limit(4096, 4, 0) in (49, 50) and pace.limit(4096, 0, 0) in (249, 250)


def test_micro_batches_share_the_requests() -> None:
    """Bug: all requests that came at once stay in one micro-batch, so that one stage of a model
    computes and the others wait for it."""
    config = make_config(async_scheduling=False, micro_batches=3)
    core = EngineCore(config, FakeRunner(config))
    for id in range(9):
        core.add_request(make_request(id, 5, max_tokens=20 if id < 3 else 40, ignore_eos=True))
    sizes = []
    while core.has_work():
        core.step()
        sizes.append([len(group) for group in core.scheduler.decode_groups])
    assert [3, 3, 3] in sizes
    assert [2, 2, 2] in sizes, "those that are left are shared out again"


@pytest.mark.parametrize("ahead", [True, False])
def test_a_decode_step_makes_few_calls(ahead: bool) -> None:
    """Bug: each step of decodes runs more Python than before, which nobody sees in a diff."""
    core, _ = make_core(async_scheduling=ahead)
    for id in range(4):
        core.add_request(make_request(id, 8, max_tokens=60, ignore_eos=True))
    counts = []
    for _ in range(40):
        calls: list[str] = []

        def note(frame: FrameType, event: str, _: object, calls: list[str] = calls) -> None:
            files = [part.f_code.co_filename for part in (frame, frame.f_back) if part is not None]
            if event == "call" and all(file.startswith(ENGINE) for file in files):
                calls.append(frame.f_code.co_name)  # the fake device's calls do not count

        sys.setprofile(note)
        core.step()
        sys.setprofile(None)
        counts.append(len(calls))
    assert min(counts) <= 39, "more than a decode step needs"
