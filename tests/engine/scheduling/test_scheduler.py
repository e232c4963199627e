"""Scheduler, step by step, with results made by hand: who runs, who waits, who ends and why."""

import random
from typing import Any, get_args, get_type_hints

import pytest

from engine.batch import Batch, StepResult, TokenLogprobs
from engine.config.engine_config import EngineConfig
from engine.messages import Delta
from engine.scheduling.admission import ADMISSION, BATCHING, future_peak
from engine.scheduling.pacing.chunking import prefill_tokens, steps_until_computed
from engine.scheduling.request import Request, RequestPhase
from engine.scheduling.scheduler import Scheduler
from tests.fakes import EOS, make_config, make_request


class Hand:
    """A scheduler whose results the test writes: tokens by request id, and 9 for the others."""

    def __init__(self, **changes: Any) -> None:
        self.config = make_config(**changes)
        self.scheduler = Scheduler(self.config)
        self.in_flight: list[tuple[Batch, list[int]]] = []

    def add_request(self, id: int, prompt: list[int] | int = 4, **fields: Any) -> Request:
        request = Request(make_request(id, prompt, **fields), self.config, id)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Batch:
        batch = self.scheduler.schedule()
        assert batch is not None
        by_row = {r.row: r.id for r in self.scheduler.running.values()}
        self.in_flight.append((batch, [by_row[row] for row in batch.rows]))
        return batch

    def update(self, tokens: dict[int, int] | None = None, **extra: Any) -> dict[int, Delta]:
        batch, ids = self.in_flight.pop(0)
        sampling = [id for id, samples in zip(ids, batch.samples, strict=True) if samples]
        result = StepResult(batch.step, [(tokens or {}).get(id, 9) for id in sampling])
        for name, by_id in extra.items():
            setattr(result, name, {ids.index(id): value for id, value in by_id.items()})
        deltas = self.scheduler.update(result)
        self.scheduler.check_integrity()
        return {delta.id: delta for delta in deltas}

    def go(self, tokens: dict[int, int] | None = None, **extra: Any) -> dict[int, Delta]:
        """Run one step, not ahead, and return its deltas by request id."""
        self.schedule()
        return self.update(tokens, **extra)

    def lengths(self, batch: Batch) -> dict[int, int]:
        ids = self.in_flight[-1][1]
        return dict(zip(ids, batch.lengths, strict=True))


def test_decodes_then_chunks_then_waiting_share_one_budget() -> None:
    """Bug: a long prompt stops those who decode, or the budget is spent on one request only."""
    hand = Hand(max_num_batched_tokens=10)
    hand.add_request(1, 4)
    hand.go()
    hand.add_request(2, 15)
    hand.add_request(3, 8)
    batch = hand.schedule()
    assert hand.lengths(batch) == {1: 1, 2: 9} and batch.num_decodes == 1
    assert batch.samples == [True, False]
    hand.update()
    batch = hand.schedule()
    assert hand.lengths(batch) == {1: 1, 2: 6, 3: 3}
    assert batch.samples == [True, True, False] and batch.num_tokens == 10
    assert [new.row for new in batch.new_rows] == [batch.rows[2]]


def test_a_prompt_beside_decodes_comes_in_halves() -> None:
    """Bug: one long prompt is one long gap in every stream; or it waits where nobody decodes; or
    many that wait are computed a little at a time."""
    hand = Hand(max_num_batched_tokens=2048, max_model_len=4096, num_blocks=4096, max_num_seqs=8)
    hand.add_request(1, 1500)
    assert hand.lengths(hand.schedule()) == {1: 1500}, "nobody decodes"
    hand.update()
    hand.add_request(2, 1000)
    chunks = []
    while (length := hand.lengths(hand.schedule()).get(2, 1)) > 1:
        chunks.append(length)
        hand.update()
    assert chunks == [500, 250, 128, 122], "half of what is left, at least a 16th of the budget"
    hand.update()
    for id in range(3, 23):
        hand.add_request(id, 1000)
    batch = hand.schedule()
    assert batch.num_tokens == 2048, "six of the twenty can start: more than a step can do"
    hand.update()


def test_steps_until_computed_are_those_of_the_pace() -> None:
    """Bug: admission by the future peak believes that prompts are computed sooner than they are."""
    for budget in (1, 20, 32, 500, 8192):
        for tokens in (0, 1, 31, 33, 5000):
            left, steps = tokens, 0
            while left:
                left -= min(left, prefill_tokens(left, budget))
                steps += 1
            assert steps_until_computed(tokens, budget) == steps
            assert steps >= tokens / budget


