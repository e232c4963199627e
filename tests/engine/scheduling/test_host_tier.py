"""The host tier: blocks that fall out of the device's prefix cache and come back on a hit."""

from typing import Any

import pytest

from engine.config.kv_groups import Chunked, Full, Window
from engine.scheduling.memory.host_plan import HostPlan
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.memory.snapshots import SnapshotPlan
from tests.engine.scheduling.driver import Driver, random_run
from tests.fakes import FakeCopies

ALL = HostPlan(blocks=100, block_bytes=1 << 10, everything=True)
BY_REUSE = HostPlan(blocks=100, block_bytes=1 << 10)
PROMPT = [2 + i * i % 47 for i in range(40)]


def tier_of(driver: Driver) -> HostTier:
    assert driver.scheduler.tier is not None
    return driver.scheduler.tier


def copies_of(driver: Driver) -> FakeCopies:
    copies = tier_of(driver).copies
    assert isinstance(copies, FakeCopies)
    return copies


def make_driver(host: HostPlan = ALL, **changes: Any) -> Driver:
    """Return a driver of a device with 15 blocks of 4 tokens, which `flood` fills."""
    return Driver(**({"num_blocks": 15, "max_model_len": 60, "host": host} | changes))


def say(driver: Driver, prompt: list[int], **fields: Any) -> list[int]:
    """Run one request; return its output."""
    number = driver.add_request(prompt, **({"max_tokens": 4, "ignore_eos": True} | fields))
    tokens = driver.expected[number][0]
    driver.finish()
    return tokens


def flood(driver: Driver, number: int = 0) -> None:
    """Evict all blocks of the device."""
    say(driver, [10 + number] * 55)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_evicted_prefix(async_scheduling: bool) -> None:
    """Bugs: blocks of the host have other keys, or a hit computes the tokens again."""
    driver = make_driver(async_scheduling=async_scheduling)
    say(driver, PROMPT)
    flood(driver)
    before = driver.runner.num_tokens
    say(driver, [*PROMPT, 3])
    assert driver.runner.num_tokens - before < 10
    assert driver.core.stats().host_kv_loaded_tokens == 40
    assert driver.core.stats().prefix_hits >= 40


def test_conversation_by_second_use() -> None:
    """Bug: the turns of a conversation are not stored, though each goes on from the last; or the
    prompt of somebody who never comes again is."""
    driver = make_driver(BY_REUSE)
    text = PROMPT[:20]
    for turn in range(5):
        text = [*text, *say(driver, text), 30 + turn]
        flood(driver, turn)
    stats = driver.core.stats()
    assert stats.host_kv_loaded_tokens >= 20 + 24 + 28
    assert stats.host_kv_blocks < 12  # none of the floods


def test_no_reuse_copies_nothing() -> None:
    """Bug: prompts that nobody repeats cost copies, and push out what is reused."""
    driver = make_driver(BY_REUSE)
    for number in range(12):
        say(driver, [10 + number] * 40, ignore_eos=False)
    assert copies_of(driver).num_stored == len(tier_of(driver)) == 0


def test_shared_prefix_computed_again_is_stored() -> None:
    """Bug: a long system prompt that is evicted between its uses is never seen as reused."""
    driver = make_driver(BY_REUSE)
    for last in range(3):
        say(driver, [*PROMPT, 40 + last, 5, 5, 5])
        flood(driver, last)
    assert driver.core.stats().host_kv_loaded_tokens == 40


@pytest.mark.parametrize("field, others", [("cache_salt", "tenant"), ("adapter", "lora")])
def test_others_share_nothing(field: str, others: str) -> None:
    """Bug: a tenant, or an adapter, gets the keys of another by way of the host."""
    driver = make_driver()
    say(driver, PROMPT)
    flood(driver)
    say(driver, PROMPT, **{field: others})
    assert driver.core.stats().host_kv_loaded_tokens == 0
    flood(driver, 1)
    say(driver, [*PROMPT, 3], **{field: others})
    assert driver.core.stats().host_kv_loaded_tokens == 40


def test_others_go_on_during_a_load() -> None:
    """Bug: the load of one request holds up the batch."""
    driver = make_driver(num_blocks=40, delay=12)
    say(driver, PROMPT)
    for number in range(3):
        flood(driver, number)
    waiting = driver.add_request([*PROMPT, 3], max_tokens=2, ignore_eos=True)
    other = driver.add_request([9, 8, 7], max_tokens=5, ignore_eos=True)
    while other not in driver.outputs or not driver.outputs[other].finish:
        driver.step()
    assert waiting not in driver.outputs
    driver.finish()
    assert driver.core.stats().host_kv_wait_seconds > 0


