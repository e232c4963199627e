"""Gated DeltaNet on CUDA.

Decodes: each program keeps a head's state in registers and walks the tokens of an entry, of which a
decode has one. Convolution, gates, norms of queries and keys, norm and gate of the result and the
next tail are made on the way: a decode step is one launch, which reads and writes each state once.
Prompts go by chunks (`delta_chunks_cuda`, and `kimi_chunks_cuda` for Kimi Delta Attention), or are
walked too where their numbers must not depend on the step: the entry alone decides what a walk
computes, in which order.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.metadata import AttentionMeta
from kernels.recurrent.chunks_cuda import softplus
from kernels.recurrent.convolution_cuda import comes_last, convolved, keep_tail, tickets
from kernels.recurrent.delta_chunks_cuda import delta_chunks
from kernels.recurrent.delta_rule import DeltaHeads
from kernels.recurrent.kimi_chunks_cuda import kimi_chunks


class WalkLaunch(NamedTuple):
    columns: int  # of a state that a program has in registers at once
    num_warps: int


def walk_launch(programs: int, sms: int, values: int, prompts: bool) -> WalkLaunch:
    """Decision rule; programs = entries * heads, values = the padded columns of a state. A few
    programs need all of their bytes in flight at once; many share a multiprocessor, where one reads
    while others write. A walk of many tokens keeps the whole state."""
    if prompts or programs <= 2 * sms:
        return WalkLaunch(values, 16 if values >= 128 else 4)
    return WalkLaunch(min(32, values), 4)


@triton.jit(
    do_not_specialize=["x_stride", "z_stride", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts", "a", "b"],
)
def _delta_kernel(
    x,
    z,
    a,
    b,
    conv,
    decay,
    bias,
    norm,
    tail,
    state,
    out,
    arrived,  # [entries * KEY_HEADS]: of `tickets`
    rows,
    query_start,
    kv_len,
    counts,
    eps,
    x_stride,
    z_stride,
    a_stride,
    b_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,  # KEY padded to a power of two
    COLUMNS: tl.constexpr,  # of the state, at once
    PIECES: tl.constexpr,  # which the columns are
    ALL: tl.constexpr,  # entries, and padding; else decodes
    BY_KEY: tl.constexpr,  # Kimi Delta Attention
    PDL: tl.constexpr,
):
    entry = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, KEYS)
    own = tl.arange(0, COLUMNS)
    pieces = tl.arange(0, PIECES)[:, None]
    columns = pieces * COLUMNS + own[None, :]
    key_mask = dims < KEY
    value_mask = columns < VALUE
    scale = tl.load(norm + columns, mask=value_mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    begin = tl.load(query_start + entry).to(tl.int64)
    end = tl.load(query_start + entry + 1).to(tl.int64)
    if entry >= tl.load(counts + ALL):
        if ALL:
            pads = tl.zeros([PIECES, COLUMNS], out.dtype.element_ty)
            for token in range(begin, end):
                into = out + (token * VALUE_HEADS + head) * VALUE
                tl.store(into + columns, pads, mask=value_mask)
        return
    if begin == end:
        return
    before = tl.load(kv_len + entry) - (end - begin)  # 0: the request begins
    row = tl.load(rows + entry).to(tl.int64)
    tail += row * (TAPS - 1) * CHANNELS
    state += (row * VALUE_HEADS + head) * KEY * VALUE
    tile = dims[:, None] * VALUE + own[None, :]
    matrix = tl.zeros([KEYS, COLUMNS], tl.float32)
    if PIECES == 1:
        tile_mask = key_mask[:, None] & (own < VALUE)[None, :]
        matrix = tl.load(state + tile, mask=tile_mask & (before + tile * 0 > 0), other=0.0)
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    key_head = head // SHARED
    of_q = key_head * KEY + dims
    of_k = KEY_HEADS * KEY + of_q
    of_v = 2 * KEY_HEADS * KEY + head * VALUE + own
    rate = tl.exp(tl.load(decay + head))
    of_decay = head
    decay_mask = True
    if BY_KEY:
        of_decay = head * KEY + dims
        decay_mask = key_mask
    shift = tl.load(bias + of_decay, mask=decay_mask, other=0.0)
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
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * KEY**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        step = tl.load(a + token * a_stride + of_decay, mask=decay_mask, other=0.0)
        kept = tl.exp(-rate * softplus(step.to(tl.float32) + shift))
        if BY_KEY:
            kept = kept[:, None]
        beta = MOST * tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
        found = tl.zeros([PIECES, COLUMNS], tl.float32)
        for piece in tl.static_range(PIECES):
            there = piece * COLUMNS + own < VALUE
            v = convolved(
                x, tail, conv, None, token, ago, before, of_v + piece * COLUMNS, there, x_stride,
                CHANNELS, TAPS,
            )  # fmt: skip
            v = v * tl.sigmoid(v)
            at = state + piece * COLUMNS + tile
            tile_mask = key_mask[:, None] & there[None, :]
            if PIECES > 1:
                goes_on = tile_mask & (before + ago + tile * 0 > 0)
                matrix = tl.load(at, mask=goes_on, other=0.0)
            matrix = matrix * kept
            wrong = (v - tl.sum(matrix * k[:, None], axis=0)) * beta
            matrix += k[:, None] * wrong[None, :]
            if PIECES > 1:
                tl.store(at, matrix, mask=tile_mask)
            read = tl.sum(matrix * q[:, None], axis=0)
            found = tl.where(pieces == piece, read[None, :], found)
        mean = tl.sum(tl.sum(found * found, axis=1), axis=0) / VALUE
        found = found / tl.sqrt(mean + eps) * scale
        gate = tl.load(z + token * z_stride + head * VALUE + columns, mask=value_mask, other=0.0)
        gate = gate.to(tl.float32)
        opened = tl.sigmoid(gate)
        if not BY_KEY:
            opened *= gate
        found = found * opened
        into = out + (token * VALUE_HEADS + head) * VALUE + columns
        tl.store(into, found.to(out.dtype.element_ty), mask=value_mask)
    if PIECES == 1:
        tl.store(state + tile, matrix, mask=key_mask[:, None] & (own < VALUE)[None, :])
    for piece in tl.static_range(PIECES):
        there = piece * COLUMNS + own < VALUE
        channels = of_v + piece * COLUMNS
        keep_tail(x, tail, begin, end, before, channels, there, x_stride, CHANNELS, TAPS)
    # Queries and keys are of all heads that share them.
    if comes_last(arrived + entry * KEY_HEADS + key_head, SHARED):
        keep_tail(x, tail, begin, end, before, of_q, key_mask, x_stride, CHANNELS, TAPS)
        keep_tail(x, tail, begin, end, before, of_k, key_mask, x_stride, CHANNELS, TAPS)


def gated_delta(
    x: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    heads: DeltaHeads,
    tail: Tensor,
    state: Tensor,
    meta: AttentionMeta,
    deterministic: bool = False,
) -> Tensor:
    """See `kernels.reference.Kernels.gated_delta`; x, z, a and b may have rows of any stride, a and
    b of the same. Tokens after the last entry's get zeros.

    deterministic: a token's result is the same bit by bit however its prompt is cut.
    """
    assert a.stride(0) == b.stride(0)
    out = x.new_empty(x.shape[0], heads.value_heads * heads.value_size)
    _walk(x, z, a, b, heads, tail, state, out, meta, deterministic)
    if not deterministic and x.shape[0] > meta.num_decodes:
        delta_chunks(x, z, a, b, heads, tail, state, out, meta)
    return out


def kimi_delta(
    x: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    heads: DeltaHeads,
    tail: Tensor,
    state: Tensor,
    meta: AttentionMeta,
    deterministic: bool = False,
) -> Tensor:
    """See `kernels.reference.Kernels.kimi_delta`; x, z, a and b may have rows of any stride. Tokens
    after the last entry's get zeros. deterministic: as in gated_delta."""
    out = x.new_empty(x.shape[0], heads.value_heads * heads.value_size)
    _walk(x, z, a, b, heads, tail, state, out, meta, deterministic)
    if not deterministic and x.shape[0] > meta.num_decodes:
        kimi_chunks(x, z, a, b, heads, tail, state, out, meta)
    return out


