"""Gated DeltaNet on CUDA: each program keeps a piece of a head's state in registers and walks the
tokens of an entry, be it one or a prompt. Convolution, gates and norms of queries and keys are made
on the way, so a decode step reads and writes each state once.

The entry alone decides what is computed, in which order: the numbers do not depend on the step.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMeta
from kernels.recurrent.convolution_cuda import convolved, keep_tails
from kernels.recurrent.delta_rule import DeltaHeads

VALUES = 32  # columns of a state that a program keeps


@triton.jit(
    do_not_specialize=["x_stride", "gate_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts", "a", "b"],
)
def _delta_kernel(
    x,
    a,
    b,
    conv,
    decay,
    bias,
    tail,
    state,
    out,
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    gate_stride,  # of a and b
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    KEYS: tl.constexpr,  # KEY padded to a power of two
    VALUES: tl.constexpr,  # columns of the state
):
    entry = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, KEYS)
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    key_mask = dims < KEY
    value_mask = columns < VALUE
    begin = tl.load(query_start + entry).to(tl.int64)
    end = tl.load(query_start + entry + 1).to(tl.int64)
    into = out + head * VALUE + columns
    if entry >= tl.load(counts + 1):  # padding
        for token in range(begin, end):
            zeros = tl.zeros([VALUES], tl.float32)
            tl.store(into + token * VALUE_HEADS * VALUE, zeros, mask=value_mask)
        return
    if begin == end:
        return
    before = tl.load(kv_len + entry) - (end - begin)  # 0: the request begins
    row = tl.load(rows + entry).to(tl.int64)
    tail += row * (TAPS - 1) * CHANNELS
    at = (row * VALUE_HEADS + head) * KEY * VALUE
    tile = at + dims[:, None] * VALUE + columns[None, :]
    tile_mask = key_mask[:, None] & value_mask[None, :]
    goes_on = tile_mask & (before + tile * 0 > 0)
    matrix = tl.load(state + tile, mask=goes_on, other=0.0)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    of_q = key_head * KEY + dims
    of_k = KEY_HEADS * KEY + of_q
    of_v = 2 * KEY_HEADS * KEY + head * VALUE + columns
    rate = tl.exp(tl.load(decay + head))
    shift = tl.load(bias + head)
    for token in range(begin, end):
        ago = token - begin
        q = convolved(
            x, tail, conv, None, token, ago, before, of_q, key_mask, x_stride, CHANNELS, TAPS
        )
        q = q * tl.sigmoid(q)
        k = convolved(
            x, tail, conv, None, token, ago, before, of_k, key_mask, x_stride, CHANNELS, TAPS
        )
        k = k * tl.sigmoid(k)
        v = convolved(
            x, tail, conv, None, token, ago, before, of_v, value_mask, x_stride, CHANNELS, TAPS
        )
        v = v * tl.sigmoid(v)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * KEY**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        step = tl.load(a + token * gate_stride + head).to(tl.float32) + shift
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        beta = tl.sigmoid(tl.load(b + token * gate_stride + head).to(tl.float32))
        matrix = matrix * tl.exp(-rate * step)
        wrong = (v - tl.sum(matrix * k[:, None], axis=0)) * beta
        matrix += k[:, None] * wrong[None, :]
        found = tl.sum(matrix * q[:, None], axis=0)
        tl.store(into + token * VALUE_HEADS * VALUE, found, mask=value_mask)
    tl.store(state + tile, matrix, mask=tile_mask)


def gated_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    heads: DeltaHeads,
    tail: Tensor,
    state: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    """See `kernels.reference.Kernels.gated_delta`; x, a and b may have rows of any stride, a and b
    of the same. Tokens after the last entry's get zeros."""
    num_entries = meta.kv_len.shape[0]
    channels, taps = heads.conv.shape
    out = state.new_empty(x.shape[0], heads.value_heads, heads.value_size)
    assert a.stride(0) == b.stride(0) and meta.rows is not None and meta.counts is not None
    pieces = triton.cdiv(heads.value_size, VALUES)
    _delta_kernel[(num_entries, heads.value_heads, pieces)](
        x,
        a,
        b,
        heads.conv,
        heads.decay,
        heads.bias,
        tail,
        state,
        out,
        meta.rows,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        x.stride(0),
        a.stride(0),
        KEY_HEADS=heads.key_heads,
        VALUE_HEADS=heads.value_heads,
        KEY=heads.key_size,
        VALUE=heads.value_size,
        CHANNELS=channels,
        TAPS=taps,
        KEYS=triton.next_power_of_2(heads.key_size),
        VALUES=VALUES,
        num_warps=4,
    )
    keep_tails(x, taps, tail, meta)
    return out