def begin_slow_load(driver: Driver) -> int:
    """Begin a request that decodes, and then one whose load takes 12 polls; return the latter."""
    say(driver, PROMPT)
    for number in range(3):
        flood(driver, number)
    driver.add_request([9, 8, 7], max_tokens=40, ignore_eos=True)
    for _ in range(3):
        driver.step()
    waiting = driver.add_request([*PROMPT, 3], max_tokens=2, ignore_eos=True)
    driver.step()
    assert driver.scheduler.loading and driver.scheduler.requests[waiting].row < 0
    return waiting


@pytest.mark.parametrize("async_scheduling, steps", [(True, 1), (False, 0)])
def test_starts_one_step_after_its_copy(
    async_scheduling: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: a loaded request starts two steps after its copy, as it is queued only when the copy
    has ended; a request whose copy ends after the running step holds up the batch."""
    driver = make_driver(num_blocks=40, delay=12, async_scheduling=async_scheduling)
    waiting = begin_slow_load(driver)
    request = driver.scheduler.requests[waiting]
    copies = copies_of(driver)
    (ticket,) = copies._loads
    seconds_left = 0.010
    monkeypatch.setattr(copies, "ending", lambda: {ticket: seconds_left})
    monkeypatch.setattr(driver.scheduler, "_seconds_left", lambda: 0.008)
    for _ in range(3):
        driver.step()
        assert request.row < 0, "the others wait for the copy"
    seconds_left = 0.006
    before = driver.runner.num_steps
    driver.step()
    assert request.row >= 0 and driver.runner.num_steps == before + 1
    # the request's step is the next one on the device, behind those that were in flight before
    assert len(driver.scheduler.in_flight) == steps
    assert driver.scheduler.loading, "the copy is still in flight"
    driver.finish()
    assert driver.core.stats().host_kv_loaded_tokens == 40


@pytest.mark.parametrize("what", ["abort", "reset"])
def test_started_before_the_end_of_its_copy(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: the blocks of a copy in flight are given to another request when theirs has left, or
    enter the prefix cache again after a reset."""
    driver = make_driver(num_blocks=40, delay=12)
    waiting = begin_slow_load(driver)
    copies, (pool,) = copies_of(driver), driver.scheduler.memory.pools
    (ticket,) = copies._loads
    monkeypatch.setattr(copies, "ending", lambda: {ticket: 0.0})
    before = pool.num_free
    driver.step()
    assert driver.scheduler.requests[waiting].row >= 0 and driver.scheduler.loading
    if what == "abort":
        driver.abort(waiting)
    else:
        driver.core.reset_prefix_cache()
    while driver.scheduler.loading:
        assert sum(map(len, tier_of(driver).tables(pool))) == 10, "the copy's blocks are not held"
        driver.step()
    driver.finish()
    assert pool.num_free >= before
    hits = driver.core.stats().prefix_hits
    say(driver, [*PROMPT, 4])
    assert driver.core.stats().prefix_hits - hits == (0 if what == "reset" else 40)


def test_same_prefix_is_loaded_once() -> None:
    """Bug: a second request with the same tokens loads them again, computes them, or waits until
    the first is done."""
    driver = make_driver(num_blocks=40, delay=3)
    say(driver, PROMPT)
    for number in range(3):
        flood(driver, number)
    before = driver.runner.num_tokens
    ids = [driver.add_request([*PROMPT, 40 + n], max_tokens=9, ignore_eos=True) for n in range(3)]
    while not all(number in driver.outputs for number in ids):
        driver.step()
    assert not any(driver.outputs[number].finish for number in ids), "they ran together"
    driver.finish()
    assert driver.core.stats().host_kv_loaded_tokens == 40
    assert driver.runner.num_tokens - before < 3 * 13


def test_loads_leave_room_for_their_requests() -> None:
    """Bug: prefixes of more requests are loaded than can start; what was loaded for the others is
    evicted before they do, and computed."""
    driver = make_driver(num_blocks=34, delay=3)
    prompts = [[2 + (token + number) % 47 for token in PROMPT] for number in range(3)]
    for prompt in prompts:
        say(driver, prompt)
    for number in range(3):
        flood(driver, number)
    before = driver.runner.num_tokens
    for prompt in prompts:  # 10 blocks to load each, and 14 to start
        driver.add_request([*prompt, *range(2, 18)], max_tokens=4, ignore_eos=True)
    driver.finish()
    assert driver.core.stats().host_kv_loaded_tokens == 3 * 40
    assert driver.runner.num_tokens - before <= 3 * (16 + 4)


def test_failed_load_is_a_miss() -> None:
    """Bug: a copy that fails ends its request, or leaves wrong keys in the prefix cache."""
    driver = make_driver(failing=(1,))
    say(driver, PROMPT)
    flood(driver)
    say(driver, [*PROMPT, 3])
    stats = driver.core.stats()
    assert (stats.host_kv_failed_loads, stats.host_kv_loaded_tokens) == (1, 0)
    flood(driver, 1)
    say(driver, [*PROMPT, 4])  # computing it again has stored it again
    assert driver.core.stats().host_kv_loaded_tokens == 40


@pytest.mark.parametrize("rate, loads", [(1e12, True), (1.0, False)])
def test_slow_copies_are_not_taken(rate: float, loads: bool) -> None:
    """Bug: a tier that is slower than the device makes answers later."""
    driver = make_driver()
    say(driver, PROMPT)
    flood(driver)
    copies_of(driver).load_rate = rate
    tier_of(driver).worth.observe_step(8192, 8192 * 1e-4)
    say(driver, [*PROMPT, 3])
    assert (driver.core.stats().host_kv_loaded_tokens > 0) == loads


def test_few_tokens_are_computed() -> None:
    """Bug: a request waits for a load that is shorter than its launch."""
    driver = make_driver(HostPlan(100, 1 << 10, least_tokens=41, everything=True))
    say(driver, PROMPT)
    flood(driver)
    say(driver, [*PROMPT, 3])
    assert driver.core.stats().host_kv_loaded_tokens == 0


@pytest.mark.parametrize("during", [False, True])
def test_reset_drops_all(during: bool) -> None:
    """Bug: after an update of the weights a request gets keys of the old ones, perhaps by a load
    that was in flight."""
    driver = make_driver(delay=3)
    say(driver, PROMPT)
    flood(driver)
    if during:
        driver.add_request([*PROMPT, 3], max_tokens=2)
        driver.step()
        assert driver.scheduler.loading
    driver.core.reset_prefix_cache()
    driver.finish()
    say(driver, [*PROMPT, 4])
    assert driver.core.stats().host_kv_loaded_tokens == 0
    assert len(tier_of(driver)) <= 16


def test_abort_during_a_load() -> None:
    """Bug: the blocks of the load are lost, or are used before they have come."""
    driver = make_driver(delay=3)
    say(driver, PROMPT)
    flood(driver)
    number = driver.add_request([*PROMPT, 3], max_tokens=2)
    driver.step()
    assert driver.scheduler.loading
    driver.abort(number)
    driver.finish()
    say(driver, [*PROMPT, 4])  # the load has filled the prefix cache all the same
    assert driver.core.stats().host_kv_loaded_tokens == 40


def test_preempted_request_comes_back() -> None:
    """Bug: what a preempted request had computed is lost, although the host has room."""
    driver = make_driver(BY_REUSE, num_blocks=18)
    for number in range(2):
        driver.add_request([20 + number] * 24, max_tokens=30, ignore_eos=True)
    driver.finish()
    assert driver.scheduler.counters.preemptions > 0
    assert driver.core.stats().host_kv_stored_bytes > 0


def test_back_pressure_drops_stores() -> None:
    """Bug: stores that come faster than the copies go wait without bound; or what is stored of a
    prefix is its tail, which nothing can start from."""
    driver = make_driver()
    copies_of(driver).most = 5
    say(driver, PROMPT)
    assert len(tier_of(driver)) == 5 and tier_of(driver).dropped > 0
    flood(driver)
    say(driver, [*PROMPT, 3])
    assert driver.core.stats().host_kv_loaded_tokens == 20


def test_shrunken_pool() -> None:
    """Bug: a load writes into a pool that has been replaced, or its request waits for ever."""
    driver = make_driver(num_blocks=40, delay=3)
    say(driver, PROMPT)
    for number in range(3):
        flood(driver, number)
    driver.add_request([*PROMPT, 3], max_tokens=2)
    driver.step()
    copies_of(driver).wait()
    driver.runner.shrink(20)
    driver.scheduler.shrink(20)
    driver.finish()


@pytest.mark.parametrize("slots, states", [(1, 3), (6, 40)])
@pytest.mark.parametrize(
    "changes", [{}, {"num_blocks": 24, "max_model_len": 64}, {"async_scheduling": False}]
)
def test_random_lives_of_recurrent_models(slots: int, states: int, changes: dict[str, Any]) -> None:
    """Bugs: a request goes on from the state of another place, or from one that is not there yet;
    a snapshot's slot is lost, or given to a load and to a step."""
    loaded = 0
    for seed in range(4):
        host = HostPlan(100, 1, everything=seed < 2, states=states, state_bytes=1)
        driver = random_run(
            seed,
            host=host,
            delay=seed,
            failing=(2, 5),
            snapshots=SnapshotPlan(slots, 8, gap=4),
            kinds=(Full(),),
            **changes,
        )
        loaded += tier_of(driver).loaded_bytes
        driver.core.check_integrity()
    assert loaded > 10, "these runs are meant to load"


def test_a_state_comes_with_its_blocks() -> None:
    """Bug: without the snapshot the blocks are of no use, and everything is computed again."""
    host = HostPlan(100, 1 << 10, everything=True, states=30, state_bytes=1000)
    driver = make_driver(host, snapshots=SnapshotPlan(3, 64, gap=4), max_num_seqs=2)
    say(driver, PROMPT)
    for number in range(4):
        flood(driver, number)
    before = driver.runner.num_tokens
    say(driver, [*PROMPT, 3])
    stats = driver.core.stats()
    assert stats.host_kv_loaded_tokens == 40 and stats.host_kv_loaded_bytes == 10 * (1 << 10) + 1000
    assert driver.runner.num_tokens - before < 10


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_blocks": 24, "max_model_len": 64},
        {"max_num_batched_tokens": 7, "async_scheduling": False},
        {"block_size": 1, "num_blocks": 130},
        {"micro_batches": 2},
        {"kinds": (Full(), Window(12)), "num_blocks": 60},
        {"kinds": (Full(), Chunked(16)), "num_blocks": 60, "async_scheduling": False},
    ],
)
def test_random_lives(changes: dict[str, Any]) -> None:
    """Bugs: a rare order of load, preemption, abort and reset that loses a block, or shows a
    request the keys of another tenant or adapter."""
    loaded = 0
    for seed in range(4):
        host = HostPlan(25 if seed % 2 else 200, 1, everything=seed < 2)
        driver = random_run(seed, host=host, delay=seed, failing=(2, 5), **changes)
        loaded += tier_of(driver).loaded_bytes
        driver.core.check_integrity()
    assert loaded > 20, "these runs are meant to load"


