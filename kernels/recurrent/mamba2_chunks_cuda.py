"""Mamba-2 over prompts on CUDA, 64 tokens at a time on tensor cores, in three launches:

    prepare   per chunk and head: convolutions and time steps
    pass      per entry, head and some rows: updates the state chunk by chunk
    read      per chunk and head: outputs, from the state before the chunk and the chunk's tokens

The computation is that of `kernels.recurrent.mamba2.chunk_scan`. States are float32 between chunks.
Operands, and data between launches, have x's dtype. Chunks begin at each entry's first token in the
step, so results depend on how a prompt is chunked.
"""

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
)
from kernels.recurrent.convolution_cuda import convolved_rows, keep_tail
from kernels.recurrent.mamba2 import Mamba2Heads
from kernels.recurrent.sizes import mamba2_sizes

PREPARE = Launch(4, 1)
PASS = PassLaunch(64, 4, 2)
READ = Launch(4, 1)


# Strides are specialised, as a model has few values of them: strides divisible by 16 allow loads of
# 16 bytes.
# 20 parameters or more: 19 are tensors and numbers of the launch, and constants are in a struct.
@triton.jit(
    do_not_specialize=["dt_stride", "num_tokens"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts", "dt"],
)
def _mamba2_prepare_kernel(
    x,
    dt,
    conv,
    conv_bias,
    decay,
    bias,
    tail,
    inner,  # [slots, HEADS, CHUNK, SIZES]: convolved x
    inputs,  # [slots, GROUPS, CHUNK, STATES]: B; outputs is C
    outputs,
    sizes,  # [slots, HEADS, CHUNK] float32: the time steps, Mamba's delta
    totals,  # like `sizes`: cumulative log decays in the chunk
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    dt_stride,
    num_tokens,
    LAYER: tl.constexpr,  # `Mamba2Sizes`
    CHUNK: tl.constexpr,
):
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    dtype = inner.dtype.element_ty
    EACH: tl.constexpr = LAYER.heads // LAYER.groups
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, LAYER.states)
    own = tl.arange(0, LAYER.sizes)
    there = first + steps < length
    first_token = (begin + first).to(tl.int64)
    before = tl.load(kv_len + entry) - length  # 0 if the request begins
    tail += tl.load(rows + entry).to(tl.int64) * (LAYER.taps - 1) * LAYER.channels
    u = convolved_rows(
        x, tail, conv, conv_bias, first_token, first, length, before, head * LAYER.size + own,
        own < LAYER.size, x_stride, CHUNK, LAYER.channels, LAYER.taps,
    )  # fmt: skip
    u = tl.where(there[:, None], u * tl.sigmoid(u), 0.0)
    at = (slot.to(tl.int64) * LAYER.heads + head) * CHUNK
    tl.store(inner + at * LAYER.sizes + steps[:, None] * LAYER.sizes + own[None, :], u.to(dtype))
    step = tl.load(dt + (first_token + steps) * dt_stride + head, mask=there, other=0.0)
    step = softplus(step.to(tl.float32) + tl.load(bias + head))
    step = tl.where(there, tl.minimum(tl.maximum(step, LAYER.least), LAYER.most), 0.0)
    tl.store(sizes + at + steps, step)
    tl.store(totals + at + steps, tl.cumsum(-tl.exp(tl.load(decay + head)) * step, axis=0))
    if head % EACH == 0:
        group = head // EACH
        of_b = LAYER.heads * LAYER.size + group * LAYER.state + dims
        at = (slot.to(tl.int64) * LAYER.groups + group) * CHUNK * LAYER.states
        tile = at + steps[:, None] * LAYER.states + dims[None, :]
        known = there[:, None] & (dims < LAYER.state)[None, :]
        b = convolved_rows(
            x, tail, conv, conv_bias, first_token, first, length, before, of_b, dims < LAYER.state,
            x_stride, CHUNK, LAYER.channels, LAYER.taps,
        )  # fmt: skip
        tl.store(inputs + tile, tl.where(known, b * tl.sigmoid(b), 0.0).to(dtype))
        c = convolved_rows(
            x, tail, conv, conv_bias, first_token, first, length, before,
            LAYER.groups * LAYER.state + of_b,
            dims < LAYER.state, x_stride, CHUNK, LAYER.channels, LAYER.taps,
        )  # fmt: skip
        tl.store(outputs + tile, tl.where(known, c * tl.sigmoid(c), 0.0).to(dtype))


