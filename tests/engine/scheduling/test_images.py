"""Images in the scheduler: what a step encodes, what the runner keeps, and who else notices."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from deployments.observe.replica_metrics import REPLICA_METRICS
from deployments.routing.prefix_index import STRIDE, hash_prefix
from engine.batch import Batch, OutOfMemory, StepResult
from engine.config.kv_groups import Full, Window
from engine.images.image import Image
from engine.messages import EngineRequest, UpdateWeights
from engine.scheduling import request, scheduler
from engine.scheduling.core import EngineCore
from engine.scheduling.memory import block_manager
from engine.scheduling.memory.image_cache import ImageCache
from engine.scheduling.memory.image_plan import ImagePlan
from engine.scheduling.memory.prefix_hash import extend_hashes, root_hash
from tests.drafters import computed, told
from tests.engine.scheduling.driver import Driver, random_run
from tests.fakes import (
    IMAGE_TOKEN,
    FakeRunner,
    _Step,
    expected,
    make_config,
    make_core,
    make_prompt,
    make_request,
    received,
    run,
)

PLAN = ImagePlan((IMAGE_TOKEN,), cache_tokens=24, largest=8, row_size=1)
WHOLE = replace(PLAN, bidirectional=True)
TEXT = [20, 21, 22, 23, 24]


class Recording(FakeRunner):
    """A fake runner that records each step: sizes of encoded images, drops, and lengths of
    entries."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(make_config(**({"images": PLAN} | changes)))
        self.steps: list[tuple[list[int], int, list[int]]] = []

    def launch(self, batch: Batch) -> _Step:
        images = [image.size for image in (*batch.images, *batch.ahead_images)]
        self.steps.append((images, len(batch.dropped_images), list(batch.lengths)))
        return super().launch(batch)

    @property
    def encodes(self) -> list[list[int]]:
        return [images for images, _, _ in self.steps if images]


def core_with(runner: FakeRunner, **fields: Any) -> EngineCore:
    return EngineCore(runner.config, runner, **fields)


def check(core: EngineCore, *requests: EngineRequest) -> None:
    """Assert that each request's output is the one that it has alone."""
    wanted = {r.id: expected(r, core.config) for r in requests}
    said = {id: (o.tokens, o.finish) for id, o in run(core, requests).items()}
    assert {id: said[id] for id in wanted} == wanted


def test_blocks_for_an_image_beside_the_window_before_it() -> None:
    """Bug: a request is as long as the blocks, and no step has room for its whole image."""
    runner = Recording(images=WHOLE, kinds=(Full(), Window(8)), num_blocks=18, block_size=4)
    core = core_with(runner)
    assert core.config.max_model_len == 4 * (18 - 3 - 2)  # blocks of a window and of an image
    length = core.config.max_model_len - 1
    check(core, make_request(1, **make_prompt([9] * (length - 9), 8, [9]), max_tokens=1))


def test_a_chunk_ends_before_an_image_that_its_step_cannot_encode() -> None:
    """Bug: tokens of an image are computed without its embeddings, or a step encodes without
    bound and keeps streams waiting."""
    runner = Recording(max_num_batched_tokens=12, async_scheduling=False)
    prompt = make_prompt([9], 7, [9], 6, [9] * 4)  # images of 8 (and 2 ends of rows) and 7
    check(core_with(runner), make_request(1, **prompt, max_tokens=1))
    assert runner.steps == [([8], 0, [12]), ([7], 0, [11])]
    tight = Recording(max_num_batched_tokens=64, images=replace(PLAN, cache_tokens=8))
    check(core_with(tight), make_request(1, **prompt, max_tokens=1))
    assert tight.steps == [([8], 0, [12]), ([7], 1, [11])]


