"""Attention over paged latents for sequences (entries) with many query tokens, with expanded keys.

Each head's key and value are computed from each latent. Keys and values are shorter than latents,
so with many queries this takes fewer operations than absorbed queries.

The keys of all entries are concatenated, and expanded a piece at a time, so that long contexts take
no more memory than a step's own tokens. Each piece continues the queries' online softmax. The
number of launches depends on the number of keys, which the host must know, so a CUDA graph cannot
contain these launches.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from kernels.attention.inputs import LatentInputs
from kernels.launch.device import shared_memory
from kernels.launch.entries import entry_of
from kernels.metadata import AttentionMeta

LEAST_PIECE = 2048  # minimum number of keys that are expanded at once
# Maximum prompt tokens of a step with absorbed queries. More would take too much memory, as
# absorbed queries and their results are as long as latents.
MOST_ABSORBED = 2048
_GATHER = 16  # latents per program of the gather kernel


def worth_expanding(inputs: LatentInputs, meta: AttentionMeta) -> bool:
    """Whether expanded keys and values take fewer operations than absorbed queries for a step.

    Absorbed queries need no expansion of keys, but are longer. Returns False if the host does not
    know the lengths, else True above MOST_ABSORBED prompt tokens.
    """
    num_tokens = len(inputs.q)
    _, elements, rank = inputs.up.shape  # elements of a head's key and value
    starts, lengths = meta.query_start_host, meta.kv_len_host
    if starts is None or lengths is None:
        return False
    if num_tokens - meta.num_decodes > MOST_ABSORBED:
        return True
    spared = 0
    for entry in range(meta.num_decodes, len(lengths)):
        tokens, keys = starts[entry + 1] - starts[entry], lengths[entry]
        spared += tokens * keys * (2 * rank - elements) - (keys - tokens) * rank * elements
    return spared > 0


@triton.jit
def _key_start(key_ends, kv_len, first_entry, entry):
    """Return the position of an entry's first key among the keys of all chunks."""
    origin = tl.load(key_ends + first_entry) - tl.load(kv_len + first_entry)
    return tl.load(key_ends + entry) - tl.load(kv_len + entry) - origin


