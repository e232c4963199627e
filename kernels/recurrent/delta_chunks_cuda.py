"""Gated DeltaNet over prompts on CUDA, 64 tokens at a time on tensor cores, in four launches:

    convolve  per head and some tokens: convolutions, norms of queries and keys
    solve     per chunk and head: gates, and the solution of the triangular system of the tokens'
              corrections, as a function of the state before the chunk
    pass      per entry, head and some columns: updates the state chunk by chunk, and computes
              the tokens' outputs
    norm      per head and some tokens: norms and gates the outputs

Names follow `kernels.recurrent.delta_rule.chunk_rule`. A chunk's corrections are U - W S with the
state S before the chunk, U = T beta V, W = T beta exp(g) K, and the inverse T = (1 + tril(beta K
K^T, decayed))^-1. States are float32 between chunks. Operands, and data between launches, have x's
dtype.

States are not written to memory per chunk: `pass` keeps them in registers, so it must also compute
the outputs. Convolutions have their own launch. If they were fused into `solve`, only two programs
would fit on a multiprocessor, and value heads that share a key head would repeat the convolution.

Chunks begin at each entry's first token in the step, so results depend on how a prompt is chunked.

Kimi Delta Attention (`kimi_chunks_cuda`), which decays each key element separately, uses convolve,
pass and norm, too. It multiplies queries and keys by the decays before pass.

If decodes defer state updates (`delta_rule_cuda`), convolve applies pending updates to the state in
memory and zeroes them. In convolve one program computes a head of an entry. In pass, several
programs per head would race with the zeroing, and have no registers left.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.device import shared_memory
from kernels.launch.pdl import num_sms
from kernels.metadata import AttentionMeta
from kernels.recurrent.chunks_cuda import (
    CHUNK,
    ENTRIES,
    Launch,
    decays,
    first_slot,
    num_chunked,
    num_slots,
    slot_of,
    softplus,
    unit_lower_inverse,
)
from kernels.recurrent.convolution_cuda import convolved_rows, keep_tail
from kernels.recurrent.delta_pass_launch import pass_launch
from kernels.recurrent.delta_rule import DeltaInputs
from kernels.recurrent.sizes import delta_sizes, late_sizes, tile_sizes

LOG2E = tl.constexpr(1.4426950408889634)


class RowsLaunch(NamedTuple):
    rows: int  # tokens per program
    num_warps: int


CONVOLVE = RowsLaunch(64, 4)
SOLVE = Launch(4, 1)
NORM = RowsLaunch(8, 2)


@triton.jit
def silu(x):
    """Return x * sigmoid(x) without a division: in six instructions per element, not thirteen."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return x * root * root