@pytest.mark.parametrize("host", [None, HostPlan(200, 1, everything=True)], ids=["alone", "host"])
def test_evicted_prefixes_are_told(host: HostPlan | None) -> None:
    """Bugs: routers are not told that a prefix is gone; or they are though the host has it, or
    though it is still on the device."""
    driver = make_driver(host, num_blocks=60, max_model_len=200)
    names = b"prefix-1" + b"prefix-2"
    prompt = [2 + i * i % 47 for i in range(150)]
    say(driver, prompt, prefix_hashes=names)
    assert driver.core.take_evicted() == (b"", b"")
    say(driver, [9] * 130)  # evicts the tail alone
    assert driver.core.take_evicted() == ((b"", b"prefix-2") if host else (b"prefix-2", b""))
    say(driver, [8] * 180)
    assert driver.core.take_evicted() == ((b"", b"prefix-1") if host else (b"prefix-1", b""))
    driver.core.reset_prefix_cache()
    gone, _ = driver.core.take_evicted()
    assert len(gone) == (16 if host else 0), "and no longer on the host"


def test_prefixes_that_leave_the_host_are_told() -> None:
    """Bug: routers go on sending conversations to a replica whose host memory has dropped them."""
    driver = make_driver(HostPlan(40, 1, everything=True), num_blocks=60, max_model_len=200)
    say(driver, [2 + i * i % 47 for i in range(150)], prefix_hashes=b"prefix-1" + b"prefix-2")
    gone = b""
    for number in range(6):
        say(driver, [10 + number] * 150)
        gone += driver.core.take_evicted()[0]
    assert sorted((gone[:8], gone[8:])) == [b"prefix-1", b"prefix-2"]