def test_an_image_that_sees_itself_is_never_cut() -> None:
    """Bug: rows of an image are computed before the rest of it, and look into nothing."""
    prompt = make_prompt([9] * 10, 7, 7, [9])
    runner = Recording(images=WHOLE, max_num_batched_tokens=16, max_num_seqs=4, num_blocks=40)
    check(core_with(runner), make_request(1, **prompt, max_tokens=1))
    assert [lengths for *_, lengths in runner.steps] == [[10], [10], [11]]
    with_images = [make_request(id, **prompt, max_tokens=30, seed=id) for id in range(6)]
    # the bound that decodes put on prompts is smaller than an image
    check(core_with(Recording(images=WHOLE, max_num_batched_tokens=20)), *with_images)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_of_one_prompt_encode_once(prefix_caching: bool) -> None:
    """Bug: n = 8 costs eight encodes of one image."""
    runner = Recording(prefix_caching=prefix_caching, max_num_batched_tokens=20)
    core = core_with(runner)
    prompt = make_prompt(TEXT, 7, TEXT, 5, TEXT)
    check(core, *(make_request(id, **prompt, choice=id, seed=1) for id in range(8)))
    assert runner.encodes == [[8, 6]] or runner.encodes == [[8], [6]]
    assert core.stats().image_cache_hits >= (0 if prefix_caching else 14)


def test_a_prefix_may_end_inside_an_image() -> None:
    """Bug: the rest of an image has no embeddings after a prefix hit, or an image whose keys are
    all cached is encoded again."""
    runner = Recording(images=WHOLE)
    core = core_with(runner)
    prompt = make_prompt([9] * 3, 7, [9] * 5)  # the image ends after three blocks and a token
    check(core, make_request(1, **prompt))
    core.scheduler.drop_images()
    short = make_request(2, **make_prompt([9] * 3, 7, [8]))
    wanted = expected(short, core.config)
    output = run(core, [short])[2]
    assert (output.tokens, output.finish) == wanted and output.cached == 12
    assert runner.encodes == [[8], [8]]
    core.scheduler.drop_images()
    assert run(core, [make_request(3, **prompt)])[3].cached == 16
    assert runner.encodes == [[8], [8]]


def test_keys_name_the_image_and_its_place() -> None:
    """Bug: a question about one picture is answered from the keys of another, or of the same
    picture elsewhere."""
    core, _ = make_core(images=PLAN)
    for id, parts in enumerate(([9, 9], 8, 16), start=1):  # both pictures are one token
        wanted = [make_request(id, **make_prompt([9] * 3, parts, [9] * 9))]
        check(core, *wanted)
    swapped = [make_prompt([9], 8, [9], 16, [9] * 9), make_prompt([9], 16, [9], 8, [9] * 9)]
    check(core, *(make_request(10 + id, **prompt) for id, prompt in enumerate(swapped)))
    assert core.stats().prefix_hits == 0


def chain(*images: Image) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash("", "", ""), list(range(12)), 4, 3, images)
    return hashes


def test_hashes_of_texts_stay_and_those_of_images_differ_by_what_overlaps() -> None:
    """Bug: an upgrade empties every cache, routers and engines disagree, or an image that ends
    before a block is not in its chain."""
    text = chain()
    assert text[2].hex() == "7516caae27c11dc85915555505f03f30"
    first = Image(b"a" * 16, 2, 4, 4, (2, 2), (1, 2, 2), b"")
    other, later = (
        msgspec.structs.replace(first, digest=b"b" * 16),
        msgspec.structs.replace(first, start=3),
    )
    chains = [
        text,
        chain(first),
        chain(other),
        chain(later),
        chain(first, msgspec.structs.replace(first, start=8)),
    ]
    for blocks in zip(*chains, strict=True):
        assert len(set(blocks)) == len(chains) - (blocks[0] is not text[2])
    ids = list(range(3 * STRIDE + 1))
    far = msgspec.structs.replace(first, start=STRIDE + 5)
    assert hash_prefix(ids)[0] == hash_prefix(ids, images=[far])[0]
    assert not set(hash_prefix(ids)[1:]) & set(hash_prefix(ids, images=[far]))


def test_tenants_share_no_embeddings() -> None:
    """Bug: by the time of an answer, a tenant learns whether another has sent a picture."""
    runner = Recording()
    core = core_with(runner)
    prompt = make_prompt(TEXT, 7, TEXT)
    check(core, *(make_request(id, **prompt, cache_salt=str(id)) for id in range(2)))
    assert sum(map(len, runner.encodes)) == 2