def test_waiting_is_served_by_priority_then_arrival() -> None:
    """Bug: a request of low priority, or a late one, goes first."""
    hand = Hand(max_num_seqs=1)
    for id, priority in [(1, 1), (2, 0), (3, -1), (4, 0)]:
        hand.add_request(id, priority=priority, max_tokens=1)
    served = []
    while hand.scheduler.requests:
        served += hand.go()
    assert served == [3, 2, 4, 1]


def test_chunks_with_higher_priority_come_first() -> None:
    """Bug: among running prompts the budget goes by chance instead of by the order of service."""
    hand = Hand(max_num_batched_tokens=8)
    hand.add_request(1, 40, priority=1)
    hand.go()
    hand.add_request(2, 8, priority=1)
    hand.add_request(3, 20, priority=0)
    assert hand.lengths(hand.schedule()) == {1: 8}, "running ones are not pushed aside"
    hand.update()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_latest_of_the_lowest_priority_is_preempted(ahead: bool) -> None:
    """Bug: the oldest request loses its work, or two requests preempt each other for ever."""
    hand = Hand(num_blocks=7, max_model_len=28, async_scheduling=ahead)
    requests = [
        hand.add_request(id, 8, priority=p, max_tokens=8) for id, p in [(1, 0), (2, 1), (3, 0)]
    ]
    ends: dict[int, str] = {}
    order = []
    for _ in range(100):
        if hand.scheduler.requests and (batch := hand.scheduler.schedule()) is not None:
            by_row = {r.row: r.id for r in hand.scheduler.running.values()}
            hand.in_flight.append((batch, [by_row[row] for row in batch.rows]))
        order += [r.id for r in requests if r.phase is RequestPhase.WAITING and r.num_cached >= 0]
        if len(hand.in_flight) > int(ahead) or (hand.in_flight and batch is None):
            deltas = hand.update()
            ends |= {delta.id: delta.finish for delta in deltas.values() if delta.finish}
    assert ends == dict.fromkeys([1, 2, 3], "length")
    assert hand.scheduler.counters.preemptions > 0 and order[0] == 2 and 1 not in order
    assert all(len(r.token_ids) == 16 for r in requests)


def test_last_in_order_waits_for_a_block_instead_of_preempting() -> None:
    """Bug: the newest request pushes out an older one and is pushed out by it in turn."""
    hand = Hand(num_blocks=4, max_model_len=16, async_scheduling=False)
    first, two = hand.add_request(1, 7, max_tokens=9), hand.add_request(2, 4, max_tokens=9)
    for _ in range(3):
        hand.go()
    while first.phase is not RequestPhase.ENDED:
        hand.go()
    while two.phase is not RequestPhase.ENDED:
        hand.go()
    assert len(first.token_ids) == 16 and len(two.token_ids) == 13
    assert hand.scheduler.counters.preemptions == 1, (
        "the newer one, when the older one had no block"
    )


def test_stops_and_their_reasons() -> None:
    """Bug: a wrong finish reason, an end token not reported, min_tokens or ignore_eos not read."""
    hand = Hand(async_scheduling=False)
    hand.add_request(1)
    hand.add_request(2, ignore_eos=True, max_tokens=3)
    hand.add_request(3, stop_token_ids=(7,))
    hand.add_request(4, min_tokens=2, stop_token_ids=(7,), max_tokens=5)
    hand.add_request(5, max_tokens=1)
    deltas = hand.go(dict.fromkeys([1, 2, 4, 5], EOS) | {3: 7})
    assert (deltas[1].finish, deltas[1].stop_token, deltas[1].token_ids) == ("stop", EOS, [EOS])
    assert (deltas[2].finish, deltas[2].stop_token) == ("", None)
    assert (deltas[3].finish, deltas[3].stop_token) == ("stop", 7)
    assert deltas[4].finish == ""
    assert (deltas[5].finish, deltas[5].stop_token) == ("stop", EOS), "an end token at the limit"
    deltas = hand.go({2: EOS, 4: 7})
    assert deltas[4].finish == "", "below min_tokens there are only two tokens"
    deltas = hand.go({2: 9, 4: 7})
    assert (deltas[2].finish, deltas[2].stop_token) == ("length", None)
    assert (deltas[4].finish, deltas[4].stop_token) == ("stop", 7)
    assert not hand.scheduler.requests


