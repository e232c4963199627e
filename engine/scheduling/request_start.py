"""Start: the KV pool in which a waiting request can start, and its cached blocks there.

`find_start` changes nothing: the scheduler carries out the start that it returns.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.scheduling.admission import Fits, Footprint, KVMemory, fits_now
from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.snapshots import Snapshots
from engine.scheduling.request import Request


class Start(NamedTuple):
    """The pool where a waiting request can start, with its cached prefix and footprint there.

    kv_rank: the rank of the pool.
    cached: the block table of the request's cached prefix in the pool.
    num_resident: number of cached positions (block_size tokens each), including those after the
        last snapshot.
    footprint: the memory that the request takes.
    """

    kv_rank: int
    cached: list[int]
    num_resident: int
    footprint: Footprint


def find_start(
    request: Request,
    hashes: list[bytes],
    pools: Sequence[BlockManager],
    memories: Sequence[KVMemory],
    snapshots: Snapshots | None,
    fits: Fits,
) -> Start | None:
    """Return how a waiting request can start now; None if no pool has room for it.

    Of several pools, the one is chosen with the smallest sum of blocks in use and blocks that this
    request would have to compute. So a request starts where its prefix is cached, unless that rank
    has much more work.

    hashes: hashes of the blocks of the prefix that may be shared.
    memories: the memory of each pool.
    fits: the admission strategy.
    """
    num_tokens = len(request.token_ids)
    starts: list[tuple[int, Start]] = []
    for rank, (pool, memory) in enumerate(zip(pools, memories, strict=True)):
        if snapshots is None:
            cached, num_resident = pool.match_prefix(hashes), 0
        else:
            cached, num_resident = snapshots.match(hashes, pool.match_prefix, pool.num_groups)
        resident = [block for block in cached if block >= 0]
        footprint = Footprint(
            now=num_tokens,
            final=max(num_tokens, request.limit - 1),
            held=len(resident),
            shared=len(resident) - pool.num_unused(resident),
        )
        if not fits_now(memory, footprint):
            continue
        # A request that runs alone fits, even if a strategy rounds its size up beyond the memory.
        if not fits(memory, footprint) and memory.num_running:
            continue
        used_blocks = memory.num_blocks - memory.free + memory.promised - len(resident)
        starts.append((used_blocks, Start(rank, cached, num_resident, footprint)))
    return min(starts, key=lambda each: each[0])[1] if starts else None
