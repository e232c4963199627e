"""Gated DeltaNet and Kimi Delta Attention on CUDA.

Decodes: one launch reads and writes each state once. A program computes a head of a sequence, or
some columns of the head's state, block by block; it loads the next block while it computes one. The
launch also computes convolution, gates, norms of queries and keys, norm and gate of the result, and
the next tail.

With pending updates (`late`), most decodes do not write the state. A decode writes it only if its
token is the request's first, or if the request's number of tokens, including this one, is a
multiple of LATE + 1. Other decodes append a pending update: their key, correction, and the
cumulative sum of log decays. With S0 the state in memory and pending updates i, the state is

    exp(G) S0 + sum over i of exp(G - G_i) k_i u_i^T

where G is the sum of log decays since S0 was written. Outputs are computed from these terms, so the
state in memory is only read. The number of pending updates follows from the position alone. So if a
prompt or a new request writes a state at another position, it must also zero the earlier updates;
zeros have no effect.

The update that a decode appends is not read in the same launch, so programs that share a head need
not wait for each other.

Prompts are computed in chunks (`delta_chunks_cuda`, and `kimi_chunks_cuda` for Kimi). In
deterministic mode all sequences are computed token by token instead (`delta_walk_cuda`), as are
short sequences. Runs of drafts are computed in `delta_verify_cuda`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.metadata import AttentionMeta
from kernels.recurrent.chunks_cuda import softplus
from kernels.recurrent.convolution_cuda import comes_last, tickets
from kernels.recurrent.delta_chunks_cuda import delta_chunks
from kernels.recurrent.delta_rule import DeltaInputs
from kernels.recurrent.delta_walk_cuda import (
    decay_of,
    head_channels,
    normed_result,
    walk,
)
from kernels.recurrent.kimi_chunks_cuda import kimi_chunks
from kernels.recurrent.sizes import delta_sizes, late_sizes


class DecodeLaunch(NamedTuple):
    columns: int  # columns of a state that a program has in registers at once
    num_warps: int
    parts: int  # programs that share a head of a sequence


def decode_launch(programs: int, sms: int, values: int, by_key: bool = False) -> DecodeLaunch:
    """Return a decode's launch parameters, from sweeps on an H200.

    programs: sequences * heads. values: padded columns of a state.

    The sweeps had 32 heads of 128 x 128 and 1 to 512 sequences. With few sequences, a head's
    columns are divided among several programs to use all multiprocessors. With more than four warps
    a program would have more threads than a key has elements, and load elements many times.
    """
    if 2 * programs <= sms and not by_key:
        return DecodeLaunch(min(16, values), 1, max(1, values // 16))
    if programs <= 2 * sms:
        return DecodeLaunch(min(64, values), 4, 1)
    return DecodeLaunch(min(32, values), 2, 1)


@triton.jit
def weights_of(conv, channels, mask, TAPS: tl.constexpr):
    """Load the convolution weights of some channels, one vector per tap, oldest first."""
    weights = ()
    for tap in tl.static_range(TAPS):
        weights += (tl.load(conv + channels * TAPS + tap, mask=mask, other=0.0),)
    return weights


@triton.jit
def _seen(x, tail, before, channels, mask, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Load the convolution's inputs of some channels for a decode, one vector per tap.

    x: pointer to the token's own inputs. before: the number of the request's earlier tokens.
    """
    inputs = ()
    old = mask & (before + channels * 0 > 0)
    for place in tl.static_range(TAPS - 1):
        inputs += (tl.load(tail + place * CHANNELS + channels, mask=old, other=0.0),)
    inputs += (tl.load(x + channels, mask=mask, other=0.0),)
    return inputs


@triton.jit
def _mixed(seen, weights, TAPS: tl.constexpr):
    """Return SiLU of some channels' convolution. seen, weights: from `_seen` and `weights_of`."""
    total = seen[0].to(tl.float32) * weights[0]
    for tap in tl.static_range(1, TAPS):
        total += seen[tap].to(tl.float32) * weights[tap]
    return total * tl.sigmoid(total)


