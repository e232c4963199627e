"""Gated DeltaNet over prompts on CUDA where `ways.FUSED`: no chunk's state goes to memory.

Four launches, 64 tokens at a time on tensor cores:

    convolve  of each head and some tokens: convolutions, of which queries and keys are normed
    solve     of each chunk and head: gates, and the triangular system that says what each token
              corrects, solved but for the state before the chunk
    pass      of each entry, head and some columns: the state goes from chunk to chunk, and tokens
              read of it and of each other
    norm      of each head and some tokens: what was read, normed and gated

The letters, the types, and where sums begin are those of `delta_chunks_cuda`.

A state is in no memory but its own: `pass` has it in registers, so what reads it is there too.
Convolutions have a launch of their own because with them `solve` takes all registers of a
multiprocessor for two programs, and heads of values that share a key would each make it.

As pass and read are there, pass and norm are those of Kimi Delta Attention too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMeta
from kernels.recurrent.chunks_cuda import (
    CHUNK,
    ENTRIES,
    Launch,
    PassLaunch,
    decays,
    first_slot,
    num_chunked,
    num_slots,
    slot_of,
    softplus,
    unit_lower_inverse,
)
from kernels.recurrent.convolution_cuda import convolved_rows, keep_tail
from kernels.recurrent.delta_chunks_cuda import Handed, tile_sizes
from kernels.recurrent.delta_rule import DeltaHeads

LOG2E = tl.constexpr(1.4426950408889634)


class RowsLaunch(NamedTuple):
    rows: int  # tokens a program
    num_warps: int


CONVOLVE = RowsLaunch(32, 4)
SOLVE = Launch(4, 1)
PASS = PassLaunch(32, 4, 2)
NORM = RowsLaunch(32, 4)


@triton.jit
def silu(x):
    """x sigmoid(x) in six instructions an element, where a division takes thirteen."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return x * root * root