@triton.jit
def _make_whole(
    state, late, before, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    LATE: tl.constexpr, ENTRY: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Apply a head's pending updates to its state in memory, and zero the pending updates.

    late: the head's pending updates. before: tokens of the request so far; 0 if it begins.
    """
    COLUMNS: tl.constexpr = 16
    count = before % (LATE + 1)
    dims = tl.arange(0, KEYS)
    of_sum = KEY + VALUE + dims * (1 if BY_KEY else 0)
    for origin in range(0, tl.where(count > 0, VALUE, 0), COLUMNS):
        columns = origin + tl.arange(0, COLUMNS)
        total = tl.zeros([KEYS], tl.float32)
        for i in range(LATE):
            mask = (dims < KEY) & (count + dims * 0 > i)
            # Cumulative log decays only decrease, so the last one is the minimum.
            total = tl.minimum(total, tl.load(late + i * ENTRY + of_sum, mask=mask, other=0.0))
        tile = state + dims[:, None] * VALUE + columns[None, :]
        there = (dims < KEY)[:, None] & (columns < VALUE)[None, :]
        matrix = tl.load(tile, mask=there, other=0.0) * tl.exp(total)[:, None]
        for i in range(LATE):
            mask = (dims < KEY) & (count + dims * 0 > i)
            key = tl.load(late + i * ENTRY + dims, mask=mask, other=0.0)
            key *= tl.exp(total - tl.load(late + i * ENTRY + of_sum, mask=mask, other=0.0))
            own = (columns < VALUE) & (count + columns * 0 > i)
            value = tl.load(late + i * ENTRY + KEY + columns, mask=own, other=0.0)
            matrix += key[:, None] * value[None, :]
        tl.store(tile, matrix, mask=there)
    tl.debug_barrier()  # other threads may still be reading
    for origin in range(0, LATE * ENTRY, KEYS):
        place = origin + dims
        tl.store(late + place, tl.zeros([KEYS], tl.float32), mask=place < LATE * ENTRY)


# Strides are specialised, as a model has few values of them: strides divisible by 16 allow loads of
# 16 bytes.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _delta_convolve_kernel(
    x,
    conv,
    tail,
    state,
    late,  # pending updates, as in `_delta_decode_kernel`
    queries,  # [slots, KEY_HEADS, CHUNK, KEYS], like keys
    keys,
    values,  # [slots, VALUE_HEADS, CHUNK, VALUES]
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    num_tokens,
    SIZES: tl.constexpr,  # `DeltaSizes`
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    LATE: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Convolve heads of queries, then heads of keys, then heads of values."""
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
    before = tl.load(kv_len + entry) - length  # 0 if the request begins
    tail += tl.load(rows + entry).to(tl.int64) * (SIZES.taps - 1) * SIZES.channels
    if head < 2 * SIZES.key_heads:
        dims = tl.arange(0, SIZES.key_columns)
        qk = convolved_rows(
            x, tail, conv, None, first_token, first, length, before, head * SIZES.key_dim + dims,
            dims < SIZES.key_dim, x_stride, ROWS, SIZES.channels, SIZES.taps,
        )  # fmt: skip
        qk = silu(qk)
        qk *= tl.rsqrt(tl.sum(qk * qk, axis=1) + 1e-6)[:, None]
        into = keys
        if head < SIZES.key_heads:
            into = queries
            qk *= SIZES.key_dim**-0.5
        into += (
            slot.to(tl.int64) * SIZES.key_heads + head % SIZES.key_heads
        ) * CHUNK * SIZES.key_columns + origin * SIZES.key_columns
        tl.store(into + steps[:, None] * SIZES.key_columns + dims[None, :], qk.to(dtype))
    else:
        columns = tl.arange(0, SIZES.value_columns)
        head -= 2 * SIZES.key_heads
        # Use another name than `qk`: Triton requires one shape for a name assigned in two branches.
        v = convolved_rows(
            x, tail, conv, None, first_token, first, length, before,
            2 * SIZES.key_heads * SIZES.key_dim + head * SIZES.value_dim + columns,
            columns < SIZES.value_dim, x_stride, ROWS, SIZES.channels, SIZES.taps,
        )  # fmt: skip
        into = (
            values
            + ((slot.to(tl.int64) * SIZES.value_heads + head) * CHUNK + origin)
            * SIZES.value_columns
        )
        tl.store(into + steps[:, None] * SIZES.value_columns + columns[None, :], silu(v).to(dtype))
        if LATE:
            own = tl.load(rows + entry).to(tl.int64) * SIZES.value_heads + head
            if first == 0:
                _make_whole(
                    state + own * SIZES.key_dim * SIZES.value_dim, late + own * LATE * ENTRY,
                    before, SIZES.key_dim, SIZES.value_dim, SIZES.key_columns, LATE, ENTRY,
                    SIZES.by_key,
                )  # fmt: skip


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
    values,  # values on input, overwritten by U
    totals,  # [slots, VALUE_HEADS, CHUNK] float32: cumulative sums of log decays in the chunk
    # [slots, VALUE_HEADS, CHUNK, CHUNK] of x's dtype: queries @ keys^T, decayed
    overlaps,
    query_start,
    counts,
    gate_stride,
    num_tokens,
    SIZES: tl.constexpr,  # `DeltaSizes`
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
    dims = tl.arange(0, SIZES.key_columns)
    columns = tl.arange(0, SIZES.value_columns)
    of_keys = (
        (slot.to(tl.int64) * SIZES.key_heads + head // (SIZES.value_heads // SIZES.key_heads))
        * CHUNK
        * SIZES.key_columns
    )
    key_tile = of_keys + steps[:, None] * SIZES.key_columns + dims[None, :]
    at = (slot.to(tl.int64) * SIZES.value_heads + head) * CHUNK
    value_tile = at * SIZES.value_columns + steps[:, None] * SIZES.value_columns + columns[None, :]
    k = tl.load(keys + key_tile)
    v = tl.load(values + value_tile)
    there = first + steps < length
    gates = (begin + first + steps).to(tl.int64) * gate_stride + head
    step = tl.load(a + gates, mask=there, other=0.0).to(tl.float32) + tl.load(bias + head)
    step = tl.where(there, -tl.exp(tl.load(decay + head)) * softplus(step), 0.0)
    beta = SIZES.most * tl.sigmoid(tl.load(b + gates, mask=there, other=0.0).to(tl.float32))
    total = tl.cumsum(step, axis=0)
    tl.store(totals + at + steps, total)
    between = decays(total, CHUNK)
    q = tl.load(queries + key_tile)
    overlap = tl.dot(q, tl.trans(k), input_precision="ieee") * between
    square = at * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    tl.store(overlaps + square, overlap.to(dtype))
    lower = tl.dot(k, tl.trans(k), input_precision="ieee") * between * beta[:, None]
    lower = tl.where(steps[:, None] > steps[None, :], lower, 0.0)
    inverse = unit_lower_inverse(lower, CHUNK, PRECISION) * beta[None, :]
    u = tl.dot(inverse.to(dtype), v, input_precision="ieee")
    tl.store(values + value_tile, u.to(dtype))
    since = tl.exp2(total * LOG2E)
    w = tl.dot((inverse * since[None, :]).to(dtype), k, input_precision="ieee")
    tl.store(
        weights + at * SIZES.key_columns + steps[:, None] * SIZES.key_columns + dims[None, :],
        w.to(dtype),
    )


@triton.jit
def _whole(totals, at, KEYS: tl.constexpr, CHUNK: tl.constexpr, BY_KEY: tl.constexpr):
    """Load the logarithm of a whole chunk's decay.

    at: index of the chunk's first token in `totals`, counted over all slots and heads.
    """
    last = at + CHUNK - 1
    if BY_KEY:
        return tl.load(totals + last * KEYS + tl.arange(0, KEYS))
    else:
        return tl.load(totals + last)


class PassTile(NamedTuple):
    """The tile of a program of `_delta_pass_kernel`, as one `tl.constexpr`.

    columns: columns of the state.
    slice: channels whose tails a program writes.
    stages: pipeline stages over chunks.
    """

    columns: int
    slice: int
    stages: int


@triton.jit(
    do_not_specialize=["x_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _delta_pass_kernel(
    x,
    queries,
    keys,
    weights,
    values,  # U
    totals,  # BY_KEY: [slots, VALUE_HEADS, CHUNK, KEYS]
    overlaps,
    out,  # [num_tokens, VALUE_HEADS, VALUE]: outputs before the norm
    tail,
    state,
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    SIZES: tl.constexpr,  # `DeltaSizes`
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,  # `PassTile`
):
    STAGES: tl.constexpr = TILE.stages
    BY_KEY: tl.constexpr = SIZES.by_key
    head = tl.program_id(0)
    piece = tl.program_id(1)
    dtype = keys.dtype.element_ty
    key_head = head // (SIZES.value_heads // SIZES.key_heads)
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, SIZES.key_columns)
    columns = piece * TILE.columns + tl.arange(0, TILE.columns)
    channels = (head * tl.num_programs(1) + piece) * TILE.slice + tl.arange(0, TILE.slice)
    key_tile = steps[:, None] * SIZES.key_columns + dims[None, :]
    turned_tile = steps[None, :] * SIZES.key_columns + dims[:, None]
    square = steps[:, None] * CHUNK + steps[None, :]
    value_tile = steps[:, None] * SIZES.value_columns + columns[None, :]
    own_tile = dims[:, None] * SIZES.value_dim + columns[None, :]
    own_mask = (dims < SIZES.key_dim)[:, None] & (columns < SIZES.value_dim)[None, :]
    first_entry = tl.load(counts) + tl.program_id(2)
    for entry in range(first_entry, tl.load(counts + 1), tl.num_programs(2)):
        begin = tl.load(query_start + entry)
        end = tl.load(query_start + entry + 1)
        if begin < end:
            before = tl.load(kv_len + entry) - (end - begin)
            row = tl.load(rows + entry).to(tl.int64)
            own = state + (row * SIZES.value_heads + head) * SIZES.key_dim * SIZES.value_dim
            goes_on = own_mask & (before + own_tile * 0 > 0)
            matrix = tl.load(own + own_tile, mask=goes_on, other=0.0)
            first = first_slot(query_start, counts, entry, CHUNK).to(tl.int64)
            last = first + tl.cdiv(end - begin, CHUNK)
            # Load the decay one chunk ahead, so that its latency does not delay the state's update.
            whole = _whole(
                totals, (first * SIZES.value_heads + head) * CHUNK, SIZES.key_columns, CHUNK, BY_KEY
            )
            for slot in tl.range(first, last, num_stages=STAGES):
                at = slot * SIZES.value_heads + head
                of_keys = (slot * SIZES.key_heads + key_head) * CHUNK * SIZES.key_columns
                w = tl.load(weights + at * CHUNK * SIZES.key_columns + key_tile)
                u = tl.load(values + at * CHUNK * SIZES.value_columns + value_tile)
                k = tl.load(keys + of_keys + turned_tile)
                q = tl.load(queries + of_keys + key_tile)
                overlap = tl.load(overlaps + at * CHUNK * CHUNK + square)
                if not BY_KEY:
                    total = tl.load(totals + at * CHUNK + steps)
                following = tl.minimum(slot + 1, last - 1) * SIZES.value_heads + head
                next_whole = _whole(totals, following * CHUNK, SIZES.key_columns, CHUNK, BY_KEY)
                known = matrix.to(dtype)
                corrections = u.to(tl.float32) - tl.dot(w, known, input_precision="ieee")
                rounded = corrections.to(dtype)
                outputs = tl.dot(q, known, input_precision="ieee")
                if not BY_KEY:
                    outputs *= tl.exp2(total * LOG2E)[:, None]
                outputs = tl.dot(overlap, rounded, outputs, input_precision="ieee")
                token = begin + (slot - first) * CHUNK + steps
                into = (
                    out
                    + (token * SIZES.value_heads + head)[:, None] * SIZES.value_dim
                    + columns[None, :]
                )
                mask = (token < end)[:, None] & (columns < SIZES.value_dim)[None, :]
                tl.store(into, outputs.to(out.dtype.element_ty), mask=mask)
                if BY_KEY:
                    matrix = matrix * tl.exp2(whole * LOG2E)[:, None]
                else:
                    matrix = matrix * tl.exp2(whole * LOG2E)
                    rounded = (corrections * tl.exp2((whole - total) * LOG2E)[:, None]).to(dtype)
                matrix = tl.dot(k, rounded, matrix, input_precision="ieee")
                whole = next_whole
            tl.store(own + own_tile, matrix, mask=own_mask)
            keep_tail(
                x, tail + row * (SIZES.taps - 1) * SIZES.channels, begin.to(tl.int64),
                end.to(tl.int64), before,
                channels, channels < SIZES.channels, x_stride, SIZES.channels, SIZES.taps,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts"],
)
def _delta_norm_kernel(
    out,  # outputs of pass, normed and gated in place
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
    """Norm and gate the outputs of chunks' tokens; padding tokens get zeros."""
    head = tl.program_id(0)
    first = tl.load(query_start + tl.load(counts))
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, VALUES)
    mask = (token >= first) & (token < num_tokens)
    mask = mask[:, None] & (columns < VALUE)[None, :]
    known = mask & (token < tl.load(query_start + tl.load(counts + 1)))[:, None]
    token = token.to(tl.int64)
    into = out + ((token * HEADS + head) * VALUE)[:, None] + columns[None, :]
    normed = tl.load(into, mask=known, other=0.0).to(tl.float32)
    normed *= tl.rsqrt(tl.sum(normed * normed, axis=1) / VALUE + eps)[:, None]
    normed *= tl.load(norm + columns, mask=columns < VALUE, other=0.0)[None, :]
    gate = z + (token * z_stride)[:, None] + head * VALUE + columns[None, :]
    gate = tl.load(gate, mask=known, other=0.0).to(tl.float32)
    normed *= tl.sigmoid(gate) if BY_KEY else silu(gate)
    tl.store(into, normed.to(out.dtype.element_ty), mask=mask)


class Handed(NamedTuple):
    """The intermediate tensors that `pass` reads; see the arguments of `_delta_pass_kernel`."""

    queries: Tensor
    keys: Tensor
    weights: Tensor
    values: Tensor
    totals: Tensor
    overlaps: Tensor


def delta_chunks(
    inputs: DeltaInputs,
    out: Tensor,  # [num_tokens, value_heads * value_size]
    meta: AttentionMeta,
) -> None:
    """Compute the gated delta rule of a step's chunks into out; update tails and states in place.

    The chunks are the entries meta.counts[0] .. meta.counts[1] - 1. Padding tokens get zeros.
    """
    x, _, a, b, heads, _, state, _ = inputs
    assert meta.rows is not None and meta.counts is not None
    num_tokens = x.shape[0]
    key_heads, value_heads = heads.key_heads, heads.value_heads
    slots = num_slots(num_tokens, meta)
    sizes = tile_sizes(heads, x.element_size())
    queries = x.new_empty(slots, key_heads, CHUNK, sizes["KEYS"])
    keys = torch.empty_like(queries)
    weights = x.new_empty(slots, value_heads, CHUNK, sizes["KEYS"])
    values = x.new_empty(slots, value_heads, CHUNK, sizes["VALUES"])
    totals = state.new_empty(slots, value_heads, CHUNK)
    overlaps = x.new_empty(slots, value_heads, CHUNK, CHUNK)
    convolve(inputs, queries, keys, values, meta)
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
        SIZES=delta_sizes(heads, sizes["KEYS"], sizes["VALUES"]),
        CHUNK=CHUNK,
        PRECISION="ieee" if x.element_size() > 2 else "tf32",
        num_warps=SOLVE.num_warps,
        num_stages=SOLVE.num_stages,
    )
    handed = Handed(queries, keys, weights, values, totals, overlaps)
    pass_and_norm(inputs, out, meta, handed)


def convolve(
    inputs: DeltaInputs,
    queries: Tensor,  # [slots, key_heads, CHUNK, KEYS], like keys
    keys: Tensor,
    values: Tensor,  # [slots, value_heads, CHUNK, VALUES]
    meta: AttentionMeta,
) -> None:
    """Launch the first kernel of a step's chunks (convolve).

    The kernel writes convolved and normed queries and keys, and convolved values, to the arguments
    of these names. It also applies pending updates to the states.
    """
    x, _, _, _, heads, tail, state, late = inputs
    slots, key_heads, _, padded = keys.shape
    value_heads = values.shape[1]
    _delta_convolve_kernel[(2 * key_heads + value_heads, slots, CHUNK // CONVOLVE.rows)](
        x,
        heads.conv,
        tail,
        state,
        late,
        queries,
        keys,
        values,
        meta.rows,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        x.stride(0),
        x.shape[0],
        SIZES=delta_sizes(heads, padded, values.shape[3]),
        CHUNK=CHUNK,
        ROWS=CONVOLVE.rows,
        **late_sizes(late),
        num_warps=CONVOLVE.num_warps,
        num_stages=1,
    )


def pass_and_norm(
    inputs: DeltaInputs,
    out: Tensor,
    meta: AttentionMeta,
    handed: Handed,
) -> None:
    """Launch the last two kernels of a step's chunks (pass and norm).

    The kernels write the tokens' outputs to out, and each entry's new state and tail to inputs.
    """
    x, z, _, _, heads, tail, state, _ = inputs
    queries, keys, weights, values, totals, overlaps = handed
    value_heads, padded = values.shape[1], values.shape[3]
    channels = heads.conv.shape[0]
    walked = min(ENTRIES, num_chunked(meta))
    # The launch depends on the number of prompts in a step; all variants are compiled at the start
    # (`engine.runner.warm_up`).
    shape = pass_launch(
        walked * value_heads, num_sms(x.device), keys.shape[3], padded, x.element_size(),
        shared_memory(x.device),
    )  # fmt: skip
    pieces = triton.cdiv(padded, shape.columns)
    _delta_pass_kernel[(value_heads, pieces, walked)](
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
        SIZES=delta_sizes(heads, keys.shape[3], padded),
        CHUNK=CHUNK,
        TILE=PassTile(
            columns=shape.columns,
            slice=triton.next_power_of_2(triton.cdiv(channels, value_heads * pieces)),
            stages=shape.num_stages,
        ),
        num_warps=shape.num_warps,
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
