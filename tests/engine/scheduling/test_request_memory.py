"""RequestMemory alone: no queue, no steps, no phases but those that a test sets."""

from typing import Any

import pytest

from engine.config.kv_groups import Full, Window
from engine.scheduling.admission import optimistic
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.memory.request_memory import RequestMemory
from engine.scheduling.request import Request, RequestPhase
from engine.scheduling.request_start import find_start
from tests.fakes import make_config, make_request


class Memory(RequestMemory):
    """A RequestMemory with blocks of 4 tokens, whose requests start with all blocks of their
    prompts."""

    def __init__(self, rows: int = 4, **changes: Any) -> None:
        self.config: CoreConfig = make_config(**({"block_size": 4, "num_blocks": 20} | changes))
        super().__init__(self.config, rows)
        self.arrivals = 0

    def begin(self, tokens: list[int], **fields: Any) -> Request:
        self.arrivals += 1
        request = Request(make_request(self.arrivals, tokens, **fields), self.config, self.arrivals)
        hashes = self.pools[0].hash_prefix(request, (len(tokens) - 1) // 4)
        memories = [self.seen(rank, [], lambda _: 0, 1, 0) for rank in range(len(self.pools))]
        start = find_start(request, hashes, self.pools, memories, self.snapshots, optimistic)
        assert start is not None
        self.start(request, start, cacheable=True)
        pool = self.pool(request)
        pool.extend((request,), -(-len(tokens) // 4) - len(request.blocks) // pool.num_groups)
        request.phase = RequestPhase.COMPUTING
        request.num_computed = len(tokens)
        pool.hash_blocks(request, len(tokens))
        self.check_integrity()
        return request


def test_what_a_step_uses_is_not_given_to_another() -> None:
    """Bug: a row or block that is free while a launched step still writes it; one that stays taken
    after that; or a block that others share and is freed with the first of them."""
    memory = Memory()
    first = memory.begin([*range(2, 12)])
    second = memory.begin([*range(2, 12)])
    (pool,) = memory.pools
    assert second.blocks[:2] == first.blocks[:2] and pool.num_free == 16
    first.last_step, second.last_step = 7, 8
    row = first.row
    memory.release(first)
    assert not memory.give_back(6) and pool.num_free == 16 and row not in memory.free_rows
    (freed,) = memory.give_back(7)
    assert freed.row == row == memory.free_rows[-1] and pool.num_free == 17
    memory.release(second)
    assert memory.give_back(8) and pool.num_free == 20 and memory.reserved_blocks == 0
    memory.check_integrity()
    memory.empty(10)
    assert memory.pools[0].num_free == 10


def test_what_comes_free_by_itself() -> None:
    """Bug: a request is preempted although blocks that are coming suffice, or none is although
    those that are coming are shared and stay."""
    memory = Memory()
    ending, staying = memory.begin([*range(2, 12)]), memory.begin([*range(2, 12)])
    assert memory.coming(0, []) == 0
    ending.phase = RequestPhase.FINISHING
    assert memory.coming(0, []) == 1, "its third block is its own"
    ending.last_step = 5
    memory.release(ending)
    assert memory.coming(0, []) == 1
    staying.phase = RequestPhase.FINISHING
    assert memory.coming(0, []) == 2, "each has one that the other has not"
    windows = Memory(kinds=(Full(), Window(5)))
    request = windows.begin([*range(2, 18)])
    request.num_computed = 4
    assert windows.coming(0, []) == 0
    assert windows.coming(0, [(request, 12)]) == windows.pools[0].num_behind(request, 16) > 0


def test_who_gives_back_first() -> None:
    """Bug: an older or more urgent request is preempted for a later one, one that has blocks of
    another pool, or one that is about to end anyway."""
    memory = Memory(kv_ranks=2)
    urgent = memory.begin([2, 3, 4], priority=-1)
    other = memory.begin([5, 6, 7])
    assert (urgent.kv_rank, other.kv_rank) == (0, 1)
    late = [memory.begin([*range(first, first + 3)]) for first in (8, 11)]
    for rank in range(2):
        mine = [r for r in (urgent, other, *late) if r.kv_rank == rank]
        assert memory.last_in_order(rank) is mine[-1]
        mine[-1].phase = RequestPhase.FINISHING
        assert memory.last_in_order(rank) is mine[-2]


@pytest.mark.parametrize("left", [False, True])
def test_what_admission_sees(left: bool) -> None:
    """Bug: blocks that running requests still need are promised to a new one, or those of a request
    that has left and whose step is not done are counted as free."""
    memory = Memory()
    request = memory.begin([*range(2, 12)], max_tokens=16)
    request.token_ids += range(12, 21)
    request.last_step = 3
    if left:
        memory.release(request)
    seen = memory.seen(0, [] if left else [request], lambda _: 0, 5, 1)
    assert (seen.free, seen.num_blocks, seen.budget, seen.lag) == (17, 20, 5, 1)
    assert seen.num_running == (not left)
    (footprint,) = seen.running()
    if left:
        assert seen.promised == seen.uncomputed == 0
        assert footprint == (12, 12, 3, 0)
    else:
        assert seen.promised == 2 and seen.uncomputed == 9, "19 tokens are five blocks"
        assert footprint == (19, 25, 3, 0)
