"""Mamba-2 on CUDA.

Decodes: each program keeps some rows of a head's state in registers and walks the tokens of an
entry, of which a decode has one. Convolution and next tail are made on the way: a decode step is
one launch, which reads and writes each state once. Prompts go by chunks (`mamba2_chunks_cuda`), or
are walked too where their numbers must not depend on the step: the entry alone decides what a walk
computes, in which order.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMeta
from kernels.recurrent.chunks_cuda import softplus
from kernels.recurrent.convolution_cuda import comes_last, convolved, keep_tail, tickets
from kernels.recurrent.mamba2 import Mamba2Heads
from kernels.recurrent.mamba2_chunks_cuda import mamba2_chunks

ROWS = 32  # of a head's state that a program keeps


@triton.jit(
    do_not_specialize=["x_stride", "dt_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts", "dt"],
)
def _mamba2_kernel(
    x,
    dt,
    conv,
    conv_bias,
    decay,
    skip,
    bias,
    tail,
    state,
    out,
    arrived,  # [entries * GROUPS]: of `tickets`
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    dt_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    STATES: tl.constexpr,  # STATE padded to a power of two
    ROWS: tl.constexpr,
    ALL: tl.constexpr,  # entries, and padding; else decodes
):
    entry = tl.program_id(0)
    head = tl.program_id(1)
    own = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, STATES)
    own_mask = own < SIZE
    dim_mask = dims < STATE
    begin = tl.load(query_start + entry).to(tl.int64)
    end = tl.load(query_start + entry + 1).to(tl.int64)
    into = out + head * SIZE + own
    if entry >= tl.load(counts + ALL):
        if ALL:
            for token in range(begin, end):
                zeros = tl.zeros([ROWS], tl.float32)
                tl.store(into + token * HEADS * SIZE, zeros, mask=own_mask)
        return
    if begin == end:
        return
    before = tl.load(kv_len + entry) - (end - begin)  # 0: the request begins
    row = tl.load(rows + entry).to(tl.int64)
    tail += row * (TAPS - 1) * CHANNELS
    tile = (row * HEADS + head) * SIZE * STATE + own[:, None] * STATE + dims[None, :]
    tile_mask = own_mask[:, None] & dim_mask[None, :]
    goes_on = tile_mask & (before + tile * 0 > 0)
    matrix = tl.load(state + tile, mask=goes_on, other=0.0)
    group = head // (HEADS // GROUPS)
    of_x = head * SIZE + own
    of_b = HEADS * SIZE + group * STATE + dims
    of_c = of_b + GROUPS * STATE
    rate = tl.exp(tl.load(decay + head))
    through = tl.load(skip + head)
    shift = tl.load(bias + head)
    for token in range(begin, end):
        ago = token - begin
        u = convolved(
            x, tail, conv, conv_bias, token, ago, before, of_x, own_mask, x_stride, CHANNELS, TAPS
        )
        u = u * tl.sigmoid(u)
        b = convolved(
            x, tail, conv, conv_bias, token, ago, before, of_b, dim_mask, x_stride, CHANNELS, TAPS
        )
        b = tl.where(dim_mask, b * tl.sigmoid(b), 0.0)
        c = convolved(
            x, tail, conv, conv_bias, token, ago, before, of_c, dim_mask, x_stride, CHANNELS, TAPS
        )
        c = tl.where(dim_mask, c * tl.sigmoid(c), 0.0)
        step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + shift)
        step = tl.minimum(tl.maximum(step, LEAST), MOST)
        matrix = matrix * tl.exp(-rate * step) + (u * step)[:, None] * b[None, :]
        found = tl.sum(matrix * c[None, :], axis=1) + through * u
        tl.store(into + token * HEADS * SIZE, found, mask=own_mask)
    tl.store(state + tile, matrix, mask=tile_mask)
    keep_tail(x, tail, begin, end, before, of_x, own_mask, x_stride, CHANNELS, TAPS)
    # B and C are of all heads of the group.
    programs = HEADS // GROUPS * tl.num_programs(2)
    if comes_last(arrived + entry * GROUPS + group, programs):
        keep_tail(x, tail, begin, end, before, of_b, dim_mask, x_stride, CHANNELS, TAPS)
        keep_tail(x, tail, begin, end, before, of_c, dim_mask, x_stride, CHANNELS, TAPS)


def mamba2(
    x: Tensor,
    dt: Tensor,
    heads: Mamba2Heads,
    tail: Tensor,
    state: Tensor,
    meta: AttentionMeta,
    deterministic: bool = False,
) -> Tensor:
    """See `kernels.reference.Kernels.mamba2`; x and dt may have rows of any stride. Tokens after
    the last entry's get zeros.

    deterministic: a token's result is the same bit by bit however its prompt is cut.
    """
    assert meta.rows is not None and meta.counts is not None
    channels, taps = heads.conv.shape
    out = state.new_empty(x.shape[0], heads.heads, heads.head_size)
    walked = meta.kv_len.shape[0] if deterministic else meta.num_decodes
    if walked:
        pieces = triton.cdiv(heads.head_size, ROWS)
        _mamba2_kernel[(walked, heads.heads, pieces)](
            x,
            dt,
            heads.conv,
            heads.conv_bias,
            heads.decay,
            heads.skip,
            heads.bias,
            tail,
            state,
            out,
            tickets(x.device, walked * heads.groups),
            meta.rows,
            meta.query_start,
            meta.kv_len,
            meta.counts,
            x.stride(0),
            dt.stride(0),
            HEADS=heads.heads,
            SIZE=heads.head_size,
            GROUPS=heads.groups,
            STATE=heads.state_size,
            CHANNELS=channels,
            TAPS=taps,
            LEAST=heads.limits[0],
            MOST=min(heads.limits[1], 3e38),
            STATES=triton.next_power_of_2(heads.state_size),
            ROWS=ROWS,
            ALL=int(deterministic),
            num_warps=4,
        )
    if not deterministic and x.shape[0] > meta.num_decodes:
        mamba2_chunks(x, dt, heads, tail, state, out, meta)
    return out
