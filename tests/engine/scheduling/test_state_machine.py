"""Random lives of an engine: whatever comes in whatever order, the invariants of Driver hold."""

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
    multiple,
    rule,
)

from engine.scheduling.memory.host_plan import HostPlan
from engine.scheduling.memory.image_plan import ImagePlan
from engine.scheduling.memory.kv_growth import KVGrowth
from tests.drafters import KINDS, computed, told
from tests.engine.scheduling.driver import Driver, random_run
from tests.engine.scheduling.moving import MovingPair, random_moves
from tests.fakes import IMAGE_TOKEN, make_prompt

STEM = [2 + i * i % 47 for i in range(48)]


class EngineMachine(RuleBasedStateMachine):
    """A state machine that adds, steps, finishes, aborts and resets in any order.

    Preemption and late results come from too few blocks, and from stepping one batch ahead.
    """

    ids = Bundle("ids")
    driver: Driver

    @initialize(
        async_scheduling=st.booleans(),
        block_size=st.sampled_from([1, 3, 4]),
        budget=st.sampled_from([3, 7, 64]),
        spare=st.integers(0, 20),
        prefix_caching=st.booleans(),
        admission=st.sampled_from(["optimistic", "optimistic", "peak", "sum", "reserved"]),
        drafts=st.sampled_from(["", *KINDS]),
        by_model=st.booleans(),
        lengths=st.lists(st.sampled_from([0, 1, 3, 7]), min_size=1, max_size=4),
        slots=st.sampled_from([0, 0, 5, 60]),
        everything=st.booleans(),
        disk=st.booleans(),
        delay=st.sampled_from([0, 1, 5]),
    )
    def start(
        self,
        block_size: int,
        budget: int,
        spare: int,
        drafts: str,
        by_model: bool,
        lengths: list[int],
        slots: int,
        everything: bool,
        disk: bool,
        **changes: Any,
    ) -> None:
        if slots and changes["prefix_caching"]:
            changes["host"] = HostPlan(slots, 1, everything=everything)
            changes["failing"] = (3, 4)
            changes["disk"] = disk
        if drafts and changes["admission"] != "peak":
            changes["speculation"] = computed(lengths) if by_model else told(drafts, lengths)
            changes["drafts"] = drafts
        self.driver = Driver(
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=6,
            max_model_len=60,
            num_blocks=-(-60 // block_size) + spare,  # one long request fits, two may not
            fail=(13,),
            **changes,
        )

    @rule(
        target=ids,
        length=st.integers(1, 62),
        own=st.integers(0, 2),
        max_tokens=st.sampled_from([0, 1, 2, 7, 30, None]),
        min_tokens=st.sampled_from([0, 0, 5]),
        seed=st.sampled_from([1, 2, 13]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        ignore_eos=st.booleans(),
        cache_salt=st.sampled_from(["", "tenant"]),
        adapter=st.sampled_from(["", "lora", "words", "keys"]),
        priority=st.sampled_from([0, 0, 1]),
        choices=st.sampled_from([1, 1, 3]),
    )
    def add_request(self, length: int, own: int, choices: int, **fields: Any) -> Any:
        prompt = (STEM * 2)[: max(1, length - own)] + [40 + own] * own
        fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"] or 0)
        ids = [
            self.driver.add_request(prompt, choice=choice, **fields) for choice in range(choices)
        ]
        return multiple(*ids)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.driver.core.has_work():
                self.driver.step()

    @rule(request_id=consumes(ids))
    def abort(self, request_id: int) -> None:
        self.driver.abort(request_id)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.driver.core.reset_prefix_cache()

    @rule()
    def finish(self) -> None:
        self.driver.finish()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "driver"):
            self.driver.core.check_integrity()
            if self.driver.core.config.admission != "optimistic":
                assert self.driver.scheduler.counters.preemptions == 0

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.finish()


EngineMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,  # the same lives in every run; the random runs below are easy to widen
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.nightly
class TestManyEngines(EngineMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(EngineMachine.TestCase.settings, max_examples=800)


class ImageMachine(EngineMachine):
    """The state machine with images, in an engine whose runner keeps few of their embeddings."""

    @initialize(
        async_scheduling=st.booleans(),
        block_size=st.sampled_from([1, 3, 4]),
        budget=st.sampled_from([16, 20, 64]),
        spare=st.integers(0, 20),
        prefix_caching=st.booleans(),
        micro_batches=st.sampled_from([1, 1, 2]),
        cache_tokens=st.sampled_from([8, 13, 40]),
        bidirectional=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        budget: int,
        spare: int,
        cache_tokens: int,
        bidirectional: bool,
        **changes: Any,
    ) -> None:
        self.driver = Driver(
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=6,
            max_model_len=60,
            num_blocks=-(-60 // block_size) + spare,
            fail=(13,),
            images=ImagePlan((IMAGE_TOKEN,), cache_tokens, 8, bidirectional),
            **changes,
        )

    @rule(
        target=EngineMachine.ids,
        parts=st.lists(st.one_of(st.integers(0, 9), st.just(STEM[:5])), min_size=1, max_size=6),
        max_tokens=st.sampled_from([0, 1, 2, 7, None]),
        seed=st.sampled_from([1, 2, 13]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        cache_salt=st.sampled_from(["", "tenant"]),
        adapter=st.sampled_from(["", "lora", "words"]),
        priority=st.sampled_from([0, 0, 1]),
        choices=st.sampled_from([1, 1, 3]),
    )
    def add_images(self, parts: list[Any], choices: int, **fields: Any) -> Any:
        prompt = make_prompt(*parts, [7])
        ids = [
            self.driver.add_request(**prompt, choice=choice, **fields) for choice in range(choices)
        ]
        return multiple(*ids)

    @rule()
    def drop_images(self) -> None:
        self.driver.scheduler.drop_images()


ImageMachine.TestCase.settings = settings(EngineMachine.TestCase.settings, max_examples=50)
TestImageMachine = ImageMachine.TestCase


class GrowingMachine(EngineMachine):
    """The state machine with memory that grows, beside another engine that takes and gives some."""

    @initialize(
        async_scheduling=st.booleans(),
        block_size=st.sampled_from([3, 4]),
        budget=st.sampled_from([16, 64]),
        prefix_caching=st.booleans(),
        growth=st.sampled_from([30, 100]),
        host=st.booleans(),
        delay=st.sampled_from([0, 1, 5]),
    )
    def start(self, block_size: int, budget: int, host: bool, **changes: Any) -> None:
        if host and changes["prefix_caching"]:
            changes["host"] = HostPlan(60, 1, everything=True)
        self.driver = Driver(
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=6,
            max_model_len=60,
            num_blocks=-(-60 // block_size) + 1,
            fail=(13,),
            **changes,
        )

    @property
    def growth(self) -> KVGrowth:
        assert self.driver.core._growth is not None
        return self.driver.core._growth

    @rule(
        free=st.sampled_from([0, 10, 100]),
        wanted=st.sampled_from([0, 50, 10_000]),
        count=st.integers(1, 8),
    )
    def share_memory(self, free: int, wanted: int, count: int) -> None:
        """Let the other engine take or give memory and ask for some, while steps go on."""
        share: Any = self.growth.share
        share.free, share.wanted = 10 * (self.growth.least + free), wanted
        for _ in range(count):
            self.growth._polled -= 10  # as an engine without steps notices it, too
            self.growth.tick()
            if self.driver.core.has_work():
                self.driver.step()

    @rule(copying=st.booleans())
    def copy(self, copying: bool) -> None:
        """Let copies from freed blocks begin or end."""
        self.growth.pages.copying = copying  # type: ignore[attr-defined]

    @invariant()
    def blocks_have_pages(self) -> None:
        if hasattr(self, "driver"):
            (pool,) = self.driver.scheduler.memory.pools
            assert self.growth.least <= pool.num_blocks <= self.growth.pages.most
            assert 10 * pool.num_blocks <= self.growth.pages.mapped_bytes


GrowingMachine.TestCase.settings = settings(EngineMachine.TestCase.settings, max_examples=60)
TestGrowingMachine = GrowingMachine.TestCase


@pytest.mark.parametrize(
    "async_scheduling, micro_batches, kv_ranks",
    [
        *((True, 1, 1), (True, 2, 1), (False, 1, 1), (True, 1, 2)),
        *(
            pytest.param(ahead, micro_batches, 1, marks=pytest.mark.slow)
            for ahead, micro_batches in ((True, 3), (False, 2), (False, 3))
        ),
    ],
)
def test_random_lives(async_scheduling: bool, micro_batches: int, kv_ranks: int) -> None:
    """Bugs: a rare order of preemption, abort and late result that loses a block or a token; of
    several ranks that keep keys, a request reads or frees another's blocks."""
    configs: list[dict[str, Any]] = [
        {},
        {"num_blocks": 24, "max_model_len": 64},
        {"max_num_batched_tokens": 7},
        {"block_size": 1, "num_blocks": 130},
        {"prefix_caching": False},
    ]
    preemptions = 0
    for seed, changes in enumerate(configs * 4):
        if kv_ranks > 1:  # which have about as many blocks together
            changes = {**changes, "kv_ranks": kv_ranks, "max_model_len": 64}
            changes["num_blocks"] = max(18, changes.get("num_blocks", 40) // kv_ranks)
        driver = random_run(
            seed, async_scheduling=async_scheduling, micro_batches=micro_batches, **changes
        )
        preemptions += driver.scheduler.counters.preemptions
    assert preemptions > 50, "these runs are meant to preempt"


class MovingMachine(RuleBasedStateMachine):
    """A state machine of two engines that pull prefixes from each other, in any order.

    It adds, steps, delivers messages, cuts, aborts, resets and keeps blocks, with too few blocks
    and slots.
    """

    ids = Bundle("ids")
    pair: MovingPair

    @initialize(
        async_scheduling=st.booleans(),
        block_size=st.sampled_from([1, 3, 4]),
        budget=st.sampled_from([7, 64]),
        spare=st.integers(0, 20),
        staged=st.sampled_from([1, 3, 40]),
        host=st.sampled_from([0, 0, 30]),
        delay=st.sampled_from([0, 1, 5]),
        failing=st.sampled_from([(), (2, 5)]),
    )
    def start(
        self, block_size: int, budget: int, spare: int, staged: int, host: int, **changes: Any
    ) -> None:
        if host:
            changes["host"] = HostPlan(host, 1, everything=True)
        self.pair = MovingPair(
            staged,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=6,
            max_model_len=60,
            num_blocks=-(-60 // block_size) + spare,
            fail=(13,),
            **changes,
        )

    @rule(
        target=ids,
        engine=st.integers(0, 1),
        length=st.integers(1, 58),
        own=st.integers(0, 2),
        max_tokens=st.sampled_from([0, 1, 7, 30, None]),
        seed=st.sampled_from([1, 2, 13]),
        cache_salt=st.sampled_from(["", "", "tenant"]),
        adapter=st.sampled_from(["", "", "lora", "words"]),
        keep_seconds=st.sampled_from([0.0, 20.0]),
    )
    def add_request(self, engine: int, length: int, own: int, **fields: Any) -> Any:
        prompt = (STEM * 2)[: max(1, length - own)] + [40 + own] * own
        return engine, self.pair.add_request(engine, prompt, **fields)

    @rule(engine=st.integers(0, 1), count=st.integers(1, 12))
    def step(self, engine: int, count: int) -> None:
        for _ in range(count):
            self.pair.step(engine)

    @rule(count=st.integers(1, 12))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.pair.deliver()

    @rule()
    def cut(self) -> None:
        self.pair.cut()

    @rule(request=consumes(ids))
    def abort(self, request: tuple[int, int]) -> None:
        engine, number = request
        self.pair.drivers[engine].abort(number)

    @rule(engine=st.integers(0, 1))
    def reset_prefix_cache(self, engine: int) -> None:
        self.pair.drivers[engine].core.reset_prefix_cache()

    @rule(engine=st.integers(0, 1))
    def yield_blocks(self, engine: int) -> None:
        self.pair.moves(engine).yield_blocks()

    @rule()
    def finish(self) -> None:
        self.pair.finish()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "pair"):
            for driver in self.pair.drivers:
                driver.core.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.finish()


MovingMachine.TestCase.settings = settings(EngineMachine.TestCase.settings, max_examples=25)
TestMovingMachine = MovingMachine.TestCase


@pytest.mark.nightly
class TestManyMoves(MovingMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(MovingMachine.TestCase.settings, max_examples=600)


def test_random_lives_of_two_engines() -> None:
    """Bugs: a rare order of pull, load, preemption, abort, cut and reset that loses a block or a
    slot, never ends, or shows a request the keys of another tenant or adapter."""
    seeds = [*range(20), 1980]  # in 1980 the first of the queue waits for the end of a pull
    assert sum(random_moves(seed, STEM) for seed in seeds) > 60, "they are meant to move blocks"
