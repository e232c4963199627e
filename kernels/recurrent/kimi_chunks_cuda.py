"""Kimi Delta Attention over prompts on CUDA, 64 tokens at a time on tensor cores, in five launches:

    gates     of each chunk and head: convolutions of queries and keys, and sums of decays
    pairs     of each 16 tokens of a chunk and head: what earlier tokens leave for them
    solve     of each chunk and head: as `_delta_solve_kernel`, from what pairs found
    pass, norm   those of `delta_chunks_cuda`

As in `kernels.recurrent.delta_rule.chunk_rule_by_key`, of which the letters are. What token j
leaves for a later token i is a sum over elements of keys, each of which decays by exp(g_i - g_j).
As a product of matrices that is (k_i exp(g_i - r)) (k_j exp(r - g_j)), where r must lie between g_i
and g_j lest a factor overflows: here r is the sum before the 16 tokens that i is of. The pairs
within these 16 have a sum of their own, element by element.

States are float32 between chunks; what is multiplied, and what one launch leaves for the next but
for sums of decays, is of x's type.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMeta
from kernels.recurrent.chunks_cuda import (
    CHUNK,
    Launch,
    num_slots,
    slot_of,
    softplus,
    unit_lower_inverse,
)
from kernels.recurrent.convolution_cuda import convolved_rows
from kernels.recurrent.delta_chunks_cuda import (
    LOG2E,
    Handed,
    convolve,
    pass_and_norm,
    tile_sizes,
)
from kernels.recurrent.delta_rule import DeltaHeads

PART = 16  # tokens of a chunk whose pairs are summed element by element
GATES = Launch(4, 1)
PAIRS = Launch(4, 1)
SOLVE = Launch(4, 1)
# No GPU has run these yet: `bench.kernels.mixer_sweep` times them and says which to set.
# True: pairs are all products of matrices, as `_kimi_halves_kernel` has them.
HALVES = False
HALVED = Launch(8, 1)
# True: convolutions have the launch that those of Gated DeltaNet have.
APART = False


# Strides of tiles are a model's few: where 16 divides one, 16 bytes are read at once.
@triton.jit(
    do_not_specialize=["a_stride", "num_tokens"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts", "a"],
)
def _kimi_gates_kernel(
    x,
    a,
    conv,
    decay,
    bias,
    tail,
    queries,  # [slots, HEADS, CHUNK, KEYS], as keys
    keys,
    totals,  # the same in float32: logarithms of decays since the chunk's begin
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    a_stride,
    num_tokens,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    KEYS: tl.constexpr,  # KEY padded
    CHUNK: tl.constexpr,
):
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, KEYS)
    there = (first + steps < length)[:, None] & (dims < KEY)[None, :]
    first_token = (begin + first).to(tl.int64)
    before = tl.load(kv_len + entry) - length  # 0: the request begins
    tail += tl.load(rows + entry).to(tl.int64) * (TAPS - 1) * CHANNELS
    own = head * KEY + dims
    at = (slot.to(tl.int64) * HEADS + head) * CHUNK * KEYS
    tile = at + steps[:, None] * KEYS + dims[None, :]
    q = convolved_rows(
        x, tail, conv, None, first_token, first, length, before, own, dims < KEY, x_stride, CHUNK,
        CHANNELS, TAPS,
    )  # fmt: skip
    q = q * tl.sigmoid(q)
    q = q * (tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6) * KEY**-0.5)[:, None]
    tl.store(queries + tile, q.to(queries.dtype.element_ty))
    k = convolved_rows(
        x, tail, conv, None, first_token, first, length, before, HEADS * KEY + own, dims < KEY,
        x_stride, CHUNK, CHANNELS, TAPS,
    )  # fmt: skip
    k = k * tl.sigmoid(k)
    k = k * tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)[:, None]
    tl.store(keys + tile, k.to(keys.dtype.element_ty))
    step = a + ((first_token + steps) * a_stride)[:, None] + own[None, :]
    step = tl.load(step, mask=there, other=0.0).to(tl.float32)
    step += tl.load(bias + own, mask=dims < KEY, other=0.0)[None, :]
    step = tl.where(there, -tl.exp(tl.load(decay + head)) * softplus(step), 0.0)
    tl.store(totals + tile, tl.cumsum(step, axis=0))


@triton.jit(
    do_not_specialize=["a_stride", "num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts", "a"],
)
def _kimi_decays_kernel(
    a,
    decay,
    bias,
    totals,
    query_start,
    counts,
    a_stride,
    num_tokens,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The sums of decays that `_kimi_gates_kernel` makes, alone."""
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, KEYS)
    there = (first + steps < length)[:, None] & (dims < KEY)[None, :]
    own = head * KEY + dims
    step = a + ((begin + first + steps).to(tl.int64) * a_stride)[:, None] + own[None, :]
    step = tl.load(step, mask=there, other=0.0).to(tl.float32)
    step += tl.load(bias + own, mask=dims < KEY, other=0.0)[None, :]
    step = tl.where(there, -tl.exp(tl.load(decay + head)) * softplus(step), 0.0)
    totals += (slot.to(tl.int64) * HEADS + head) * CHUNK * KEYS
    tl.store(totals + steps[:, None] * KEYS + dims[None, :], tl.cumsum(step, axis=0))


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts"],
)
def _kimi_pairs_kernel(
    queries,
    keys,
    totals,
    lower,  # [slots, HEADS, CHUNK, CHUNK] float32: keys' with earlier keys, without beta
    overlaps,  # the same of x's type: queries' with keys
    query_start,
    counts,
    num_tokens,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    head = tl.program_id(0)
    slot = tl.program_id(1)
    origin = tl.program_id(2) * PART
    entry, _, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    dtype = keys.dtype.element_ty
    steps = tl.arange(0, CHUNK)
    own = origin + tl.arange(0, PART)
    dims = tl.arange(0, KEYS)
    at = slot.to(tl.int64) * HEADS + head
    queries += at * CHUNK * KEYS
    keys += at * CHUNK * KEYS
    totals += at * CHUNK * KEYS
    tile = own[:, None] * KEYS + dims[None, :]
    q = tl.load(queries + tile).to(tl.float32)
    k = tl.load(keys + tile).to(tl.float32)
    total = tl.load(totals + tile)
    before = tl.load(totals + (origin - 1) * KEYS + dims, mask=dims * 0 + origin > 0, other=0.0)
    since = tl.exp(total - before[None, :])
    earlier = (steps < origin)[:, None] & (dims < KEYS)[None, :]
    tile = steps[:, None] * KEYS + dims[None, :]
    others = tl.load(keys + tile, mask=earlier, other=0.0).to(tl.float32)
    until = tl.exp(
        tl.minimum(before[None, :] - tl.load(totals + tile, mask=earlier, other=0.0), 0.0)
    )
    others = tl.trans((others * until).to(dtype))
    of_keys = tl.dot((k * since).to(dtype), others, input_precision="ieee")
    of_queries = tl.dot((q * since).to(dtype), others, input_precision="ieee")
    for number in range(PART):
        column = origin + number
        left = tl.exp(tl.minimum(total - tl.load(totals + column * KEYS + dims)[None, :], 0.0))
        left *= tl.load(keys + column * KEYS + dims).to(tl.float32)[None, :]
        here = (steps == column)[None, :]
        of_keys = tl.where(here, tl.sum(k * left, axis=1)[:, None], of_keys)
        of_queries = tl.where(here, tl.sum(q * left, axis=1)[:, None], of_queries)
    into = at * CHUNK * CHUNK + own[:, None] * CHUNK + steps[None, :]
    of_keys = tl.where(own[:, None] > steps[None, :], of_keys, 0.0)
    tl.store(lower + into, of_keys)
    of_queries = tl.where(own[:, None] >= steps[None, :], of_queries, 0.0)
    tl.store(overlaps + into, of_queries.to(dtype))


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts"],
)
def _kimi_halves_kernel(
    queries,
    keys,
    totals,
    lower,
    overlaps,
    query_start,
    counts,
    num_tokens,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # CHUNK is 2 to the power of this
):
    """As `_kimi_pairs_kernel`, of all pairs of a chunk. Two tokens are in the two halves of one
    block of 2, 4 ... CHUNK tokens, so a level of blocks is a product of matrices. There the sum
    at the end of the first half lies between theirs: no factor is above 1, and each token has one
    factor for all others."""
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, _, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    dtype = keys.dtype.element_ty
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, KEYS)
    at = slot.to(tl.int64) * HEADS + head
    totals += at * CHUNK * KEYS
    tile = steps[:, None] * KEYS + dims[None, :]
    q = tl.load(queries + at * CHUNK * KEYS + tile)
    k = tl.load(keys + at * CHUNK * KEYS + tile)
    total = tl.load(totals + tile)
    same = steps[:, None] == steps[None, :]
    own = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
    of_queries = tl.where(same, own[:, None], 0.0)
    of_keys = tl.zeros([CHUNK, CHUNK], tl.float32)
    for level in tl.static_range(LEVELS):
        half = steps >> level
        middle = ((half | 1) << level) - 1
        apart = total - tl.load(totals + middle[:, None] * KEYS + dims[None, :])
        left = tl.exp2(tl.abs(apart) * -LOG2E)
        near = (k.to(tl.float32) * left).to(dtype)
        turned = tl.trans(near)
        found = tl.dot(near, turned, input_precision="ieee")
        pairs = (half[:, None] == half[None, :] + 1) & (half[:, None] % 2 == 1)
        of_keys = tl.where(pairs, found, of_keys)
        near = (q.to(tl.float32) * left).to(dtype)
        found = tl.dot(near, turned, input_precision="ieee")
        of_queries = tl.where(pairs, found, of_queries)
    into = at * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    tl.store(lower + into, of_keys)
    tl.store(overlaps + into, of_queries.to(dtype))


