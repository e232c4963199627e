"""Gated DeltaNet and Kimi Delta Attention on CUDA, token by token.

A program keeps a head's state in registers and computes the tokens of one sequence (an entry of the
step) one after the other, so results are batch-invariant. It applies pending updates first. The
kernel computes all entries in deterministic mode, or if all entries are short
(`AttentionMeta.by_token`). In deterministic mode a first launch over draft tokens writes no states,
and a second launch over the accepted tokens does.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.metadata import AttentionMeta, StateRuns
from kernels.recurrent.chunks_cuda import softplus
from kernels.recurrent.convolution_cuda import comes_last, convolved, keep_tail, tickets
from kernels.recurrent.delta_rule import DeltaInputs
from kernels.recurrent.sizes import delta_sizes, late_sizes


@triton.jit
def head_channels(
    head, dims, columns, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """Return the channels of a value head's query and key, and of some columns of its value."""
    of_q = head // (VALUE_HEADS // KEY_HEADS) * KEY + dims
    of_k = KEY_HEADS * KEY + of_q
    of_v = 2 * KEY_HEADS * KEY + head * VALUE + columns
    return of_q, of_k, of_v


@triton.jit
def decay_of(decay, bias, head, dims, KEY: tl.constexpr, BY_KEY: tl.constexpr):
    """Load a head's decay rate exp(A_log).

    Returns (rate, offsets into `a`, mask of these, dt_bias). With BY_KEY the last three are vectors
    over the key's elements.
    """
    rate = tl.exp(tl.load(decay + head))
    of_decay = head
    mask = True
    if BY_KEY:
        of_decay = head * KEY + dims
        mask = dims < KEY
    return rate, of_decay, mask, tl.load(bias + of_decay, mask=mask, other=0.0)


@triton.jit
def normed_result(results, scale, gate, eps, VALUE: tl.constexpr, BY_KEY: tl.constexpr):
    """Apply norm and gate to a head's results [pieces, columns].

    results: zero in padding columns. gate: the head's z, of the same shape.
    """
    mean = tl.sum(tl.sum(results * results, axis=1), axis=0) / VALUE
    gate = gate.to(tl.float32)
    opened = tl.sigmoid(gate)
    if not BY_KEY:
        opened *= gate
    return results / tl.sqrt(mean + eps) * scale * opened


