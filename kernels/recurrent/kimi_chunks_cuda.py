"""Kimi Delta Attention over prompts on CUDA, 64 tokens at a time on tensor cores, in six launches:

    convolve  as in `delta_chunks_cuda`
    decays    per chunk and head: cumulative sums of log decays
    pairs     per 16 tokens of a chunk and head: the effect of earlier tokens on these
    solve     per chunk and head: as in `_delta_solve_kernel`, from the results of pairs
    pass, norm   as in `delta_chunks_cuda`

Names follow `kernels.recurrent.delta_rule.chunk_rule_by_key`. The effect of token j on a later
token i is a sum over key elements, each decayed by exp(g_i - g_j), where g are cumulative log
decays. As a GEMM it is (k_i exp(g_i - r)) (k_j exp(r - g_j)), where the factors must not overflow.
Here r is the value of g before the 16 tokens that i belongs to. For j among these 16 tokens the
second factor is above 1. If an element decays by more than STEEPEST within these tokens, their
pairs are summed element by element.

States are float32 between chunks. Operands, and data between launches except cumulative log decays,
have x's dtype.
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
from kernels.recurrent.delta_chunks_cuda import Handed, convolve, pass_and_norm
from kernels.recurrent.delta_rule import DeltaInputs
from kernels.recurrent.sizes import tile_sizes

PART = 16  # tokens whose pairs may be summed element by element
# dtype -> the maximum decrease of a key element's cumulative log decay within PART tokens for which
# a GEMM computes the pairs. The factors of a pair are between e^-STEEPEST and e^STEEPEST, and must
# not lose x's precision.
STEEPEST = {torch.float32: 60.0, torch.bfloat16: 60.0, torch.float16: 6.0}
DECAYS = Launch(4, 1)
PAIRS = Launch(4, 1)
SOLVE = Launch(4, 1)


@triton.jit(
    do_not_specialize=["a_stride", "num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts", "a"],
)
def _kimi_decays_kernel(
    a,
    decay,
    bias,
    totals,  # [slots, HEADS, CHUNK, KEYS] float32: cumulative log decays in the chunk
    query_start,
    counts,
    a_stride,
    num_tokens,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEYS: tl.constexpr,  # padded KEY
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
    lower,  # [slots, HEADS, CHUNK, CHUNK] float32: decayed keys @ earlier keys^T, without beta
    overlaps,  # like `lower`, in x's dtype: decayed queries @ earlier keys^T
    query_start,
    counts,
    num_tokens,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    STEEPEST: tl.constexpr,
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
    last = tl.load(totals + (origin + PART - 1) * KEYS + dims)
    steep = tl.max(before - last, axis=0) > STEEPEST
    seen = (steps < tl.where(steep, origin, origin + PART))[:, None] & (dims < KEYS)[None, :]
    tile = steps[:, None] * KEYS + dims[None, :]
    others = tl.load(keys + tile, mask=seen, other=0.0).to(tl.float32)
    until = before[None, :] - tl.load(totals + tile, mask=seen, other=0.0)
    until = tl.exp(tl.minimum(until, STEEPEST))
    others = tl.trans((others * until).to(dtype))
    of_keys = tl.dot((k * since).to(dtype), others, input_precision="ieee")
    of_queries = tl.dot((q * since).to(dtype), others, input_precision="ieee")
    if steep:
        for number in range(PART):
            column = origin + number
            decayed_keys = tl.exp(
                tl.minimum(total - tl.load(totals + column * KEYS + dims)[None, :], 0.0)
            )
            decayed_keys *= tl.load(keys + column * KEYS + dims).to(tl.float32)[None, :]
            here = (steps == column)[None, :]
            of_keys = tl.where(here, tl.sum(k * decayed_keys, axis=1)[:, None], of_keys)
            of_queries = tl.where(here, tl.sum(q * decayed_keys, axis=1)[:, None], of_queries)
    into = at * CHUNK * CHUNK + own[:, None] * CHUNK + steps[None, :]
    of_keys = tl.where(own[:, None] > steps[None, :], of_keys, 0.0)
    tl.store(lower + into, of_keys)
    of_queries = tl.where(own[:, None] >= steps[None, :], of_queries, 0.0)
    tl.store(overlaps + into, of_queries.to(dtype))


@triton.jit(
    do_not_specialize=["b_stride", "num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts", "b"],
)
def _kimi_solve_kernel(
    b,
    queries,  # overwritten with queries decayed from the chunk's beginning
    keys,  # overwritten with keys decayed until the chunk's end
    totals,
    lower,
    weights,  # W: [slots, HEADS, CHUNK, KEYS]
    values,  # [slots, HEADS, CHUNK, VALUES]: values on input, overwritten by U
    query_start,
    counts,
    b_stride,
    num_tokens,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,  # padded VALUE
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
    dims = tl.arange(0, KEYS)
    columns = tl.arange(0, VALUES)
    there = first + steps < length
    at = (slot.to(tl.int64) * HEADS + head) * CHUNK
    gates = (begin + first + steps).to(tl.int64) * b_stride + head
    beta = MOST * tl.sigmoid(tl.load(b + gates, mask=there, other=0.0).to(tl.float32))
    inverse = tl.load(lower + at * CHUNK + steps[:, None] * CHUNK + steps[None, :])
    inverse = unit_lower_inverse(inverse * beta[:, None], CHUNK, PRECISION) * beta[None, :]
    inverse = inverse.to(dtype)
    value_tile = at * VALUES + steps[:, None] * VALUES + columns[None, :]
    v = tl.load(values + value_tile)
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
    inputs: DeltaInputs,
    out: Tensor,  # [num_tokens, value_heads * value_size]
    meta: AttentionMeta,
) -> None:
    """Compute Kimi Delta Attention of a step's chunks into out; update tails and states in place.

    The chunks are the entries meta.counts[0] .. meta.counts[1] - 1. Padding tokens get zeros.
    """
    x, _, a, b, heads, _, state, _ = inputs
    assert meta.rows is not None and heads.key_heads == heads.value_heads
    num_tokens, slots = x.shape[0], num_slots(x.shape[0], meta)
    sizes = tile_sizes(heads, x.element_size())
    queries = x.new_empty(slots, heads.key_heads, CHUNK, sizes["KEYS"])
    keys, weights = torch.empty_like(queries), torch.empty_like(queries)
    totals = state.new_empty(queries.shape)
    lower = state.new_empty(slots, heads.key_heads, CHUNK, CHUNK)
    overlaps = x.new_empty(lower.shape)
    values = x.new_empty(slots, heads.key_heads, CHUNK, sizes["VALUES"])
    common = {"HEADS": heads.key_heads, "KEYS": sizes["KEYS"], "CHUNK": CHUNK}
    convolve(inputs, queries, keys, values, meta)
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
        num_warps=DECAYS.num_warps,
        num_stages=DECAYS.num_stages,
    )
    _kimi_pairs_kernel[(heads.key_heads, slots, CHUNK // PART)](
        queries,
        keys,
        totals,
        lower,
        overlaps,
        meta.query_start,
        meta.counts,
        num_tokens,
        **common,
        PART=PART,
        STEEPEST=STEEPEST[x.dtype],
        num_warps=PAIRS.num_warps,
        num_stages=PAIRS.num_stages,
    )
    _kimi_solve_kernel[(heads.key_heads, slots)](
        b,
        queries,
        keys,
        totals,
        lower,
        weights,
        values,
        meta.query_start,
        meta.counts,
        b.stride(0),
        num_tokens,
        **common,
        VALUES=sizes["VALUES"],
        MOST=heads.most,
        PRECISION="ieee" if x.element_size() > 2 else "tf32",
        num_warps=SOLVE.num_warps,
        num_stages=SOLVE.num_stages,
    )
    handed = Handed(queries, keys, weights, values, totals, overlaps)
    pass_and_norm(inputs, out, meta, handed)
