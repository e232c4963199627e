"""Paged causal attention for sequences (entries) with several query tokens after a cached prefix.

A program computes one kv head, consecutive queries of one entry, and the query heads that share the
kv head. A row is one query of one head. Tiles of keys that all rows see are computed without a
mask, tiles on the diagonal with a mask. The grid is an upper bound that the host knows. A program
finds its entry by binary search, and most surplus programs end at once.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode import LOG2E, capped
from kernels.attention.inputs import AttentionInputs
from kernels.attention.shapes import Heads, Scores
from kernels.launch.entries import entry_of
from kernels.metadata import AttentionMeta


@triton.jit
def _in_block(position, dims, head, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the offsets of keys' elements from the beginning of their blocks, [keys, dims]."""
    return ((head * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims[None, :]


class PrefillTile(NamedTuple):
    """The tile of a program, as one `tl.constexpr`."""

    rows: int  # queries times heads of a group
    dims: int  # HEAD_DIM padded to a power of two
    keys: int


# 20 parameters or more: 16 are what the loop reads and carries, and constants are in structs.
@triton.jit
def _walk(
    query,
    k_cache,
    v_cache,
    table,
    head,
    begin,
    end,
    row_position,
    row_last,  # the last key that each row sees
    top,
    denominator,
    acc,
    scale_log2,
    cap_log2,
    slope,  # each row's ALiBi slope, if SLOPES
    lowest,  # the first key that any row sees
    HEADS: tl.constexpr,  # `Heads`
    TILE: tl.constexpr,  # `PrefillTile`
    MASKED: tl.constexpr,
    SCORES: tl.constexpr,  # `Scores`
):
    """Return a running softmax (top, denominator, acc) after keys [begin, end) of an entry.

    begin: a multiple of KEYS.
    """
    # With a window, it is possible that no query sees a tile's first keys. Their block may then
    # belong to another request.
    KEYS: tl.constexpr = TILE.keys
    PART: tl.constexpr = MASKED and (SCORES.window > 0 or SCORES.chunk > 0)
    keys = tl.arange(0, KEYS)
    dims = tl.arange(0, TILE.dims)
    PAGE: tl.constexpr = HEADS.num_kv_heads * HEADS.block_size * HEADS.head_dim
    # The loop is limited by its own instructions, not by the tensor cores. So loop invariants are
    # computed before it. If a tile consists of whole blocks, only block ids change in the loop.
    WHOLE: tl.constexpr = KEYS % HEADS.block_size == 0
    if WHOLE:
        in_block = _in_block(keys, dims, head, HEADS.head_dim, HEADS.block_size)
        ids = table + begin // HEADS.block_size + keys // HEADS.block_size
    else:
        in_block = _in_block(begin + keys, dims, head, HEADS.head_dim, HEADS.block_size)
        ids = table + (begin + keys) // HEADS.block_size
    # Load block ids one tile ahead of the keys, which the compiler's pipeline prefetches.
    own = begin + keys < end
    if PART:
        own = own & (begin + keys >= lowest)
    page = tl.load(ids, mask=own, other=0)
    for start in range(begin, end, KEYS):
        position = start + keys
        where = (page.to(tl.int64) * PAGE)[:, None] + in_block
        if WHOLE:
            ids += KEYS // HEADS.block_size
        else:
            in_block = _in_block(position + KEYS, dims, head, HEADS.head_dim, HEADS.block_size)
            ids = table + (position + KEYS) // HEADS.block_size
        page = tl.load(ids, mask=position + KEYS < end, other=0)
        if MASKED:
            seen = position < end
            if PART:
                seen = seen & (position >= lowest)
            mask = seen[:, None] & (dims < HEADS.head_dim)[None, :]
            key = tl.load(k_cache + where, mask=mask, other=0.0)
        elif HEADS.head_dim < TILE.dims:
            mask = (dims < HEADS.head_dim)[None, :]
            key = tl.load(k_cache + where, mask=mask, other=0.0)
        else:
            key = tl.load(k_cache + where)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if SCORES.softcap:
            score = capped(score * scale_log2, cap_log2)
        elif SCORES.slopes:
            ahead = position[None, :] - row_position[:, None]
            score = score * scale_log2 + slope[:, None] * ahead.to(tl.float32)
        if MASKED:
            score = tl.where(position[None, :] <= row_last[:, None], score, float("-inf"))
        if PART:
            first_key = row_position - (SCORES.window - 1)
            if SCORES.chunk:
                first_key = row_position // SCORES.chunk * SCORES.chunk
            score = tl.where(position[None, :] >= first_key[:, None], score, float("-inf"))
        scaled: tl.constexpr = SCORES.softcap or SCORES.slopes
        factor = 1.0 if scaled else scale_log2
        new_top = tl.maximum(top, tl.max(score, axis=1) * factor)
        base = new_top
        if PART:  # rows that have seen no key yet: a finite base avoids inf - inf
            base = tl.where(new_top > float("-inf"), new_top, 0.0)
        weight = tl.exp2(score * factor - base[:, None])
        shrink = tl.exp2(top - base)
        # Keep partial sums per thread; they are added up once, after the loop.
        part = tl.sum(tl.reshape(weight, [weight.shape[0], KEYS // 8, 8]), axis=1)
        denominator = denominator * shrink[:, None] + part
        acc = acc * shrink[:, None]
        if MASKED or HEADS.head_dim < TILE.dims:
            value = tl.load(v_cache + where, mask=mask, other=0.0)
        else:
            value = tl.load(v_cache + where)
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        top = new_top
    return top, denominator, acc


@triton.jit
def borders(
    first_position,
    length,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
):
    """Return the range of keys that any row sees, and the whole tiles of keys that all rows see.

    Returns (lowest, end, begin_full, full): ranges lowest .. end - 1 and begin_full .. full - 1.
    """
    full = (first_position + 1) // KEYS * KEYS
    if DETERMINISTIC:
        full = full * 0  # use only the masked loop, so that each key has the same machine code
    end = tl.minimum(first_position + QUERIES, length)
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(first_position - (WINDOW - 1), 0)
        all_see = tl.maximum(end - WINDOW, 0)
    if CHUNK:
        lowest = first_position // CHUNK * CHUNK
        all_see = (end - 1) // CHUNK * CHUNK
    begin_full = 0
    if WINDOW or CHUNK:
        begin_full = tl.minimum(tl.cdiv(all_see, KEYS) * KEYS, tl.cdiv(end, KEYS) * KEYS)
        if DETERMINISTIC:
            begin_full = lowest // KEYS * KEYS
        full = tl.maximum(full, begin_full)
    return lowest, begin_full, full, end


@triton.jit(
    do_not_specialize=["table_stride", "num_tokens"],
    do_not_specialize_on_alignment=["block_table", "query_start", "kv_len", "counts", "last_keys"],
)
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_table,
    query_start,
    kv_len,
    counts,
    sinks,  # [num_heads] float32, if SINKS
    slopes,  # [num_heads] float32, if SLOPES
    last_keys,  # [num_tokens] int32, if SCORES.last_keys
    scale_log2,
    cap_log2,
    table_stride,
    num_tokens,
    HEADS: tl.constexpr,  # `Heads`
    TILE: tl.constexpr,  # `PrefillTile`
    SCORES: tl.constexpr,  # `Scores`
    DETERMINISTIC: tl.constexpr,
):
    DIMS: tl.constexpr = TILE.dims
    ROWS: tl.constexpr = TILE.rows
    QUERIES: tl.constexpr = ROWS // HEADS.group
    NUM_HEADS: tl.constexpr = HEADS.num_kv_heads * HEADS.group
    head = tl.program_id(0)
    # Start the last queries of the step first: within a request these see the most keys.
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    first_entry = tl.load(counts)
    if DETERMINISTIC:
        first_entry = first_entry * 0  # compute decodes here, too
    num_entries = tl.load(counts + 1)
    entry, begin, first = entry_of(query_start, first_entry, num_entries, index, QUERIES)
    query_len = num_tokens - begin
    if entry < num_entries:
        query_len = tl.load(query_start + entry + 1) - begin
    if first >= query_len:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    query_index = first + rows // HEADS.group
    row_mask = (rows < QUERIES * HEADS.group) & (query_index < query_len)
    token = (begin + query_index).to(tl.int64)
    at = (token * NUM_HEADS + head * HEADS.group + rows % HEADS.group) * HEADS.head_dim
    where = at[:, None] + dims[None, :]
    tile_mask = row_mask[:, None] & (dims < HEADS.head_dim)[None, :]
    if entry == num_entries:
        tl.store(out + where, tl.zeros([ROWS, DIMS], out.dtype.element_ty), mask=tile_mask)
        return

    query = tl.load(q + where, mask=tile_mask, other=0.0)
    length = tl.load(kv_len + entry)
    table = block_table + entry.to(tl.int64) * table_stride
    first_position = length - query_len + first
    # Rows after the last query see the same keys as the last query.
    row_position = tl.minimum(first_position + rows // HEADS.group, length - 1)
    lowest, begin_full, full, end = borders(
        first_position, length, QUERIES, TILE.keys, SCORES.window, SCORES.chunk, DETERMINISTIC
    )
    row_last = row_position
    if SCORES.last_keys:
        row_last = tl.load(last_keys + token, mask=row_mask, other=0)
        row_last = tl.minimum(tl.maximum(row_last, row_position), length - 1)
        end = tl.max(row_last, axis=0) + 1
    top = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS, 8], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    query_head = head * HEADS.group + rows % HEADS.group
    if SCORES.sinks:  # a sink is like a key with a value of zero
        top = tl.load(sinks + query_head) * LOG2E
        denominator += tl.where(tl.arange(0, 8) == 0, 1.0, 0.0)[None, :]
    slope = top
    if SCORES.slopes:
        slope = tl.load(slopes + query_head) * LOG2E
    if SCORES.window or SCORES.chunk:
        top, denominator, acc = _walk(
            query, k_cache, v_cache, table, head, lowest // TILE.keys * TILE.keys,
            tl.minimum(begin_full, end), row_position, row_last, top,
            denominator, acc, scale_log2, cap_log2, slope, lowest, HEADS, TILE, True, SCORES,
        )  # fmt: skip
    top, denominator, acc = _walk(
        query, k_cache, v_cache, table, head, begin_full, full, row_position, row_last, top,
        denominator, acc, scale_log2, cap_log2, slope, lowest, HEADS, TILE, False, SCORES,
    )  # fmt: skip
    top, denominator, acc = _walk(
        query, k_cache, v_cache, table, head, full, end, row_position, row_last, top, denominator,
        acc, scale_log2, cap_log2, slope, lowest, HEADS, TILE, True, SCORES,
    )  # fmt: skip
    acc = acc / tl.sum(denominator, axis=1)[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=tile_mask)


class PrefillLaunch(NamedTuple):
    rows: int  # queries times heads of a group, in one program
    keys: int  # in one tile
    num_warps: int
    num_stages: int


def prefill_launch(dims: int, element_size: int, deterministic: bool) -> PrefillLaunch:
    """Return the launch that was fastest in measurements on an H200. dims: the padded head size.

    A deterministic launch computes decodes, too. As these have few rows, its tile is smaller.
    """
    if dims > 256:  # larger tiles do not fit
        return PrefillLaunch(32, 16, 8, 2)
    if dims > 128 or element_size > 2:
        return PrefillLaunch(64, 32, 4, 2)
    return PrefillLaunch(64, 64, 4, 3) if deterministic else PrefillLaunch(128, 64, 8, 3)


def attention_prefill(
    inputs: AttentionInputs, meta: AttentionMeta, out: Tensor, deterministic: bool = False
) -> None:
    """Compute attention of the step's entries that are not decodes.

    Their indices are meta.counts[0] .. meta.counts[1] - 1.

    out: like q; tokens after the last entry get zeros.
    deterministic: compute the decodes, too, that is entries 0 .. meta.counts[1] - 1. Results are
        then batch-invariant, and do not depend on how a prompt is cut into chunks.
    """
    q, k_cache, v_cache, scale, softcap, sinks, slopes = inputs
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    dims = max(16, triton.next_power_of_2(head_dim))  # 16: the minimum of a matmul
    shape = prefill_launch(dims, q.element_size(), deterministic)
    rows = max(shape.rows, triton.next_power_of_2(group))
    blocks = meta.most_blocks(num_tokens, rows // group, decodes=deterministic)
    _prefill_kernel[(num_kv_heads, blocks)](
        q,
        k_cache,
        v_cache,
        out,
        meta.block_table,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        q if sinks is None else sinks,
        q if slopes is None else slopes,
        q if meta.last_keys is None else meta.last_keys,
        scale / softcap if softcap else scale * 1.4426950408889634,
        softcap * 1.4426950408889634,
        meta.block_table.stride(0),
        num_tokens,
        HEADS=Heads(
            num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size
        ),
        TILE=PrefillTile(rows=rows, dims=dims, keys=shape.keys),
        SCORES=Scores(
            window=meta.window,
            chunk=meta.chunk,
            softcap=softcap > 0,
            sinks=sinks is not None,
            slopes=slopes is not None,
            last_keys=meta.last_keys is not None,
        ),
        DETERMINISTIC=deterministic,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def attention_prefill_fixed(inputs: AttentionInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Compute attention of decodes and chunks into out by a deterministic `attention_prefill`."""
    attention_prefill(inputs, meta, out, deterministic=True)
