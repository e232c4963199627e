"""Mamba-1 on CUDA, for decodes and prompts.

A program keeps the states of some channels in registers and processes the tokens of one sequence
(an entry of the step) one by one. So results are batch-invariant.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMeta
from kernels.recurrent.mamba1 import Mamba1Inputs

BLOCK = 64  # channels per program


@triton.jit(
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _mamba1_kernel(
    x,
    dt,
    b,
    c,
    rates,
    skip,
    state,
    out,
    rows,
    query_start,
    kv_len,
    counts,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    STATES: tl.constexpr,  # STATE, padded to a power of two
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, STATES)
    mask = channels < CHANNELS
    dim_mask = dims < STATE
    begin = tl.load(query_start + entry).to(tl.int64)
    end = tl.load(query_start + entry + 1).to(tl.int64)
    if entry >= tl.load(counts + 1):  # padding
        for token in range(begin, end):
            zeros = tl.zeros([BLOCK], tl.float32)
            tl.store(out + token * CHANNELS + channels, zeros, mask=mask)
        return
    if begin == end:
        return
    before = tl.load(kv_len + entry) - (end - begin)  # 0 if the request begins
    row = tl.load(rows + entry).to(tl.int64)
    tile = channels[:, None] * STATE + dims[None, :]
    tile_mask = mask[:, None] & dim_mask[None, :]
    own = state + row * CHANNELS * STATE
    goes_on = tile_mask & (before + tile * 0 > 0)
    matrix = tl.load(own + tile, mask=goes_on, other=0.0)
    rate = tl.load(rates + tile, mask=tile_mask, other=0.0)
    through = tl.load(skip + channels, mask=mask, other=0.0)
    for token in range(begin, end):
        at = token * CHANNELS + channels
        u = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        step = tl.load(dt + at, mask=mask, other=0.0).to(tl.float32)
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        of_b = tl.load(b + token * STATE + dims, mask=dim_mask, other=0.0).to(tl.float32)
        of_c = tl.load(c + token * STATE + dims, mask=dim_mask, other=0.0).to(tl.float32)
        matrix = matrix * tl.exp(rate * step[:, None]) + (u * step)[:, None] * of_b[None, :]
        outputs = tl.sum(matrix * of_c[None, :], axis=1) + through * u
        tl.store(out + at, outputs, mask=mask)
    tl.store(own + tile, matrix, mask=tile_mask)


def mamba1(inputs: Mamba1Inputs, meta: AttentionMeta) -> Tensor:
    """Return the results of Mamba-1 without the gate; update states in place (`Kernels.mamba1`).

    Tokens after the last entry get zeros.
    """
    x, dt, b, c, rates, skip, _, state = inputs
    assert meta.rows is not None and meta.counts is not None
    channels, size = rates.shape
    out = state.new_empty(x.shape)
    _mamba1_kernel[(meta.kv_len.shape[0], triton.cdiv(channels, BLOCK))](
        x,
        dt,
        b,
        c,
        rates,
        skip,
        state,
        out,
        meta.rows,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        CHANNELS=channels,
        STATE=size,
        STATES=triton.next_power_of_2(size),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