@triton.jit(
    do_not_specialize=["b_stride", "num_tokens"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts", "b"],
)
def _kimi_solve_kernel(
    x,
    b,
    conv,
    tail,
    queries,  # leaves them as of the chunk's begin
    keys,  # leaves them as of the chunk's end
    totals,
    lower,
    weights,  # W: [slots, HEADS, CHUNK, KEYS]
    values,  # U: [slots, HEADS, CHUNK, VALUES]
    rows,
    query_start,
    kv_len,
    counts,
    x_stride,
    b_stride,
    num_tokens,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,  # VALUE padded
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    APART: tl.constexpr,  # values are there, and U takes their place
):
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    dtype = keys.dtype.element_ty
    steps = tl.arange(0, CHUNK)
    dims = tl.arange(0, KEYS)
    columns = tl.arange(0, VALUES)
    there = first + steps < length
    first_token = (begin + first).to(tl.int64)
    before = tl.load(kv_len + entry) - length
    tail += tl.load(rows + entry).to(tl.int64) * (TAPS - 1) * CHANNELS
    at = (slot.to(tl.int64) * HEADS + head) * CHUNK
    beta = tl.load(b + (first_token + steps) * b_stride + head, mask=there, other=0.0)
    beta = MOST * tl.sigmoid(beta.to(tl.float32))
    inverse = tl.load(lower + at * CHUNK + steps[:, None] * CHUNK + steps[None, :])
    inverse = unit_lower_inverse(inverse * beta[:, None], CHUNK, PRECISION) * beta[None, :]
    inverse = inverse.to(dtype)
    value_tile = at * VALUES + steps[:, None] * VALUES + columns[None, :]
    if APART:
        v = tl.load(values + value_tile)
    else:
        v = convolved_rows(
            x, tail, conv, None, first_token, first, length, before,
            2 * HEADS * KEY + head * VALUE + columns, columns < VALUE, x_stride, CHUNK, CHANNELS,
            TAPS,
        )  # fmt: skip
        v = (v * tl.sigmoid(v)).to(dtype)
    u = tl.dot(inverse, v, input_precision="ieee")
    tl.store(values + value_tile, u.to(dtype))
    tile = at * KEYS + steps[:, None] * KEYS + dims[None, :]
    total = tl.load(totals + tile)
    whole = tl.load(totals + (at + CHUNK - 1) * KEYS + dims)
    since = tl.exp(total)
    q = tl.load(queries + tile).to(tl.float32)
    tl.store(queries + tile, (q * since).to(dtype))
    k = tl.load(keys + tile).to(tl.float32)
    w = tl.dot(inverse, (k * since).to(dtype), input_precision="ieee")
    tl.store(weights + tile, w.to(dtype))
    tl.store(keys + tile, (k * tl.exp(whole[None, :] - total)).to(dtype))


def kimi_chunks(
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
    """As `kernels.reference.Kernels.kimi_delta`, of the entries counts[0] .. counts[1] - 1 of meta;
    tokens after the last get zeros."""
    assert meta.rows is not None and heads.key_heads == heads.value_heads
    num_tokens, (channels, taps) = x.shape[0], heads.conv.shape
    slots = num_slots(num_tokens, meta)
    sizes = tile_sizes(heads, x.element_size())
    queries = x.new_empty(slots, heads.key_heads, CHUNK, sizes["KEYS"])
    keys, weights = torch.empty_like(queries), torch.empty_like(queries)
    totals = state.new_empty(queries.shape)
    lower = state.new_empty(slots, heads.key_heads, CHUNK, CHUNK)
    overlaps = x.new_empty(lower.shape)
    values = x.new_empty(slots, heads.key_heads, CHUNK, sizes["VALUES"])
    where = (meta.rows, meta.query_start, meta.kv_len, meta.counts)
    common = {"HEADS": heads.key_heads, "KEYS": sizes["KEYS"], "CHUNK": CHUNK}
    convolution = {"KEY": heads.key_size, "CHANNELS": channels, "TAPS": taps}
    if APART:
        convolve(x, heads, tail, queries, keys, values, meta)
        _kimi_decays_kernel[(heads.key_heads, slots)](
            a,
            heads.decay,
            heads.bias,
            totals,
            meta.query_start,
            meta.counts,
            a.stride(0),
            num_tokens,
            **common,
            KEY=heads.key_size,
            num_warps=GATES.num_warps,
        )
    else:
        _kimi_gates_kernel[(heads.key_heads, slots)](
            x,
            a,
            heads.conv,
            heads.decay,
            heads.bias,
            tail,
            queries,
            keys,
            totals,
            *where,
            x.stride(0),
            a.stride(0),
            num_tokens,
            **common,
            **convolution,
            num_warps=GATES.num_warps,
            num_stages=GATES.num_stages,
        )
    found = (queries, keys, totals, lower, overlaps, meta.query_start, meta.counts, num_tokens)
    if HALVES:
        _kimi_halves_kernel[(heads.key_heads, slots)](
            *found,
            **common,
            LEVELS=CHUNK.bit_length() - 1,
            num_warps=HALVED.num_warps,
            num_stages=HALVED.num_stages,
        )
    else:
        _kimi_pairs_kernel[(heads.key_heads, slots, CHUNK // PART)](
            *found,
            **common,
            PART=PART,
            num_warps=PAIRS.num_warps,
            num_stages=PAIRS.num_stages,
        )
    _kimi_solve_kernel[(heads.key_heads, slots)](
        x,
        b,
        heads.conv,
        tail,
        queries,
        keys,
        totals,
        lower,
        weights,
        values,
        *where,
        x.stride(0),
        b.stride(0),
        num_tokens,
        **common,
        **convolution,
        VALUE=heads.value_size,
        VALUES=sizes["VALUES"],
        MOST=heads.most,
        PRECISION="ieee" if x.element_size() > 2 else "tf32",
        APART=APART,
        num_warps=SOLVE.num_warps,
        num_stages=SOLVE.num_stages,
    )
    handed = Handed(queries, keys, weights, values, totals, overlaps)
    pass_and_norm(x, z, heads, tail, state, out, meta, handed)
