"""Snapshots of recurrent states: which prefixes are found again, what is computed for them, and
lives of an engine whose layers keep all keys, those of a window, and a state."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from engine.config.kv_groups import Full, Window
from engine.messages import EngineRequest
from engine.scheduling.core import EngineCore
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.memory.host_plan import HostPlan
from engine.scheduling.memory.snapshots import SnapshotPlan, Snapshots
from tests.drafters import KINDS, ListedLengths, ToldDrafter, computed, told
from tests.engine.scheduling.driver import Driver, random_run
from tests.fakes import FakeRunner, expected, make_core, make_request, run

PLAN = SnapshotPlan(slots=8, every=16, gap=4)
HYBRID = (Full(), Window(9))


def core_with(plan: SnapshotPlan = PLAN, **changes: Any) -> tuple[EngineCore, FakeRunner]:
    values: dict[str, Any] = {"kinds": HYBRID, "num_blocks": 200, "snapshots": plan}
    return make_core(**(values | changes))


def snapshots_of(core: EngineCore) -> Snapshots:
    assert core.scheduler.memory.snapshots is not None
    return core.scheduler.memory.snapshots


def computed_by(core: EngineCore, runner: FakeRunner, request: EngineRequest) -> int:
    """Run a request, and return the number of tokens that the device computes for it."""
    before = runner.num_tokens
    run(core, [request])
    return runner.num_tokens - before


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_conversation_computes_what_is_new(async_scheduling: bool) -> None:
    """Bug: no snapshot is taken at the end of a prompt or of an answer, and each turn computes the
    whole conversation; or one is taken of another place than its name says."""
    core, _ = core_with(async_scheduling=async_scheduling)
    tokens = make_request(1, 37).token_ids
    for turn in range(4):
        request = make_request(1, tokens, max_tokens=9, ignore_eos=True)
        known = len(tokens)
        (output,) = run(core, [request]).values()
        if turn:
            assert output.cached >= known - 3 - PLAN.gap - 4, "less than the turn before"
        tokens = [*tokens[:known], *output.tokens, 3, 5, 4]


def test_a_prompt_is_found_to_its_last_border() -> None:
    """Bug: the same prompt again computes more than what a border cannot hold."""
    core, runner = core_with()
    prompt = make_request(1, 39).token_ids
    assert computed_by(core, runner, make_request(1, prompt.copy(), max_tokens=1)) == 39
    assert computed_by(core, runner, make_request(2, prompt.copy(), max_tokens=1)) == 3


def test_where_prompts_part_a_third_one_begins() -> None:
    """Bug: a system prompt that ends nowhere special is computed by each request for ever."""
    core, _ = core_with(SnapshotPlan(slots=8, every=1000, gap=4))
    system = make_request(1, 26).token_ids
    cached = []
    for user in range(2, 5):
        prompt = [*system, *[user] * 22]
        cached.append(run(core, [make_request(user, prompt, max_tokens=1)])[user].cached)
    assert cached == [0, 0, 24]


def test_long_prompts_have_snapshots_on_their_way() -> None:
    """Bug: a prompt that is cut short finds nothing of what was computed of it."""
    core, _ = core_with()
    prompt = make_request(1, 70).token_ids
    run(core, [make_request(1, prompt.copy(), max_tokens=1)])
    for length, cached in ((60, 48), (40, 32), (17, 16), (10, 0)):
        request = make_request(length, prompt[:length], max_tokens=1)
        assert run(core, [request])[length].cached == cached


def test_short_prompts_are_not_cut() -> None:
    """Bug: each greeting takes a step more, and a snapshot's memory, for a few tokens."""
    core, runner = core_with(SnapshotPlan(slots=8, every=64, gap=64))
    run(core, [make_request(1, 40, max_tokens=5, ignore_eos=True)])
    assert runner.num_steps == 5 and not len(snapshots_of(core))


def test_the_budget_bounds_them_and_the_oldest_goes() -> None:
    """Bug: more snapshots than there is memory for; or one in use goes before an old one."""
    core, _ = core_with(SnapshotPlan(slots=3, every=1000, gap=4), max_num_seqs=1)
    prompts = [make_request(id, 30).token_ids for id in range(1, 6)]
    ids = iter(range(100, 200))

    def ask(number: int) -> int:
        id = next(ids)
        return run(core, [make_request(id, prompts[number].copy(), max_tokens=1)])[id].cached

    assert [ask(0), ask(1), ask(2), ask(0)] == [0, 0, 0, 28]
    assert [ask(3), ask(0), ask(1)] == [0, 28, 0]
    assert len(snapshots_of(core)) == 3