# Strides of tiles are a model's few: where 16 divides one, 16 bytes are read at once.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _delta_convolve_kernel(
    x,
    conv,
    tail,
    queries,  # [slots, KEY_HEADS, CHUNK, KEYS], as keys
    keys,
    values,  # [slots, VALUE_HEADS, CHUNK, VALUES]
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    KEYS: tl.constexpr,  # KEY padded
    VALUES: tl.constexpr,  # VALUE padded
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Heads of queries, then those of keys, then those of values."""
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    dtype = keys.dtype.element_ty
    origin = tl.program_id(2) * ROWS
    first += origin
    steps = tl.arange(0, ROWS)
    first_token = (begin + first).to(tl.int64)
    before = tl.load(kv_len + entry) - length  # 0: the request begins
    tail += tl.load(rows + entry).to(tl.int64) * (TAPS - 1) * CHANNELS
    if head < 2 * KEY_HEADS:
        dims = tl.arange(0, KEYS)
        found = convolved_rows(
            x, tail, conv, None, first_token, first, length, before, head * KEY + dims, dims < KEY,
            x_stride, ROWS, CHANNELS, TAPS,
        )  # fmt: skip
        found = silu(found)
        found *= tl.rsqrt(tl.sum(found * found, axis=1) + 1e-6)[:, None]
        into = keys
        if head < KEY_HEADS:
            into = queries
            found *= KEY**-0.5
        into += (slot.to(tl.int64) * KEY_HEADS + head % KEY_HEADS) * CHUNK * KEYS + origin * KEYS
        tl.store(into + steps[:, None] * KEYS + dims[None, :], found.to(dtype))
    else:
        columns = tl.arange(0, VALUES)
        head -= 2 * KEY_HEADS
        found = convolved_rows(
            x, tail, conv, None, first_token, first, length, before,
            2 * KEY_HEADS * KEY + head * VALUE + columns, columns < VALUE, x_stride, ROWS, CHANNELS,
            TAPS,
        )  # fmt: skip
        into = values + ((slot.to(tl.int64) * VALUE_HEADS + head) * CHUNK + origin) * VALUES
        tl.store(into + steps[:, None] * VALUES + columns[None, :], silu(found).to(dtype))


@triton.jit(
    do_not_specialize=["gate_stride", "num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts", "a", "b"],
)
def _delta_solve_kernel(
    a,
    b,
    decay,
    bias,
    queries,
    keys,
    weights,  # W: [slots, VALUE_HEADS, CHUNK, KEYS]
    values,  # U takes their place
    totals,  # [slots, VALUE_HEADS, CHUNK] float32: logarithms of decays since the chunk's begin
    overlaps,  # [slots, VALUE_HEADS, CHUNK, CHUNK] of x's type: queries with keys, decayed
    query_start,
    counts,
    gate_stride,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    dtype = keys.dtype.element_ty
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, KEYS)
    columns = tl.arange(0, VALUES)
    of_keys = (slot.to(tl.int64) * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * CHUNK * KEYS
    key_tile = of_keys + steps[:, None] * KEYS + dims[None, :]
    at = (slot.to(tl.int64) * VALUE_HEADS + head) * CHUNK
    value_tile = at * VALUES + steps[:, None] * VALUES + columns[None, :]
    k = tl.load(keys + key_tile)
    v = tl.load(values + value_tile)
    there = first + steps < length
    gates = (begin + first + steps).to(tl.int64) * gate_stride + head
    step = tl.load(a + gates, mask=there, other=0.0).to(tl.float32) + tl.load(bias + head)
    step = tl.where(there, -tl.exp(tl.load(decay + head)) * softplus(step), 0.0)
    beta = MOST * tl.sigmoid(tl.load(b + gates, mask=there, other=0.0).to(tl.float32))
    total = tl.cumsum(step, axis=0)
    tl.store(totals + at + steps, total)
    left = decays(total, CHUNK)
    q = tl.load(queries + key_tile)
    overlap = tl.dot(q, tl.trans(k), input_precision="ieee") * left
    square = at * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    tl.store(overlaps + square, overlap.to(dtype))
    lower = tl.dot(k, tl.trans(k), input_precision="ieee") * left * beta[:, None]
    lower = tl.where(steps[:, None] > steps[None, :], lower, 0.0)
    inverse = unit_lower_inverse(lower, CHUNK, PRECISION) * beta[None, :]
    u = tl.dot(inverse.to(dtype), v, input_precision="ieee")
    tl.store(values + value_tile, u.to(dtype))
    since = tl.exp2(total * LOG2E)
    w = tl.dot((inverse * since[None, :]).to(dtype), k, input_precision="ieee")
    tl.store(weights + at * KEYS + steps[:, None] * KEYS + dims[None, :], w.to(dtype))


@triton.jit
def _whole(totals, at, KEYS: tl.constexpr, CHUNK: tl.constexpr, BY_KEY: tl.constexpr):
    """The logarithm of a chunk's decay, whose totals begin at token number `at` of all slots'."""
    last = at + CHUNK - 1
    if BY_KEY:
        return tl.load(totals + last * KEYS + tl.arange(0, KEYS))
    else:
        return tl.load(totals + last)


@triton.jit(
    do_not_specialize=["x_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _delta_pass_read_kernel(
    x,
    queries,
    keys,
    weights,
    values,  # U
    totals,  # BY_KEY: [slots, VALUE_HEADS, CHUNK, KEYS]
    overlaps,
    out,  # [num_tokens, VALUE_HEADS, VALUE]: what tokens read
    tail,
    state,
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the state
    SLICE: tl.constexpr,  # channels whose tails a program keeps
    STAGES: tl.constexpr,
    BY_KEY: tl.constexpr,  # Kimi Delta Attention
):
    head = tl.program_id(0)
    piece = tl.program_id(1)
    dtype = keys.dtype.element_ty
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, KEYS)
    columns = piece * COLUMNS + tl.arange(0, COLUMNS)
    channels = (head * tl.num_programs(1) + piece) * SLICE + tl.arange(0, SLICE)
    key_tile = steps[:, None] * KEYS + dims[None, :]
    turned_tile = steps[None, :] * KEYS + dims[:, None]
    square = steps[:, None] * CHUNK + steps[None, :]
    value_tile = steps[:, None] * VALUES + columns[None, :]
    own_tile = dims[:, None] * VALUE + columns[None, :]
    own_mask = (dims < KEY)[:, None] & (columns < VALUE)[None, :]
    first_entry = tl.load(counts) + tl.program_id(2)
    for entry in range(first_entry, tl.load(counts + 1), tl.num_programs(2)):
        begin = tl.load(query_start + entry)
        end = tl.load(query_start + entry + 1)
        if begin < end:
            before = tl.load(kv_len + entry) - (end - begin)
            row = tl.load(rows + entry).to(tl.int64)
            own = state + (row * VALUE_HEADS + head) * KEY * VALUE
            goes_on = own_mask & (before + own_tile * 0 > 0)
            kept = tl.load(own + own_tile, mask=goes_on, other=0.0)
            first = first_slot(query_start, counts, entry, CHUNK).to(tl.int64)
            last = first + tl.cdiv(end - begin, CHUNK)
            # Read a chunk ahead: what decays the state is a trip to memory of its own.
            whole = _whole(totals, (first * VALUE_HEADS + head) * CHUNK, KEYS, CHUNK, BY_KEY)
            for slot in tl.range(first, last, num_stages=STAGES):
                at = slot * VALUE_HEADS + head
                of_keys = (slot * KEY_HEADS + key_head) * CHUNK * KEYS
                w = tl.load(weights + at * CHUNK * KEYS + key_tile)
                u = tl.load(values + at * CHUNK * VALUES + value_tile)
                k = tl.load(keys + of_keys + turned_tile)
                q = tl.load(queries + of_keys + key_tile)
                overlap = tl.load(overlaps + at * CHUNK * CHUNK + square)
                if not BY_KEY:
                    total = tl.load(totals + at * CHUNK + steps)
                following = tl.minimum(slot + 1, last - 1) * VALUE_HEADS + head
                next_whole = _whole(totals, following * CHUNK, KEYS, CHUNK, BY_KEY)
                known = kept.to(dtype)
                corrections = u.to(tl.float32) - tl.dot(w, known, input_precision="ieee")
                rounded = corrections.to(dtype)
                found = tl.dot(q, known, input_precision="ieee")
                if not BY_KEY:
                    found *= tl.exp2(total * LOG2E)[:, None]
                found = tl.dot(overlap, rounded, found, input_precision="ieee")
                token = begin + (slot - first) * CHUNK + steps
                into = out + (token * VALUE_HEADS + head)[:, None] * VALUE + columns[None, :]
                mask = (token < end)[:, None] & (columns < VALUE)[None, :]
                tl.store(into, found.to(out.dtype.element_ty), mask=mask)
                if BY_KEY:
                    kept = kept * tl.exp2(whole * LOG2E)[:, None]
                else:
                    kept = kept * tl.exp2(whole * LOG2E)
                    rounded = (corrections * tl.exp2((whole - total) * LOG2E)[:, None]).to(dtype)
                kept = tl.dot(k, rounded, kept, input_precision="ieee")
                whole = next_whole
            tl.store(own + own_tile, kept, mask=own_mask)
            keep_tail(
                x, tail + row * (TAPS - 1) * CHANNELS, begin.to(tl.int64), end.to(tl.int64), before,
                channels, channels < CHANNELS, x_stride, CHANNELS, TAPS,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts"],
)
def _delta_norm_kernel(
    out,  # what tokens read; normed and gated in its place
    z,
    norm,
    query_start,
    counts,
    eps,
    z_stride,
    num_tokens,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    BY_KEY: tl.constexpr,
):
    """Of chunks' tokens; those behind get zeros."""
    head = tl.program_id(0)
    first = tl.load(query_start + tl.load(counts))
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, VALUES)
    mask = (token >= first) & (token < num_tokens)
    mask = mask[:, None] & (columns < VALUE)[None, :]
    known = mask & (token < tl.load(query_start + tl.load(counts + 1)))[:, None]
    token = token.to(tl.int64)
    into = out + ((token * HEADS + head) * VALUE)[:, None] + columns[None, :]
    found = tl.load(into, mask=known, other=0.0).to(tl.float32)
    found *= tl.rsqrt(tl.sum(found * found, axis=1) / VALUE + eps)[:, None]
    found *= tl.load(norm + columns, mask=columns < VALUE, other=0.0)[None, :]
    gate = z + (token * z_stride)[:, None] + head * VALUE + columns[None, :]
    gate = tl.load(gate, mask=known, other=0.0).to(tl.float32)
    found *= tl.sigmoid(gate) if BY_KEY else silu(gate)
    tl.store(into, found.to(out.dtype.element_ty), mask=mask)


