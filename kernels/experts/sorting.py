"""The sort of (token, expert) pairs by expert, stable in the order of tokens.

A few pairs take one launch: a program for each expert, which reads all pairs. Many pairs take two
launches. The first counts each expert's pairs in each block of pairs. In the second, each program
computes the positions of a block's pairs from the counts of earlier blocks. The result does not
depend on the order in which programs run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl

# Maximum number of pairs that are sorted in one launch. On an H200, 10,240 pairs of 512 experts
# take 6.5 us in two launches and 21 us in one; 81,920 pairs take 13.5 us and 161 us.
AT_ONCE = 2560
BLOCK = 256  # pairs per program, which compares all of them with each other
BLOCKS = 4  # blocks per program of the first launch, so that the second reads fewer counts
_TILE = 8192  # int32s that a program keeps in registers


class Sorted(NamedTuple):
    """The (token, expert) pairs sorted by expert, as indices into the flattened ids.

    The pairs of expert e are order[starts[e] : starts[e + 1]], ascending. Pairs of experts on other
    ranks are left out."""

    order: Tensor  # [pairs] int32
    starts: Tensor  # [experts + 1] int32


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(
    ids,  # [pairs]
    order,  # [pairs]: output, `Sorted.order`
    starts,  # [EXPERTS + 1]: output, `Sorted.starts`
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    below = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(ids + start + at, mask=start + at < pairs, other=EXPERTS)
        below += (chosen < expert).to(tl.int32)
    place = tl.sum(below, axis=0)
    tl.store(starts + expert, place)
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(ids + start + at, mask=start + at < pairs, other=EXPERTS)
        mine = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(mine, axis=0) - mine
        tl.store(order + place + rank, start + at, mask=mine == 1)
        place += tl.sum(mine, axis=0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, place)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    ids,  # [pairs]
    earlier,  # [runs * BLOCKS, WIDE]: for each block, pairs per expert in its run's earlier blocks
    counts,  # [runs, WIDE]: pairs per expert in each run; a run is the blocks of one program
    pairs,
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,  # a power of two, at least EXPERTS
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    run = tl.program_id(0)
    expert = tl.arange(0, WIDE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = tl.zeros([WIDE], tl.int32)
    at = run * BLOCKS * BLOCK + tl.arange(0, BLOCK)
    following = tl.load(ids + at, mask=at < pairs, other=EXPERTS)
    for block in tl.static_range(BLOCKS):
        chosen = following
        if block + 1 < BLOCKS:  # load the next block while this one is counted
            at += BLOCK
            following = tl.load(ids + at, mask=at < pairs, other=EXPERTS)
        tl.store(earlier + (run * BLOCKS + block) * WIDE + expert, seen)
        seen += tl.histogram(chosen, WIDE, mask=chosen < EXPERTS)
    tl.store(counts + run * WIDE + expert, seen)


@triton.jit(do_not_specialize=["pairs", "runs"])
def _place_kernel(
    ids,  # [pairs]
    earlier,  # counts from `_count_kernel`
    counts,
    order,  # [pairs]: output, `Sorted.order`
    starts,  # [EXPERTS + 1]: output, `Sorted.starts`
    pairs,
    runs,
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COMPARED: tl.constexpr,  # pairs that an iteration compares with the block's
    RUNS: tl.constexpr,  # counts that an iteration reads
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.arange(0, WIDE)
    inside = tl.arange(0, BLOCK)
    # ids were written two launches ago, so they can be read before gdc_wait.
    at = block * BLOCK + inside
    chosen = tl.load(ids + at, mask=at < pairs, other=EXPERTS)
    here = chosen < EXPERTS
    key = chosen * BLOCK + inside
    smaller = tl.zeros([BLOCK, COMPARED], tl.int32)
    for first in range(0, BLOCK, COMPARED):
        other = first + tl.arange(0, COMPARED)
        exists = block * BLOCK + other < pairs
        theirs = tl.load(ids + block * BLOCK + other, mask=exists, other=EXPERTS)
        smaller += ((theirs * BLOCK + other)[None, :] < key[:, None]).to(tl.int32)
    sorted_inside = tl.sum(smaller, axis=1)
    mine = tl.histogram(chosen, WIDE, mask=here)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.load(earlier + block * WIDE + expert)  # pairs per expert in earlier blocks
    total = tl.zeros([WIDE], tl.int32)
    for first in range(0, runs, RUNS):
        run = first + tl.arange(0, RUNS)
        count = tl.load(
            counts + run[:, None] * WIDE + expert[None, :], mask=(run < runs)[:, None], other=0
        )
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((run < block // BLOCKS)[:, None], count, 0), axis=0)
    if block == 0:
        tl.store(starts, 0)
        tl.store(starts + 1 + expert, tl.cumsum(total, axis=0), mask=expert < EXPERTS)
    # `total` and `sorted_inside` both count this block's pairs of earlier experts: subtract them.
    others = total - mine
    shift = before + tl.cumsum(others, axis=0) - others
    place = tl.gather(shift, tl.where(here, chosen, 0), axis=0) + sorted_inside
    tl.store(order + place, at, mask=here)


def sort(ids: Tensor, experts: int) -> Sorted:
    """Return the (token, expert) pairs sorted by expert.

    ids: int32 [tokens, chosen], 0 .. experts - 1, or `experts` for an expert of another rank.
    """
    return (sort_at_once if ids.numel() <= AT_ONCE else sort_by_blocks)(ids, experts)


def _unsorted(ids: Tensor, experts: int) -> Sorted:
    return Sorted(
        torch.empty(ids.numel(), dtype=torch.int32, device=ids.device),
        torch.empty(experts + 1, dtype=torch.int32, device=ids.device),
    )


def sort_at_once(ids: Tensor, experts: int) -> Sorted:
    """Return the pairs sorted by expert, in one launch; arguments are those of `sort`."""
    unsorted, pairs = _unsorted(ids, experts), ids.numel()
    block = min(2048, max(128, triton.next_power_of_2(pairs)))
    _sort_kernel[(experts,)](
        ids, *unsorted, pairs, EXPERTS=experts, BLOCK=block, num_warps=4, **pdl(ids.device)
    )
    return unsorted


def sort_by_blocks(
    ids: Tensor, experts: int, block: int = BLOCK, blocks: int = BLOCKS, num_warps: int = 4
) -> Sorted:
    """Return the pairs sorted by expert, in two launches; ids, experts: as for `sort`.

    block: pairs of a program, a power of two.
    blocks: blocks whose pairs one program counts.
    """
    unsorted, pairs = _unsorted(ids, experts), ids.numel()
    wide = max(128, triton.next_power_of_2(experts))
    runs = triton.cdiv(pairs, block * blocks)
    earlier = torch.empty(runs * blocks, wide, dtype=torch.int32, device=ids.device)
    counts = torch.empty(runs, wide, dtype=torch.int32, device=ids.device)
    shape = {"EXPERTS": experts, "WIDE": wide, "BLOCK": block, "BLOCKS": blocks}
    _count_kernel[(runs,)](ids, earlier, counts, pairs, **shape, num_warps=4, **pdl(ids.device))
    _place_kernel[(triton.cdiv(pairs, block),)](
        ids,
        earlier,
        counts,
        *unsorted,
        pairs,
        runs,
        **shape,
        COMPARED=min(block, _TILE // block),
        RUNS=max(1, _TILE // wide),
        num_warps=num_warps,
        **pdl(ids.device),
    )
    return unsorted