@triton.jit(
    do_not_specialize=["x_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _mamba2_pass_kernel(
    x,
    inner,
    inputs,
    sizes,
    totals,
    states,  # [slots, HEADS, SIZES, STATES]: state before each chunk
    tail,
    state,
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    LAYER: tl.constexpr,  # `Mamba2Sizes`
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,  # rows of the state
    SLICE: tl.constexpr,  # channels whose tails a program writes
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    piece = tl.program_id(1)
    dtype = inner.dtype.element_ty
    group = head // (LAYER.heads // LAYER.groups)
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, LAYER.states)
    own = piece * ROWS + tl.arange(0, ROWS)
    channels = (head * tl.num_programs(1) + piece) * SLICE + tl.arange(0, SLICE)
    inner_tile = steps[None, :] * LAYER.sizes + own[:, None]
    input_tile = steps[:, None] * LAYER.states + dims[None, :]
    state_tile = own[:, None] * LAYER.states + dims[None, :]
    own_tile = own[:, None] * LAYER.state + dims[None, :]
    own_mask = (own < LAYER.size)[:, None] & (dims < LAYER.state)[None, :]
    first_entry = tl.load(counts) + tl.program_id(2)
    for entry in range(first_entry, tl.load(counts + 1), tl.num_programs(2)):
        begin = tl.load(query_start + entry)
        end = tl.load(query_start + entry + 1)
        if begin < end:
            before = tl.load(kv_len + entry) - (end - begin)
            row = tl.load(rows + entry).to(tl.int64)
            mine = state + (row * LAYER.heads + head) * LAYER.size * LAYER.state
            goes_on = own_mask & (before + own_tile * 0 > 0)
            matrix = tl.load(mine + own_tile, mask=goes_on, other=0.0)
            first = first_slot(query_start, counts, entry, CHUNK).to(tl.int64)
            last = first + tl.cdiv(end - begin, CHUNK)
            for slot in tl.range(first, last, num_stages=STAGES):
                at = slot * LAYER.heads + head
                u = tl.load(inner + at * CHUNK * LAYER.sizes + inner_tile)
                b = tl.load(
                    inputs + (slot * LAYER.groups + group) * CHUNK * LAYER.states + input_tile
                )
                step = tl.load(sizes + at * CHUNK + steps)
                total = tl.load(totals + at * CHUNK + steps)
                whole = tl.load(totals + at * CHUNK + CHUNK - 1)
                tl.store(states + at * LAYER.sizes * LAYER.states + state_tile, matrix.to(dtype))
                added = u.to(tl.float32) * (step * tl.exp(whole - total))[None, :]
                matrix = matrix * tl.exp(whole)
                matrix = tl.dot(added.to(dtype), b, matrix, input_precision="ieee")
            tl.store(mine + own_tile, matrix, mask=own_mask)
            keep_tail(
                x, tail + row * (LAYER.taps - 1) * LAYER.channels, begin.to(tl.int64),
                end.to(tl.int64), before,
                channels, channels < LAYER.channels, x_stride, LAYER.channels, LAYER.taps,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts"],
)
def _mamba2_read_kernel(
    inner,
    inputs,
    outputs,
    sizes,
    totals,
    states,
    skip,
    out,
    query_start,
    counts,
    num_tokens,
    LAYER: tl.constexpr,  # `Mamba2Sizes`
    CHUNK: tl.constexpr,
):
    SIZES: tl.constexpr = LAYER.sizes
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if first >= length:
        return
    dtype = inner.dtype.element_ty
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, LAYER.states)
    own = tl.arange(0, SIZES)
    token = (begin + first + steps).to(tl.int64)
    mask = (first + steps < length)[:, None] & (own < LAYER.size)[None, :]
    into = out + (token * LAYER.heads * LAYER.size)[:, None] + head * LAYER.size + own[None, :]
    if entry >= tl.load(counts + 1):  # padding
        tl.store(into, tl.zeros([CHUNK, SIZES], tl.float32), mask=mask)
        return
    at = slot.to(tl.int64) * LAYER.heads + head
    group = (
        (slot.to(tl.int64) * LAYER.groups + head // (LAYER.heads // LAYER.groups))
        * CHUNK
        * LAYER.states
    )
    tile = group + steps[:, None] * LAYER.states + dims[None, :]
    b = tl.load(inputs + tile)
    c = tl.load(outputs + tile)
    u = tl.load(inner + at * CHUNK * SIZES + steps[:, None] * SIZES + own[None, :])
    matrix = tl.load(
        states + at * SIZES * LAYER.states + own[None, :] * LAYER.states + dims[:, None]
    )
    step = tl.load(sizes + at * CHUNK + steps)
    total = tl.load(totals + at * CHUNK + steps)
    y = tl.dot(c, matrix, input_precision="ieee") * tl.exp(total)[:, None]
    overlap = tl.dot(c, tl.trans(b), input_precision="ieee")
    overlap = overlap * decays(total, CHUNK) * step[None, :]
    y = tl.dot(overlap.to(dtype), u, y, input_precision="ieee")
    y += tl.load(skip + head) * u.to(tl.float32)
    tl.store(into, y, mask=mask)


def mamba2_chunks(
    x: Tensor,
    dt: Tensor,
    heads: Mamba2Heads,
    tail: Tensor,
    state: Tensor,
    out: Tensor,  # [num_tokens, heads, head_size] float32
    meta: AttentionMeta,
) -> None:
    """Compute Mamba-2 of a step's chunks into out; update tails and states in place.

    The chunks are the entries meta.counts[0] .. meta.counts[1] - 1. Padding tokens get zeros.
    """
    assert meta.rows is not None and meta.counts is not None
    num_tokens, channels = x.shape[0], heads.conv.shape[0]
    slots = num_slots(num_tokens, meta)
    padded = max(16, triton.next_power_of_2(heads.head_size))
    states_padded = max(16, triton.next_power_of_2(heads.state_size))
    layer = mamba2_sizes(heads, padded, states_padded)
    inner = x.new_empty(slots, heads.heads, CHUNK, padded)
    inputs = x.new_empty(slots, heads.groups, CHUNK, states_padded)
    outputs = torch.empty_like(inputs)
    steps = state.new_empty(slots, heads.heads, CHUNK)
    totals = torch.empty_like(steps)
    states = x.new_empty(slots, heads.heads, padded, states_padded)
    where = (meta.rows, meta.query_start, meta.kv_len, meta.counts)
    _mamba2_prepare_kernel[(heads.heads, slots)](
        x,
        dt,
        heads.conv,
        heads.conv_bias,
        heads.decay,
        heads.bias,
        tail,
        inner,
        inputs,
        outputs,
        steps,
        totals,
        *where,
        x.stride(0),
        dt.stride(0),
        num_tokens,
        LAYER=layer,
        CHUNK=CHUNK,
        num_warps=PREPARE.num_warps,
        num_stages=PREPARE.num_stages,
    )
    rows = min(PASS.columns, padded)
    pieces = triton.cdiv(heads.head_size, rows)
    _mamba2_pass_kernel[(heads.heads, pieces, min(ENTRIES, num_chunked(meta)))](
        x,
        inner,
        inputs,
        steps,
        totals,
        states,
        tail,
        state,
        *where,
        x.stride(0),
        LAYER=layer,
        CHUNK=CHUNK,
        ROWS=rows,
        SLICE=triton.next_power_of_2(triton.cdiv(channels, heads.heads * pieces)),
        STAGES=PASS.num_stages,
        num_warps=PASS.num_warps,
    )
    _mamba2_read_kernel[(heads.heads, slots)](
        inner,
        inputs,
        outputs,
        steps,
        totals,
        states,
        heads.skip,
        out,
        meta.query_start,
        meta.counts,
        num_tokens,
        LAYER=layer,
        CHUNK=CHUNK,
        num_warps=READ.num_warps,
        num_stages=READ.num_stages,
    )