def test_a_preempted_or_resumed_request_sees_its_images_again() -> None:
    """Bug: pixels are gone once they are encoded, so that a preemption loses the image."""
    runner = Recording(num_blocks=32, prefix_caching=False, images=replace(PLAN, cache_tokens=8))
    core = core_with(runner)
    prompts = [make_prompt(TEXT, picture, TEXT) for picture in range(8)]
    check(
        core,
        *(
            make_request(id, **prompt, max_tokens=60, ignore_eos=True)
            for id, prompt in enumerate(prompts)
        ),
    )
    assert core.stats().preemptions > 3 and sum(map(len, runner.encodes)) > 8
    message = make_request(1, **prompts[5], max_tokens=20, ignore_eos=True)
    tokens, _ = expected(message, core.config)
    message.token_ids += tokens[:7]
    assert run(core, [message])[1].tokens == tokens[7:]


def test_an_abort_between_encode_and_use_leaves_nothing() -> None:
    """Bug: the pixels of a client that hung up stay for ever, or its image blocks the cache."""
    driver = Driver(images=replace(PLAN, cache_tokens=8), max_num_batched_tokens=6)
    for _ in range(3):
        ids = [driver.add_request(**make_prompt(7, TEXT), seed=1) for _ in range(2)]
        driver.step()
        assert driver.runner.num_encoded
        driver.abort(ids[0])
        driver.step()
        driver.abort(ids[1])
        driver.finish()
    assert not driver.scheduler.images._pixels  # type: ignore[union-attr]


class BadTower(Recording):
    """A runner that raises `error` in launches for which `bad(sizes of the images)` is true."""

    def __init__(self, bad: Callable[[list[int]], bool], error: Exception, **changes: Any) -> None:
        super().__init__(**changes)
        self.bad, self.error = bad, error

    def launch(self, batch: Batch) -> _Step:
        if self.bad([image.size for image in (*batch.images, *batch.ahead_images)]):
            raise self.error
        return super().launch(batch)


class Timeline(FakeRunner):
    """A fake runner that records the host's order: encodes beside steps, waits, and image
    tokens."""

    def __init__(self, **changes: Any) -> None:
        config = make_config(images=PLAN, encodes_ahead=True, async_scheduling=True, **changes)
        super().__init__(config)
        self.order: list[tuple[str, int]] = []

    def launch(self, batch: Batch) -> _Step:
        launched = super().launch(batch)
        self.order += [("encode", batch.step)] * len(batch.ahead_images)
        if any(
            start <= at < start + length
            for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True)
            for at in self.places[row]
        ):
            self.order.append(("read", batch.step))
        return launched

    def execute(self, step: _Step) -> StepResult:
        self.order.append(("wait", step.step))
        return super().execute(step)


@pytest.mark.parametrize("text", [1, 40])
def test_encodes_are_launched_beside_the_steps_before_their_tokens(text: int) -> None:
    """Bugs: a tower runs between two steps of a stream; an image behind much text costs a step of
    its own."""
    runner = Timeline(max_num_batched_tokens=64)
    core = core_with(runner)
    stream = make_request(1, 5, max_tokens=40, ignore_eos=True)
    picture = make_request(2, **make_prompt([9] * text, 7, TEXT), max_tokens=2)
    wanted = {r.id: expected(r, core.config)[0] for r in (stream, picture)}
    core.add_request(stream)
    deltas = [core.step() for _ in range(6)]
    core.add_request(picture)
    while core.has_work():
        deltas.append(core.step())
    said: dict[int, list[int]] = {1: [], 2: []}
    for delta in (delta for some in deltas for delta in some):
        said[delta.id] += delta.token_ids
    assert {id: said[id] for id in wanted} == wanted
    ((_, step),) = (entry for entry in runner.order if entry[0] == "encode")
    reads = [at for kind, at in runner.order if kind == "read"]
    assert reads[0] == step + 1
    at = runner.order.index(("encode", step))
    assert runner.order[at + 1] == ("wait", step - 1)
    assert core.stats().images_encoded == 1 and not core.stats().image_cache_hits


def test_without_streams_a_step_encodes_for_itself() -> None:
    """Bug: the first token of a request alone comes one step later."""
    runner = Timeline()
    core = core_with(runner)
    run(core, [make_request(1, **make_prompt(TEXT, 7, TEXT), max_tokens=2)])
    assert [kind for kind, _ in runner.order].count("encode") == 0
    assert runner.order[0] == ("read", 1)