@triton.jit
def _keep(tail, seen, channels, mask, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Store the convolution's state for the next token: all inputs but the oldest."""
    for place in tl.static_range(TAPS - 1):
        at = tail + place * CHANNELS + channels
        tl.store(at, seen[place + 1].to(tl.float32), mask=mask)


@triton.jit
def _following(tile, matrix, goes_on, own, piece, VALUE: tl.constexpr, PIECES: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Load block `piece + 1` of the state's columns, while block `piece` is computed.

    For the last block, returns `matrix` unchanged.
    """
    if piece + 1 < PIECES:
        there = (own < VALUE - (piece + 1) * COLUMNS)[None, :]
        return tl.load(tile + (piece + 1) * COLUMNS, mask=goes_on & there, other=0.0)
    else:
        return matrix


@triton.jit
def _renewed(
    tile, matrix, goes_on, q, k, v, decay, beta, late, since, late_keys, first, KEY: tl.constexpr,
    VALUE: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, LATE: tl.constexpr,
    ENTRY: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Apply pending updates and a token to a state, and store the state.

    Returns the token's outputs, [PIECES, COLUMNS].

    tile: pointers to the first block of the state's columns. matrix: the block's content.
    late: pending updates. since: their number. late_keys: their decayed keys.
    """
    own = first + tl.arange(0, COLUMNS)
    pieces = tl.arange(0, PIECES)[:, None]
    in_key = tl.arange(0, tile.shape[0]) < KEY
    if BY_KEY:
        decay = decay[:, None]
    outputs = tl.zeros([PIECES, COLUMNS], tl.float32)
    for piece in tl.static_range(PIECES):
        # Load the next block before this one is stored: the compiler moves no load before a store.
        following = _following(tile, matrix, goes_on, own, piece, VALUE, PIECES, COLUMNS)
        wanted = tl.sum(tl.where(pieces == piece, v, 0.0), axis=0)
        matrix = matrix * decay
        for i in tl.static_range(LATE):
            at = late + i * ENTRY + KEY + piece * COLUMNS + own
            mask = (own < VALUE - piece * COLUMNS) & (since + own * 0 > i)
            matrix += late_keys[i][:, None] * tl.load(at, mask=mask, other=0.0)[None, :]
        wrong = (wanted - tl.sum(matrix * k[:, None], axis=0)) * beta
        matrix += k[:, None] * wrong[None, :]
        there = in_key[:, None] & (own < VALUE - piece * COLUMNS)[None, :]
        tl.store(tile + piece * COLUMNS, matrix, mask=there)
        read = tl.sum(matrix * q[:, None], axis=0)
        outputs = tl.where(pieces == piece, read[None, :], outputs)
        matrix = following
    return outputs


@triton.jit
def _read(
    tile, matrix, goes_on, q, k, first, VALUE: tl.constexpr, PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return k^T state and q^T state, [PIECES, COLUMNS] each. Other arguments: see `_renewed`."""
    own = first + tl.arange(0, COLUMNS)
    pieces = tl.arange(0, PIECES)[:, None]
    of_k = tl.zeros([PIECES, COLUMNS], tl.float32)
    of_q = tl.zeros([PIECES, COLUMNS], tl.float32)
    for piece in tl.static_range(PIECES):
        following = _following(tile, matrix, goes_on, own, piece, VALUE, PIECES, COLUMNS)
        by_k = tl.sum(matrix * k[:, None], axis=0)
        by_q = tl.sum(matrix * q[:, None], axis=0)
        of_k = tl.where(pieces == piece, by_k[None, :], of_k)
        of_q = tl.where(pieces == piece, by_q[None, :], of_q)
        matrix = following
    return of_k, of_q


# 20 parameters or more: 23 are tensors and numbers of the launch, and constants are in a struct.
@triton.jit(
    do_not_specialize=["x_stride", "z_stride", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts", "a", "b"],
)
def _delta_decode_kernel(
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
    # [rows, VALUE_HEADS, LATE, ENTRY] float32, pending updates: key, correction and cumulative log
    # decay of each; None if LATE is 0
    late,
    out,
    partial,  # [entries * VALUE_HEADS, VALUES] float32: results before their norm, if PARTS > 1
    arrived,  # [entries * (KEY_HEADS + VALUE_HEADS)], from `tickets`
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
    COLUMNS: tl.constexpr,  # columns of the state in registers at once
    PARTS: tl.constexpr,  # programs that share a head
    LATE: tl.constexpr,  # pending updates per head
    ENTRY: tl.constexpr,  # elements of a pending update
    PDL: tl.constexpr,
):
    entry = tl.program_id(0)
    head = tl.program_id(1)
    SHARED: tl.constexpr = SIZES.value_heads // SIZES.key_heads
    WIDTH: tl.constexpr = SIZES.value_columns // PARTS
    PIECES: tl.constexpr = WIDTH // COLUMNS
    key_head = head // SHARED
    first = tl.program_id(2) * WIDTH
    dims = tl.arange(0, SIZES.key_columns)
    key_mask = dims < SIZES.key_dim
    own = first + tl.arange(0, COLUMNS)
    pieces = tl.arange(0, PIECES)[:, None]
    columns = own[None, :] + pieces * COLUMNS
    wide = first + tl.arange(0, WIDTH)
    wide_mask = wide < SIZES.value_dim
    of_q, of_k, of_v = head_channels(
        head, dims, wide, SIZES.key_heads, SIZES.value_heads, SIZES.key_dim, SIZES.value_dim
    )
    q_weights = weights_of(conv, of_q, key_mask, SIZES.taps)
    k_weights = weights_of(conv, of_k, key_mask, SIZES.taps)
    v_weights = weights_of(conv, of_v, wide_mask, SIZES.taps)
    scale = tl.load(norm + columns, mask=columns < SIZES.value_dim, other=0.0)
    rate, of_decay, decay_mask, shift = decay_of(
        decay, bias, head, dims, SIZES.key_dim, SIZES.by_key
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Load all indices first, then all data, so that there are only two memory latencies.
    decodes = tl.load(counts)
    token = tl.load(query_start + entry).to(tl.int64)
    before = tl.load(kv_len + entry) - 1  # 0 if the request begins
    row = tl.load(rows + entry).to(tl.int64)
    if (entry >= decodes) | (before < 0):  # padding, or a decode that another launch computes
        return
    x += token * x_stride
    tail += row * (SIZES.taps - 1) * SIZES.channels
    state += (row * SIZES.value_heads + head) * SIZES.key_dim * SIZES.value_dim
    tile = state + dims[:, None] * SIZES.value_dim + own[None, :]
    goes_on = key_mask[:, None] & (before + dims * 0 > 0)[:, None]
    # Load before the first barrier, since the compiler moves no load across one.
    matrix = tl.load(tile, mask=goes_on & (own < SIZES.value_dim)[None, :], other=0.0)
    q_seen = _seen(x, tail, before, of_q, key_mask, SIZES.channels, SIZES.taps)
    k_seen = _seen(x, tail, before, of_k, key_mask, SIZES.channels, SIZES.taps)
    v_seen = _seen(x, tail, before, of_v, wide_mask, SIZES.channels, SIZES.taps)
    step = tl.load(a + token * a_stride + of_decay, mask=decay_mask, other=0.0)
    beta = tl.load(b + token * b_stride + head)
    gate = tl.load(
        z + token * z_stride + head * SIZES.value_dim + columns,
        mask=columns < SIZES.value_dim,
        other=0.0,
    )
    if LATE:
        since = before % (LATE + 1)  # tokens since the state was written
        late += (row * SIZES.value_heads + head) * LATE * ENTRY
        of_sum = SIZES.key_dim + SIZES.value_dim
        if SIZES.by_key:
            of_sum += dims
        late_keys, late_values, late_sums = (), (), ()
        for i in tl.static_range(LATE):
            found_key = key_mask & (since + dims * 0 > i)
            found_value = (columns < SIZES.value_dim) & (since + columns * 0 > i)
            old = late + i * ENTRY
            late_keys += (tl.load(old + dims, mask=found_key, other=0.0),)
            late_values += (tl.load(old + SIZES.key_dim + columns, mask=found_value, other=0.0),)
            # This load is not masked by `since`. Another program may be writing an unused update.
            late_sum = tl.load(old + of_sum, mask=decay_mask, other=0.0)
            late_sums += (tl.where(since > i, late_sum, 0.0),)
    q = _mixed(q_seen, q_weights, SIZES.taps)
    k = _mixed(k_seen, k_weights, SIZES.taps)
    v = tl.reshape(_mixed(v_seen, v_weights, SIZES.taps), [PIECES, COLUMNS])
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * SIZES.key_dim**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    total = -rate * softplus(step.to(tl.float32) + shift)
    beta = SIZES.most * tl.sigmoid(beta.to(tl.float32))
    if LATE:
        # Cumulative log decays only decrease, so the last one is the minimum.
        last_sum = late_sums[0]
        for i in tl.static_range(1, LATE):
            last_sum = tl.minimum(last_sum, late_sums[i])
        total += last_sum
        decayed_keys = ()
        for i in tl.static_range(LATE):
            decayed_keys += (late_keys[i] * tl.exp(total - late_sums[i]),)
    decay_factor = tl.exp(total)
    # Several programs read the tail of queries and keys, so the last one writes it. Arrive before
    # any store, because the arrival would wait for the store's end.
    last = True
    if SHARED * PARTS > 1:
        last = comes_last(arrived + entry * SIZES.key_heads + key_head, SHARED * PARTS)
    else:
        tl.debug_barrier()  # other threads may still be reading these elements
    _keep(tail, v_seen, of_v, wide_mask, SIZES.channels, SIZES.taps)
    if last:
        _keep(tail, q_seen, of_q, key_mask, SIZES.channels, SIZES.taps)
        _keep(tail, k_seen, of_k, key_mask, SIZES.channels, SIZES.taps)
    if LATE:
        if (since == LATE) | (before == 0):
            outputs = _renewed(
                tile, matrix, goes_on, q, k, v, decay_factor, beta, late, since, decayed_keys,
                first, SIZES.key_dim, SIZES.value_dim, PIECES, COLUMNS, LATE, ENTRY, SIZES.by_key,
            )  # fmt: skip
            if since == 0:  # a new request: the state includes this token, so the update is zero
                tl.store(
                    late + SIZES.key_dim + columns, columns * 0.0, mask=columns < SIZES.value_dim
                )
                if first == 0:
                    tl.store(late + dims, dims * 0.0, mask=key_mask)
                    tl.store(late + of_sum, total * 0.0, mask=decay_mask)
        else:
            known, outputs = _read(
                tile,
                matrix,
                goes_on,
                q * decay_factor,
                k * decay_factor,
                first,
                SIZES.value_dim,
                PIECES,
                COLUMNS,
            )
            for i in tl.static_range(LATE):
                known += tl.sum(decayed_keys[i] * k, axis=0) * late_values[i]
                outputs += tl.sum(decayed_keys[i] * q, axis=0) * late_values[i]
            wrong = (v - known) * beta
            outputs += tl.sum(q * k, axis=0) * wrong
            entry_at = late + since * ENTRY
            tl.store(entry_at + SIZES.key_dim + columns, wrong, mask=columns < SIZES.value_dim)
            if first == 0:
                tl.store(entry_at + dims, k, mask=key_mask)
                tl.store(entry_at + of_sum, total, mask=decay_mask)
    else:
        outputs = _renewed(
            tile, matrix, goes_on, q, k, v, decay_factor, beta, None, 0, (), first, SIZES.key_dim,
            SIZES.value_dim, PIECES, COLUMNS, LATE, ENTRY, SIZES.by_key,
        )  # fmt: skip
    if PARTS == 1:
        outputs = normed_result(outputs, scale, gate, eps, SIZES.value_dim, SIZES.by_key)
        into = out + (token * SIZES.value_heads + head) * SIZES.value_dim + columns
        tl.store(into, outputs.to(out.dtype.element_ty), mask=columns < SIZES.value_dim)
    else:
        whole = tl.arange(0, SIZES.value_columns)[None, :]
        there = whole < SIZES.value_dim
        partial += (entry * SIZES.value_heads + head) * SIZES.value_columns
        tl.store(partial + columns, outputs)
        heads_arrived = arrived + tl.num_programs(0) * SIZES.key_heads
        if comes_last(heads_arrived + entry * SIZES.value_heads + head, PARTS):
            # Bypass L1, which may not have other multiprocessors' writes.
            every = tl.load(partial + whole, cache_modifier=".cg")
            scales = tl.load(norm + whole, mask=there, other=0.0)
            gates = tl.load(
                z + token * z_stride + head * SIZES.value_dim + whole, mask=there, other=0.0
            )
            every = normed_result(every, scales, gates, eps, SIZES.value_dim, SIZES.by_key)
            into = out + (token * SIZES.value_heads + head) * SIZES.value_dim + whole
            tl.store(into, every.to(out.dtype.element_ty), mask=there)


def gated_delta(inputs: DeltaInputs, meta: AttentionMeta, deterministic: bool = False) -> Tensor:
    """Return the results of `Kernels.gated_delta`; update tails and states in place.

    Tokens after the last entry get zeros.
    inputs: x, z, a and b may have any row stride, but a and b must have the same.
    deterministic: make results independent of how a prompt is chunked, bit for bit.
    """
    x, heads = inputs.x, inputs.heads
    assert inputs.a.stride(0) == inputs.b.stride(0)
    out = x.new_empty(x.shape[0], heads.value_heads * heads.value_size)
    walks = deterministic or meta.by_token
    by_token(inputs, out, meta, walks)
    if not walks and x.shape[0] > meta.num_decodes:
        delta_chunks(inputs, out, meta)
    return out


def kimi_delta(inputs: DeltaInputs, meta: AttentionMeta, deterministic: bool = False) -> Tensor:
    """Return the results of Kimi Delta Attention; update tails and states in place.

    Tokens after the last entry get zeros.
    inputs: x, z, a and b may have any row stride. deterministic: as in gated_delta.
    """
    x, heads = inputs.x, inputs.heads
    out = x.new_empty(x.shape[0], heads.value_heads * heads.value_size)
    walks = deterministic or meta.by_token
    by_token(inputs, out, meta, walks)
    if not walks and x.shape[0] > meta.num_decodes:
        kimi_chunks(inputs, out, meta)
    return out


def by_token(
    inputs: DeltaInputs,
    out: Tensor,
    meta: AttentionMeta,
    prompts: bool,
) -> None:
    """Compute the delta rule of a step's decodes into out; update tails and states in place.

    prompts: whether to compute prompts token by token, too, and write zeros for padding.
    """
    x, z, a, b, heads, tail, state, late = inputs
    assert meta.rows is not None and meta.counts is not None
    entries = meta.kv_len.shape[0] if prompts else meta.num_decodes
    if not entries:
        return
    if prompts:
        walk(inputs, out, meta)
        return
    values = triton.next_power_of_2(heads.value_size)
    programs = entries * heads.value_heads
    arrived = tickets(x.device, entries * (heads.key_heads + heads.value_heads))
    weights = (heads.conv, heads.decay, heads.bias, heads.norm)
    where = (meta.rows, meta.query_start, meta.kv_len, meta.counts)
    strides = (x.stride(0), z.stride(0), a.stride(0), b.stride(0))
    sizes = delta_sizes(heads, triton.next_power_of_2(heads.key_size), values)
    launch = decode_launch(programs, num_sms(x.device), values, heads.by_key)
    partial = state.new_empty(programs, values) if launch.parts > 1 else state
    _delta_decode_kernel[(entries, heads.value_heads, launch.parts)](
        x,
        z,
        a,
        b,
        *weights,
        tail,
        state,
        late,
        out,
        partial,
        arrived,
        *where,
        heads.eps,
        *strides,
        SIZES=sizes,
        COLUMNS=launch.columns,
        PARTS=launch.parts,
        **late_sizes(late),
        num_warps=launch.num_warps,
        **pdl(x.device),
    )
