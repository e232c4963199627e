"""Paged attention for sequences (entries) with one query token: split over keys, grouped heads.

Once per step `plan` cuts the entries' keys into splits and lists these on the device, those of the
longest entry first. In each layer one persistent grid processes (split, kv head) pairs. The size of
the grid depends only on the device and the number of entries, so one CUDA graph serves all lengths.
A program takes its next pair from a counter, so all programs end at about the same time.

If an entry has several splits, each writes its partial output and log-sum-exp. The split that
finishes last merges them, or a second small grid does. Both merge in the order of the keys, so
results do not depend on which split finishes last.

A run (decodes of one request at consecutive positions, see `decode_plan.py`) is planned as its
first entry. A tile then has a row for each pair of a query and a head. The last split also covers
the keys of the run's own tokens, which only the run's later queries see.

Three things determine the time, the most important first. Enough bytes must be in flight from the
start, so few programs need long tiles. One wave of equal shares is better than two. Splits should
be few, as each costs a few dependent memory accesses.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode_plan import MIN_ROWS, DecodePlan
from kernels.attention.inputs import AttentionInputs
from kernels.attention.shapes import Heads, Scores
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.metadata import AttentionMeta

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(score, cap_log2):
    """Return the soft-capped score, cap_log2 * tanh(score), without overflow."""
    return cap_log2 - 2.0 * cap_log2 / (tl.exp2(score * (2.0 * LOG2E)) + 1.0)


@triton.jit
def merge_into(
    out, partial, partial_lse, entry, first, splits, head, queries,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    MERGE: tl.constexpr, MERGE_ROWS: tl.constexpr, QUERIES: tl.constexpr = 1,
):  # fmt: skip
    """Merge the `splits` partial outputs of each query head of one kv head, and write the results.

    Computes `queries` consecutive entries from `entry` on. Each split has QUERIES rows in `partial`
    and `partial_lse`, from row `first` on.
    """
    rows = tl.arange(0, MERGE_ROWS)
    dims = tl.arange(0, DIMS)
    chunk = tl.arange(0, MERGE)
    row_mask = rows < GROUP * queries
    dim_mask = dims < HEAD_DIM
    rows = rows // GROUP * NUM_HEADS + head * GROUP + rows % GROUP
    best = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    merged = tl.zeros([MERGE_ROWS, DIMS], tl.float32)
    for start in range(0, splits, MERGE):
        at = ((first + (start + chunk) * QUERIES) * NUM_HEADS)[:, None] + rows[None, :]
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
    target = (entry * NUM_HEADS + rows) * HEAD_DIM
    tl.store(
        out + target[:, None] + dims[None, :],
        merged.to(out.dtype.element_ty),
        mask=row_mask[:, None] & dim_mask[None, :],
    )


@triton.jit(do_not_specialize_on_alignment=["entries"])
def _merge_kernel(
    out, partial, partial_lse, entries,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, MERGE: tl.constexpr,
    QUERIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of DIMS elements of one query head of one entry, if the entry has several
    splits."""
    entry = tl.program_id(0).to(tl.int64)
    first = tl.load(entries + entry * 3).to(tl.int64) * QUERIES
    splits = tl.load(entries + entry * 3 + 1)
    if QUERIES > 1:
        first += tl.load(entries + entry * 3 + 2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if splits > 1:
        out += tl.program_id(2) * DIMS
        partial += tl.program_id(2) * DIMS
        merge_into(
            out, partial, partial_lse, entry, first, splits, tl.program_id(1), 1,
            NUM_HEADS, 1, HEAD_DIM, DIMS, MERGE, 1, QUERIES,
        )  # fmt: skip


@triton.jit
def run_of(items, item, exists):
    """Load the position of the first query of a split's run, and the run's number of queries.

    item: index of the split in items (`DecodePlan.items`).
    """
    last = tl.load(items + item * 8 + 5, mask=exists, other=0)
    return last, tl.load(items + item * 8 + 6, mask=exists, other=1)


@triton.jit
def item_of(items, item, exists):
    """Load a split's entry, its first key and its end key. item: index of the split in items."""
    entry = tl.load(items + item * 8, mask=exists, other=0).to(tl.int64)
    begin = tl.load(items + item * 8 + 1, mask=exists, other=0)
    end = tl.load(items + item * 8 + 2, mask=exists, other=0)
    return entry, begin, end


@triton.jit
def _attend_own_keys(
    query, top, denominator, acc, slope, query_of, k_cache, v_cache, table,
    begin, count, head, scale_log2, cap_log2,
    HEADS: tl.constexpr, DIMS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Attend a run's queries causally to the keys of the run's later tokens.

    begin, count: position of the first of these keys, and their number.
    Returns the updated (top, denominator, acc).
    """
    PAGE: tl.constexpr = HEADS.num_kv_heads * HEADS.block_size * HEADS.head_dim
    offsets = tl.arange(0, 16)
    dims = tl.arange(0, DIMS)
    position = begin + offsets
    seen = offsets < count
    page = tl.load(table + position // HEADS.block_size, mask=seen, other=0)
    in_page = (head * HEADS.block_size + position % HEADS.block_size) * HEADS.head_dim
    where = (page.to(tl.int64) * PAGE + in_page)[:, None] + dims[None, :]
    mask = seen[:, None] & (dims < HEADS.head_dim)[None, :]
    key = tl.load(k_cache + where, mask=mask, other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
    if SCORES.softcap:
        score = capped(score, cap_log2)
    if SCORES.slopes:
        ahead = (offsets + 1)[None, :] - query_of[:, None]
        score += slope[:, None] * ahead.to(tl.float32)
    visible = seen[None, :] & (offsets[None, :] < query_of[:, None])
    score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    denominator = denominator * shrink + tl.sum(weight, axis=1)
    value = tl.load(v_cache + where, mask=mask, other=0.0)
    acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return new_top, denominator, acc


class DecodeTile(NamedTuple):
    """The tile of a program, as one `tl.constexpr`."""

    rows: int  # `queries` * GROUP, padded to the minimum of tensor cores
    dims: int  # HEAD_DIM padded to a power of two
    keys: int  # keys of a tile
    merge: int  # splits merged at a time
    merge_rows: int  # GROUP padded to a power of two
    last_merges: bool  # whether the split that finishes last merges; else `_merge_kernel` does
    queries: int = 1  # maximum number of entries of a run that are planned as one


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
    HEADS: tl.constexpr,  # `Heads`
    TILE: tl.constexpr,  # `DecodeTile`
    SCORES: tl.constexpr,  # `Scores`
    PDL: tl.constexpr,
):
    DIMS: tl.constexpr = TILE.dims
    ROWS: tl.constexpr = TILE.rows
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    keys = tl.arange(0, TILE.keys)
    query_of, head_of = 0, rows
    if TILE.queries > 1:
        query_of, head_of = rows // HEADS.group, rows % HEADS.group
    row_mask = rows < HEADS.group
    dim_mask = dims < HEADS.head_dim
    tile_mask = row_mask[:, None] & dim_mask[None, :]
    NUM_HEADS: tl.constexpr = HEADS.num_kv_heads * HEADS.group
    PAGE: tl.constexpr = HEADS.num_kv_heads * HEADS.block_size * HEADS.head_dim
    programs = tl.num_programs(0)
    pairs = tl.load(counted) * HEADS.num_kv_heads
    work = tl.program_id(0)
    entry, begin, end = item_of(items, work // HEADS.num_kv_heads, work < pairs)
    last, queries = 0, 1
    if TILE.queries > 1:
        last, queries = run_of(items, work // HEADS.num_kv_heads, work < pairs)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while work < pairs:
        head = work % HEADS.num_kv_heads
        item = work // HEADS.num_kv_heads
        table = block_table + entry * table_stride
        head_rows = (entry + query_of) * NUM_HEADS + head * HEADS.group + head_of
        head_rows *= HEADS.head_dim
        if TILE.queries > 1:
            row_mask = rows < HEADS.group * queries
            tile_mask = row_mask[:, None] & dim_mask[None, :]
        splits = tl.load(items + item * 8 + 3)
        first = tl.load(items + item * 8 + 4).to(tl.int64)
        query = tl.load(q + head_rows[:, None] + dims[None, :], mask=tile_mask, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        denominator = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        if SCORES.sinks:  # the first split includes the sink, like a key with a value of zero
            sink = tl.load(sinks + head * HEADS.group + head_of, mask=row_mask, other=0.0) * LOG2E
            top = tl.where(item == first, sink, top)
            denominator += tl.where(item == first, 1.0, 0.0)
        slope = top
        if SCORES.slopes:
            slope = tl.load(slopes + head * HEADS.group + head_of, mask=row_mask, other=0.0) * LOG2E
            if TILE.queries == 1:
                last = tl.load(items + item * 8 + 5)
        # Load block ids one tile ahead of the keys, which the compiler's pipeline prefetches.
        position = begin + keys
        page = tl.load(table + position // HEADS.block_size, mask=position < end, other=0)
        # Take the next pair from the counter while the first loads are in flight. A layer adds
        # exactly `pairs` to the counter, so modulo `pairs` each layer begins at zero.
        next_work = pairs
        if programs < pairs:
            next_work = programs + tl.atomic_add(counted + 1, 1, sem="relaxed") % pairs
        next_item = item_of(items, next_work // HEADS.num_kv_heads, next_work < pairs)
        if TILE.queries > 1:
            next_run = run_of(items, next_work // HEADS.num_kv_heads, next_work < pairs)
        for start in range(begin, end, TILE.keys):
            position = start + keys
            seen = position < end
            in_page = (head * HEADS.block_size + position % HEADS.block_size) * HEADS.head_dim
            offset = page.to(tl.int64) * PAGE + in_page
            position += TILE.keys
            page = tl.load(table + position // HEADS.block_size, mask=position < end, other=0)
            where = offset[:, None] + dims[None, :]
            mask = seen[:, None] & dim_mask[None, :] if HEADS.head_dim < DIMS else seen[:, None]
            key = tl.load(k_cache + where, mask=mask, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
            if SCORES.softcap:
                score = capped(score, cap_log2)
            if SCORES.slopes:
                ahead = start + keys - last
                ahead = ahead[None, :] - (query_of + tl.zeros([ROWS], tl.int32))[:, None]
                score += slope[:, None] * ahead.to(tl.float32)
            score = tl.where(seen[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, axis=1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            denominator = denominator * shrink + tl.sum(weight, axis=1)
            value = tl.load(v_cache + where, mask=mask, other=0.0)
            acc = acc * shrink[:, None]
            acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
            top = new_top
        if TILE.queries > 1:  # noqa: SIM102  one is decided by the compiler
            if (queries > 1) & (item == first + splits - 1):
                top, denominator, acc = _attend_own_keys(
                    query, top, denominator, acc, slope, query_of, k_cache, v_cache, table,
                    last + 1, queries - 1, head, scale_log2, cap_log2, HEADS, DIMS, SCORES,
                )  # fmt: skip
        # A padding entry may have no key at all: 0 / 1 instead of 0 / 0.
        denominator = tl.where(denominator > 0.0, denominator, 1.0)
        acc = acc / denominator[:, None]
        if splits == 1:
            where_out = out + head_rows[:, None] + dims[None, :]
            tl.store(where_out, acc.to(out.dtype.element_ty), mask=tile_mask)
        else:
            split = item.to(tl.int64) * TILE.queries + query_of
            at = split * NUM_HEADS + head * HEADS.group + head_of
            tl.store(partial + at[:, None] * HEADS.head_dim + dims[None, :], acc, mask=tile_mask)
            tl.store(partial_lse + at, top + tl.log2(denominator), mask=row_mask)
            if TILE.last_merges:
                tl.debug_barrier()  # all threads' stores must precede the arrival
                arrivals = arrived + entry * HEADS.num_kv_heads + head
                before = tl.atomic_add(arrivals, 1, sem="release")
                if before == splits - 1:
                    tl.atomic_xchg(arrivals, 0, sem="acquire")
                    tl.debug_barrier()
                    if queries == 1:
                        merge_into(
                            out, partial, partial_lse,
                            entry, first * TILE.queries, splits, head, 1,
                            NUM_HEADS, HEADS.group, HEADS.head_dim, DIMS,
                            TILE.merge, TILE.merge_rows, TILE.queries,
                        )  # fmt: skip
                    else:
                        merge_into(
                            out, partial, partial_lse,
                            entry, first * TILE.queries, splits, head, queries,
                            NUM_HEADS, HEADS.group, HEADS.head_dim, DIMS, 2, ROWS, TILE.queries,
                        )  # fmt: skip
        work = next_work
        entry, begin, end = next_item
        if TILE.queries > 1:
            last, queries = next_run


def attention_decode(inputs: AttentionInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Compute attention (`Kernels.attention`) of the decodes in meta.plan into out.

    out: like q; rows of other tokens are not written.
    """
    q, k_cache, v_cache, scale, softcap, sinks, slopes = inputs
    plan: DecodePlan = meta.plan
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    dims = max(16, triton.next_power_of_2(head_dim))  # 16: the minimum of a matmul
    merge_rows = triton.next_power_of_2(group)
    shape = plan.shape
    programs = num_sms(q.device) * shape.per_sm
    _decode_kernel[(programs,)](
        q,
        k_cache,
        v_cache,
        out,
        meta.block_table,
        plan.count,
        plan.items,
        plan.arrived,
        plan.partial,
        plan.partial_lse,
        q if sinks is None else sinks,
        q if slopes is None else slopes,
        scale / softcap if softcap else scale * 1.4426950408889634,
        softcap * 1.4426950408889634,
        meta.block_table.stride(0),
        HEADS=Heads(
            num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size
        ),
        TILE=DecodeTile(
            rows=max(MIN_ROWS, triton.next_power_of_2(group)),
            dims=dims,
            keys=shape.keys,
            merge=max(2, shape.merge // (merge_rows * dims)),
            merge_rows=merge_rows,
            last_merges=plan.last_merges,
            queries=plan.queries,
        ),
        SCORES=Scores(softcap=softcap > 0, sinks=sinks is not None, slopes=slopes is not None),
        **pdl(q.device),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if not plan.last_merges:
        merge(out, plan)


def merge(out: Tensor, plan: DecodePlan, pieces: int = 1) -> None:
    """Merge the partial results of entries with several splits into out.

    out: [num_entries, num_heads, size].
    plan: the plan in which a kernel has written the partial results.
    pieces: programs that share a head's elements; with several, `size` is a power of two.
    """
    _, num_heads, size = plan.partial.shape
    dims = triton.next_power_of_2(triton.cdiv(size, pieces))
    _merge_kernel[(plan.entries.shape[0], num_heads, pieces)](
        out,
        plan.partial,
        plan.partial_lse,
        plan.entries,
        NUM_HEADS=num_heads,
        HEAD_DIM=size,
        DIMS=dims,
        MERGE=max(2, 8192 // dims),
        QUERIES=plan.queries,
        num_warps=4,
        **pdl(out.device),
    )
