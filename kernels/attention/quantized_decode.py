"""Decode attention over keys and values in 8 and 4 bits, with the plan, splits and merge of
`decode.py`.

Matmuls use the quantised codes. A key's scale multiplies its score, a value's scale its softmax
weight. The softmax subtracts the maximum of (score + exponent of the value's scale). So the largest
product of a weight and a scale is near 1, and all products fit into float16. The weights are summed
in float32. A tile's scales and offsets are loaded while the previous tile is multiplied, its block
ids one tile earlier.

If a load has several elements, there is one matmul for each position in it. Keys are loaded as
bytes: int4 keys take a matmul for even elements and one for odd elements. Values are loaded as
pairs of bytes: 8-bit values take two matmuls, int4 values four. int4's offset (`least`) adds (sum
of a query's elements) * offset to a score, and the weighted sum of the values' offsets to the
result.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode import LOG2E, DecodeTile, capped, item_of, merge, merge_into
from kernels.attention.decode_plan import DecodePlan
from kernels.attention.inputs import AttentionInputs
from kernels.attention.shapes import Heads, Scores
from kernels.kv.codes import (
    code_pages,
    exponent_of,
    middle_of,
    numbers_in,
    pair_parts,
    pairs,
    parts_of,
    products,
    shift_of,
    words,
    words_at,
)
from kernels.kv.quantized import QuantizedKV
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.metadata import AttentionMeta


# 20 parameters or more: 17 are tensors and numbers of the launch, and constants are in structs.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table", "counted", "items", "arrived"],
)
def _quantized_decode_kernel(
    q,
    k_codes,
    v_codes,  # pairs of bytes
    k_words,  # bfloat16 numbers of a token and head, as bits
    v_words,
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
    SHARES: tl.constexpr,  # keys that all warps together process in one MMA
    SCORES: tl.constexpr,  # `Scores`
    CODES: tl.constexpr,  # `CodePages`
    DTYPE: tl.constexpr,  # dtype of products
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    DIMS: tl.constexpr = TILE.dims
    KEYS: tl.constexpr = TILE.keys
    ROWS: tl.constexpr = TILE.rows
    PACKED: tl.constexpr = 2 if CODES.kind == 3 else 1  # elements a byte
    PARTS: tl.constexpr = 2 * PACKED
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, DIMS // PACKED)
    dims = columns * PACKED
    keys = tl.arange(0, KEYS)
    row_mask = rows < HEADS.group
    dim_mask = dims < HEADS.head_dim
    tile_mask = row_mask[:, None] & dim_mask[None, :]
    value_columns = tl.arange(0, DIMS // PARTS)
    value_dims = value_columns * PARTS
    value_mask = value_dims < HEADS.head_dim
    out_mask = row_mask[:, None] & value_mask[None, :]
    NUM_HEADS: tl.constexpr = HEADS.num_kv_heads * HEADS.group
    programs = tl.num_programs(0)
    pairs = tl.load(counted) * HEADS.num_kv_heads
    work = tl.program_id(0)
    entry, begin, end = item_of(items, work // HEADS.num_kv_heads, work < pairs)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while work < pairs:
        head = work % HEADS.num_kv_heads
        item = work // HEADS.num_kv_heads
        table = block_table + entry * table_stride
        head_rows = (entry * NUM_HEADS + head * HEADS.group + rows) * HEADS.head_dim
        splits = tl.load(items + item * 8 + 3)
        first = tl.load(items + item * 8 + 4).to(tl.int64)
        # Load block ids and scales one tile ahead. The compiler prefetches codes by several tiles.
        position = begin + keys
        page = tl.load(table + position // HEADS.block_size, mask=position < end, other=0)
        where_query = q + head_rows[:, None] + dims[None, :]
        query = tl.load(where_query, mask=tile_mask, other=0.0).to(tl.float32)
        odd = query
        if PACKED == 2:
            odd = tl.load(where_query + 1, mask=tile_mask, other=0.0).to(tl.float32)
        shift = shift_of(query, odd)
        query = query * tl.exp2(-shift)[:, None]
        odd = odd * tl.exp2(-shift)[:, None]
        total = tl.sum(query + odd, axis=1)
        query, odd = query.to(DTYPE), odd.to(DTYPE)
        factor = tl.exp2(shift) * scale_log2
        top = tl.full([ROWS], float("-inf"), tl.float32)
        parts = tl.zeros([ROWS, SHARES], tl.float32)
        denominator = parts
        middle = parts  # weights times `middle_of` values
        acc0 = tl.zeros([ROWS, DIMS // PARTS], tl.float32)
        acc1 = tl.zeros([ROWS, DIMS // PARTS], tl.float32)
        acc2 = tl.zeros([ROWS, DIMS // PARTS], tl.float32)
        acc3 = tl.zeros([ROWS, DIMS // PARTS], tl.float32)
        if SCORES.sinks:  # a sink is like a key with a value of zero and a value scale of 2^-24
            sink = tl.load(sinks + head * HEADS.group + rows, mask=row_mask, other=0.0) * LOG2E
            top = tl.where(item == first, sink - 24.0, top)
            is_first = (item == first) & (tl.arange(0, SHARES) == 0)
            denominator += tl.where(is_first, 16777216.0, 0.0)[None, :]
        if SCORES.slopes:
            slope = tl.load(slopes + head * HEADS.group + rows, mask=row_mask, other=0.0) * LOG2E
            last = tl.load(items + item * 8 + 5)
        in_page = head * HEADS.block_size + position % HEADS.block_size
        seen = position < end
        k_word = words_at(k_words, page, in_page, seen, CODES.number_page)
        v_word = words_at(v_words, page, in_page, seen, CODES.number_page)
        # Take the next pair from the counter while the first loads are in flight. A layer adds
        # exactly `pairs` to the counter, so modulo `pairs` each layer begins at zero.
        next_work = pairs
        if programs < pairs:
            next_work = programs + tl.atomic_add(counted + 1, 1, sem="relaxed") % pairs
        next_item = item_of(items, next_work // HEADS.num_kv_heads, next_work < pairs)
        for start in range(begin, end, KEYS):
            position = start + keys
            seen = position < end
            in_page = head * HEADS.block_size + position % HEADS.block_size
            offset = page.to(tl.int64) * CODES.code_page + in_page * (HEADS.head_dim // PACKED)
            where = offset[:, None] + columns[None, :]
            mask = seen[:, None] & dim_mask[None, :] if HEADS.head_dim < DIMS else seen[:, None]
            offset = page.to(tl.int64) * (CODES.code_page // 2) + in_page * (
                HEADS.head_dim // PARTS
            )
            value_where = offset[:, None] + value_columns[None, :]
            key_factor, key_least = numbers_in(k_word, CODES.kind)
            value_scale, value_least = numbers_in(v_word, CODES.kind)
            ahead = position + KEYS
            page = tl.load(table + ahead // HEADS.block_size, mask=ahead < end, other=0)
            in_page = head * HEADS.block_size + ahead % HEADS.block_size
            k_word = words_at(k_words, page, in_page, ahead < end, CODES.number_page)
            v_word = words_at(v_words, page, in_page, ahead < end, CODES.number_page)
            key = tl.load(k_codes + where, mask=mask, other=0.0)
            low, high = parts_of(key, CODES.kind, DTYPE, ASM)
            score = tl.dot(query, tl.trans(low), input_precision="ieee")
            if PACKED == 2:
                score = tl.dot(odd, tl.trans(high), score, input_precision="ieee")
                key_middle = middle_of(key_factor, key_least)
                score = score * key_factor[None, :] + total[:, None] * key_middle[None, :]
                score = score * factor[:, None]
            else:
                score = score * (factor[:, None] * key_factor[None, :])
            if SCORES.softcap:
                score = capped(score, cap_log2)
            if SCORES.slopes:
                distance = position - last
                score += slope[:, None] * distance[None, :].to(tl.float32)
            score = tl.where(seen[None, :], score, float("-inf"))
            scaled = score + exponent_of(value_scale)[None, :]
            new_top = tl.maximum(top, tl.max(scaled, axis=1))
            own = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            # Keep partial sums per thread; they are added up once, after the loop.
            part = tl.sum(tl.reshape(own, [ROWS, KEYS // SHARES, SHARES]), axis=1)
            denominator = denominator * shrink[:, None] + part
            if HEADS.head_dim < DIMS:
                mask = seen[:, None] & value_mask[None, :]
            value = tl.load(v_codes + value_where, mask=mask, other=0)
            weight = (own * value_scale[None, :]).to(DTYPE)
            value0, value1, value2, value3 = pair_parts(value, CODES.kind, DTYPE, ASM)
            acc0 = tl.dot(weight, value0, acc0 * shrink[:, None], input_precision="ieee")
            acc1 = tl.dot(weight, value1, acc1 * shrink[:, None], input_precision="ieee")
            if PARTS == 4:
                value_middle = middle_of(value_scale, value_least)
                own = own * value_middle[None, :]
                part = tl.sum(tl.reshape(own, [ROWS, KEYS // SHARES, SHARES]), axis=1)
                middle = middle * shrink[:, None] + part
                acc2 = tl.dot(weight, value2, acc2 * shrink[:, None], input_precision="ieee")
                acc3 = tl.dot(weight, value3, acc3 * shrink[:, None], input_precision="ieee")
            top = new_top
        middle = tl.sum(middle, axis=1)
        denominator = tl.sum(denominator, axis=1)
        # A padding entry may have no key at all: 0 / 1 instead of 0 / 0.
        denominator = tl.where(denominator > 0.0, denominator, 1.0)
        at = item.to(tl.int64) * NUM_HEADS + head * HEADS.group + rows
        where_out = out + head_rows[:, None] + value_dims[None, :]
        where_part = partial + at[:, None] * HEADS.head_dim + value_dims[None, :]
        share = 1.0 / denominator[:, None]
        acc0 = (acc0 + middle[:, None]) * share
        acc1 = (acc1 + middle[:, None]) * share
        acc2 = (acc2 + middle[:, None]) * share
        acc3 = (acc3 + middle[:, None]) * share
        if splits == 1:
            tl.store(where_out, acc0.to(out.dtype.element_ty), mask=out_mask)
            tl.store(where_out + 1, acc1.to(out.dtype.element_ty), mask=out_mask)
            if PARTS == 4:
                tl.store(where_out + 2, acc2.to(out.dtype.element_ty), mask=out_mask)
                tl.store(where_out + 3, acc3.to(out.dtype.element_ty), mask=out_mask)
        else:
            tl.store(where_part, acc0, mask=out_mask)
            tl.store(where_part + 1, acc1, mask=out_mask)
            if PARTS == 4:
                tl.store(where_part + 2, acc2, mask=out_mask)
                tl.store(where_part + 3, acc3, mask=out_mask)
            tl.store(partial_lse + at, top + tl.log2(denominator), mask=row_mask)
            if TILE.last_merges:
                tl.debug_barrier()  # all threads' stores must precede the arrival
                arrivals = arrived + entry * HEADS.num_kv_heads + head
                before = tl.atomic_add(arrivals, 1, sem="release")
                if before == splits - 1:
                    tl.atomic_xchg(arrivals, 0, sem="acquire")
                    tl.debug_barrier()
                    merge_into(
                        out, partial, partial_lse, entry, first, splits, head, 1,
                        NUM_HEADS, HEADS.group, HEADS.head_dim, DIMS, TILE.merge, TILE.merge_rows,
                    )  # fmt: skip
        work = next_work
        entry, begin, end = next_item


def quantized_decode(inputs: AttentionInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Compute attention of the decodes in meta.plan over quantised keys and values into out.

    out: like q; rows of other tokens are not written.
    """
    q, k_cache, v_cache, scale, softcap, sinks, slopes = inputs
    assert isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV)
    plan: DecodePlan = meta.plan
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    dims = max(64, triton.next_power_of_2(head_dim))
    merge_rows = triton.next_power_of_2(group)
    shape = plan.shape
    _quantized_decode_kernel[(num_sms(q.device) * shape.per_sm,)](
        q,
        k_cache.codes,
        pairs(v_cache),
        *words(k_cache, v_cache),
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
            rows=max(16, triton.next_power_of_2(group)),
            dims=dims,
            keys=shape.keys,
            merge=max(2, shape.merge // (merge_rows * dims)),
            merge_rows=merge_rows,
            last_merges=plan.last_merges,
        ),
        SHARES=8 * shape.num_warps,
        SCORES=Scores(softcap=softcap > 0, sinks=sinks is not None, slopes=slopes is not None),
        CODES=code_pages(k_cache),
        **products(q),
        **pdl(q.device),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if not plan.last_merges:
        merge(out, plan)
