"""KVGrowth: when blocks become more and fewer, on pages and a share that only count."""

from typing import Any

import pytest

from engine.scheduling.core import EngineCore
from engine.scheduling.memory.block_manager import BlockManager, LowestFirst
from engine.scheduling.memory.kv_growth import Demand, KVGrowth
from tests.fakes import make_core, make_request, run


def core_with(growth: int, **changes: Any) -> tuple[EngineCore, KVGrowth, Any]:
    """Return a core whose 16 blocks may become more, its growth, and its share."""
    sizes = {"num_blocks": 16, "block_size": 4, "max_model_len": 64, "max_num_seqs": 6}
    core, _ = make_core(growth=growth, **(sizes | changes))
    assert core._growth is not None
    return core, core._growth, core._growth.share


def requests(count: int, length: int = 30) -> list[Any]:
    return [make_request(id, length, max_tokens=20, ignore_eos=True) for id in range(1, count + 1)]


def idle(core: EngineCore, growth: KVGrowth) -> None:
    """Let the engine look at the other's memory while it has no requests."""
    for _ in range(4):
        growth._polled -= 10
        growth.tick()
        if core.has_work():
            core.step()


def test_requests_that_lack_blocks_get_them_without_a_preemption() -> None:
    """Bug: growth comes after requests were thrown out, or never."""
    core, growth, _ = core_with(100)
    fixed, _ = make_core(num_blocks=116, block_size=4, max_model_len=64, max_num_seqs=6)
    texts = {id: output.tokens for id, output in run(core, requests(6)).items()}
    assert texts == {id: output.tokens for id, output in run(fixed, requests(6)).items()}
    (pool,) = core.scheduler.memory.pools
    assert 6 * 13 <= pool.num_blocks <= 116 and growth.growths
    assert core.scheduler.counters.preemptions == 0
    stats = core.stats()
    assert stats.kv_mapped_bytes == growth.pages.mapped_bytes and stats.kv_growths


def test_memory_that_another_engine_has_is_not_taken() -> None:
    """Bug: more is mapped than was claimed, or requests end as memory does not come."""
    core, growth, share = core_with(100)
    share.free = 10 * 30
    run(core, requests(6))
    assert growth.pages.mapped_bytes <= 300
    share.free = 0
    growth.tick()
    assert growth.growable(core.scheduler.memory.pools[0]) == 0


def test_an_idle_engine_gives_its_last_blocks() -> None:
    """Bug: an engine without steps gives nothing, or gives what it has to keep."""
    core, growth, share = core_with(100)
    run(core, requests(6))
    (pool,) = core.scheduler.memory.pools
    grown = pool.num_blocks
    assert not core.has_work()
    share.wanted = 10 * 20
    growth._polled -= 10
    growth.tick()
    assert core.has_work(), "nobody looks at what is asked"
    core.step()
    assert grown - 23 <= pool.num_blocks <= grown and growth.shrinks <= 1
    share.wanted = 10_000
    idle(core, growth)
    assert pool.num_blocks == 16 == growth.least
    core.check_integrity()


def test_blocks_in_use_stay_and_go_later() -> None:
    """Bug: a block goes while its request runs; or one long request keeps all others for good."""
    core, growth, share = core_with(100)
    for request in requests(6):
        core.add_request(request)
    for _ in range(12):
        core.step()
    (pool,) = core.scheduler.memory.pools
    share.wanted, share.free = 10_000, 0
    used = {block for request in core.scheduler.running.values() for block in request.blocks}
    for _ in range(3):
        growth.tick()
        core.step()
    assert used and pool.num_blocks > max(used)
    while core.has_work():
        growth.tick()
        core.step()
    idle(core, growth)
    assert pool.num_blocks == growth.least


def test_no_block_goes_while_copies_read_it() -> None:
    """Bug: the host tier's copy of a freed block reads memory that is gone."""
    core, growth, share = core_with(100)
    run(core, requests(6))
    (pool,) = core.scheduler.memory.pools
    before, pages = pool.num_blocks, growth.pages
    pages.copying = True  # type: ignore[attr-defined]
    share.wanted = 10_000
    idle(core, growth)
    assert pool.num_blocks == before and growth.shrinks == 0
    core.check_integrity()


def test_steps_without_memory_take_it_from_blocks_for_good() -> None:
    """Bug: the blocks take again what a step of the device had no memory without."""
    core, growth, _ = core_with(100)
    run(core, requests(6))
    (pool,) = core.scheduler.memory.pools
    before = pool.num_blocks
    assert growth.shrink_for_steps(pool) and pool.num_blocks <= before * 7 // 8 + 3
    limit = pool.num_blocks
    run(core, [make_request(id, 30, max_tokens=20, ignore_eos=True) for id in range(11, 17)])
    assert pool.num_blocks <= limit


@pytest.mark.parametrize("cached", [False, True])
def test_a_pool_loses_its_tail(cached: bool) -> None:
    """Bug: an evicted prefix is still found; the first blocks go; ids are lost or come twice."""
    pool = BlockManager(8, 4, LowestFirst)
    gone: list[bytes] = []
    pool.on_forget = gone.extend
    blocks = pool.allocate(8)
    assert blocks == list(range(8))
    if cached:
        for block in blocks:
            pool._register([bytes([block])], [block], 0)
    pool.free([0, 2, 4, 6, 7])
    assert pool.withdraw(1) == 6 and gone == ([b"\2", b"\4", b"\6", b"\7"] if cached else [])
    pool.check_integrity([[1, 3, 5]])
    pool.free([5])
    assert pool.withdraw(1) == 4
    assert pool.num_empty == (1 if cached else 2)
    pool.grow(7)
    pool.check_integrity([[1, 3]])
    assert pool.allocate(pool.num_empty)[:2] == ([2, 4] if cached else [0, 2])


def test_a_failed_growth_is_tried_again_later() -> None:
    """Bug: one refusal of the device ends growth for ever, or is asked in each step."""
    core, growth, share = core_with(100)
    (pool,) = core.scheduler.memory.pools
    share.free = 0
    assert not growth.poll(pool, Demand(20)) and growth.growths == 0
    assert share.own.short > 0
    growth.poll(pool, Demand(20))
    assert growth._again > 0
    share.free, growth._again = 10_000, 0.0
    growth.poll(pool, Demand(20))
    assert growth.poll(pool, Demand(20)) and pool.num_blocks > 16