@triton.jit
def applied(
    matrix, late, since, dims, columns, KEY: tl.constexpr, VALUE: tl.constexpr,
    LATE: tl.constexpr, ENTRY: tl.constexpr, BY_KEY: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Apply pending updates to a head's state in registers, and zero them in memory if KEEPS.

    since: the number of pending updates.
    """
    of_sum = KEY + VALUE + dims * (1 if BY_KEY else 0)
    total = dims * 0.0
    for i in tl.static_range(LATE):
        mask = (dims < KEY) & (since + dims * 0 > i)
        # Cumulative log decays only decrease, so the last one is the minimum.
        total = tl.minimum(total, tl.load(late + i * ENTRY + of_sum, mask=mask, other=0.0))
    matrix *= tl.exp(total)[:, None]
    for i in tl.static_range(LATE):
        mask = (dims < KEY) & (since + dims * 0 > i)
        key = tl.load(late + i * ENTRY + dims, mask=mask, other=0.0)
        key *= tl.exp(total - tl.load(late + i * ENTRY + of_sum, mask=mask, other=0.0))
        own = (columns < VALUE) & (since + columns * 0 > i)
        value = tl.load(late + i * ENTRY + KEY + columns, mask=own, other=0.0)
        matrix += key[:, None] * value[None, :]
    if KEEPS:
        tl.debug_barrier()  # other threads may still be reading
        for origin in range(0, LATE * ENTRY, dims.shape[0]):
            tl.store(late + origin + dims, dims * 0.0, mask=origin + dims < LATE * ENTRY)
    return matrix


# 20 parameters or more: 23 are tensors and numbers of the launch, and constants are in a struct.
@triton.jit(
    do_not_specialize=["x_stride", "z_stride", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts", "a", "b"],
)
def _delta_walk_kernel(
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
    late,  # pending updates, as in `_delta_decode_kernel`
    out,  # None: results are not written
    order,  # int64, each token's row in x, z, a, b and out; None: row i is token i
    arrived,  # [entries * KEY_HEADS], from `tickets`
    rows,
    query_start,
    kv_len,
    counts,
    eps,
    x_stride,
    z_stride,
    a_stride,
    b_stride,
    SIZES: tl.constexpr,  # `DeltaSizes`
    LATE: tl.constexpr,
    ENTRY: tl.constexpr,
    KEEPS: tl.constexpr,  # whether states are written
    PDL: tl.constexpr,
):
    VALUES: tl.constexpr = SIZES.value_columns
    entry = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, SIZES.key_columns)
    columns = tl.arange(0, VALUES)
    key_mask = dims < SIZES.key_dim
    value_mask = columns < SIZES.value_dim
    scale = tl.load(norm + columns, mask=value_mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    begin = tl.load(query_start + entry).to(tl.int64)
    end = tl.load(query_start + entry + 1).to(tl.int64)
    if entry >= tl.load(counts + 1):  # padding
        if out is not None:
            pads = tl.zeros([VALUES], out.dtype.element_ty)
            for token in range(begin, end):
                into = out + (token * SIZES.value_heads + head) * SIZES.value_dim
                tl.store(into + columns, pads, mask=value_mask)
        return
    before = tl.load(kv_len + entry) - (end - begin)  # 0 if the request begins
    if (begin == end) | (before < 0):  # no tokens, or an entry that another launch computes
        return
    row = tl.load(rows + entry).to(tl.int64)
    tail += row * (SIZES.taps - 1) * SIZES.channels
    state += (row * SIZES.value_heads + head) * SIZES.key_dim * SIZES.value_dim
    tile = dims[:, None] * SIZES.value_dim + columns[None, :]
    tile_mask = key_mask[:, None] & value_mask[None, :]
    matrix = tl.load(state + tile, mask=tile_mask & (before + tile * 0 > 0), other=0.0)
    if LATE:
        late += (row * SIZES.value_heads + head) * LATE * ENTRY
        matrix = applied(
            matrix, late, before % (LATE + 1), dims, columns, SIZES.key_dim, SIZES.value_dim,
            LATE, ENTRY, SIZES.by_key, KEEPS,
        )  # fmt: skip
    SHARED: tl.constexpr = SIZES.value_heads // SIZES.key_heads
    key_head = head // SHARED
    of_q, of_k, of_v = head_channels(
        head, dims, columns, SIZES.key_heads, SIZES.value_heads, SIZES.key_dim, SIZES.value_dim
    )
    rate, of_decay, decay_mask, shift = decay_of(
        decay, bias, head, dims, SIZES.key_dim, SIZES.by_key
    )
    for token in range(begin, end):
        ago = token - begin
        place = token
        if order is not None:
            place = tl.load(order + token)
        q = convolved(
            x,
            tail,
            conv,
            None,
            token,
            ago,
            before,
            of_q,
            key_mask,
            x_stride,
            SIZES.channels,
            SIZES.taps,
            order,
        )
        q = q * tl.sigmoid(q)
        k = convolved(
            x,
            tail,
            conv,
            None,
            token,
            ago,
            before,
            of_k,
            key_mask,
            x_stride,
            SIZES.channels,
            SIZES.taps,
            order,
        )
        k = k * tl.sigmoid(k)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * SIZES.key_dim**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        step = tl.load(a + place * a_stride + of_decay, mask=decay_mask, other=0.0)
        decay_factor = tl.exp(-rate * softplus(step.to(tl.float32) + shift))
        if SIZES.by_key:
            decay_factor = decay_factor[:, None]
        beta = SIZES.most * tl.sigmoid(tl.load(b + place * b_stride + head).to(tl.float32))
        v = convolved(
            x,
            tail,
            conv,
            None,
            token,
            ago,
            before,
            of_v,
            value_mask,
            x_stride,
            SIZES.channels,
            SIZES.taps,
            order,
        )
        v = v * tl.sigmoid(v)
        matrix = matrix * decay_factor
        wrong = (v - tl.sum(matrix * k[:, None], axis=0)) * beta
        matrix += k[:, None] * wrong[None, :]
        if out is not None:
            outputs = tl.sum(matrix * q[:, None], axis=0)[None, :]
            gate = tl.load(
                z + place * z_stride + head * SIZES.value_dim + columns, mask=value_mask, other=0.0
            )
            outputs = normed_result(
                outputs, scale[None, :], gate[None, :], eps, SIZES.value_dim, SIZES.by_key
            )
            into = out + (place * SIZES.value_heads + head) * SIZES.value_dim + columns
            tl.store(into[None, :], outputs.to(out.dtype.element_ty), mask=value_mask[None, :])
    if KEEPS:
        tl.store(state + tile, matrix, mask=tile_mask)
        keep_tail(
            x, tail, begin, end, before, of_v, value_mask, x_stride, SIZES.channels, SIZES.taps,
            order,
        )  # fmt: skip
        # All value heads that share a key head read its tail, so the last program writes it.
        if comes_last(arrived + entry * SIZES.key_heads + key_head, SHARED):
            keep_tail(
                x, tail, begin, end, before, of_q, key_mask, x_stride, SIZES.channels, SIZES.taps,
                order,
            )  # fmt: skip
            keep_tail(
                x, tail, begin, end, before, of_k, key_mask, x_stride, SIZES.channels, SIZES.taps,
                order,
            )  # fmt: skip


def walk(
    inputs: DeltaInputs,
    out: Tensor | None,
    meta: AttentionMeta,
    order: Tensor | None = None,
    *,
    keeps: bool = True,
) -> None:
    """Compute the delta rule of all entries token by token; see `_delta_walk_kernel`.

    out: [num_tokens, value_heads * value_size]; None: results are not written.
    order: the indices in the step of meta's tokens; None: 0, 1, 2, ...
    keeps: whether to write states and tails.
    """
    x, z, a, b, heads, tail, state, late = inputs
    assert meta.rows is not None and meta.counts is not None
    entries, values = meta.kv_len.shape[0], triton.next_power_of_2(heads.value_size)
    sizes = delta_sizes(heads, triton.next_power_of_2(heads.key_size), values)
    _delta_walk_kernel[(entries, heads.value_heads)](
        x,
        z,
        a,
        b,
        *(heads.conv, heads.decay, heads.bias, heads.norm),
        tail,
        state,
        late,
        out,
        order,
        tickets(x.device, entries * heads.key_heads),
        *(meta.rows, meta.query_start, meta.kv_len, meta.counts),
        heads.eps,
        *(x.stride(0), z.stride(0), a.stride(0), b.stride(0)),
        SIZES=sizes,
        **late_sizes(late),
        KEEPS=keeps,
        # Two tokens of 32 requests with 32 states of 128 x 128: 69 us with 4 warps, 361 with 16.
        num_warps=4 if sizes.key_columns * values <= 128 * 128 else 16,
        **pdl(x.device),
    )


def verify_by_walks(inputs: DeltaInputs, runs: StateRuns) -> Tensor:
    """Return the outputs of decodes and of runs of drafts, [num_tokens, value_heads * value_size].

    The outputs are bit for bit those of `walk`. One launch computes decodes without drafts and
    updates their states. Another launch computes runs and writes no states. A function that updates
    the runs' states by the accepted tokens is added to `runs.replays`.
    """
    x, heads = inputs.x, inputs.heads
    out = x.new_empty(x.shape[0], heads.value_heads * heads.value_size)
    walk(inputs, out, runs.others_meta)
    walk(inputs, out, replace(runs.meta, rows=runs.rows), runs.tokens, keeps=False)
    runs.replays.append(lambda layout: walk(inputs, None, layout, runs.tokens))
    return out