def test_an_answer_replaces_its_own_snapshots_only() -> None:
    """Bug: each long answer fills the budget with states of its middle, and prompts have none."""
    core, _ = core_with(SnapshotPlan(slots=6, every=1000, gap=4), max_num_seqs=3)
    prompts = [make_request(id, 21).token_ids for id in range(1, 4)]
    requests = [
        make_request(id, prompt.copy(), max_tokens=40, ignore_eos=True)
        for id, prompt in enumerate(prompts)
    ]
    run(core, requests)
    assert len(snapshots_of(core)) == 6
    for id, prompt in enumerate(prompts, start=10):
        assert run(core, [make_request(id, prompt.copy(), max_tokens=1)])[id].cached == 20


def test_rows_of_no_request_hold_snapshots() -> None:
    """Bug: all memory is for states of requests that may run, and a server with few of them finds
    nothing of what they said; or a row is given to a request and a snapshot."""
    core, _ = core_with(SnapshotPlan(slots=1, every=1000, gap=4), max_num_seqs=6, num_blocks=400)
    prompts = [make_request(id, 30).token_ids for id in range(5)]

    def cached(count: int, first: int) -> list[int]:
        asked = [make_request(first + i, prompts[i].copy(), max_tokens=1) for i in range(count)]
        outputs = run(core, asked)
        return [outputs[first + i].cached for i in range(count)]

    assert cached(3, 10) == [0] * 3
    snapshots = snapshots_of(core)
    assert (len(snapshots), snapshots.capacity, len(snapshots.rows)) == (3, 7, 2)
    assert core.stats().snapshot_slots == 7
    assert cached(3, 20) == [28] * 3, "each begins from a row or the slot, in a row of its own"
    assert cached(5, 30) == [28] * 3 + [0] * 2
    core.check_integrity()
    # As many run as there are rows: snapshots make room, the oldest first.
    run(core, [make_request(40 + id, 9, max_tokens=2) for id in range(6)])
    assert len(snapshots) == 1 and not snapshots.rows and snapshots.evicted >= 4
    core.check_integrity()


def test_the_only_row_left_may_have_what_a_request_begins_from() -> None:
    """Bug: the snapshot that was found is given away for its row before its request has begun."""
    core, _ = core_with(SnapshotPlan(slots=1, every=1000, gap=4), max_num_seqs=2)
    prompts = [make_request(id, 30).token_ids for id in range(2)]
    run(core, [make_request(1, prompts[0].copy(), max_tokens=1)])  # has the slot of its own
    run(core, [make_request(2, prompts[1].copy(), max_tokens=1)])  # lies in a row
    snapshots = snapshots_of(core)
    assert len(snapshots.rows) == 1
    core.add_request(make_request(3, 9, max_tokens=30, ignore_eos=True))
    core.step()
    outputs = run(core, [make_request(4, prompts[1].copy(), max_tokens=9)])
    assert outputs[4].cached == 28
    core.check_integrity()


def test_the_end_of_a_prompt_is_worth_a_step_or_is_not_cut() -> None:
    """Bug: a turn of few tokens takes a step more on a device that computes them all for as much;
    or the next turn computes them once more, though the answer had a border to take them at."""
    plan = SnapshotPlan(slots=8, every=1000, gap=8, worth=20)
    core, runner = core_with(plan)
    tokens = make_request(1, 39).token_ids
    for turn, new in ((0, 39), (1, 13), (2, 13)):
        before = runner.num_steps
        request = make_request(turn, tokens.copy(), max_tokens=10, ignore_eos=True)
        (output,) = run(core, [request]).values()
        assert runner.num_steps - before == 10 + (turn == 0)
        assert not turn or len(tokens) - output.cached <= new + plan.gap + 4
        tokens = [*tokens, *output.tokens, 3, 5, 4]


