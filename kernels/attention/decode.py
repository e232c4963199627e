"""Paged attention for entries with one query token: split over keys, heads of a group packed.

Once a step `plan` cuts the entries' keys into splits and lists them, the longest entry's first, on
the device. In each layer one persistent grid, whose size depends on the device and the number of
entries alone, walks (split, kv head) pairs; so one CUDA graph serves all lengths. A program that is
done with its pair draws the next from a counter, so that all end at about the same time however
the lengths are mixed. Where an entry has several splits,
each writes its partial output and log-sum-exp; the last to arrive merges them, or a second small
grid does, always in the order of the keys, so results do not depend on which split came last.

What decides the time, in this order: enough bytes in flight from the first moment (few programs
take long tiles); one round of equal shares rather than two; as few splits as that allows, because
each costs a handful of dependent trips to memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl

LOG2E = tl.constexpr(1.4426950408889634)
TILE = 64  # split sizes are multiples of this
MIN_SPLIT = 64  # keys
CUTS = 8  # splits a program may get on average, at most; 3 where entries are many

# What the plan takes a split to cost, in keys: for each one a program has to walk, more if there
# is something to merge, and once for merging at all. Measured on an H200; they need not be exact.
WALK_COST, MERGE_COST, MERGE_ONCE = 96, 64, 192
TAIL = 4  # the last split to be drawn ends this fraction of a split after the average program


class DecodeLaunch(NamedTuple):
    keys: int  # a tile
    num_warps: int
    num_stages: int
    per_sm: int  # programs on a multiprocessor
    merge: int = 4096  # elements of the tile that merges splits


def _decode_launch(pairs: int, sms: int, dims: int, element_size: int) -> DecodeLaunch:
    """Decision rule from measurements with mixed lengths; pairs = entries * kv heads, dims = the
    padded head size.

    With a pair or fewer for each multiprocessor, long tiles in flight make up for missing programs.
    With a few, small programs share out what the mixture leaves; from two on, whole entries do.
    """
    if dims > 256:  # tiles of more keys do not fit
        return DecodeLaunch(16, 4, 2, 1)
    if dims > 128 or element_size > 2:
        return DecodeLaunch(32, 4, 2, 2)
    if sms < 2 * pairs <= 2 * sms:
        return DecodeLaunch(128, 4, 3, 1)
    if sms < pairs <= 2 * sms:
        return DecodeLaunch(32, 2, 3, 4)
    if pairs <= 12 * sms:
        return DecodeLaunch(64, 4, 4, 2)
    return DecodeLaunch(32, 4, 3, 4)


@dataclass(slots=True)
class DecodePlan:
    """Splits of one step, and the memory that all its layers use in turn."""

    count: Tensor  # [2] int32: splits listed; pairs drawn since the plan was made
    # [max splits, 8] int32: entry, first key, end key, splits of the entry, its first item, the
    # query's position
    items: Tensor
    entries: Tensor  # [num_entries, 2] int32: first item, splits
    arrived: Tensor  # [num_entries, num_kv_heads] int32: splits done; zero between layers
    partial: Tensor  # [max splits, num_heads, head_dim] float32: outputs before the merge
    partial_lse: Tensor  # [max splits, num_heads] float32: log2 of the sum of exponentials
    # Many entries are seldom split: the last split merges. Few are split finely: merging takes a
    # grid.
    last_merges: bool
    shape: DecodeLaunch


@triton.jit(do_not_specialize_on_alignment=["kv_len", "arrived", "counted", "decodes"])
def _plan_kernel(
    kv_len,
    counted,
    items,
    entries,
    arrived,
    decodes,
    fill,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    CUTS: tl.constexpr,
    TAIL: tl.constexpr,
    WALK_COST: tl.constexpr,
    MERGE_COST: tl.constexpr,
    MERGE_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    WRITE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    entry = tl.program_id(0)
    index = tl.arange(0, ENTRIES)
    num_entries = tl.load(decodes)
    length = tl.load(kv_len + index, mask=index < num_entries, other=0)
    start_key = 0
    if WINDOW:
        start_key = tl.maximum(tl.load(kv_len + entry) - WINDOW, 0)
        length = tl.minimum(length, WINDOW)
    if CHUNK:
        start_key = tl.maximum(tl.load(kv_len + entry) - 1, 0) // CHUNK * CHUNK
        length = length - tl.maximum(length - 1, 0) // CHUNK * CHUNK
    real = index < num_entries
    # Try sizes from "one split for each program" down (and "no split"), and take the one that
    # should end first: programs walk equal shares of the keys, then wait for the longest split.
    total = tl.sum(length, axis=0)
    longest = tl.max(length, axis=0)
    size = tl.maximum(tl.cdiv(longest, TILE) * TILE, MIN_SPLIT)
    best = 1 << 30
    for cuts in tl.static_range(0, CUTS + 1):
        if cuts > 0:
            tried = tl.cdiv(tl.cdiv(total, fill * cuts), TILE) * TILE
            tried = tl.maximum(tried, MIN_SPLIT)
        else:
            tried = size
        count = tl.sum(tl.where(real, tl.maximum(tl.cdiv(length, tried), 1), 0), axis=0)
        walk = tl.minimum(tried, longest)
        end = tl.where(count <= fill, walk, tl.maximum(walk, total // fill + walk // TAIL))
        end += tl.cdiv(count, fill) * WALK_COST
        merges = MERGE_ONCE + tl.cdiv(count, fill) * MERGE_COST
        end += tl.where(count > num_entries, merges, 0)
        # Only what fits into the workspace.
        better = (end < best) & (count <= fill * CUTS + num_entries)
        size = tl.where(better, tried, size)
        best = tl.where(better, end, best)
    splits = tl.where(real, tl.maximum(tl.cdiv(length, size), 1), 0)
    mine = tl.sum(tl.where(index == entry, splits, 0), axis=0)  # 0 beyond num_entries
    own_length = tl.sum(tl.where(index == entry, length, 0), axis=0)
    before = (length > own_length) | ((length == own_length) & (index < entry))
    first = tl.sum(tl.where(before, splits, 0), axis=0)
    even = (
        tl.cdiv(tl.cdiv(own_length, tl.maximum(mine, 1)), TILE) * TILE
    )  # <= size, and leaves no split empty
    for start in range(0, mine, WRITE):
        split = start + tl.arange(0, WRITE)
        target = items + (first + split) * 8
        mask = split < mine
        tl.store(target, entry, mask=mask)
        tl.store(target + 1, start_key + split * even, mask=mask)
        last = start_key + tl.minimum((split + 1) * even, own_length)
        tl.store(target + 2, last, mask=mask)
        tl.store(target + 3, mine, mask=mask)
        tl.store(target + 4, first, mask=mask)
        tl.store(target + 5, start_key + own_length - 1, mask=mask)
    tl.store(entries + entry * 2, first)
    tl.store(entries + entry * 2 + 1, mine)
    heads = tl.arange(0, HEADS)
    tl.store(arrived + entry * NUM_KV_HEADS + heads, 0, mask=heads < NUM_KV_HEADS)
    if entry == 0:
        tl.store(counted, tl.sum(splits, axis=0))
        tl.store(counted + 1, 0)


@triton.jit
def capped(score, cap_log2):
    """cap_log2 * tanh(score), without overflow."""
    return cap_log2 - 2.0 * cap_log2 / (tl.exp2(score * (2.0 * LOG2E)) + 1.0)


@triton.jit
def _merge(
    out, partial, partial_lse, entry, first, splits, head,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    MERGE: tl.constexpr, MERGE_ROWS: tl.constexpr,
):  # fmt: skip
    """out[entry, head * GROUP ...] = splits first, first + 1 ..., weighed by their shares."""
    rows = tl.arange(0, MERGE_ROWS)
    dims = tl.arange(0, DIMS)
    chunk = tl.arange(0, MERGE)
    row_mask = rows < GROUP
    dim_mask = dims < HEAD_DIM
    best = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    merged = tl.zeros([MERGE_ROWS, DIMS], tl.float32)
    for start in range(0, splits, MERGE):
        at = ((first + start + chunk) * NUM_HEADS + head * GROUP)[:, None] + rows[None, :]
        there = (start + chunk < splits)[:, None] & row_mask[None, :]
        part = tl.load(
            partial + at[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=there[:, :, None] & dim_mask[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        lse = tl.load(partial_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        # Rows of padding stay at -inf; a finite stand-in keeps inf - inf out of the exponent.
        new_best = tl.maximum(best, tl.max(lse, axis=0))
        base = tl.where(new_best > float("-inf"), new_best, 0.0)
        share = tl.exp2(lse - base[None, :])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(share, axis=0)
        merged = merged * keep[:, None] + tl.sum(part * share[:, :, None], axis=0)
        best = new_best
    merged = merged / total[:, None]
    target = (entry * NUM_HEADS + head * GROUP + rows) * HEAD_DIM
    tl.store(
        out + target[:, None] + dims[None, :],
        merged.to(out.dtype.element_ty),
        mask=row_mask[:, None] & dim_mask[None, :],
    )


@triton.jit(do_not_specialize_on_alignment=["entries"])
def _merge_kernel(
    out, partial, partial_lse, entries,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, MERGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one (entry, query head), where there are several."""
    entry = tl.program_id(0).to(tl.int64)
    first = tl.load(entries + entry * 2).to(tl.int64)
    splits = tl.load(entries + entry * 2 + 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if splits > 1:
        _merge(
            out, partial, partial_lse, entry, first, splits, tl.program_id(1),
            NUM_HEADS, 1, HEAD_DIM, DIMS, MERGE, 1,
        )  # fmt: skip


@triton.jit
def item_of(items, item, exists):
    """Entry, first key and end key of a split."""
    entry = tl.load(items + item * 8, mask=exists, other=0).to(tl.int64)
    begin = tl.load(items + item * 8 + 1, mask=exists, other=0)
    end = tl.load(items + item * 8 + 2, mask=exists, other=0)
    return entry, begin, end


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table", "counted", "items", "arrived"],
)
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_table,
    counted,
    items,
    arrived,
    partial,
    partial_lse,
    sinks,  # [num_heads] float32, if SINKS
    slopes,  # [num_heads] float32, if SLOPES
    scale_log2,
    cap_log2,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP padded to what the matrix unit takes
    DIMS: tl.constexpr,  # HEAD_DIM padded to a power of two
    KEYS: tl.constexpr,  # keys a tile
    MERGE: tl.constexpr,  # splits merged at a time
    MERGE_ROWS: tl.constexpr,  # GROUP padded to a power of two
    LAST_MERGES: tl.constexpr,  # else _merge_kernel does
    SOFTCAP: tl.constexpr,  # scores times scale_log2 are what tanh takes
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    keys = tl.arange(0, KEYS)
    row_mask = rows < GROUP
    dim_mask = dims < HEAD_DIM
    tile_mask = row_mask[:, None] & dim_mask[None, :]
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    PAGE: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    programs = tl.num_programs(0)
    pairs = tl.load(counted) * NUM_KV_HEADS
    work = tl.program_id(0)
    entry, begin, end = item_of(items, work // NUM_KV_HEADS, work < pairs)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while work < pairs:
        head = work % NUM_KV_HEADS
        item = work // NUM_KV_HEADS
        table = block_table + entry * table_stride
        head_rows = (entry * NUM_HEADS + head * GROUP + rows) * HEAD_DIM
        splits = tl.load(items + item * 8 + 3)
        first = tl.load(items + item * 8 + 4).to(tl.int64)
        query = tl.load(q + head_rows[:, None] + dims[None, :], mask=tile_mask, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        denominator = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        if SINKS:  # in the first split, as a key without a value
            sink = tl.load(sinks + head * GROUP + rows, mask=row_mask, other=0.0) * LOG2E
            top = tl.where(item == first, sink, top)
            denominator += tl.where(item == first, 1.0, 0.0)
        if SLOPES:
            slope = tl.load(slopes + head * GROUP + rows, mask=row_mask, other=0.0) * LOG2E
            last = tl.load(items + item * 8 + 5)
        # Block ids are read a tile ahead of the keys, which the compiler reads ahead in turn.
        position = begin + keys
        page = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
        # Draw the next pair while the first loads are on their way. A layer draws exactly `pairs`
        # numbers (each program's last is one too many), so the remainder starts again at zero.
        next_work = pairs
        if programs < pairs:
            next_work = programs + tl.atomic_add(counted + 1, 1, sem="relaxed") % pairs
        next_item = item_of(items, next_work // NUM_KV_HEADS, next_work < pairs)
        for start in range(begin, end, KEYS):
            position = start + keys
            seen = position < end
            in_page = (head * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
            offset = page.to(tl.int64) * PAGE + in_page
            position += KEYS
            page = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
            where = offset[:, None] + dims[None, :]
            mask = seen[:, None] & dim_mask[None, :] if HEAD_DIM < DIMS else seen[:, None]
            key = tl.load(k_cache + where, mask=mask, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
            if SOFTCAP:
                score = capped(score, cap_log2)
            if SLOPES:
                ahead = start + keys - last
                score += slope[:, None] * ahead[None, :].to(tl.float32)
            score = tl.where(seen[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, axis=1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            denominator = denominator * shrink + tl.sum(weight, axis=1)
            value = tl.load(v_cache + where, mask=mask, other=0.0)
            acc = acc * shrink[:, None]
            acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
            top = new_top
        # A padding entry may have no key at all: 0 / 1 instead of 0 / 0.
        denominator = tl.where(denominator > 0.0, denominator, 1.0)
        acc = acc / denominator[:, None]
        if splits == 1:
            where_out = out + head_rows[:, None] + dims[None, :]
            tl.store(where_out, acc.to(out.dtype.element_ty), mask=tile_mask)
        else:
            at = item.to(tl.int64) * NUM_HEADS + head * GROUP + rows
            tl.store(partial + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=tile_mask)
            tl.store(partial_lse + at, top + tl.log2(denominator), mask=row_mask)
            if LAST_MERGES:
                tl.debug_barrier()  # every thread's stores come before the arrival
                arrivals = arrived + entry * NUM_KV_HEADS + head
                before = tl.atomic_add(arrivals, 1, sem="release")
                if before == splits - 1:
                    tl.atomic_xchg(arrivals, 0, sem="acquire")
                    tl.debug_barrier()
                    _merge(
                        out, partial, partial_lse, entry, first, splits, head,
                        NUM_HEADS, GROUP, HEAD_DIM, DIMS, MERGE, MERGE_ROWS,
                    )  # fmt: skip
        work = next_work
        entry, begin, end = next_item


def plan(
    kv_len: Tensor,  # [num_entries] int32
    num_heads: int,
    k_cache: Tensor,  # any layer's: [num_blocks, num_kv_heads, block_size, head_dim]
    max_kv_len: int,
    decodes: Tensor,  # [1] int32: the leading entries that are decodes
    window: int = 0,
    chunk: int = 0,
) -> DecodePlan:
    """Cut the keys of a step's decodes, those that window and chunk let their queries see."""
    sms = num_sms(kv_len.device)
    _, num_kv_heads, _, head_dim = k_cache.shape
    pairs = kv_len.shape[0] * num_kv_heads
    dims = triton.next_power_of_2(head_dim)
    shape = _decode_launch(pairs, sms, dims, k_cache.element_size())
    sizes = (num_heads, num_kv_heads, head_dim)
    return cut(kv_len, sizes, shape, 2 * pairs > sms, max_kv_len, decodes, window, chunk)


def cut(
    kv_len: Tensor,
    sizes: tuple[int, int, int],
    shape: DecodeLaunch,
    last_merges: bool,
    max_kv_len: int,
    decodes: Tensor,
    window: int = 0,
    chunk: int = 0,
) -> DecodePlan:
    """The same for another kernel. sizes: query heads, parts of them that walk an entry's keys on
    their own, elements of a head's result."""
    num_heads, num_kv_heads, head_dim = sizes
    num_entries = kv_len.shape[0]
    device = kv_len.device
    fill = max(1, num_sms(device) * shape.per_sm // num_kv_heads)
    cuts = CUTS if num_entries <= 256 else 3
    seen = min(max_kv_len, window or chunk or max_kv_len)
    most = min(fill * cuts, num_entries * triton.cdiv(seen, MIN_SPLIT)) + num_entries
    result = DecodePlan(
        count=torch.empty(2, dtype=torch.int32, device=device),
        items=torch.empty((most, 8), dtype=torch.int32, device=device),
        entries=torch.empty((num_entries, 2), dtype=torch.int32, device=device),
        arrived=torch.empty((num_entries, num_kv_heads), dtype=torch.int32, device=device),
        partial=torch.empty((most, num_heads, head_dim), dtype=torch.float32, device=device),
        partial_lse=torch.empty((most, num_heads), dtype=torch.float32, device=device),
        last_merges=last_merges,
        shape=shape,
    )
    _plan_kernel[(num_entries,)](
        kv_len,
        result.count,
        result.items,
        result.entries,
        result.arrived,
        decodes,
        fill,
        NUM_KV_HEADS=num_kv_heads,
        TILE=TILE,
        MIN_SPLIT=MIN_SPLIT,
        CUTS=cuts,
        TAIL=TAIL,
        WALK_COST=WALK_COST,
        MERGE_COST=MERGE_COST,
        # The second grid runs whether or not there is something to merge.
        MERGE_ONCE=MERGE_ONCE if result.last_merges else 0,
        ENTRIES=max(32, triton.next_power_of_2(num_entries)),
        HEADS=triton.next_power_of_2(num_kv_heads),
        WRITE=128,
        WINDOW=window,
        CHUNK=chunk,
        num_warps=4,
    )
    return result


def attention_decode(
    q: Tensor,  # [num_entries, num_heads, head_dim]
    k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: Tensor,
    out: Tensor,  # like q
    block_table: Tensor,  # [num_entries, max_blocks] int32
    scale: float,
    plan: DecodePlan,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """out = softmax(scale q k^T) v over the keys that the plan lists, for its entries' tokens; see
    `kernels.reference.Kernels.attention`."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    dims = triton.next_power_of_2(head_dim)
    merge_rows = triton.next_power_of_2(group)
    shape = plan.shape
    programs = num_sms(q.device) * shape.per_sm
    _decode_kernel[(programs,)](
        q,
        k_cache,
        v_cache,
        out,
        block_table,
        plan.count,
        plan.items,
        plan.arrived,
        plan.partial,
        plan.partial_lse,
        q if sinks is None else sinks,
        q if slopes is None else slopes,
        scale / softcap if softcap else scale * 1.4426950408889634,
        softcap * 1.4426950408889634,
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIMS=dims,
        KEYS=shape.keys,
        MERGE=max(2, shape.merge // (merge_rows * dims)),
        MERGE_ROWS=merge_rows,
        LAST_MERGES=plan.last_merges,
        SOFTCAP=softcap > 0,
        SINKS=sinks is not None,
        SLOPES=slopes is not None,
        **pdl(q.device),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if not plan.last_merges:
        merge(out, plan)


def merge(out: Tensor, plan: DecodePlan) -> None:
    """Into out [num_entries, num_heads, size] what the splits of an entry have found."""
    _, num_heads, size = plan.partial.shape
    dims = triton.next_power_of_2(size)
    _merge_kernel[(plan.entries.shape[0], num_heads)](
        out,
        plan.partial,
        plan.partial_lse,
        plan.entries,
        NUM_HEADS=num_heads,
        HEAD_DIM=size,
        DIMS=dims,
        MERGE=max(2, 8192 // dims),
        num_warps=4,
        **pdl(out.device),
    )
