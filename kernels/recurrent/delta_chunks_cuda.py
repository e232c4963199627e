"""Gated DeltaNet over prompts on CUDA, 64 tokens at a time on tensor cores, in three launches:

    prepare   of each chunk and head: convolutions, gates, and the triangular system that says what
              each token corrects, solved but for the state before the chunk
    pass      of each entry, head and some columns: the state goes from chunk to chunk
    read      of each chunk and head: what tokens read of the state and of each other, normed, gated

As in `kernels.recurrent.delta_rule.chunk_rule`, of which the letters are: the corrections of a
chunk are U - W S where S is the state before it, U = T beta V, W = T beta exp(g) K with the inverse
T = (1 + tril(beta K K^T, decayed))^-1. States are float32 between chunks; what is multiplied, and
what one launch leaves for the next, is of x's type.

Sums begin with a chunk, and chunks with an entry: the numbers depend on where a prompt was cut.

pass and read are those of Kimi Delta Attention too, whose decays are of each element of a key
(`kimi_chunks_cuda`). Queries and keys have these in them by then, and products of queries with keys
are made already.
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
from kernels.recurrent.delta_rule import DeltaHeads

PREPARE = Launch(4, 1)
PASS = PassLaunch(32, 4, 2)
READ = Launch(4, 1)


# Strides of tiles are a model's few: where 16 divides one, 16 bytes are read at once.
@triton.jit(
    do_not_specialize=["gate_stride", "num_tokens"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts", "a", "b"],
)
def _delta_prepare_kernel(
    x,
    a,
    b,
    conv,
    decay,
    bias,
    tail,
    queries,  # [slots, KEY_HEADS, CHUNK, KEYS], as keys
    keys,
    weights,  # W: [slots, VALUE_HEADS, CHUNK, KEYS]
    values,  # U: [slots, VALUE_HEADS, CHUNK, VALUES]
    totals,  # [slots, VALUE_HEADS, CHUNK] float32: logarithms of decays since the chunk's begin
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    gate_stride,  # of a and b
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,  # KEY padded
    VALUES: tl.constexpr,  # VALUE padded
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    dtype = keys.dtype.element_ty
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    key_head = head // SHARED
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, KEYS)
    columns = tl.arange(0, VALUES)
    there = first + steps < length
    first_token = (begin + first).to(tl.int64)
    before = tl.load(kv_len + entry) - length  # 0: the request begins
    tail += tl.load(rows + entry).to(tl.int64) * (TAPS - 1) * CHANNELS
    own = key_head * KEY + dims
    at = (slot.to(tl.int64) * KEY_HEADS + key_head) * CHUNK * KEYS
    key_tile = at + steps[:, None] * KEYS + dims[None, :]
    if head % SHARED == 0:
        q = convolved_rows(
            x, tail, conv, None, first_token, first, length, before, own, dims < KEY, x_stride,
            CHUNK, CHANNELS, TAPS,
        )  # fmt: skip
        q = q * tl.sigmoid(q)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6) * KEY**-0.5)[:, None]
        tl.store(queries + key_tile, q.to(dtype))
    k = convolved_rows(
        x, tail, conv, None, first_token, first, length, before, KEY_HEADS * KEY + own, dims < KEY,
        x_stride, CHUNK, CHANNELS, TAPS,
    )  # fmt: skip
    k = k * tl.sigmoid(k)
    k = (k * tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)[:, None]).to(dtype)
    if head % SHARED == 0:
        tl.store(keys + key_tile, k)

    gates = (first_token + steps) * gate_stride + head
    step = tl.load(a + gates, mask=there, other=0.0).to(tl.float32) + tl.load(bias + head)
    step = tl.where(there, -tl.exp(tl.load(decay + head)) * softplus(step), 0.0)
    beta = MOST * tl.sigmoid(tl.load(b + gates, mask=there, other=0.0).to(tl.float32))
    total = tl.cumsum(step, axis=0)
    at = (slot.to(tl.int64) * VALUE_HEADS + head) * CHUNK
    tl.store(totals + at + steps, total)
    overlap = tl.dot(k, tl.trans(k), input_precision="ieee")
    lower = tl.where(steps[:, None] > steps[None, :], overlap, 0.0)
    lower = lower * decays(total, CHUNK) * beta[:, None]
    inverse = unit_lower_inverse(lower, CHUNK, PRECISION) * beta[None, :]
    w = tl.dot((inverse * tl.exp(total)[None, :]).to(dtype), k, input_precision="ieee")
    tl.store(weights + at * KEYS + steps[:, None] * KEYS + dims[None, :], w.to(dtype))
    v = convolved_rows(
        x, tail, conv, None, first_token, first, length, before,
        2 * KEY_HEADS * KEY + head * VALUE + columns, columns < VALUE, x_stride, CHUNK, CHANNELS,
        TAPS,
    )  # fmt: skip
    v = (v * tl.sigmoid(v)).to(dtype)
    u = tl.dot(inverse.to(dtype), v, input_precision="ieee")
    tl.store(values + at * VALUES + steps[:, None] * VALUES + columns[None, :], u.to(dtype))


@triton.jit(
    do_not_specialize=["x_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _delta_pass_kernel(
    x,
    keys,
    weights,
    values,  # corrections take the place of U
    totals,  # BY_KEY: [slots, VALUE_HEADS, CHUNK, KEYS]
    states,  # [slots, VALUE_HEADS, KEYS, VALUES]: before each chunk
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
    value_tile = steps[:, None] * VALUES + columns[None, :]
    state_tile = dims[:, None] * VALUES + columns[None, :]
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
            for slot in tl.range(first, last, num_stages=STAGES):
                at = slot * VALUE_HEADS + head
                of_keys = keys + (slot * KEY_HEADS + key_head) * CHUNK * KEYS
                w = tl.load(weights + at * CHUNK * KEYS + key_tile)
                u = tl.load(values + at * CHUNK * VALUES + value_tile)
                k = tl.load(of_keys + turned_tile)
                known = kept.to(dtype)
                tl.store(states + at * KEYS * VALUES + state_tile, known)
                corrections = u.to(tl.float32) - tl.dot(w, known, input_precision="ieee")
                tl.store(values + at * CHUNK * VALUES + value_tile, corrections.to(dtype))
                if BY_KEY:
                    whole = tl.load(totals + (at * CHUNK + CHUNK - 1) * KEYS + dims)[:, None]
                else:
                    whole = tl.load(totals + at * CHUNK + CHUNK - 1)
                    total = tl.load(totals + at * CHUNK + steps)
                    corrections *= tl.exp(whole - total)[:, None]
                kept = kept * tl.exp(whole)
                kept = tl.dot(k, corrections.to(dtype), kept, input_precision="ieee")
            tl.store(own + own_tile, kept, mask=own_mask)
            keep_tail(
                x, tail + row * (TAPS - 1) * CHANNELS, begin.to(tl.int64), end.to(tl.int64), before,
                channels, channels < CHANNELS, x_stride, CHANNELS, TAPS,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts"],
)
def _delta_read_kernel(
    queries,
    keys,
    values,  # corrections
    totals,
    overlaps,  # BY_KEY: [slots, VALUE_HEADS, CHUNK, CHUNK], of queries with keys
    states,
    z,
    norm,
    out,
    query_start,
    counts,
    eps,
    z_stride,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_KEY: tl.constexpr,
):
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if first >= length:
        return
    dtype = keys.dtype.element_ty
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, KEYS)
    columns = tl.arange(0, VALUES)
    token = (begin + first + steps).to(tl.int64)
    mask = (first + steps < length)[:, None] & (columns < VALUE)[None, :]
    into = out + (token * VALUE_HEADS * VALUE)[:, None] + head * VALUE + columns[None, :]
    if entry >= tl.load(counts + 1):  # padding
        tl.store(into, tl.zeros([CHUNK, VALUES], out.dtype.element_ty), mask=mask)
        return
    at = slot.to(tl.int64) * VALUE_HEADS + head
    of_keys = (slot.to(tl.int64) * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * CHUNK * KEYS
    key_tile = of_keys + steps[:, None] * KEYS + dims[None, :]
    q = tl.load(queries + key_tile)
    kept = tl.load(states + at * KEYS * VALUES + dims[:, None] * VALUES + columns[None, :])
    found = tl.dot(q, kept, input_precision="ieee")
    if BY_KEY:
        square = steps[:, None] * CHUNK + steps[None, :]
        overlap = tl.load(overlaps + at * CHUNK * CHUNK + square)
    else:
        k = tl.load(keys + key_tile)
        total = tl.load(totals + at * CHUNK + steps)
        found *= tl.exp(total)[:, None]
        overlap = tl.dot(q, tl.trans(k), input_precision="ieee") * decays(total, CHUNK)
        overlap = overlap.to(dtype)
    corrections = tl.load(values + at * CHUNK * VALUES + steps[:, None] * VALUES + columns[None, :])
    found = tl.dot(overlap, corrections, found, input_precision="ieee")
    found = found / tl.sqrt(tl.sum(found * found, axis=1) / VALUE + eps)[:, None]
    found *= tl.load(norm + columns, mask=columns < VALUE, other=0.0)[None, :]
    gate = z + (token * z_stride)[:, None] + head * VALUE + columns[None, :]
    gate = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    found *= tl.sigmoid(gate)
    if not BY_KEY:
        found *= gate
    tl.store(into, found.to(out.dtype.element_ty), mask=mask)


class Handed(NamedTuple):
    """What pass and read are given; see their arguments."""

    queries: Tensor
    keys: Tensor
    weights: Tensor
    values: Tensor
    totals: Tensor
    overlaps: Tensor | None = None  # of heads by_key


def tile_sizes(heads: DeltaHeads, element_size: int) -> dict[str, int]:
    """KEYS and VALUES: what sizes are padded to."""
    # In 16 bits Triton 3.6 reads beyond what a program has where a product of wgmma is narrower.
    least = 16 if element_size > 2 else 64
    padded = (triton.next_power_of_2(size) for size in (heads.key_size, heads.value_size))
    return {name: max(least, size) for name, size in zip(("KEYS", "VALUES"), padded, strict=True)}


def delta_chunks(
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
    """As `kernels.reference.Kernels.gated_delta`, of the entries counts[0] .. counts[1] - 1 of
    meta; tokens after the last get zeros."""
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
    where = (meta.rows, meta.query_start, meta.kv_len, meta.counts)
    _delta_prepare_kernel[(value_heads, slots)](
        x,
        a,
        b,
        heads.conv,
        heads.decay,
        heads.bias,
        tail,
        queries,
        keys,
        weights,
        values,
        totals,
        *where,
        x.stride(0),
        a.stride(0),
        num_tokens,
        **sizes,
        KEY=heads.key_size,
        CHANNELS=channels,
        TAPS=taps,
        MOST=heads.most,
        PRECISION="ieee" if x.element_size() > 2 else "tf32",
        num_warps=PREPARE.num_warps,
        num_stages=PREPARE.num_stages,
    )
    handed = Handed(queries, keys, weights, values, totals)
    pass_and_read(x, z, heads, tail, state, out, meta, handed)


def pass_and_read(
    x: Tensor,
    z: Tensor,
    heads: DeltaHeads,
    tail: Tensor,
    state: Tensor,
    out: Tensor,
    meta: AttentionMeta,
    handed: Handed,
) -> None:
    """The last two launches of a step's chunks."""
    queries, keys, weights, values, totals, overlaps = handed
    (slots, value_heads, _, padded), keys_padded = values.shape, keys.shape[3]
    channels, taps = heads.conv.shape
    states = x.new_empty(slots, value_heads, keys_padded, padded)
    sizes = {
        "KEY_HEADS": heads.key_heads,
        "VALUE_HEADS": value_heads,
        "VALUE": heads.value_size,
        "KEYS": keys_padded,
        "VALUES": padded,
        "CHUNK": CHUNK,
        "BY_KEY": heads.by_key,
    }
    columns = min(PASS.columns, padded)
    pieces = triton.cdiv(padded, columns)
    _delta_pass_kernel[(value_heads, pieces, min(ENTRIES, num_chunked(meta)))](
        x,
        keys,
        weights,
        values,
        totals,
        states,
        tail,
        state,
        meta.rows,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        x.stride(0),
        **sizes,
        KEY=heads.key_size,
        CHANNELS=channels,
        TAPS=taps,
        COLUMNS=columns,
        SLICE=triton.next_power_of_2(triton.cdiv(channels, value_heads * pieces)),
        STAGES=PASS.num_stages,
        num_warps=PASS.num_warps,
    )
    _delta_read_kernel[(value_heads, slots)](
        queries,
        keys,
        values,
        totals,
        overlaps,
        states,
        z,
        heads.norm,
        out,
        meta.query_start,
        meta.counts,
        heads.eps,
        z.stride(0),
        x.shape[0],
        **sizes,
        num_warps=READ.num_warps,
        num_stages=READ.num_stages,
    )