def test_snapshots_go_with_their_blocks() -> None:
    """Bug: a prefix is found whose keys are another request's by now; or slots that nobody can find
    stay taken."""
    core, _ = core_with(num_blocks=60)
    prompt = make_request(1, 40).token_ids
    run(core, [make_request(1, prompt.copy(), max_tokens=1)])
    assert len(snapshots_of(core))
    run(core, [make_request(2, 110, max_tokens=1), make_request(3, 100, max_tokens=1)])
    assert run(core, [make_request(4, prompt.copy(), max_tokens=1)])[4].cached == 0
    core.reset_prefix_cache()
    assert not len(snapshots_of(core))


def test_snapshots_of_steps_that_do_not_count_are_forgotten() -> None:
    """Bug: a step that failed was to take a snapshot of a request that is not in it any more, and
    the next one with this prefix goes on from what was never copied."""
    core, _ = core_with()
    core.add_request(make_request(1, 39))
    assert core.scheduler.schedule() is not None
    batch = core.scheduler.schedule()
    assert batch is not None and batch.saved_states and len(snapshots_of(core)) == 1
    core.scheduler.requeue(trusted=True)
    assert not len(snapshots_of(core))
    core.check_integrity()


def test_no_slot_is_a_model_without_prefix_cache() -> None:
    """Bug: a model whose snapshots have no memory divides by none, or says that it found some."""
    core, _ = core_with(SnapshotPlan(slots=0, every=16), prefix_caching=False)
    for id in (1, 2):
        request = make_request(id, [7] * 40, max_tokens=9)
        assert run(core, [request])[id].cached == 0


ADMISSIONS, SLOTS = ("optimistic", "sum", "reserved", "peak"), (0, 1, 3, 40)