def test_an_encode_beside_a_step_is_for_its_request_alone() -> None:
    """Bug: hits are counted of a request that waited for its own image, or not of another's."""
    core = core_with(Timeline(prefix_caching=False))
    core.add_request(make_request(0, 5, max_tokens=60, ignore_eos=True))
    for _ in range(3):
        core.step()
    requests = [make_request(id, **make_prompt(TEXT, 7, TEXT)) for id in (1, 2)]
    check(core, *requests)
    assert core.stats().images_encoded == 1 and core.stats().image_cache_hits == 1


def test_an_encode_is_not_counted_if_its_step_cannot_run() -> None:
    """Bug: all streams are preempted for a prompt that gets no block, and later steps believe in
    embeddings that nobody has encoded."""
    runner = Recording(
        num_blocks=32, max_num_batched_tokens=4, max_num_seqs=4, encodes_ahead=True,
        async_scheduling=True, prefix_caching=False,
    )  # fmt: skip
    core = core_with(runner)
    core.add_request(make_request(1, 16, max_tokens=50, ignore_eos=True, priority=1))
    for _ in range(6):
        core.step()
    check(core, make_request(2, **make_prompt([9] * 85, 7, TEXT), max_tokens=2))
    assert core.stats().preemptions and runner.encodes == [[8]]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_image_that_fails_in_the_tower_costs_its_request_alone(ahead: bool) -> None:
    """Bug: one picture ends the engine, or everybody who runs beside it."""
    runner = BadTower(
        lambda sizes: 5 in sizes, RuntimeError("tower"), images=PLAN, encodes_ahead=ahead
    )
    core = core_with(runner)
    if ahead:
        core.add_request(make_request(50, 5, max_tokens=100, ignore_eos=True))
        core.step()
    requests = [make_request(id, **make_prompt(TEXT, id, TEXT)) for id in range(8)]
    wanted = {r.id: expected(r, core.config) for r in requests}
    outputs = run(core, requests)
    outputs.pop(50, None)
    for id, output in outputs.items():
        if id == 4:
            assert output.deltas[-1].error.startswith("engine_error: the engine fails on this")
        else:
            assert (output.tokens, output.finish) == wanted[id]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("plan", [PLAN, WHOLE])
def test_a_tower_without_memory_encodes_fewer_images_at_a_time(
    plan: ImagePlan, ahead: bool
) -> None:
    """Bug: images that fit one by one fail together, or a step that never fits is tried again for
    ever."""
    changes = {"images": plan, "encodes_ahead": ahead}
    runner = BadTower(lambda sizes: sum(sizes) > 8, OutOfMemory("tower"), **changes)
    core = core_with(runner)
    if ahead:
        core.add_request(make_request(50, 5, max_tokens=100, ignore_eos=True))
        core.step()
    check(core, *(make_request(id, **make_prompt(TEXT, 7, id, TEXT)) for id in range(6)))
    assert core.stats().out_of_memory > 0
    runner = BadTower(lambda sizes: 8 in sizes, OutOfMemory("tower"), **changes)
    core = core_with(runner)
    outputs = run(core, [make_request(id, **make_prompt(TEXT, id, TEXT)) for id in (6, 7)])
    assert [output.finish == "error" for output in outputs.values()] == [False, True]


def test_embeddings_end_with_the_weights_that_made_them() -> None:
    """Bug: after an update, or a sleep, an answer is about what an older tower saw, or about
    memory that was given back."""

    class Weights:
        def holds(self, folder: str) -> bool:
            return False

        def check(self, folder: str) -> None: ...
        def load(self, folder: str) -> None: ...

    class Memory:
        def sleep(self, parts: Collection[str], *, drop: bool) -> None:
            runner.encoded.clear()

        def wake(self, parts: Collection[str]) -> None: ...

    runner = Recording()
    core = core_with(runner, weights=Weights(), memory=Memory())
    requests = iter(make_request(id, **make_prompt([9] * id, 7, TEXT)) for id in range(9))
    for change in (lambda: core.update_weights(UpdateWeights(1, os.curdir)), core.sleep):
        check(core, next(requests))
        check(core, next(requests))
        change()
        while not (core._updates.ready or core._sleep.wanted):
            pass
        while core.has_work():
            core.step()
    check(core, next(requests))
    assert runner.encodes == [[8]] * 3
    assert [dropped for _, dropped, _ in runner.steps if dropped] == [1, 1]


