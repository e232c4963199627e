"""Prefill attention over keys and values in 8 and 4 bits: the algorithm of `prefill.py`, with codes
read and multiplied as in `quantized_decode.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode import LOG2E, capped
from kernels.attention.inputs import AttentionInputs
from kernels.attention.prefill import PrefillLaunch, PrefillTile, borders
from kernels.attention.shapes import Heads, Scores
from kernels.kv.codes import (
    code_pages,
    elements_of,
    exponent_of,
    middle_of,
    numbers_in,
    products,
    shift_of,
    words,
)
from kernels.kv.quantized import QuantizedKV
from kernels.launch.entries import entry_of
from kernels.metadata import AttentionMeta


@triton.jit
def _seen(position, end, lowest, PART: tl.constexpr):
    seen = position < end
    if PART:
        seen = seen & (position >= lowest)
    return seen


@triton.jit
def _words(k_words, v_words, page, in_page, mask, NUMBER_PAGE: tl.constexpr, KIND: tl.constexpr):
    """Load the words (scales and offsets) of keys and of values as two arrays [keys, 2].

    The keys' words are in the first column of the first array, the values' words in the second
    column of the second array. The other columns are zero.

    With the register layout of scores, each thread would read and unpack a quarter of all words.
    With arrays [keys, 2] a thread reads one word or two, and Triton converts these arrays to the
    layout of scores through shared memory.
    """
    parity = tl.arange(0, 2)[None, :]
    at = (page.to(tl.int64) * NUMBER_PAGE + in_page)[:, None] + parity
    at = tl.max_contiguous(at, [1, 2])  # neighbouring threads have the columns of a key
    k_word = tl.load(k_words + at, mask=mask[:, None] & (parity == 0), other=0)
    v_word = tl.load(v_words - 1 + at, mask=mask[:, None] & (parity == 1), other=0)
    return k_word, v_word


@triton.jit
def _numbers(k_word, v_word, KIND: tl.constexpr):
    """Unpack the words of keys and values to their scales and least elements (`numbers_in`)."""
    if KIND == 3:
        key_scale, key_least = numbers_in(tl.sum(k_word, axis=1), KIND)
        value_scale, value_least = numbers_in(tl.sum(v_word, axis=1), KIND)
    else:
        low = k_word.to(tl.uint16, bitcast=True).to(tl.int32)
        word = tl.sum(low | (v_word.to(tl.int32) << 16), axis=1)
        key_scale, value_scale = numbers_in(word, 3)
        key_least, value_least = key_scale, value_scale
    return key_scale, key_least, value_scale, value_least


# 20 parameters or more: 20 are what the loop reads and carries, and constants are in structs.
@triton.jit
def _walk(
    query,
    total,  # [rows]: the sum of each row of `query`
    factor,  # [rows]: the factor of each row's scores
    k_codes,
    v_codes,
    k_words,
    v_words,
    table,
    head,
    begin,
    end,
    row_position,
    row_last,  # the last key that each row sees
    top,
    denominator,
    middle,  # if int4: sum of weights times `middle_of` values, [rows, 8] like the denominator
    acc,
    cap_log2,
    slope,  # each row's ALiBi slope, if SLOPES
    lowest,  # the first key that any row sees
    HEADS: tl.constexpr,  # `Heads`
    TILE: tl.constexpr,  # `PrefillTile`
    MASKED: tl.constexpr,
    SCORES: tl.constexpr,  # `Scores`
    CODES: tl.constexpr,  # `CodePages`
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Attend a program's queries to the keys [begin, end) of one entry.

    begin: a multiple of KEYS.
    """
    # With a window, it is possible that no query sees a tile's first keys. Their block may then
    # belong to another request.
    KEYS: tl.constexpr = TILE.keys
    PART: tl.constexpr = MASKED and (SCORES.window > 0 or SCORES.chunk > 0)
    PACKED: tl.constexpr = 2 if CODES.kind == 3 else 1  # elements a byte
    ROWS: tl.constexpr = acc.shape[0]
    keys = tl.arange(0, KEYS)
    columns = tl.arange(0, TILE.dims // PACKED)
    dim_mask = (columns * PACKED < HEADS.head_dim)[None, :]
    # Loop invariants are computed before the loop (`prefill._walk`). Block ids and scales are
    # loaded one tile ahead; the compiler prefetches codes by several tiles.
    WHOLE: tl.constexpr = KEYS % HEADS.block_size == 0
    position = begin + keys
    rows_in = head * HEADS.block_size + (keys if WHOLE else position) % HEADS.block_size
    ids = table + position // HEADS.block_size
    seen = _seen(position, end, lowest, PART)
    page = tl.load(ids, mask=seen, other=0)
    k_word, v_word = _words(k_words, v_words, page, rows_in, seen, CODES.number_page, CODES.kind)
    for start in range(begin, end, KEYS):
        position = start + keys
        where = (page.to(tl.int64) * CODES.code_page)[:, None]
        where += (rows_in * (HEADS.head_dim // PACKED))[:, None] + columns[None, :]
        key_factor, key_least, value_scale, value_least = _numbers(k_word, v_word, CODES.kind)
        ahead = position + KEYS
        if WHOLE:
            ids += KEYS // HEADS.block_size
        else:
            rows_in = head * HEADS.block_size + ahead % HEADS.block_size
            ids = table + ahead // HEADS.block_size
        page = tl.load(ids, mask=ahead < end, other=0)
        k_word, v_word = _words(
            k_words, v_words, page, rows_in, ahead < end, CODES.number_page, CODES.kind
        )
        if MASKED:
            mask = _seen(position, end, lowest, PART)[:, None]
            if HEADS.head_dim < TILE.dims:
                mask = mask & dim_mask
            key = tl.load(k_codes + where, mask=mask, other=0.0)
        elif HEADS.head_dim < TILE.dims:
            mask = dim_mask
            key = tl.load(k_codes + where, mask=mask, other=0.0)
        else:
            key = tl.load(k_codes + where)
        key = elements_of(key, CODES.kind, DTYPE, ASM)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if PACKED == 2:
            key_middle = middle_of(key_factor, key_least)
            score = score * key_factor[None, :] + total[:, None] * key_middle[None, :]
        else:
            score = score * key_factor[None, :]
        row_factor = factor[:, None]
        if SCORES.softcap:
            score = capped(score * row_factor, cap_log2)
        elif SCORES.slopes:
            distance = position[None, :] - row_position[:, None]
            score = score * row_factor + slope[:, None] * distance.to(tl.float32)
        if SCORES.softcap or SCORES.slopes:
            row_factor = tl.full([ROWS, 1], 1.0, tl.float32)
        if MASKED:
            score = tl.where(position[None, :] <= row_last[:, None], score, float("-inf"))
        if PART:
            first_key = row_position - (SCORES.window - 1)
            if SCORES.chunk:
                first_key = row_position // SCORES.chunk * SCORES.chunk
            score = tl.where(position[None, :] >= first_key[:, None], score, float("-inf"))
        # Each multiplication by `row_factor` is fused with the following addition (FMA).
        scaled = score * row_factor + exponent_of(value_scale)[None, :]
        new_top = tl.maximum(top, tl.max(scaled, axis=1))
        base = new_top
        if PART:  # rows that have seen no key yet: a finite base avoids inf - inf
            base = tl.where(new_top > float("-inf"), new_top, 0.0)
        own = tl.exp2(score * row_factor - base[:, None])
        shrink = tl.exp2(top - base)
        # Keep partial sums per thread; they are added up once, after the loop.
        part = tl.sum(tl.reshape(own, [ROWS, KEYS // 8, 8]), axis=1)
        denominator = denominator * shrink[:, None] + part
        acc = acc * shrink[:, None]
        if MASKED or HEADS.head_dim < TILE.dims:
            value = tl.load(v_codes + where, mask=mask, other=0.0)
        else:
            value = tl.load(v_codes + where)
        weight = (own * value_scale[None, :]).to(DTYPE)
        value = elements_of(value, CODES.kind, DTYPE, ASM)
        acc = tl.dot(weight, value, acc, input_precision="ieee")
        if PACKED == 2:
            own = own * middle_of(value_scale, value_least)[None, :]
            part = tl.sum(tl.reshape(own, [ROWS, KEYS // 8, 8]), axis=1)
            middle = middle * shrink[:, None] + part
        top = new_top
    return top, denominator, middle, acc


# 20 parameters or more: 17 are tensors and numbers of the launch, and constants are in structs.
@triton.jit(
    do_not_specialize=["table_stride", "num_tokens"],
    do_not_specialize_on_alignment=["block_table", "query_start", "kv_len", "counts", "last_keys"],
)
def _quantized_prefill_kernel(
    q,
    k_codes,
    v_codes,
    k_words,  # bfloat16 numbers of a token and head, as bits
    v_words,
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
    CODES: tl.constexpr,  # `CodePages`
    DTYPE: tl.constexpr,  # dtype of products
    ASM: tl.constexpr,
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
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    if entry == num_entries:
        tl.store(out + where, acc.to(out.dtype.element_ty), mask=tile_mask)
        return

    query = tl.load(q + where, mask=tile_mask, other=0.0).to(tl.float32)
    shift = shift_of(query, query)
    query = query * tl.exp2(-shift)[:, None]
    total = tl.sum(query, axis=1)
    query = query.to(DTYPE)
    factor = tl.exp2(shift) * scale_log2
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
    middle = tl.zeros([ROWS, 8], tl.float32)
    query_head = head * HEADS.group + rows % HEADS.group
    if SCORES.sinks:  # a sink is like a key with a value of zero and a value scale of 2^-24
        top = tl.load(sinks + query_head) * LOG2E - 24.0
        denominator += tl.where(tl.arange(0, 8) == 0, 16777216.0, 0.0)[None, :]
    slope = top
    if SCORES.slopes:
        slope = tl.load(slopes + query_head) * LOG2E
    if SCORES.window or SCORES.chunk:
        top, denominator, middle, acc = _walk(
            query, total, factor, k_codes, v_codes, k_words, v_words, table, head,
            lowest // TILE.keys * TILE.keys, tl.minimum(begin_full, end), row_position, row_last,
            top, denominator, middle, acc, cap_log2, slope, lowest, HEADS, TILE,
            True, SCORES, CODES, DTYPE, ASM,
        )  # fmt: skip
    top, denominator, middle, acc = _walk(
        query, total, factor, k_codes, v_codes, k_words, v_words, table, head,
        begin_full, full, row_position, row_last, top, denominator,
        middle, acc, cap_log2, slope, lowest, HEADS, TILE,
        False, SCORES, CODES, DTYPE, ASM,
    )  # fmt: skip
    top, denominator, middle, acc = _walk(
        query, total, factor, k_codes, v_codes, k_words, v_words, table, head,
        full, end, row_position, row_last, top, denominator,
        middle, acc, cap_log2, slope, lowest, HEADS, TILE,
        True, SCORES, CODES, DTYPE, ASM,
    )  # fmt: skip
    under = tl.sum(denominator, axis=1)[:, None]
    acc = (acc + tl.sum(middle, axis=1)[:, None]) / under
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=tile_mask)


def _launch(dims: int, element_size: int) -> PrefillLaunch:
    """Return the launch for a quantised cache; see `prefill.prefill_launch` for plain caches.

    dims: the padded head size.

    Shared memory holds each tile twice, as codes and as float16.
    """
    if dims > 256:  # larger tiles do not fit
        return PrefillLaunch(32, 32, 8, 2)
    if dims > 128 or element_size > 2:
        return PrefillLaunch(64, 32, 4, 2)
    return PrefillLaunch(64, 64, 4, 3)


def quantized_prefill(
    inputs: AttentionInputs, meta: AttentionMeta, out: Tensor, deterministic: bool = False
) -> None:
    """Compute attention of prompts' chunks over quantised keys and values into out.

    Arguments are those of `prefill.attention_prefill`.
    """
    q, k_cache, v_cache, scale, softcap, sinks, slopes = inputs
    assert isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV)
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    dims = max(32, triton.next_power_of_2(head_dim))
    shape = _launch(dims, q.element_size())
    rows = max(shape.rows, triton.next_power_of_2(group))
    blocks = meta.most_blocks(num_tokens, rows // group, decodes=deterministic)
    _quantized_prefill_kernel[(num_kv_heads, blocks)](
        q,
        k_cache.codes,
        v_cache.codes,
        *words(k_cache, v_cache),
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
        CODES=code_pages(k_cache),
        **products(q),
        DETERMINISTIC=deterministic,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def quantized_prefill_fixed(inputs: AttentionInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Compute attention of decodes and chunks into out by a deterministic `quantized_prefill`."""
    quantized_prefill(inputs, meta, out, deterministic=True)
