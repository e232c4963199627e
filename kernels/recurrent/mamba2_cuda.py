"""Mamba-2 on CUDA.

Each program keeps some rows of a head's state in registers, and processes the tokens of a sequence
(an entry of the step) one by one. Convolution and next tail are fused. So a step of decodes is one
launch that reads and writes each state once. Prompts are computed in chunks (`mamba2_chunks_cuda`).
In deterministic mode they are computed token by token, so that results are batch-invariant.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMeta
from kernels.recurrent.chunks_cuda import softplus
from kernels.recurrent.convolution_cuda import comes_last, convolved, keep_tail, tickets
from kernels.recurrent.mamba2 import Mamba2Heads
from kernels.recurrent.mamba2_chunks_cuda import mamba2_chunks
from kernels.recurrent.sizes import mamba2_sizes

ROWS = 32  # rows of a head's state per program


class Mamba2Tile(NamedTuple):
    """The tile of a program, as one `tl.constexpr`.

    rows: rows of a head's state.
    """

    rows: int
    all_entries: int  # 1: all entries and padding, 0: decodes only


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
    arrived,  # [entries * GROUPS], from `tickets`
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    dt_stride,
    LAYER: tl.constexpr,  # `Mamba2Sizes`
    TILE: tl.constexpr,  # `Mamba2Tile`
):
    ROWS: tl.constexpr = TILE.rows
    entry = tl.program_id(0)
    head = tl.program_id(1)
    own = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, LAYER.states)
    own_mask = own < LAYER.size
    dim_mask = dims < LAYER.state
    begin = tl.load(query_start + entry).to(tl.int64)
    end = tl.load(query_start + entry + 1).to(tl.int64)
    into = out + head * LAYER.size + own
    if entry >= tl.load(counts + TILE.all_entries):
        if TILE.all_entries:
            for token in range(begin, end):
                zeros = tl.zeros([ROWS], tl.float32)
                tl.store(into + token * LAYER.heads * LAYER.size, zeros, mask=own_mask)
        return
    if begin == end:
        return
    before = tl.load(kv_len + entry) - (end - begin)  # 0 if the request begins
    row = tl.load(rows + entry).to(tl.int64)
    tail += row * (LAYER.taps - 1) * LAYER.channels
    tile = (
        (row * LAYER.heads + head) * LAYER.size * LAYER.state
        + own[:, None] * LAYER.state
        + dims[None, :]
    )
    tile_mask = own_mask[:, None] & dim_mask[None, :]
    goes_on = tile_mask & (before + tile * 0 > 0)
    matrix = tl.load(state + tile, mask=goes_on, other=0.0)
    group = head // (LAYER.heads // LAYER.groups)
    of_x = head * LAYER.size + own
    of_b = LAYER.heads * LAYER.size + group * LAYER.state + dims
    of_c = of_b + LAYER.groups * LAYER.state
    rate = tl.exp(tl.load(decay + head))
    through = tl.load(skip + head)
    shift = tl.load(bias + head)
    for token in range(begin, end):
        ago = token - begin
        u = convolved(
            x,
            tail,
            conv,
            conv_bias,
            token,
            ago,
            before,
            of_x,
            own_mask,
            x_stride,
            LAYER.channels,
            LAYER.taps,
        )
        u = u * tl.sigmoid(u)
        b = convolved(
            x,
            tail,
            conv,
            conv_bias,
            token,
            ago,
            before,
            of_b,
            dim_mask,
            x_stride,
            LAYER.channels,
            LAYER.taps,
        )
        b = tl.where(dim_mask, b * tl.sigmoid(b), 0.0)
        c = convolved(
            x,
            tail,
            conv,
            conv_bias,
            token,
            ago,
            before,
            of_c,
            dim_mask,
            x_stride,
            LAYER.channels,
            LAYER.taps,
        )
        c = tl.where(dim_mask, c * tl.sigmoid(c), 0.0)
        step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + shift)
        step = tl.minimum(tl.maximum(step, LAYER.least), LAYER.most)
        matrix = matrix * tl.exp(-rate * step) + (u * step)[:, None] * b[None, :]
        outputs = tl.sum(matrix * c[None, :], axis=1) + through * u
        tl.store(into + token * LAYER.heads * LAYER.size, outputs, mask=own_mask)
    tl.store(state + tile, matrix, mask=tile_mask)
    keep_tail(x, tail, begin, end, before, of_x, own_mask, x_stride, LAYER.channels, LAYER.taps)
    # All heads of a group read the tail of B and C, so the last program writes it.
    programs = LAYER.heads // LAYER.groups * tl.num_programs(2)
    if comes_last(arrived + entry * LAYER.groups + group, programs):
        keep_tail(x, tail, begin, end, before, of_b, dim_mask, x_stride, LAYER.channels, LAYER.taps)
        keep_tail(x, tail, begin, end, before, of_c, dim_mask, x_stride, LAYER.channels, LAYER.taps)


def mamba2(
    x: Tensor,
    dt: Tensor,
    heads: Mamba2Heads,
    tail: Tensor,
    state: Tensor,
    meta: AttentionMeta,
    deterministic: bool = False,
) -> Tensor:
    """Return the results of Mamba-2; update tails and states in place (`Kernels.mamba2`).

    Tokens after the last entry get zeros.

    x, dt: rows may have any stride.
    deterministic: make results independent of how a prompt is chunked, bit for bit.
    """
    assert meta.rows is not None and meta.counts is not None
    out = state.new_empty(x.shape[0], heads.heads, heads.head_size)
    walks = deterministic or meta.by_token
    walked = meta.kv_len.shape[0] if walks else meta.num_decodes
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
            LAYER=mamba2_sizes(heads, heads.head_size, triton.next_power_of_2(heads.state_size)),
            TILE=Mamba2Tile(rows=ROWS, all_entries=int(walks)),
            num_warps=4,
        )
    if not walks and x.shape[0] > meta.num_decodes:
        mamba2_chunks(x, dt, heads, tail, state, out, meta)
    return out