def test_embeddings_of_a_failed_request_are_not_used_again() -> None:
    """Bug: one step that went wrong makes every later answer about the same picture wrong."""
    runner = Recording()
    runner.fail = {1}
    core = core_with(runner)
    outputs = run(core, [make_request(1, **make_prompt(TEXT, 7, TEXT), max_tokens=3)])
    assert outputs[1].finish == "error"
    check(core, make_request(2, **make_prompt(TEXT, 7, TEXT), max_tokens=3))
    assert runner.encodes == [[8], [8]]


def test_images_are_counted() -> None:
    """Bug: an operator cannot see what images cost, or the time of a tower shrinks the chunks of
    texts."""

    class Timed(Recording):
        def execute(self, step: _Step) -> StepResult:
            seconds = 100.0 if step.images else 0.0
            return replace(super().execute(step), encode_seconds=seconds, encode_wait=seconds)

    core = core_with(Timed(prefix_caching=False, images=PLAN))
    check(core, *(make_request(id, **make_prompt([9], 7, [9], 7, [9])) for id in range(2)))
    stats = core.stats()
    read = {metric.key: metric.read(stats) for metric in REPLICA_METRICS}
    assert read["images_encoded_total"] == 1 and read["image_tokens_encoded_total"] == 8
    assert read["image_encode_seconds_total"] == 100 and read["image_cache_hits_total"] == 3
    assert read["image_cache_usage_perc"] == 8 / 24
    assert core.scheduler.pace.limit(64, 1, 100) == 64


@pytest.mark.parametrize("ahead", [False, True])
def test_embeddings_that_came_take_no_encode_and_no_budget(ahead: bool) -> None:
    """Bugs: a step that encodes nothing ends before the second image; embeddings fill the host's
    memory without bound; an image whose embeddings were dropped has no pixels left."""
    runner = Recording(
        max_num_batched_tokens=12,
        num_blocks=32,
        async_scheduling=False,
        images=replace(PLAN, cache_tokens=16),
        encodes_ahead=ahead,
    )
    core = core_with(runner)
    prompt = make_prompt([9], 6, 5, [9] * 10)
    check(core, make_request(1, prompt["prompt"], images=received(prompt["images"]), max_tokens=1))
    assert runner.steps[0][0] == [7, 6] and not runner.num_encoded
    stats = core.stats()
    assert (stats.images_received, stats.images_encoded, stats.image_tokens_encoded) == (2, 0, 0)
    prompts = [make_prompt(TEXT, picture, TEXT) for picture in range(8)]
    requests = [
        make_request(id, prompt["prompt"], images=received(prompt["images"]), max_tokens=40)
        for id, prompt in enumerate(prompts, start=2)
    ]
    check(core, *requests)
    stats = core.stats()
    assert stats.preemptions and stats.images_received > 2 and stats.images_encoded > 1


def test_embeddings_that_came_end_with_the_weights() -> None:
    """Bug: embeddings of older weights wait with their request, and answer after an update."""
    core = core_with(Recording())
    prompt = make_prompt(TEXT, 7, TEXT)
    core.add_request(make_request(1, prompt["prompt"], images=received(prompt["images"])))
    core.scheduler.drop_images()
    while core.has_work():
        core.step()
    assert core.stats().images_encoded == 1 and not core.stats().images_received


@pytest.mark.parametrize("by_model", [False, True])
def test_drafts_beside_images_change_nothing(by_model: bool) -> None:
    """Bug: a draft stands where an image's embedding should."""
    own = computed([3]) if by_model else told("right", [3])
    core, runner = make_core(images=PLAN, speculation=own, drafts="right", max_num_seqs=8)
    requests = [make_request(id, **make_prompt(TEXT, id, TEXT)) for id in range(12)]
    for message in requests:
        message.prediction = expected(message, core.config)[0]
    check(core, *requests)
    stats = core.stats()
    assert stats.draft_tokens == sum(stats.accepted_by_position) > 0 and runner.num_encoded == 12


