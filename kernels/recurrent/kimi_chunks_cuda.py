"""Kimi Delta Attention over prompts on CUDA, 64 tokens at a time on tensor cores, in four launches:

    convolve     as in `delta_chunks_cuda`
    solve        per chunk and head: cumulated logarithms of decays, the effect of earlier tokens on
                 later ones, and from there on as `_delta_solve_kernel`
    pass, norm   as in `delta_chunks_cuda`

Names follow `kernels.recurrent.delta_rule.chunk_rule_by_key`. The effect of token j on a later
token i is a sum over key elements, each decayed by exp(g_i - g_j). As a GEMM it is (k_i exp(g_i -
r)) (k_j exp(r - g_j)), where the factors must not overflow. Here r is the value before the 16
tokens that i belongs to. For j among these 16 the second factor is above 1; where an element decays
by more than STEEPEST there, these pairs are summed element by element.

Key elements are taken 32 or 64 at a time, so that a tile's logarithms, keys and queries stay in
registers. They are computed from the gates twice, before and after the triangular system.

States are float32 between chunks. Operands, and data between launches except cumulated logarithms,
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
from kernels.recurrent.delta_chunks_cuda import Handed, convolve, pass_and_norm, tile_sizes
from kernels.recurrent.delta_rule import DeltaInputs
from kernels.recurrent.sizes import delta_sizes

PART = 16  # tokens whose pairs may be summed element by element
DIMS = 64  # key elements, and columns of values, of a tile
# The most that a key element's logarithm may decay within PART tokens for their pairs to be a GEMM.
# The factors of such a pair, e^-STEEPEST and e^STEEPEST at most, must keep x's precision.
STEEPEST = {torch.float32: 60.0, torch.bfloat16: 60.0, torch.float16: 6.0}
SOLVE = Launch(4, 1)


@triton.jit
def _row(tile, steps, index):
    """Return one row of a tile [CHUNK, DIMS]."""
    return tl.sum(tl.where((steps == index)[:, None], tile, 0.0), axis=0)


@triton.jit
def _logarithms(a, bias, rate, tokens, there, dims, KEY: tl.constexpr):
    """Return the cumulated logarithms of a chunk's decays for some key elements of a head.

    a, bias: the head's elements of the first token in the step, and of all tokens. rate: the head's
    factor. tokens: offsets of the chunk's tokens in `a`. there: which tokens exist.
    """
    known = there[:, None] & (dims < KEY)[None, :]
    gate = tl.load(a + tokens[:, None] + dims[None, :], mask=known, other=0.0).to(tl.float32)
    gate += tl.load(bias + dims, mask=dims < KEY, other=0.0)[None, :]
    return tl.cumsum(tl.where(known, -rate * softplus(gate), 0.0), axis=0)


@triton.jit
def _add_pairs(
    of_keys, of_queries, decayed_k, decayed_q, k, total, before, part, reach, steps,
    PART: tl.constexpr, STEEPEST: tl.constexpr,
):  # fmt: skip
    """Add to the rows of one part of a chunk the products with tokens before `reach`, over a tile's
    key elements.

    decayed_k, decayed_q: decayed from `before`, the logarithms before the part, and zero outside of
    it.
    """
    since = tl.exp(tl.minimum(before[None, :] - total, STEEPEST))
    others = tl.trans(tl.where((steps < reach)[:, None], k * since, 0.0).to(decayed_k.dtype))
    own = (steps // PART == part)[:, None]
    of_keys = tl.dot(tl.where(own, decayed_k, 0.0), others, of_keys, input_precision="ieee")
    of_queries = tl.dot(tl.where(own, decayed_q, 0.0), others, of_queries, input_precision="ieee")
    return of_keys, of_queries


@triton.jit
def _add_steep_pairs(
    of_keys, of_queries, q, k, total, steps,
    CHUNK: tl.constexpr, PART: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Add the products of tokens of one part, element by element over a tile's key elements."""
    PARTS: tl.constexpr = CHUNK // PART
    inner = tl.arange(0, PART)
    q = tl.reshape(q, [PARTS, PART, DIMS])
    k = tl.reshape(k, [PARTS, PART, DIMS])
    total = tl.reshape(total, [PARTS, PART, DIMS])
    for number in range(PART):
        here = (inner == number)[None, :, None]
        column = tl.sum(tl.where(here, total, 0.0), axis=1)
        effect = tl.exp(tl.minimum(total - column[:, None, :], 0.0))
        effect *= tl.sum(tl.where(here, k, 0.0), axis=1)[:, None, :]
        by_key = tl.reshape(tl.sum(k * effect, axis=2), [CHUNK])
        by_query = tl.reshape(tl.sum(q * effect, axis=2), [CHUNK])
        there = steps[None, :] == (steps // PART * PART + number)[:, None]
        of_keys += tl.where(there, by_key[:, None], 0.0)
        of_queries += tl.where(there, by_query[:, None], 0.0)
    return of_keys, of_queries


@triton.jit(
    do_not_specialize=["a_stride", "b_stride", "num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts", "a", "b"],
)
def _kimi_solve_kernel(
    a,
    b,
    decay,
    bias,
    queries,  # overwritten with queries decayed from the chunk's beginning
    keys,  # overwritten with keys decayed until the chunk's end
    weights,  # W: [slots, HEADS, CHUNK, KEYS]
    values,  # [slots, HEADS, CHUNK, VALUES]: values on input, overwritten by U
    totals,  # [slots, HEADS, KEYS] float32: logarithms of a whole chunk's decays
    # [slots, HEADS, CHUNK, CHUNK] of x's dtype: products of queries and earlier keys, decayed
    overlaps,
    query_start,
    counts,
    a_stride,
    b_stride,
    num_tokens,
    SIZES: tl.constexpr,  # `DeltaSizes`
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    DIMS: tl.constexpr,
    STEEPEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HEADS: tl.constexpr = SIZES.value_heads
    KEY: tl.constexpr = SIZES.key_dim
    KEYS: tl.constexpr = SIZES.key_columns
    VALUES: tl.constexpr = SIZES.value_columns
    COLUMNS: tl.constexpr = DIMS if DIMS < VALUES else VALUES
    TILE: tl.constexpr = DIMS if DIMS < KEYS else KEYS
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    dtype = keys.dtype.element_ty
    steps = tl.arange(0, CHUNK)
    there = first + steps < length
    tokens = (begin + first + steps).to(tl.int64)
    at = slot.to(tl.int64) * HEADS + head
    a += head * KEY
    bias += head * KEY
    rate = tl.exp(tl.load(decay + head))
    queries += at * CHUNK * KEYS
    keys += at * CHUNK * KEYS
    weights += at * CHUNK * KEYS
    values += at * CHUNK * VALUES
    totals += at * KEYS

    of_keys = tl.zeros([CHUNK, CHUNK], tl.float32)  # products of keys and earlier keys
    of_queries = tl.zeros([CHUNK, CHUNK], tl.float32)
    for origin in range(0, KEYS, TILE):
        dims = origin + tl.arange(0, TILE)
        total = _logarithms(a, bias, rate, tokens * a_stride, there, dims, KEY)
        tile = steps[:, None] * KEYS + dims[None, :]
        k = tl.load(keys + tile).to(tl.float32)
        q = tl.load(queries + tile).to(tl.float32)
        second = _row(total, steps, PART - 1)  # logarithms before the second part
        third = _row(total, steps, 2 * PART - 1)
        fourth = _row(total, steps, 3 * PART - 1)
        part = (steps // PART)[:, None]
        before = tl.where(part == 1, second[None, :], 0.0)
        before = tl.where(part == 2, third[None, :], before)
        before = tl.where(part == 3, fourth[None, :], before)
        fall = total - before
        steep = tl.min(tl.min(fall, axis=1), axis=0) < -STEEPEST
        since = tl.exp(fall)
        decayed_k = (k * since).to(dtype)
        decayed_q = (q * since).to(dtype)
        reach = tl.where(steep, 0, PART)
        if not steep:
            of_keys, of_queries = _add_pairs(
                of_keys, of_queries, decayed_k, decayed_q, k, total, second * 0.0, 0, reach, steps,
                PART, STEEPEST,
            )  # fmt: skip
        of_keys, of_queries = _add_pairs(
            of_keys, of_queries, decayed_k, decayed_q, k, total, second, 1, PART + reach, steps,
            PART, STEEPEST,
        )  # fmt: skip
        of_keys, of_queries = _add_pairs(
            of_keys, of_queries, decayed_k, decayed_q, k, total, third, 2, 2 * PART + reach, steps,
            PART, STEEPEST,
        )  # fmt: skip
        of_keys, of_queries = _add_pairs(
            of_keys, of_queries, decayed_k, decayed_q, k, total, fourth, 3, 3 * PART + reach, steps,
            PART, STEEPEST,
        )  # fmt: skip
        if steep:
            of_keys, of_queries = _add_steep_pairs(
                of_keys, of_queries, q, k, total, steps, CHUNK, PART, TILE
            )

    square = at * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    of_queries = tl.where(steps[:, None] >= steps[None, :], of_queries, 0.0)
    tl.store(overlaps + square, of_queries.to(dtype))
    beta = tl.load(b + tokens * b_stride + head, mask=there, other=0.0).to(tl.float32)
    beta = SIZES.most * tl.sigmoid(beta)
    lower = tl.where(steps[:, None] > steps[None, :], of_keys * beta[:, None], 0.0)
    inverse = (unit_lower_inverse(lower, CHUNK, PRECISION) * beta[None, :]).to(dtype)
    for origin in range(0, VALUES, COLUMNS):
        columns = origin + tl.arange(0, COLUMNS)
        tile = steps[:, None] * VALUES + columns[None, :]
        u = tl.dot(inverse, tl.load(values + tile), input_precision="ieee")
        tl.store(values + tile, u.to(dtype))
    for origin in range(0, KEYS, TILE):
        dims = origin + tl.arange(0, TILE)
        total = _logarithms(a, bias, rate, tokens * a_stride, there, dims, KEY)
        whole = _row(total, steps, CHUNK - 1)
        tl.store(totals + dims, whole)
        since = tl.exp(total)
        tile = steps[:, None] * KEYS + dims[None, :]
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
    """Compute Kimi Delta Attention of a range of entries into out; advance tails and states.

    The entries are counts[0] .. counts[1] - 1 of meta. Tokens after the last entry get zeros.
    """
    x, _, a, b, heads, _, state, _ = inputs
    assert meta.rows is not None and heads.key_heads == heads.value_heads
    num_tokens, slots = x.shape[0], num_slots(x.shape[0], meta)
    sizes = tile_sizes(heads, x.element_size())
    queries = x.new_empty(slots, heads.key_heads, CHUNK, sizes["KEYS"])
    keys, weights = torch.empty_like(queries), torch.empty_like(queries)
    totals = state.new_empty(slots, heads.key_heads, sizes["KEYS"])
    overlaps = x.new_empty(slots, heads.key_heads, CHUNK, CHUNK)
    values = x.new_empty(slots, heads.key_heads, CHUNK, sizes["VALUES"])
    convolve(inputs, queries, keys, values, meta)
    _kimi_solve_kernel[(heads.key_heads, slots)](
        a,
        b,
        heads.decay,
        heads.bias,
        queries,
        keys,
        weights,
        values,
        totals,
        overlaps,
        meta.query_start,
        meta.counts,
        a.stride(0),
        b.stride(0),
        num_tokens,
        SIZES=delta_sizes(heads, sizes["KEYS"], sizes["VALUES"]),
        CHUNK=CHUNK,
        PART=PART,
        DIMS=DIMS,
        STEEPEST=STEEPEST[x.dtype],
        PRECISION="ieee" if x.element_size() > 2 else "tf32",
        num_warps=SOLVE.num_warps,
        num_stages=SOLVE.num_stages,
    )
    handed = Handed(queries, keys, weights, values, totals, overlaps)
    pass_and_norm(inputs, out, meta, handed)
