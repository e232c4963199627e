"""Token attention: blocks of one token, and the pool that finds free ones by a cumulative sum."""

import random
from itertools import pairwise

import pytest
import torch

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.runner.caches.token_pool import TokenPool
from engine.scheduling.admission import ADMISSION
from engine.scheduling.core import EngineCore
from engine.scheduling.memory.block_manager import FreeBlocks, FreeList
from engine.scheduling.memory.regions import Regions
from tests.fakes import FakeRunner, expected, make_config, make_request, make_store, run


def pool_of(count: int, device: str = "cpu") -> TokenPool:
    return TokenPool(count, torch.device(device))


def test_contiguous_first_then_scattered() -> None:
    """LightLLM's order: the first run that is long enough, and only then any blocks."""
    pool = pool_of(10)
    assert pool.take_blocks(10) == list(range(10)) and len(pool) == 0
    pool.extend([1, 3, 4, 7, 8, 9])
    assert len(pool) == 6 and sorted(pool) == [1, 3, 4, 7, 8, 9]
    assert pool.take_blocks(2) == [3, 4]
    assert pool.take_blocks(3) == [7, 8, 9]
    pool.extend([5, 8])
    assert pool.take_blocks(2) == [1, 5]
    assert pool.take_blocks(1) == [8] and pool.take_blocks(0) == [] and list(pool) == []