def _walk(
    x: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    heads: DeltaHeads,
    tail: Tensor,
    state: Tensor,
    out: Tensor,
    meta: AttentionMeta,
    prompts: bool,  # too; padding gets zeros then
) -> None:
    assert meta.rows is not None and meta.counts is not None
    walked = meta.kv_len.shape[0] if prompts else meta.num_decodes
    if not walked:
        return
    channels, taps = heads.conv.shape
    keys = triton.next_power_of_2(heads.key_size)
    values = triton.next_power_of_2(heads.value_size)
    programs = walked * heads.value_heads
    shape = walk_launch(programs, num_sms(x.device), values, prompts)
    _delta_kernel[(walked, heads.value_heads)](
        x,
        z,
        a,
        b,
        heads.conv,
        heads.decay,
        heads.bias,
        heads.norm,
        tail,
        state,
        out,
        tickets(x.device, programs),
        meta.rows,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        heads.eps,
        x.stride(0),
        z.stride(0),
        a.stride(0),
        b.stride(0),
        KEY_HEADS=heads.key_heads,
        VALUE_HEADS=heads.value_heads,
        KEY=heads.key_size,
        VALUE=heads.value_size,
        CHANNELS=channels,
        TAPS=taps,
        MOST=heads.most,
        KEYS=keys,
        COLUMNS=shape.columns,
        PIECES=values // shape.columns,
        ALL=int(prompts),
        BY_KEY=int(heads.by_key),
        num_warps=shape.num_warps,
        **pdl(x.device),
    )
