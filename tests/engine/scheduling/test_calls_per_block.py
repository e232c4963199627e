"""Moves and loads of many blocks: operations on all blocks at once, not calls for each."""

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.messages import KVSource
from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.host_plan import HostPlan, Pairs
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.moves.block_moves import BlockMoves
from engine.scheduling.moves.puller import Arrival
from engine.scheduling.moves.records import MovePlan
from engine.scheduling.moves.source import Order
from engine.scheduling.moves.wire import Ask
from tests.engine.scheduling.moving import FakePuller
from tests.fakes import make_core, make_request

SIZES = 64, 512


class DoneCopies:
    """A `MoveCopies` whose copies are done at once."""

    load_rate = store_seconds = load_seconds = 0.0

    def __init__(self) -> None:
        self._done: list[tuple[int, bool]] = []

    def room(self) -> int:
        return 1 << 20

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        return True

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        self._done.append((ticket, True))
        return True

    def finished(self) -> list[tuple[int, bool]]:
        done, self._done = self._done, []
        return done

    def ending(self) -> dict[int, float]:
        return {}

    def stored(self, slots: Any, states: Any = ()) -> bool:
        return True

    def wait(self) -> None:
        pass

    def stores_end(self) -> Callable[[], None]:
        return self.wait

    def loads_end(self) -> Callable[[], None]:
        return self.wait


def calls_of(action: Callable[[], Any]) -> int:
    """Return the number of calls of functions, those of C included, during an action."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def moves_of(num_blocks: int) -> BlockMoves:
    plan = MovePlan(num_blocks, 1, b"equal", 1.0)
    return BlockMoves(plan, DoneCopies(), [], early=True)


def hashes_of(count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(count)]


def full_pool(num_blocks: int, hashes: list[bytes]) -> BlockManager:
    """Return a pool whose first evicted blocks have these hashes."""
    pool = BlockManager(num_blocks, 4)
    blocks = pool.allocate(len(hashes))
    pool.adopt(blocks, hashes)
    pool.free(blocks)
    return pool


def source_calls(num_blocks: int) -> int:
    """Return the calls of the source's step loop for a pull."""
    moves, hashes = moves_of(num_blocks), hashes_of(num_blocks)
    pool = full_pool(num_blocks, hashes)
    order = Order(Ask(moves.compatibility, b"".join(hashes), 0, 1), time.monotonic() + 600)

    def serve() -> None:
        moves._post_order(order)
        moves.poll(pool, 1, 1)
        while (staged := order.staged[0].get_nowait()) is not None:
            moves._post_sent(order, staged.slots)
        moves.poll(pool, 1, 1)

    calls = calls_of(serve)
    assert order.answer.get_nowait().indices == list(range(num_blocks))
    assert not moves.holds and pool.num_free == num_blocks
    pool.check_integrity([])
    return calls


def puller_calls(num_blocks: int) -> int:
    """Return the calls of the puller's step loop for a pull, for which it evicts other blocks."""
    moves, hashes = moves_of(num_blocks), hashes_of(num_blocks)
    moves._puller = FakePuller(range(0))  # type: ignore[assignment]
    others = [bytes([1]) + digest[1:][::-1] for digest in hashes]
    pool = full_pool(num_blocks, others)
    core, _ = make_core()
    core.add_request(make_request(1, 8))
    request = core.scheduler.requests[1]
    slots = list(range(num_blocks))

    def pull() -> None:
        assert moves.pull(request, KVSource("other", 1, ""), pool, hashes)
        arrival = Arrival(slots, slots, last=True)
        moves._post_arrived(moves._imports[1].pull, arrival)
        moves.poll(pool, 1, 1)

    calls = calls_of(pull)
    assert pool.match_prefix(hashes) and moves.pulled_tokens == 4 * num_blocks
    pool.check_integrity([])
    return calls


def load_calls(num_blocks: int) -> int:
    """Return the calls that let a load's blocks enter the prefix cache."""
    copies, hashes = DoneCopies(), hashes_of(num_blocks)
    tier = HostTier(HostPlan(num_blocks, 1, everything=True), copies, 1)
    pool = full_pool(num_blocks, hashes)
    tier.store(pool, pool.match_prefix(hashes), hashes)
    pool.reset()
    core, _ = make_core()
    core.add_request(make_request(1, 8))
    prefix = tier.find(pool, hashes)
    assert prefix is not None and tier.begin(core.scheduler.requests[1], pool, prefix)
    calls = calls_of(tier.take_arrived)
    assert len(pool.match_prefix(hashes)) == num_blocks and not tier.num_loads
    tier.check_integrity([])
    return calls


@pytest.mark.parametrize("calls", [source_calls, puller_calls, load_calls])
def test_calls_do_not_grow_with_the_blocks(calls: Callable[[int], int]) -> None:
    """Bug: the step loop calls functions for each of the 512 blocks of 8,192 tokens, which delays
    their request's first token by a millisecond."""
    few, many = map(calls, SIZES)
    assert many - few < 40, "a few batches more, but not a call a block"