def test_texts_run_as_in_an_engine_without_images() -> None:
    """Bug: who sends no image pays for those who do."""
    steps = []
    for plan in (None, PLAN):
        runner = Recording(images=plan, num_blocks=40, max_num_batched_tokens=20)
        rows: list[Batch] = []
        launch = runner.launch
        runner.launch = lambda batch, launch=launch, rows=rows: rows.append(batch) or launch(batch)  # type: ignore
        run(core_with(runner), [make_request(id, 3 + 5 * id % 23) for id in range(30)])
        steps.append(rows)
    assert len(steps[0]) > 20 and steps[0] == steps[1]


def calls_of_steps(plan: ImagePlan | None) -> Counter[str]:
    """Return the calls of functions in 16 steps of eight texts, some of which begin or end
    meanwhile."""
    core = core_with(FakeRunner(make_config(images=plan, encodes_ahead=plan is not None)))
    for id in range(8):
        core.add_request(make_request(id, 5, max_tokens=4 + 2 * id, ignore_eos=True))
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        inside = Path(frame.f_code.co_filename).parts[-3:-1] == ("engine", "scheduling")
        if event == "call" and inside:
            calls[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        for _ in range(16):
            core.step()
    finally:
        sys.setprofile(None)
    return calls


def test_texts_call_nothing_for_images() -> None:
    """Bug: each step of a text on a model that sees does work for images that nobody has sent."""
    alone, seeing = calls_of_steps(None), calls_of_steps(PLAN)
    assert alone["core.step"] == 16 and alone["phases._end"] > 3
    assert seeing == alone


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the budget is ignored": lambda patch: patch.setattr(
        ImageCache, "reach", lambda self, request, length, tokens: length
    ),
    "nothing is dropped": lambda patch: patch.setattr(
        ImageCache, "_make_room", lambda self, size: None
    ),
    "drops are not told": lambda patch: patch.setattr(
        ImageCache, "_drop", lambda self, digest: self._sizes.pop(digest)
    ),
    "an image is cut": lambda patch: patch.setattr(
        ImageCache, "whole", lambda self, request, length: length
    ),
    "keys do not name images": lambda patch: patch.setattr(
        block_manager, "extend_hashes", lambda *arguments: extend_hashes(*arguments[:5])
    ),
    "an encode ahead is used at once": lambda patch: patch.setattr(
        ImageCache,
        "hand_out",
        lambda self, request, length, most, tokens: (
            hand_out(self, request, length, most, tokens) and length
        ),
    ),
    "an encode of no step is counted": lambda patch: patch.setattr(
        ImageCache, "cancel", lambda self: None
    ),
    "embeddings stay after a failure": lambda patch: patch.setattr(
        scheduler.Scheduler, "drop_images", lambda self: None
    ),
    "an ended request keeps its pixels": lambda patch: patch.setattr(
        ImageCache, "end_request", lambda self, request: None
    ),
    "a preempted request needs nothing": lambda patch: patch.setattr(
        ImageCache, "restart", lambda self, request: None
    ),
    "images stay where virtual tokens push them": lambda patch: patch.setattr(
        request, "_own", lambda image, num_virtual, cache_salt: image
    ),
}


hand_out = ImageCache.hand_out


def suite() -> None:
    test_a_chunk_ends_before_an_image_that_its_step_cannot_encode()
    test_keys_name_the_image_and_its_place()
    test_an_encode_is_not_counted_if_its_step_cannot_run()
    test_embeddings_end_with_the_weights_that_made_them()
    for plan in (PLAN, replace(WHOLE, cache_tokens=9)):
        ahead = {"images": plan, "encodes_ahead": True, "max_num_batched_tokens": 20}
        random_run(3, num_blocks=44, **ahead)
        random_run(4, num_blocks=30, prefix_caching=False, **ahead)
    for plan in (PLAN, WHOLE, replace(PLAN, cache_tokens=9)):
        random_run(1, images=plan, max_num_batched_tokens=20, num_blocks=44)
        random_run(2, images=plan, max_num_batched_tokens=20, num_blocks=44, prefix_caching=False)


def test_the_suite_passes_without_a_fault() -> None:
    """Bug: faults "caught" by a suite that fails anyway."""
    suite()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an invariant of images that no test would see broken."""
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        suite()
