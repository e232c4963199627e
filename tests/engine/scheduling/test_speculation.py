"""Drafts in the scheduler: the same texts in fewer steps, whatever the drafter says."""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engine.batch import Batch
from engine.config.kv_groups import Full, Window
from engine.scheduling.core import CoreConfig, EngineCore
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.drafts import speculation as module
from engine.scheduling.drafts.speculation import Speculation, _cut
from engine.scheduling.drafts.step_drafts import StepDrafts
from engine.scheduling.drafts.verifications import Verifications
from engine.scheduling.memory.image_plan import ImagePlan
from engine.scheduling.request import Request
from engine.speculation.computed import ComputedDrafter
from engine.speculation.lengths import DraftLengths, DraftRecord
from engine.speculation.lookup import Lookup, LookupDrafts, LookupOptions
from engine.speculation.model_lengths import ModelLengths
from engine.speculation.synthetic import SyntheticAcceptance
from tests.drafters import KINDS, ListedLengths, ToldDrafter, computed, told
from tests.engine.scheduling.driver import Driver, random_run
from tests.fakes import (
    EOS,
    IMAGE_TOKEN,
    expected,
    make_core,
    make_prompt,
    make_request,
    proposals_of,
    run,
)

ENGINE = str(Path(EngineCore.step.__code__.co_filename).parents[1])


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_right_drafts_are_all_accepted(most: int, ahead: bool) -> None:
    """Bugs: verification is off by one; a right draft is dropped; steps with drafts bring one
    token."""
    driver = Driver(speculation=told("right", [most]), async_scheduling=ahead, eos_token_ids=())
    for _ in range(3):
        driver.add_request(8, max_tokens=41)
    driver.finish()
    lengths = driver.scheduler.drafts.speculation._lengths  # type: ignore[union-attr]
    assert isinstance(lengths, ListedLengths)
    assert lengths.accepted == lengths.drafted > 0
    # the prompts; then most + 1 tokens a step; ahead, one token is in flight when drafts begin
    assert driver.runner.num_steps <= 1 + ahead + -(-40 // (most + 1))
    counters = driver.scheduler.counters
    assert counters.output_tokens == 3 * 41
    assert counters.draft_tokens == sum(counters.accepted_by_position) == lengths.drafted


LIVES = pytest.mark.parametrize(
    ("kind", "ahead"),
    [
        pytest.param(kind, ahead, marks=[] if ahead or kind == "mixed" else [pytest.mark.slow])
        for kind in KINDS
        for ahead in (True, False)
    ],
)


@LIVES
def test_random_lives_with_drafts(kind: str, ahead: bool) -> None:
    """Bugs: a block or token is lost, or a text changes, in a rare order of drafts, preemption,
    abort and end."""
    configs: list[dict[str, Any]] = [
        {},
        {"num_blocks": 24, "max_model_len": 64},
        {"max_num_batched_tokens": 7},
        {"block_size": 1, "num_blocks": 130},
        {"prefix_caching": False},
        {"kinds": (Window(9), Window(4)), "num_blocks": 60},
    ]
    preemptions = accepted = 0
    for seed, changes in enumerate(configs * 2):
        speculation = told(kind, [7, 3, 0, 1])
        driver = random_run(seed, async_scheduling=ahead, speculation=speculation, **changes)
        preemptions += driver.scheduler.counters.preemptions
        accepted += sum(driver.scheduler.counters.accepted_by_position)
    assert preemptions > 5, "these runs are meant to preempt"
    assert (accepted > 0) == (kind != "wrong")


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_right_drafts_of_the_device_are_all_accepted(most: int, ahead: bool) -> None:
    """Bugs: drafts continue the text of another moment, or are dropped; the step of the prompt
    computes none; the device runs ahead of the text that drafts continue."""
    driver = Driver(
        speculation=computed([most]), drafts="right", async_scheduling=ahead, eos_token_ids=()
    )
    for _ in range(3):
        driver.add_request(8, max_tokens=41)
    driver.finish()
    lengths = driver.scheduler.drafts.speculation._lengths  # type: ignore[union-attr]
    assert isinstance(lengths, ListedLengths)
    assert lengths.accepted == lengths.drafted > 0
    assert driver.runner.num_steps <= 1 + -(-40 // (most + 1))
    assert driver.runner.max_in_flight == 1 + ahead


@LIVES
def test_random_lives_with_drafts_of_the_device(kind: str, ahead: bool) -> None:
    """Bugs: a draft has no block for its keys, or another request's; a text changes, in a rare
    order of drafts, preemption, abort and end."""
    configs: list[dict[str, Any]] = [
        {},
        {"num_blocks": 24, "max_model_len": 64},
        {"max_num_batched_tokens": 7},
        {"block_size": 1, "num_blocks": 130},
        {"kinds": (Full(), Window(9)), "num_blocks": 60},
    ]
    preemptions = accepted = 0
    for seed, changes in enumerate(configs):
        driver = random_run(
            seed, async_scheduling=ahead, speculation=computed([7, 3, 0, 1]), drafts=kind, **changes
        )
        preemptions += driver.scheduler.counters.preemptions
        accepted += sum(driver.scheduler.counters.accepted_by_position)
    assert preemptions > 2, "these runs are meant to preempt"
    assert (accepted > 0) == (kind != "wrong")


def test_synthetic_acceptance_of_the_devices_drafts() -> None:
    """Bug: benchmarks of drafters accept what a random drafter guesses, which is nothing."""
    always = SyntheticAcceptance((1.0, 1.0, 0.0))
    speculation = Speculation(ComputedDrafter(), ListedLengths([3]), always)
    core, runner = make_core(speculation=speculation, eos_token_ids=())
    runner.drafts = "wrong"
    core.add_request(make_request(1, 8, max_tokens=60))
    synthetic = set()
    while core.has_work():
        core.step()
        for proposal in proposals_of(runner.batches[-1]):
            synthetic.add((proposal.verified, proposal.synthetic))
    counters = core.scheduler.counters
    assert counters.accepted_by_position[:2] == [counters.drafts] * 2
    assert (3, 2) in synthetic


def test_cut_drafts_keep_their_synthetic_counts() -> None:
    """Bug: without blocks for a request's drafts, the others are accepted by its rates."""
    chosen = Verifications(
        requests=[
            Request(make_request(id, 8), CoreConfig(3, 64, 64, 16, 4), id) for id in range(3)
        ],
        entries=[0, 1, 2],
        lengths=[2, 2, 2],
        drafts=[[1, 2]] * 3,
        synthetic=[0, 1, 2],
    )
    chosen.cut([0, 2, 1])
    chosen.settle(tokens=[5, 5, 5], sampled=[6, 6, 6])
    assert chosen.accepted == [1, 1]


class AlwaysOn(ModelLengths):
    """A controller that does its work, but asks for three drafts of each request in each step."""

    def begin_step(self, entries: int) -> int:
        super().begin_step(entries)
        return self._most

    def worth(self, records: Sequence[DraftRecord], lengths: Sequence[int]) -> list[int]:
        super().worth(records, lengths)
        return list(lengths)


@pytest.mark.parametrize("requests", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_a_request_with_drafts_makes_few_calls(requests: int) -> None:
    """Bug: each request with drafts runs more Python in a step than before, which nobody sees in a
    diff; the device waits for it."""
    lengths, chance = AlwaysOn(3), SyntheticAcceptance((0.75, 0.55, 0.4))
    sizes: dict[str, Any] = {"num_blocks": 20 * requests, "max_num_seqs": 1024, "block_size": 16}
    core, _ = make_core(
        speculation=Speculation(ComputedDrafter(), lengths, chance),
        **sizes,
        max_num_batched_tokens=8192,
        max_model_len=256,
        prefix_caching=False,
    )
    for id in range(requests):
        core.add_request(make_request(id, 8, max_tokens=200, ignore_eos=True))
    for _ in range(8):
        core.step()
    calls = Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        files = [part.f_code.co_filename for part in (frame, frame.f_back) if part is not None]
        if event == "call" and all(file.startswith(ENGINE) for file in files):
            calls[frame.f_code.co_name] += 1  # the fake device's calls do not count

    steps = 8
    sys.setprofile(note)
    for _ in range(steps):
        core.step()
    sys.setprofile(None)
    assert core.scheduler.counters.drafts > requests * steps
    # what steps call whatever their requests, and of each request reserving and hashing blocks
    assert calls.total() <= (150 + 0.9 * requests) * steps, calls.most_common(12)


@pytest.mark.parametrize("at", [3, 5, 8])
@pytest.mark.parametrize("where", ["launch", "execute"])
def test_a_failure_with_two_steps_with_drafts_in_flight(where: str, at: int) -> None:
    """Bug: after a failed step, requests continue with drafts or accepted drafts of dropped
    steps."""
    driver = Driver(speculation=computed([3]), drafts="right", eos_token_ids=())
    for length in (8, 5, 3, 4):
        driver.add_request(length, max_tokens=40)
    right, calls = getattr(driver.runner, where), 0

    def failing(step: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            assert driver.runner.in_flight
            raise RuntimeError("lost")
        return right(step)

    setattr(driver.runner, where, failing)
    driver.finish()
    assert calls > at and driver.runner.max_in_flight == 2


def test_steps_with_images_know_their_positions() -> None:
    """Bug: a decode beside an image is rotated for the position before its accepted drafts."""
    plan = ImagePlan((IMAGE_TOKEN,), 40, 8, bidirectional=False)
    driver = Driver(speculation=computed([3]), drafts="right", images=plan, eos_token_ids=())
    driver.add_request(8, max_tokens=60)
    unsettled = []
    for count in range(16):
        if count in (5, 9):
            prompt = make_prompt([3, 4], count, [7])
            driver.add_request(prompt.pop("prompt"), max_tokens=4, **prompt)
        driver.step()
        batch = driver.runner.batches[-1]
        if batch.num_decodes:
            unsettled.append((bool(batch.images), batch.unsettled))
    driver.finish()
    assert (True, 0) in unsettled and (False, 3) in unsettled
    assert all(not images or not count for images, count in unsettled)


def test_wrong_drafts_cost_no_step() -> None:
    """Bug: a request whose drafts are wrong gets no token in that step."""
    plain, tried = (
        Driver(speculation=speculation, async_scheduling=False)
        for speculation in (None, told("wrong"))
    )
    for driver in (plain, tried):
        for length in (8, 3):
            driver.add_request(length, max_tokens=30)
        driver.finish()
    assert tried.runner.num_steps == plain.runner.num_steps


def test_engine_runs_ahead_again_without_drafts() -> None:
    """Bug: after a verification the device waits for the host in every step."""
    speculation = told("right", [7, 7, 7, *[0] * 100])
    driver = Driver(speculation=speculation, eos_token_ids=())
    driver.add_request(8, max_tokens=60)
    most = []
    while driver.core.has_work():
        driver.runner.max_in_flight = 0
        driver.step()
        most.append(driver.runner.max_in_flight)
    assert 1 in most[1:6] and set(most[8:-2]) == {2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [7, 64])
def test_steps_with_drafts_of_the_device_are_launched_ahead(kind: str, budget: int) -> None:
    """Bug: while the host handles accepted drafts, or a prompt joins, ends, or is aborted beside
    them, the device has nothing to do."""
    driver = Driver(speculation=computed([3, 3, 0, 1]), drafts=kind, max_num_batched_tokens=budget)
    alone = Counter[bool]()
    launch = driver.runner.launch

    def watched(batch: Batch) -> Any:
        alone[not driver.runner.in_flight] += 1
        return launch(batch)

    driver.runner.launch = watched  # type: ignore[method-assign]
    ids = [driver.add_request(length, max_tokens=60) for length in (8, 5)]
    for count in range(40):
        driver.step()
        if count % 5 == 0:
            ids.append(driver.add_request(3 + count, max_tokens=50, ignore_eos=True))
        if count == 17:
            driver.abort(ids[2])
    driver.finish()
    # the first step, and where a request may end at the border of a block
    assert alone[True] <= 1 + len(ids) / 2 and alone[False] > 40
    assert driver.scheduler.counters.drafts > 20


@pytest.mark.parametrize(
    ("kind", "name"),
    [(StepDrafts, "_give_room"), (DecodeGroup, "advance"), (StepDrafts, "launched")],
)
def test_a_wrong_count_of_accepted_drafts_is_noticed(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the tests of drafts pass with accepted drafts that are lost, counted twice or have no
    block."""
    right = getattr(kind, name)

    def wrong(self: Any, *arguments: Any) -> Any:
        if name == "_give_room":
            return True
        if name == "advance":
            return right(self, [(request, count + 1) for request, count in arguments[0]])
        right(self, *arguments)
        arguments[1].unsettled = 0
        return None

    monkeypatch.setattr(kind, name, wrong)
    with pytest.raises(AssertionError):
        for seed in range(4):
            speculation = computed([7, 3, 0, 1])
            random_run(seed, async_scheduling=True, speculation=speculation, drafts="right")


@pytest.mark.parametrize("speculation", [told("right", [7]), computed([3])])
def test_next_step_is_launched_before_tokens_are_published(speculation: Speculation) -> None:
    """Bug: while tokens are sent to clients the device has nothing to do."""
    driver = Driver(speculation=speculation, eos_token_ids=())
    for length in (8, 5):
        driver.add_request(length, max_tokens=60)
    driver.step()
    while driver.core.has_work():
        running = bool(driver.core.scheduler.requests)
        driver.step()
        assert driver.runner.in_flight or not driver.core.scheduler.requests or not running
    assert driver.core.scheduler.counters.draft_tokens


def test_drafts_end_where_a_request_ends() -> None:
    """Bugs: more tokens than max_tokens; tokens after an end token; an end token among drafts is
    not reported."""
    core, _ = make_core(speculation=told("right", [7]), async_scheduling=False)
    for id in range(1, 60):
        message = make_request(id, 6, max_tokens=20)
        core.add_request(message)
        core.scheduler.requests[id].prediction = expected(message, core.config)[0] + [5] * 9
    outputs = run(core)
    ends = [output.deltas[-1] for output in outputs.values()]
    assert {delta.finish for delta in ends} == {"stop", "length"}
    assert all((delta.stop_token == EOS) == (delta.finish == "stop") for delta in ends)
    assert any(len(delta.token_ids) > 1 and delta.stop_token == EOS for delta in ends)


def test_log_probabilities_come_with_their_tokens() -> None:
    """Bug: log-probabilities of rejected drafts are told, or those of accepted ones are not."""
    driver = Driver(speculation=told("mixed", [7, 3]))
    for length in (4, 9):
        driver.add_request(length, max_tokens=25, logprobs=0)
    while driver.core.has_work():
        driver.step()
    for output in driver.outputs.values():
        told_ids = [item.token_id for delta in output.deltas for item in delta.logprobs or []]
        assert told_ids == output.tokens
        positions = [-item.logprob for delta in output.deltas for item in delta.logprobs or []]
        assert positions == sorted(positions) and len(set(positions)) == len(positions)
    driver.finish()


def test_entries_and_budget_bound_drafts() -> None:
    """Bug: drafts make a step larger than buffers and graphs (FakeRunner asserts it), or one
    request takes all the room."""
    for limits in ({"max_num_seqs": 6}, {"max_num_batched_tokens": 9}):
        driver = Driver(speculation=told("right", [7]), async_scheduling=False, **limits)
        for _ in range(3):
            driver.add_request(4, max_tokens=40, ignore_eos=True)
        for _ in range(6):
            driver.step()
        drafts = [len(drafts) for _, _, drafts in driver.runner.batches[-1].drafts]
        assert drafts in ([1, 1, 1], [2, 2, 2])
        driver.finish()


def test_cut_takes_from_the_longest() -> None:
    """Rows for one request's long draft, and none for the first token of another's."""

    assert _cut([7, 3, 1], 8) == [4, 3, 1]
    assert _cut([7, 3, 1], 7) == [3, 3, 1]
    assert _cut([7, 7], 5) == [2, 2]
    assert _cut([7, 7, 7], 2) == [1, 1, 0]


def test_a_failure_at_a_draft_ends_the_request_only_if_the_draft_is_right() -> None:
    """Bugs: logits that are not finite after a wrong draft fail a healthy request; after a right
    draft they are overlooked."""
    for kind in ("right", "wrong"):
        core, runner = make_core(speculation=told(kind), async_scheduling=False)
        message = make_request(1, 6, max_tokens=12, ignore_eos=True)
        core.add_request(message)
        answer = expected(message, core.config)[0]
        core.scheduler.requests[1].prediction = answer
        execute = runner.execute

        def failing(step: Any, execute: Any = execute) -> Any:
            result = execute(step)
            if len(result.tokens) == 4 and step.entries[0][1] >= 10:
                result.tokens[2], result.errors = -1, {2: "numerical_error: not finite"}
            return result

        runner.execute = failing  # type: ignore[method-assign]
        output = run(core)[1]
        if kind == "wrong":
            assert (output.tokens, output.finish) == (answer, "length")
        else:
            assert output.finish == "error" and output.tokens == answer[: len(output.tokens)]


def test_drafter_learns_the_text_and_the_end() -> None:
    """Bug: a drafter misses tokens of steps without drafts, or is never told of an end."""
    drafter = ToldDrafter("right")
    speculation = Speculation(drafter, ListedLengths([3, 3, 0, 0]))
    driver = Driver(speculation=speculation)
    ids = [driver.add_request(5, max_tokens=20, ignore_eos=True) for _ in range(2)]
    answers = [driver.expected[id][0] for id in ids]
    driver.finish()
    assert [drafts.text[5:] for drafts in drafter.begun] == answers
    assert all(drafts.ended for drafts in drafter.begun)


def test_nothing_is_asked_where_nothing_repeats() -> None:
    """Bug: with `auto`, each step asked each request for drafts that no text has, 3 us each."""
    lookup = Lookup(LookupOptions())
    speculation = Speculation(lookup, DraftLengths(), lookup=lookup)
    driver = Driver(speculation=speculation, max_num_seqs=40, num_blocks=2000, max_model_len=400)
    for first in range(32):
        driver.add_request(3 + first, max_tokens=300, ignore_eos=True)
    for _ in range(120):
        driver.step()
    asked = 0
    propose = LookupDrafts.propose

    def counted(drafts: LookupDrafts, most: int) -> list[int]:
        nonlocal asked
        asked += 1
        return propose(drafts, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LookupDrafts, "propose", counted)
        patch.setattr(lookup, "repeats", lambda token_ids, key, length: False)
        for _ in range(100):
            driver.step()
        assert asked == 0
        patch.setattr(lookup, "repeats", lambda token_ids, key, length: True)
        for _ in range(120):
            driver.step()
        assert asked > 0
    driver.finish()


def test_new_texts_are_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: when drafts begin, one step waits until the prompts of all requests are indexed."""
    monkeypatch.setattr(module, "_READ", 20)
    drafter = ToldDrafter("right")
    driver = Driver(speculation=Speculation(drafter, ListedLengths([3])), async_scheduling=False)
    for _ in range(4):
        driver.add_request(17, max_tokens=20, ignore_eos=True)
    begun = []
    for _ in range(4):
        driver.step()
        begun.append(len(drafter.begun))
    assert begun == [0, 2, 4, 4]
    driver.finish()


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_amid_drafts(recompute: bool) -> None:
    """Bugs: a request that is computed again after an update goes on with drafts that were never
    verified; answers of the old weights are drafts of the new ones."""
    driver = Driver(speculation=told("mixed", [7, 3]), async_scheduling=False)
    for length in (4, 9, 17):
        driver.add_request(length, max_tokens=40, ignore_eos=True)
    for number in range(3):
        for _ in range(4):
            driver.step()
        driver.scheduler.change_weights(f"weights {number}", recompute=recompute)
    driver.finish()

    lookup = Lookup(LookupOptions())
    core, _ = make_core(speculation=Speculation(lookup, ListedLengths([3]), lookup=lookup))
    keys = []
    for number in range(2):
        core.add_request(make_request(number, 6, max_tokens=20))
        keys.append(core.scheduler.requests[number].root)
        run(core)
        assert lookup.answers.find(keys[number]) is not None
        core.scheduler.change_weights("new", recompute=False)
    assert keys[0] != keys[1]
