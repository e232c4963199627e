"""Paged attention for entries with one query token: split over keys, heads of a group packed, any mix of lengths.

Once a step `plan` cuts every entry's keys into splits of about equal size and lists them, on the device. In each layer
one persistent grid, whose size depends on the device alone, walks (split, kv head) pairs; so one CUDA graph serves
all lengths. A split writes its partial output and log-sum-exp; the last of an entry's splits to arrive merges them,
in the order of the keys, so that there is no second launch and results do not depend on who came last.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # split sizes are multiples of this
MIN_SPLIT = 128  # keys; below it the merge costs more than the parallelism brings
MAX_SPLIT = 512  # keys; above it the last splits to finish leave the device idle
MAX_SPLITS = (
    1024  # splits beyond one for each entry; bounds the workspace, longer totals get longer splits
)
FIXED_SPLITS = 16  # most splits of an entry in a deterministic plan


class _Shape(NamedTuple):
    keys: int  # a tile
    num_warps: int
    num_stages: int
    per_sm: int  # programs on a multiprocessor


def _shape(dims: int, element_size: int) -> _Shape:
    """Decision rule from `python -m kernels.bench`; dims is the padded head size."""
    if dims > 128 or element_size > 2:
        return _Shape(32, 4, 2, 2)
    return _Shape(64, 4, 3, 3)


@dataclass(slots=True)
class DecodePlan:
    """Splits of one step, and the memory that all its layers use in turn."""

    count: Tensor  # [1] int32: splits listed
    items: Tensor  # [max splits, 8] int32: entry, first key, end key, splits of the entry, its first item
    arrived: Tensor  # [num_entries, num_kv_heads] int32: splits done; zero between layers
    partial: Tensor  # [max splits, num_heads, head_dim] float32: outputs before the merge
    partial_lse: Tensor  # [max splits, num_heads] float32: log2 of the sum of exponentials


@triton.jit(
    do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["kv_len", "arrived", "count"]
)
def _plan_kernel(
    kv_len,
    count,
    items,
    arrived,
    num_entries,
    fill,
    most,
    fixed,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    WRITE: tl.constexpr,
):
    entry = tl.program_id(0)
    index = tl.arange(0, ENTRIES)
    length = tl.load(kv_len + index, mask=index < num_entries, other=0)
    if DETERMINISTIC:  # a function of the entry's own length
        size = tl.cdiv(tl.cdiv(length, fixed), TILE) * TILE
        size = tl.maximum(size, 2 * MIN_SPLIT)
    else:  # enough splits to fill the device, unless they get too small or too large
        total = tl.sum(length, axis=0)
        size = tl.cdiv(tl.cdiv(total, fill), TILE) * TILE
        size = tl.minimum(tl.maximum(size, MIN_SPLIT), MAX_SPLIT)
        size = tl.maximum(size, tl.cdiv(tl.cdiv(total, most), TILE) * TILE)
    splits = tl.where(index < num_entries, tl.maximum(tl.cdiv(length, size), 1), 0)
    first = tl.sum(tl.where(index < entry, splits, 0), axis=0)
    mine = tl.sum(tl.where(index == entry, splits, 0), axis=0)
    own_length = tl.sum(tl.where(index == entry, length, 0), axis=0)
    even = tl.cdiv(tl.cdiv(own_length, mine), TILE) * TILE  # <= size, and leaves no split empty
    for start in range(0, mine, WRITE):
        split = start + tl.arange(0, WRITE)
        target = items + (first + split) * 8
        mask = split < mine
        tl.store(target, entry, mask=mask)
        tl.store(target + 1, split * even, mask=mask)
        tl.store(target + 2, tl.minimum((split + 1) * even, own_length), mask=mask)
        tl.store(target + 3, mine, mask=mask)
        tl.store(target + 4, first, mask=mask)
    heads = tl.arange(0, HEADS)
    tl.store(arrived + entry * NUM_KV_HEADS + heads, 0, mask=heads < NUM_KV_HEADS)
    if entry == num_entries - 1:
        tl.store(count, first + mine)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table", "items", "count", "arrived"],
)
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_table,
    count,
    items,
    arrived,
    partial,
    partial_lse,
    scale_log2,
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
):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    keys = tl.arange(0, KEYS)
    row_mask = rows < GROUP
    dim_mask = dims < HEAD_DIM
    tile_mask = row_mask[:, None] & dim_mask[None, :]
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    PAGE: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    total = tl.load(count) * NUM_KV_HEADS
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        head = work % NUM_KV_HEADS
        item = work // NUM_KV_HEADS
        entry = tl.load(items + item * 8).to(tl.int64)
        begin = tl.load(items + item * 8 + 1)
        end = tl.load(items + item * 8 + 2)
        splits = tl.load(items + item * 8 + 3)
        table = block_table + entry * table_stride
        head_rows = (entry * NUM_HEADS + head * GROUP + rows) * HEAD_DIM
        query = tl.load(q + head_rows[:, None] + dims[None, :], mask=tile_mask, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        denominator = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        # Block ids are read one tile ahead of the keys, which the compiler's pipeline reads ahead in turn.
        position = begin + keys
        page = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
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
            tl.debug_barrier()  # every thread's stores come before the arrival
            before = tl.atomic_add(arrived + entry * NUM_KV_HEADS + head, 1, sem="acq_rel")
            if before == splits - 1:
                tl.store(arrived + entry * NUM_KV_HEADS + head, 0)
                first = tl.load(items + item * 8 + 4).to(tl.int64)
                merge_rows = tl.arange(0, MERGE_ROWS)
                chunk = tl.arange(0, MERGE)
                merge_mask = merge_rows < GROUP
                best = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
                total_weight = tl.zeros([MERGE_ROWS], tl.float32)
                merged = tl.zeros([MERGE_ROWS, DIMS], tl.float32)
                for step in range(0, splits, MERGE):
                    slot = (first + step + chunk) * NUM_HEADS + head * GROUP
                    there = (step + chunk < splits)[:, None] & merge_mask[None, :]
                    slot = slot[:, None] + merge_rows[None, :]
                    lse = tl.load(
                        partial_lse + slot, mask=there, other=float("-inf"), cache_modifier=".cg"
                    )
                    part = tl.load(
                        partial + slot[:, :, None] * HEAD_DIM + dims[None, None, :],
                        mask=there[:, :, None] & dim_mask[None, None, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    # Rows of padding stay slot -inf; a finite stand-in keeps inf - inf out of the exponent.
                    new_best = tl.maximum(best, tl.max(lse, axis=0))
                    base = tl.where(new_best > float("-inf"), new_best, 0.0)
                    share = tl.exp2(lse - base[None, :])
                    keep = tl.exp2(best - base)
                    total_weight = total_weight * keep + tl.sum(share, axis=0)
                    merged = merged * keep[:, None] + tl.sum(part * share[:, :, None], axis=0)
                    best = new_best
                merged = merged / total_weight[:, None]
                target = (entry * NUM_HEADS + head * GROUP + merge_rows) * HEAD_DIM
                tl.store(
                    out + target[:, None] + dims[None, :],
                    merged.to(out.dtype.element_ty),
                    mask=merge_mask[:, None] & dim_mask[None, :],
                )


@lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; a small stand-in where kernels are interpreted on the CPU."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan(
    kv_len: Tensor,  # [num_entries] int32
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    deterministic: bool = False,
) -> DecodePlan:
    """Cut the keys of a step's decodes. deterministic: an entry's splits do not depend on the other entries."""
    num_entries = kv_len.shape[0]
    device = kv_len.device
    per_sm = _shape(triton.next_power_of_2(head_dim), 2).per_sm
    fill = max(1, num_sms(device) * per_sm // num_kv_heads)
    if deterministic:
        most = num_entries * min(FIXED_SPLITS, triton.cdiv(max_kv_len, 2 * MIN_SPLIT))
    else:
        most = min(MAX_SPLITS, num_entries * triton.cdiv(max_kv_len, MIN_SPLIT)) + num_entries
    result = DecodePlan(
        count=torch.empty(1, dtype=torch.int32, device=device),
        items=torch.empty((most, 8), dtype=torch.int32, device=device),
        arrived=torch.empty((num_entries, num_kv_heads), dtype=torch.int32, device=device),
        partial=torch.empty((most, num_heads, head_dim), dtype=torch.float32, device=device),
        partial_lse=torch.empty((most, num_heads), dtype=torch.float32, device=device),
    )
    _plan_kernel[(num_entries,)](
        kv_len,
        result.count,
        result.items,
        result.arrived,
        num_entries,
        fill,
        MAX_SPLITS,
        FIXED_SPLITS,
        NUM_KV_HEADS=num_kv_heads,
        TILE=TILE,
        MIN_SPLIT=MIN_SPLIT,
        MAX_SPLIT=MAX_SPLIT,
        DETERMINISTIC=deterministic,
        ENTRIES=max(32, triton.next_power_of_2(num_entries)),
        HEADS=triton.next_power_of_2(num_kv_heads),
        WRITE=128,
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
) -> None:
    """out = softmax(scale q k^T) v over the keys that the plan lists, for the first num_entries tokens."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    dims = triton.next_power_of_2(head_dim)
    merge_rows = triton.next_power_of_2(group)
    shape = _shape(dims, k_cache.element_size())
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
        scale * 1.4426950408889634,
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIMS=dims,
        KEYS=shape.keys,
        MERGE=max(2, 4096 // (merge_rows * dims)),
        MERGE_ROWS=merge_rows,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