def test_freed_twice() -> None:
    """A block that two requests write to."""
    pool = pool_of(4)
    pool.take_blocks(2)
    pool.append(3)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.take_blocks(1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_against_a_set(device: str) -> None:
    """A count that drifts from the mask, a block given twice; on a GPU, where blocks are found on a
    stream of their own, a mask that is read before it is written."""
    rng = random.Random(0)
    pool, free, used = pool_of(64, device), set(range(64)), set[int]()
    for _ in range(2000):
        if rng.random() < 0.5 and free:
            count = rng.randint(1, min(8, len(free)))
            blocks = pool.take_blocks(count)
            assert len(set(blocks)) == count and set(blocks) <= free
            runs = sorted(blocks)
            if all(b == a + 1 for a, b in pairwise(runs)):
                assert blocks == runs
            free -= set(blocks)
            used |= set(blocks)
        elif used:
            back = rng.sample(sorted(used), rng.randint(1, min(8, len(used))))
            pool.extend(back)
            free |= set(back)
            used -= set(back)
        assert len(pool) == len(free)
    assert set(pool) == free


@pytest.mark.parametrize("kept", ["list", "cumsum"])
@pytest.mark.parametrize("admission", ADMISSION)
def test_blocks_of_one_token(admission: str, kept: str) -> None:
    """A table index or a prefix that is off by one where every token has a block; memory that is
    never full or never exceeded although every token counts."""

    def free_blocks(count: int) -> FreeBlocks:
        return FreeList(count) if kept == "list" else pool_of(count)

    config = make_config(block_size=1, num_blocks=160, max_num_seqs=16, admission=admission)
    core = EngineCore(config, FakeRunner(config), make_store(), free_blocks)
    prefix = [3 + i % 40 for i in range(20)]
    requests = [
        make_request(
            i,
            prefix[: i % 21] + [2 + (i * 5 + j) % 45 for j in range(1 + i * 7 % 30)],
            max_tokens=1 + i * 11 % 40,
            ignore_eos=i % 2 == 0,
        )
        for i in range(60)
    ]
    wanted = {r.id: expected(replace_ids(r), core.config) for r in requests}
    outputs = run(core, requests)
    assert {id: (o.tokens, o.finish) for id, o in outputs.items()} == wanted
    assert core.stats().prefix_hits > 0
    if admission == "optimistic":
        assert core.stats().preemptions > 0


def test_regions_against_a_set() -> None:
    """Bugs: two requests in one block; a gap that is passed over although the region fits; gaps
    side by side that no region may span; a count that drifts."""
    for seed in range(20):
        rng = random.Random(seed)
        pool, free, used = Regions(64), set(range(64)), list[list[int]]()
        for _ in range(300):
            if rng.random() < 0.5 and pool.largest:
                count = rng.randint(1, pool.largest)
                fits = (at for at in range(65 - count) if free >= set(range(at, at + count)))
                first = next(fits)
                blocks = pool.take_blocks(count)
                assert blocks == list(range(first, first + count))
                free -= set(blocks)
                used.append(blocks)
            elif used:
                back = used.pop(rng.randrange(len(used)))
                rng.shuffle(back)
                pool.extend(back)
                free |= set(back)
            assert len(pool) == len(free) and set(pool) == free
            runs = [0]
            for block in range(64):
                runs.append(runs[-1] + 1 if block in free else 0)
            assert pool.largest == max(runs)
            assert all(end < begin for (_, end), (begin, _) in pairwise(pool._gaps))
    with pytest.raises(AssertionError, match="freed twice"):
        pool.append(next(iter(pool)))
    with pytest.raises(AssertionError, match="no gap has 65 blocks, the largest has"):
        pool.take_blocks(65)


@pytest.mark.parametrize("block_size", [1, 4])
def test_requests_in_regions(block_size: int) -> None:
    """Bugs: a request that gets a block beyond its region; one that starts where blocks enough are
    free but no gap is; a region that is lost when a request is aborted."""
    config = make_config(
        block_size=block_size, num_blocks=200 // block_size, max_num_seqs=16, prefix_caching=False
    )
    core = EngineCore(config, FakeRunner(config), make_store(), Regions)
    memory = core.scheduler.memory
    requests = [
        make_request(
            i,
            [2 + (i * 5 + j) % 45 for j in range(1 + i * 7 % 50)],
            max_tokens=1 + i * 11 % 60,
            ignore_eos=i % 2 == 0,
        )
        for i in range(80)
    ]
    wanted = {r.id: expected(replace_ids(r), core.config) for r in requests}
    outputs, fragmented = {r.id: list[int]() for r in requests}, 0
    for request in requests:
        core.add_request(request)
    core.add_request(make_request(100, [5] * 30, max_tokens=60, ignore_eos=True))
    finishes = {}
    for step in range(2000):
        if not core.has_work():
            break
        if step == 40:
            core.abort([100])
        for delta in core.step():
            if delta.id != 100:
                outputs[delta.id] += delta.token_ids
                finishes[delta.id] = delta.finish or finishes.get(delta.id)
        core.check_integrity()
        (pool,) = memory.pools
        fragmented += pool.room < pool.num_free
        for request in memory.running.values():
            assert all(b == a + 1 for a, b in pairwise(request.blocks))
    assert {id: (tokens, finishes[id]) for id, tokens in outputs.items()} == wanted
    assert core.stats().preemptions == 0 and fragmented
    assert memory.pools[0].room == config.num_blocks  # gaps have joined again


def test_regions_are_refused_where_blocks_are_shared() -> None:
    """Bug: a prefix cache that is said to be on and finds nothing."""
    with pytest.raises(ConfigError, match="set prefix_caching: false"):
        EngineConfig(model="m", allocation="contiguous")
    with pytest.raises(ConfigError, match="admission is peak; leave one of them out"):
        EngineConfig(model="m", allocation="contiguous", prefix_caching=False, admission="peak")


def replace_ids(request):  # type: ignore[no-untyped-def]
    """Return a copy of a request, because the engine writes into its tokens."""
    import msgspec

    return msgspec.structs.replace(request, token_ids=list(request.token_ids))


def test_a_smaller_cache_has_a_pool_of_its_size() -> None:
    """After the device ran short of memory blocks are given that are no more."""
    config = make_config(block_size=1, num_blocks=160)
    core = EngineCore(config, FakeRunner(config), make_store(), pool_of)
    core.scheduler.shrink(130)
    assert core.stats().free_blocks == 130 == core.scheduler.memory.pools[0].num_free