def test_a_result_for_an_ended_request_is_dropped() -> None:
    """Bug: one batch ahead, a request that stopped shows the token of the step already launched,
    or its blocks are given away while that step still writes them."""
    hand = Hand()
    request = hand.add_request(1, 8)
    other = hand.add_request(2, 8)
    hand.schedule()
    hand.schedule()
    assert hand.update({1: EOS})[1].finish == "stop"
    assert request.phase is RequestPhase.ENDED and request.row == -1
    free = hand.scheduler.memory.pools[0].num_free
    hand.schedule()
    deltas = hand.update({1: 33})
    assert list(deltas) == [2] and request.token_ids[-1] == EOS
    assert hand.scheduler.memory.pools[0].num_free > free
    assert hand.scheduler.abort([2])[0].finish == "abort"
    assert hand.update() == {} and other.token_ids[-1] == 9
    hand.scheduler.check_integrity()


def test_abort_anywhere() -> None:
    """Bug: an aborted request keeps its place in the queue, its row or its blocks."""
    hand = Hand(max_num_batched_tokens=8, max_num_seqs=3)
    for id, prompt in enumerate([2, 20, 4, 4]):
        hand.add_request(id, prompt)
    hand.schedule()
    phases = [r.phase for r in hand.scheduler.requests.values()]
    assert phases == [
        RequestPhase.DECODING,
        RequestPhase.COMPUTING,
        RequestPhase.WAITING,
        RequestPhase.WAITING,
    ]
    deltas = hand.scheduler.abort([0, 1, 2, 3, 99, 0])
    assert [(d.id, d.finish) for d in deltas] == [(id, "abort") for id in range(4)]
    assert hand.scheduler.schedule() is None
    assert hand.update() == {}
    assert hand.scheduler.memory.pools[0].num_free == hand.config.num_blocks
    assert hand.scheduler.num_waiting_tokens == 0


def test_a_half_computed_block_is_not_found() -> None:
    """Bug: a request that is aborted between two chunks leaves a block with keys missing."""
    hand = Hand(max_num_batched_tokens=6, async_scheduling=False)
    hand.add_request(1, list(range(2, 14)))
    hand.go()
    hand.scheduler.abort([1])
    hand.add_request(2, list(range(2, 14)))
    hand.go()
    assert hand.go()[2].cached == 4


def test_one_failing_entry_ends_one_request() -> None:
    """Bug: a numerical error of one request ends its neighbours, shows its token, or leaves its
    keys where the next request with that prompt finds them."""
    hand = Hand(async_scheduling=False)
    hand.add_request(1, list(range(2, 12)))
    hand.add_request(2, 8)
    deltas = hand.go({1: -1}, errors={1: "numerical_error: x"})
    assert (deltas[1].finish, deltas[1].error, deltas[1].token_ids) == (
        "error",
        "numerical_error: x",
        [],
    )
    assert deltas[2].token_ids == [9] and deltas[2].finish == ""
    hand.add_request(3, list(range(2, 12)))
    assert hand.go()[3].cached == 0


def test_a_failure_that_comes_after_the_preemption() -> None:
    """Bug: the request that fails is back in the queue, and its blocks stay in the cache."""
    hand = Hand(num_blocks=6, max_model_len=24)
    hand.add_request(1, 8, max_tokens=12)
    failing = hand.add_request(2, list(range(2, 16)), max_tokens=3)
    hand.schedule()
    assert hand.scheduler.schedule() is None, "the blocks come back with the step in flight"
    assert failing.phase is RequestPhase.WAITING and hand.scheduler.counters.preemptions == 1
    deltas = hand.update(errors={2: "numerical_error: x"})
    assert deltas[2].finish == "error" and failing.phase is RequestPhase.ENDED
    hashes = hand.scheduler.memory.pools[0].hash_prefix(failing, 3)
    assert len(hashes) == 3 and not hand.scheduler.memory.pools[0].match_prefix(hashes)


def lp(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, [], [], 0.0)


def test_logprobs_travel_with_their_tokens_and_the_prompts_once() -> None:
    """Bug: prompt log-probabilities of one chunk only, or again with every delta."""
    hand = Hand(max_num_batched_tokens=4, async_scheduling=False)
    prompt = list(range(2, 12))
    request = hand.add_request(1, prompt, prompt_logprobs=0, logprobs=0, max_tokens=2)
    for start in (0, 4):
        chunk = [lp(t) for t in prompt[start + 1 : start + 5]]
        assert hand.go(prompt_logprobs={1: chunk}) == {}
    first = hand.go(prompt_logprobs={1: [lp(11)]}, logprobs={1: lp(9)})[1]
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert [item.token_id for item in first.prompt_logprobs[1:] if item] == prompt[1:]
    assert first.logprobs == [lp(9)] and first.cached == 0
    last = hand.go(logprobs={1: lp(9)})[1]
    assert last.prompt_logprobs is None and last.logprobs == [lp(9)] and last.cached == -1
    assert last.finish == "length" and request.phase is RequestPhase.ENDED