def delta_fused(
    x: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    heads: DeltaHeads,
    tail: Tensor,
    state: Tensor,
    out: Tensor,  # [num_tokens, value_heads * value_size]
    meta: AttentionMeta,
) -> None:
    """As `delta_chunks_cuda.delta_chunks`."""
    assert meta.rows is not None and meta.counts is not None
    num_tokens, (channels, taps) = x.shape[0], heads.conv.shape
    key_heads, value_heads = heads.key_heads, heads.value_heads
    slots = num_slots(num_tokens, meta)
    sizes = {
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": value_heads,
        "VALUE": heads.value_size,
        "CHUNK": CHUNK,
        **tile_sizes(heads, x.element_size()),
    }
    queries = x.new_empty(slots, key_heads, CHUNK, sizes["KEYS"])
    keys = torch.empty_like(queries)
    weights = x.new_empty(slots, value_heads, CHUNK, sizes["KEYS"])
    values = x.new_empty(slots, value_heads, CHUNK, sizes["VALUES"])
    totals = state.new_empty(slots, value_heads, CHUNK)
    overlaps = x.new_empty(slots, value_heads, CHUNK, CHUNK)
    where = (meta.rows, meta.query_start, meta.kv_len, meta.counts)
    _delta_convolve_kernel[(2 * key_heads + value_heads, slots, CHUNK // CONVOLVE.rows)](
        x,
        heads.conv,
        tail,
        queries,
        keys,
        values,
        *where,
        x.stride(0),
        num_tokens,
        **sizes,
        KEY=heads.key_size,
        CHANNELS=channels,
        TAPS=taps,
        ROWS=CONVOLVE.rows,
        num_warps=CONVOLVE.num_warps,
        num_stages=1,
    )
    _delta_solve_kernel[(value_heads, slots)](
        a,
        b,
        heads.decay,
        heads.bias,
        queries,
        keys,
        weights,
        values,
        totals,
        overlaps,
        meta.query_start,
        meta.counts,
        a.stride(0),
        num_tokens,
        KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads,
        MOST=heads.most,
        KEYS=sizes["KEYS"],
        VALUES=sizes["VALUES"],
        CHUNK=CHUNK,
        PRECISION="ieee" if x.element_size() > 2 else "tf32",
        num_warps=SOLVE.num_warps,
        num_stages=SOLVE.num_stages,
    )
    handed = Handed(queries, keys, weights, values, totals, overlaps)
    pass_and_norm(x, z, heads, tail, state, out, meta, handed)


def pass_and_norm(
    x: Tensor,
    z: Tensor,
    heads: DeltaHeads,
    tail: Tensor,
    state: Tensor,
    out: Tensor,
    meta: AttentionMeta,
    handed: Handed,
) -> None:
    """The last two launches of a step's chunks, as `delta_chunks_cuda.pass_and_read`."""
    queries, keys, weights, values, totals, overlaps = handed
    assert overlaps is not None
    value_heads, padded = values.shape[1], values.shape[3]
    channels, taps = heads.conv.shape
    columns = min(PASS.columns, padded)
    pieces = triton.cdiv(padded, columns)
    _delta_pass_read_kernel[(value_heads, pieces, min(ENTRIES, num_chunked(meta)))](
        x,
        queries,
        keys,
        weights,
        values,
        totals,
        overlaps,
        out,
        tail,
        state,
        meta.rows,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        x.stride(0),
        KEY_HEADS=heads.key_heads,
        VALUE_HEADS=value_heads,
        KEY=heads.key_size,
        VALUE=heads.value_size,
        CHANNELS=channels,
        TAPS=taps,
        KEYS=keys.shape[3],
        VALUES=padded,
        CHUNK=CHUNK,
        COLUMNS=columns,
        SLICE=triton.next_power_of_2(triton.cdiv(channels, value_heads * pieces)),
        STAGES=PASS.num_stages,
        BY_KEY=heads.by_key,
        num_warps=PASS.num_warps,
    )
    _delta_norm_kernel[(value_heads, triton.cdiv(x.shape[0], NORM.rows))](
        out,
        z,
        heads.norm,
        meta.query_start,
        meta.counts,
        heads.eps,
        z.stride(0),
        x.shape[0],
        HEADS=value_heads,
        VALUE=heads.value_size,
        VALUES=padded,
        ROWS=NORM.rows,
        BY_KEY=heads.by_key,
        num_warps=NORM.num_warps,
    )