@triton.jit(
    do_not_specialize=["table_stride", "piece", "size"],
    do_not_specialize_on_alignment=["block_table", "key_ends", "kv_len", "counts"],
)
def _latent_gather_kernel(
    cache,
    gathered,  # [size, KEPT]
    block_table,
    key_ends,  # [entries]: inclusive prefix sums of kv_len
    kv_len,
    counts,
    table_stride,
    piece,  # the first key
    size,  # keys of the piece
    KEPT: tl.constexpr,
    WIDTH: tl.constexpr,  # KEPT padded
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    first_entry = tl.load(counts)
    entry = first_entry + tl.program_id(0)
    if entry >= tl.load(counts + 1):
        return
    start = _key_start(key_ends, kv_len, first_entry, entry)
    begin = tl.maximum(piece - start, 0)
    end = tl.minimum(tl.load(kv_len + entry), piece + size - start)
    position = begin + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = position < end
    table = block_table + entry.to(tl.int64) * table_stride
    page = tl.load(table + position // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    mask = there[:, None] & (dims < KEPT)[None, :]
    source = (page * BLOCK_SIZE + position % BLOCK_SIZE) * KEPT
    latent = tl.load(cache + source[:, None] + dims[None, :], mask=mask, other=0.0)
    target = (start + position - piece).to(tl.int64) * KEPT
    tl.store(gathered + target[:, None] + dims[None, :], latent, mask=mask)


@triton.jit
def _walk(
    query, rotated, made, shared, begin, end, row_position, top, denominator, acc, scale_log2,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, SIZES: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend a program's queries to the keys [begin, end) (int64) of an entry.

    made, shared: pointers to the entry's key 0: expanded keys and values, and rotary keys. Key 0
    itself may be outside of the piece in memory.
    """
    keys = tl.arange(0, KEYS)
    dims = tl.arange(0, SIZES.nopes)
    columns = tl.arange(0, SIZES.value_columns)
    rotary = tl.arange(0, SIZES.ropes)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        own = made + start * WIDTH
        position = start + keys
        seen = position < end
        if MASKED or SIZES.nope < SIZES.nopes:
            mask = seen[:, None] & (dims < SIZES.nope)[None, :]
            key = tl.load(own + keys[:, None] * WIDTH + dims[None, :], mask=mask, other=0.0)
        else:
            key = tl.load(own + keys[:, None] * WIDTH + dims[None, :])
        from_shared = shared + start * KEPT + keys[:, None] * KEPT + rotary[None, :]
        if MASKED or SIZES.rope < SIZES.ropes:
            mask = seen[:, None] & (rotary < SIZES.rope)[None, :]
            also = tl.load(from_shared, mask=mask, other=0.0)
        else:
            also = tl.load(from_shared)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.dot(rotated, tl.trans(also), score, input_precision="ieee")
        if MASKED:
            visible = (position[None, :] <= row_position[:, None]) & seen[None, :]
            score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1) * scale_log2)
        weight = tl.exp2(score * scale_log2 - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        denominator = denominator * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        from_made = own + keys[:, None] * WIDTH + (SIZES.nope + columns)[None, :]
        if MASKED or SIZES.value_dim < SIZES.value_columns:
            mask = seen[:, None] & (columns < SIZES.value_dim)[None, :]
            value = tl.load(from_made, mask=mask, other=0.0)
        else:
            value = tl.load(from_made)
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        top = new_top
    return top, denominator, acc


class ExpandedSizes(NamedTuple):
    """The sizes of a layer whose keys and values are expanded from latents, as one `tl.constexpr`.

    nope: elements of a head's key without rotary embeddings.
    rope: elements of a key with rotary embeddings, which all heads share.
    rank: elements of a latent.
    value_dim: elements of a head's value.
    nopes, ropes, value_columns: `nope`, `rope` and `value_dim`, padded to powers of two.
    """

    heads: int
    nope: int
    rope: int
    rank: int
    value_dim: int
    nopes: int
    ropes: int
    value_columns: int


@triton.jit(
    do_not_specialize=["num_tokens", "piece", "size"],
    do_not_specialize_on_alignment=["query_start", "key_ends", "kv_len", "counts"],
)
def _latent_expanded_kernel(
    q,  # [tokens, heads, NOPE + ROPE]
    made,  # [size, heads, NOPE + VALUE]
    gathered,  # [size, RANK + ROPE]
    out,  # [tokens, heads, VALUE]
    carried,  # [tokens, heads, VALUE] float32: the accumulator after earlier pieces
    carried_top,  # [2, tokens, heads] float32: largest scores and denominators so far
    query_start,
    key_ends,  # [entries]: inclusive prefix sums of kv_len
    kv_len,
    counts,
    scale_log2,
    num_tokens,
    piece,
    size,
    SIZES: tl.constexpr,  # `ExpandedSizes`
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    VALUES: tl.constexpr = SIZES.value_columns
    EACH: tl.constexpr = SIZES.nope + SIZES.value_dim
    WIDTH: tl.constexpr = SIZES.heads * EACH
    KEPT: tl.constexpr = SIZES.rank + SIZES.rope
    head = tl.program_id(0)
    # Start the last queries of the step first: within a request these see the most keys.
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    first_entry = tl.load(counts)
    num_entries = tl.load(counts + 1)
    entry, begin, first = entry_of(query_start, first_entry, num_entries, index, ROWS)
    query_len = num_tokens - begin
    if entry < num_entries:
        query_len = tl.load(query_start + entry + 1) - begin
    if first >= query_len:
        return
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, VALUES)
    row_mask = first + rows < query_len
    token = (begin + first + rows).to(tl.int64)
    at = token * SIZES.heads + head
    tile_mask = row_mask[:, None] & (columns < SIZES.value_dim)[None, :]
    where = at[:, None] * SIZES.value_dim + columns[None, :]
    if entry == num_entries:
        tl.store(out + where, tl.zeros([ROWS, VALUES], out.dtype.element_ty), mask=tile_mask)
        return
    length = tl.load(kv_len + entry)
    start = _key_start(key_ends, kv_len, first_entry, entry)
    first_position = length - query_len + first
    end = tl.minimum(first_position + ROWS, length)  # end of the keys that any row sees
    lowest = tl.maximum(piece - start, 0).to(tl.int64)  # the first key of this piece
    highest = tl.minimum(end, piece + size - start).to(tl.int64)
    if lowest >= highest:
        return
    dims = tl.arange(0, SIZES.nopes)
    rotary = tl.arange(0, SIZES.ropes)
    from_q = q + (at * (SIZES.nope + SIZES.rope))[:, None]
    mask = row_mask[:, None] & (dims < SIZES.nope)[None, :]
    query = tl.load(from_q + dims[None, :], mask=mask, other=0.0)
    mask = row_mask[:, None] & (rotary < SIZES.rope)[None, :]
    rotated = tl.load(from_q + (SIZES.nope + rotary)[None, :], mask=mask, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    if lowest > 0:
        top = tl.load(carried_top + at, mask=row_mask, other=0.0)
        sums = carried_top + num_tokens.to(tl.int64) * SIZES.heads
        denominator = tl.load(sums + at, mask=row_mask, other=1.0)
        acc = tl.load(carried + where, mask=tile_mask, other=0.0)
    # Rows after the last query see the same keys as the last query.
    row_position = tl.minimum(first_position + rows, length - 1)
    full = tl.maximum(tl.minimum(first_position + 1, highest) - lowest, 0) // KEYS * KEYS + lowest
    origin = (start - piece).to(tl.int64)
    from_made = made + origin * WIDTH + head * EACH
    shared = gathered + origin * KEPT + SIZES.rank
    top, denominator, acc = _walk(
        query, rotated, from_made, shared, lowest, full, row_position, top, denominator, acc,
        scale_log2, WIDTH, KEPT, SIZES, KEYS, False, STAGES,
    )  # fmt: skip
    top, denominator, acc = _walk(
        query, rotated, from_made, shared, full, highest, row_position, top, denominator, acc,
        scale_log2, WIDTH, KEPT, SIZES, KEYS, True, STAGES,
    )  # fmt: skip
    if highest < end:
        tl.store(carried_top + at, top, mask=row_mask)
        sums = carried_top + num_tokens.to(tl.int64) * SIZES.heads
        tl.store(sums + at, denominator, mask=row_mask)
        tl.store(carried + where, acc, mask=tile_mask)
    else:
        acc = acc / denominator[:, None]
        tl.store(out + where, acc.to(out.dtype.element_ty), mask=tile_mask)


class ExpandedLaunch(NamedTuple):
    rows: int  # queries of one head in a program
    keys: int  # keys of a tile
    num_warps: int
    num_stages: int


def expanded_launch(sizes: "ExpandedSizes", element_size: int, room: int) -> ExpandedLaunch:
    """Return the launch whose tiles fit into registers and shared memory.

    room: bytes of shared memory.
    """
    if element_size > 2:
        return ExpandedLaunch(16, 16, 4, 1)
    wide = max(sizes.nopes, sizes.value_columns) > 128
    launch = ExpandedLaunch(128, 32, 8, 2) if wide else ExpandedLaunch(128, 64, 8, 3)
    queries = (sizes.nopes + sizes.ropes) * element_size  # bytes of a row
    stage = launch.keys * (queries + sizes.value_columns * element_size)
    if launch.rows * queries + (launch.num_stages - 1) * stage > room:
        launch = launch._replace(num_stages=2)
    if launch.rows * queries + stage > room:
        launch = launch._replace(rows=64, keys=launch.keys // 2, num_warps=4)
    return launch


def latent_expanded(inputs: LatentInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Compute latent attention of the step's entries after the decodes, with expanded keys.

    meta: must have its lengths on the host.
    out: [num_tokens, num_heads, value]; tokens after the last entry get zeros.
    """
    q, cache, up, scale = inputs
    num_tokens, heads, head_dim = q.shape
    rank, width = up.shape[2], cache.shape[3]
    nope, rope = head_dim - (width - rank), width - rank
    value = up.shape[1] - nope
    entries = meta.kv_len.shape[0]
    assert meta.kv_len_host is not None and meta.counts is not None
    keys = sum(meta.kv_len_host[meta.num_decodes :])
    size = min(keys, max(num_tokens, LEAST_PIECE))
    padded = (max(16, triton.next_power_of_2(size)) for size in (nope, rope, value))
    sizes = ExpandedSizes(heads, nope, rope, rank, value, *padded)
    shape = expanded_launch(sizes, q.element_size(), shared_memory(q.device))
    blocks = num_tokens // shape.rows + entries - meta.num_decodes + 1
    gathered = cache.new_empty(size, width)
    carried = q.new_empty(num_tokens, heads, value, dtype=torch.float32)
    carried_top = q.new_empty(2, num_tokens, heads, dtype=torch.float32)
    products = up.reshape(-1, rank)
    key_ends = meta.kv_len.cumsum(0, dtype=torch.int32)
    for piece in range(0, keys, size):
        here = min(size, keys - piece)
        longest = min(here, meta.max_kv_len)
        _latent_gather_kernel[(entries - meta.num_decodes, triton.cdiv(longest, _GATHER))](
            cache,
            gathered,
            meta.block_table,
            key_ends,
            meta.kv_len,
            meta.counts,
            meta.block_table.stride(0),
            piece,
            here,
            KEPT=width,
            WIDTH=triton.next_power_of_2(width),
            BLOCK_SIZE=cache.shape[2],
            ROWS=_GATHER,
            num_warps=8,
        )
        expanded = linear(gathered[:here, :rank], products)
        _latent_expanded_kernel[(heads, blocks)](
            q,
            expanded,
            gathered,
            out,
            carried,
            carried_top,
            meta.query_start,
            key_ends,
            meta.kv_len,
            meta.counts,
            scale * 1.4426950408889634,
            num_tokens,
            piece,
            here,
            SIZES=sizes,
            ROWS=shape.rows,
            KEYS=shape.keys,
            STAGES=shape.num_stages,
            num_warps=shape.num_warps,
        )