def test_prompt_logprobs_survive_a_preemption() -> None:
    """Bug: a chunk computed again after a preemption gives its log-probabilities a second time."""
    request = Hand().add_request(1, list(range(2, 12)), prompt_logprobs=0)
    items = [lp(t) for t in range(3, 12)]
    request.collect_prompt_logprobs(0, items[:4])
    request.collect_prompt_logprobs(0, items[:7])  # from the beginning, in another chunking
    request.collect_prompt_logprobs(7, items[7:])
    assert request.prompt_logprobs == [None, *items]


def test_max_tokens_zero_ends_with_the_prompts_logprobs() -> None:
    """Bug: scoring a prompt samples a token, or never ends."""
    hand = Hand(max_num_batched_tokens=4, async_scheduling=False)
    hand.add_request(1, [2, 3, 4, 5, 6], prompt_logprobs=0, max_tokens=0)
    assert hand.go(prompt_logprobs={1: [lp(t) for t in (3, 4, 5, 6)]}) == {}
    batch = hand.schedule()
    assert batch.samples == [False]
    delta = hand.update()[1]
    assert (delta.finish, delta.token_ids, delta.cached) == ("length", [], 0)
    assert delta.prompt_logprobs is not None and len(delta.prompt_logprobs) == 5


def test_choices_of_one_prompt_share_its_blocks_within_one_step() -> None:
    """Bug: n = 4 computes and stores the prompt four times."""
    hand = Hand()
    prompt = list(range(2, 22))
    requests = [hand.add_request(id, prompt, choice=id, seed=1) for id in range(4)]
    batch = hand.schedule()
    assert sorted(batch.lengths) == [4, 4, 4, 20]
    for request in requests[1:]:
        assert request.blocks[:4] == requests[0].blocks[:4]
        assert request.blocks[4] != requests[0].blocks[4], "the last block gets written"
    assert hand.scheduler.counters.prefix_hits == 3 * 16
    cached = {id: delta.cached for id, delta in hand.update().items()}
    assert cached == {0: 0, 1: 16, 2: 16, 3: 16}


def test_at_least_the_last_token_is_computed_again() -> None:
    """Bug: a prompt of full blocks that is wholly cached has no logits to sample from."""
    hand = Hand(async_scheduling=False)
    for id in (1, 2):
        hand.add_request(id, list(range(2, 10)), max_tokens=1)
        deltas = hand.go()
        assert deltas[id].finish == "length"
    assert deltas[2].cached == 4


def test_stats_count_what_is_left_to_compute() -> None:
    """Bug: routing and scaling see an idle engine that is full, or work that was done."""
    hand = Hand(max_num_batched_tokens=8, max_num_seqs=1)
    hand.add_request(1, 12)
    hand.add_request(2, 5)
    assert hand.scheduler.num_waiting_tokens == 17
    hand.schedule()
    assert hand.scheduler.num_waiting_tokens == 17, "launched is not computed"
    hand.scheduler.abort([2])
    assert hand.scheduler.num_waiting_tokens == 12
    hand.schedule()
    counters = hand.scheduler.counters
    counted = [(hand.scheduler.num_waiting_tokens, counters.prompt_tokens)]
    for _ in range(2):
        hand.update()
        counted.append((hand.scheduler.num_waiting_tokens, counters.prompt_tokens))
    assert counted == [(12, 0), (4, 8), (0, 12)]


# ---- admission -----------------------------------------------------------------------------------


def brute_force_peak(now: list[int], left: list[int]) -> int:
    return max(
        sum(n + t for n, steps in zip(now, left, strict=True) if steps >= t)
        for t in range(max(left) + 1)
    )


def test_future_peak_equals_brute_force() -> None:
    """Bug: sorted the wrong way round the estimate is too low, and memory runs out in flight."""
    rng = random.Random(0)
    for _ in range(20_000):
        count = rng.randrange(1, 7)
        now = [rng.randrange(0, 12) for _ in range(count)]
        left = [rng.randrange(0, 12) for _ in range(count)]
        assert future_peak(now, left) == brute_force_peak(now, left)
    demo = [(5, 4), (4, 3), (5, 3), (3, 2), (4, 2)]
    assert future_peak([n for n, _ in demo], [steps for _, steps in demo]) == 31
    assert future_peak([], []) == 0