@pytest.mark.parametrize(
    ("admission", "slots"),
    [
        pytest.param(
            admission,
            slots,
            marks=[] if admission == "optimistic" or slots == 3 else [pytest.mark.nightly],
        )
        for admission in ADMISSIONS
        for slots in SLOTS
    ],
)
def test_random_lives(admission: str, slots: int) -> None:
    """Bug: a rare order of hits, preemptions, failures and evictions that resumes from a state
    which is not there yet or any more, or loses a slot."""
    preemptions = hits = 0
    for seed in range(4):
        driver = random_run(
            seed,
            kinds=(HYBRID, (Full(),))[seed % 2],
            num_blocks=34 * (2 - seed % 2),
            snapshots=SnapshotPlan(slots, every=12, gap=(4, 9)[seed // 2]),
            admission=admission,
            prefix_caching=bool(slots),
            async_scheduling=bool(seed % 2),
            max_num_batched_tokens=(64, 7)[seed == 2],
        )
        preemptions += driver.scheduler.counters.preemptions
        hits += driver.scheduler.counters.prefix_hits
    assert (preemptions > 0) == (admission == "optimistic")
    assert (hits > 0) == (slots > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_random_lives_with_drafts(kind: str) -> None:
    """Bug: a state keeps a rejected draft or lacks an accepted one, when a snapshot is taken of it,
    its request is preempted, or its row is another's."""
    preemptions = hits = accepted = 0
    for seed in range(6):
        driver = random_run(
            seed,
            kinds=(HYBRID, (Full(),))[seed % 2],
            num_blocks=30 * (2 - seed % 2),
            snapshots=SnapshotPlan((3, 0, 40)[seed % 3], every=12, gap=(4, 9)[seed // 3]),
            prefix_caching=seed % 3 != 1,
            async_scheduling=bool(seed % 2),
            speculation=(told(kind, [7, 3, 0, 1]), computed([7, 3, 0, 1]))[seed // 3],
            drafts=kind,
        )
        preemptions += driver.scheduler.counters.preemptions
        hits += driver.scheduler.counters.prefix_hits
        accepted += sum(driver.scheduler.counters.accepted_by_position)
    assert preemptions and hits and (accepted > 0) == (kind != "wrong")


def test_drafts_end_where_a_snapshot_is_due() -> None:
    """Bug: accepted drafts take a request past a border, and the next turn computes the answer."""
    core, _ = core_with(speculation=told("right", [7]), async_scheduling=False)
    request = make_request(1, 9, max_tokens=60, ignore_eos=True)
    answer = expected(request, core.config)[0]
    tokens = [*request.token_ids, *answer]
    core.add_request(request)
    core.scheduler.requests[1].prediction = answer
    run(core)
    assert core.stats().step < 25, "most drafts are accepted"
    (output,) = run(core, [make_request(1, [*tokens, 3, 5], max_tokens=2)]).values()
    assert output.cached >= len(tokens) - PLAN.gap - 4


STEM = [2 + i * i % 47 for i in range(60)]


class HybridMachine(RuleBasedStateMachine):
    """A state machine of an engine whose layers are of three kinds.

    It admits, chunks, hits, preempts, cancels, resumes and fails requests in any order. At each
    step what Driver asserts holds: above all, each text is what the request says alone.
    """

    ids = Bundle("ids")
    driver: Driver

    @initialize(
        async_scheduling=st.booleans(),
        block_size=st.sampled_from([1, 3, 4]),
        budget=st.sampled_from([3, 7, 64]),
        spare=st.integers(0, 30),
        window=st.sampled_from([1, 2, 9, 30]),
        slots=st.sampled_from([1, 2, 5, 30]),
        every=st.sampled_from([12, 24]),
        gap=st.sampled_from([1, 4, 10]),
        worth=st.sampled_from([0, 20]),
        drafts=st.sampled_from(["", *KINDS]),
        by_model=st.booleans(),
        host=st.sampled_from([0, 0, 4, 60]),
        disk=st.booleans(),
        delay=st.sampled_from([0, 1, 5]),
    )
    def start(
        self, block_size: int, budget: int, spare: int, window: int, slots: int, every: int,
        gap: int, worth: int, drafts: str, by_model: bool, host: int, disk: bool,
        **changes: Any,
    ) -> None:  # fmt: skip
        if drafts:
            drafter = ToldDrafter(drafts)
            drafter.trusted = False  # what `resume` expects lacks the tokens that were sent
            by_host = Speculation(drafter, ListedLengths([7, 0, 3]))
            changes["speculation"] = computed([7, 0, 3]) if by_model else by_host
            changes["drafts"] = drafts
        self.texts: list[list[int]] = []
        if host:
            changes["host"] = HostPlan(2 * host, 1, everything=host > 4, states=host, state_bytes=1)
            changes["disk"] = disk
        self.driver = Driver(
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=5,
            max_model_len=60,
            kinds=(Full(), Window(window)),
            num_blocks=-(-60 // block_size) * 2 + spare,
            snapshots=SnapshotPlan(slots, every, gap, worth),
            fail=(13,),
            **changes,
        )

    @rule(
        target=ids,
        length=st.integers(1, 58),
        own=st.integers(0, 2),
        max_tokens=st.sampled_from([0, 1, 7, 30, None]),
        seed=st.sampled_from([1, 2, 13]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        cache_salt=st.sampled_from(["", "", "tenant"]),
        priority=st.sampled_from([0, 0, 1]),
    )
    def admit(self, length: int, own: int, **fields: Any) -> int:
        prompt = STEM[: max(1, length - own)] + [40 + own] * own
        return self.driver.add_request(prompt, ignore_eos=True, **fields)

    @rule(target=ids, emitted=st.integers(0, 20))
    def resume(self, emitted: int) -> int:
        """Add a request that another replica has answered in part. emitted: number of its
        tokens."""
        prompt = STEM[:30]
        alone = Driver(max_model_len=60, kinds=self.driver.core.config.kinds, snapshots=PLAN)
        id = alone.add_request(prompt.copy(), max_tokens=29, seed=3, ignore_eos=True)
        text = alone.expected[id][0]
        return self.driver.add_request(
            [*prompt, *text[:emitted]],
            max_tokens=29,
            seed=3,
            ignore_eos=True,
            num_prompt_tokens=len(prompt),
        )

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.driver.core.has_work():
                self.driver.step()

    @rule(request_id=consumes(ids))
    def cancel(self, request_id: int) -> None:
        """Abort a request, and assert that its row is free once the step in flight is done."""
        self.driver.abort(request_id)
        for _ in range(2):
            if self.driver.core.has_work():
                self.driver.step()
        assert all(r.id != request_id for r in self.driver.scheduler.running.values())

    @rule()
    def reset(self) -> None:
        self.driver.core.reset_prefix_cache()
        assert not len(snapshots_of(self.driver.core))

    @rule()
    def finish(self) -> None:
        self.driver.finish()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "driver"):
            self.driver.core.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.finish()


HybridMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestHybridMachine = HybridMachine.TestCase


@pytest.mark.nightly
class TestManyHybrids(HybridMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(HybridMachine.TestCase.settings, max_examples=400)