def peak_use(policy: str, max_tokens: int | None = 12, **changes: Any) -> tuple[int, int, int]:
    """Run 24 requests of several lengths; return the most that ran at once, steps, and
    preemptions."""
    hand = Hand(
        admission=policy,
        num_blocks=16,
        max_model_len=32,
        prefix_caching=False,
        async_scheduling=False,
        **changes,
    )
    for id in range(24):
        own = None if max_tokens is None else max_tokens + id % 5 * 3
        hand.add_request(id, 4 + id % 3, max_tokens=own, ignore_eos=True)
    running = steps = 0
    while hand.scheduler.requests:
        hand.go()
        running = max(running, len(hand.scheduler.running))
        steps += 1
    return running, steps, hand.scheduler.counters.preemptions


@pytest.mark.parametrize("policy", ["sum", "reserved", "peak"])
def test_careful_policies_never_preempt(policy: str) -> None:
    """Bug: an estimate that is a token or a step short, so that memory runs out in flight."""
    running, _, preemptions = peak_use(policy)
    assert preemptions == 0 and running >= 3


def test_policies_differ_as_they_should() -> None:
    """Bug: the policy of the configuration is not the one that runs."""
    assert peak_use("optimistic")[2] > 0
    assert peak_use("peak")[1] < peak_use("sum")[1], "staggered ends let more in"
    # With no length given, reservation must take the model's: two halves of the memory, no more.
    assert peak_use("reserved", None)[0] == 2 and peak_use("optimistic", None)[0] > 2


def test_a_strategy_is_a_function_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the scheduler has a branch for one it knows, or a name of the configuration has none."""
    kinds = get_type_hints(EngineConfig)
    assert set(get_args(kinds["admission"])) == set(ADMISSION)
    assert set(get_args(kinds["batching"])) == set(BATCHING)
    monkeypatch.setitem(ADMISSION, "alone", lambda memory, new: not memory.num_running)
    monkeypatch.setitem(BATCHING, "pairs", lambda request, running, queue: len(running) < 2)
    for names, most in (({}, 5), ({"admission": "alone"}, 1), ({"batching": "pairs"}, 2)):
        hand = Hand(num_blocks=64, async_scheduling=False, **names)
        for id in range(5):
            hand.add_request(id, 4, max_tokens=6)
        running = 0
        while hand.scheduler.requests:
            hand.go()
            running = max(running, len(hand.scheduler.running))
        assert running == most


@pytest.mark.parametrize("policy", ADMISSION)
def test_what_fits_alone_always_starts(policy: str) -> None:
    """Bug: a careful estimate, rounded up, is more than all memory, and the request never runs."""
    hand = Hand(admission=policy, num_blocks=8, max_model_len=32, async_scheduling=False)
    request = hand.add_request(1, 20, max_tokens=None)
    while request.phase is not RequestPhase.ENDED:
        hand.go()
    assert len(request.token_ids) == 32


def test_scoring_a_prompt_takes_small_chunks_beside_decodes() -> None:
    """Logits over the whole vocabulary for each token of a chunk, for one caller's
    `prompt_logprobs`, made a step nearly twice as long for all others; and two such requests must
    not have twice the share."""
    hand = Hand(max_num_batched_tokens=512, max_model_len=512, num_blocks=512)
    hand.add_request(1, 4)
    hand.go()
    for id in (2, 3):
        hand.add_request(id, 400, prompt_logprobs=0, max_tokens=1)
    batch = hand.schedule()
    lengths = hand.lengths(batch)
    assert lengths.pop(1) == 1 and sum(lengths.values()) == 256
    hand.update(prompt_logprobs=_scores(lengths))
    while len(hand.scheduler.running) > 1:
        lengths = hand.lengths(hand.schedule())
        assert lengths.pop(1) == 1 and 0 < sum(lengths.values()) <= 256
        hand.update(prompt_logprobs=_scores(lengths))
    alone = Hand(max_num_batched_tokens=512, max_model_len=512, num_blocks=512)
    alone.add_request(1, 400, prompt_logprobs=0, max_tokens=1)
    assert alone.lengths(alone.schedule()) == {1: 400}


def _scores(lengths: dict[int, int]) -> dict[int, list[TokenLogprobs]]:
    return {id: [TokenLogprobs(5, -1.0, 1, [], [], 0.0)] * length for id, length in lengths.items()}
