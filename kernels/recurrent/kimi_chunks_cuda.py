"""Kimi Delta Attention over prompts on CUDA, 64 tokens at a time on tensor cores, in four launches:

    solve     per chunk and head: cumulative sums of log decays, the effect of earlier tokens on
              later ones, and then as in `_delta_solve_kernel`
    convolve, pass, norm   as in `delta_chunks_cuda`

Names follow `kernels.recurrent.delta_rule.chunk_rule_by_key`. The effect of token j on a later
token i is a sum over key elements, each decayed by exp(g_i - g_j), where g are cumulative log
decays. As a GEMM it is (k_i exp(g_i - r)) (k_j exp(r - g_j)), where the factors must not overflow.
For a block of tokens r is the mean of its first and last g. A chunk is one block if no element
decays by more than 2 STEEPEST in it. Otherwise blocks are halved until this holds. Pairs between
two halves then need a GEMM of their own. Its r is the second half's first g, so that no factor
exceeds 1.

States are float32 between chunks. Operands, and data between launches except cumulative log decays,
have x's dtype.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMeta
from kernels.recurrent.chunks_cuda import (
    CHUNK,
    num_slots,
    slot_of,
    softplus,
    unit_lower_inverse,
)
from kernels.recurrent.delta_chunks_cuda import Handed, convolve, pass_and_norm
from kernels.recurrent.delta_rule import DeltaInputs
from kernels.recurrent.sizes import tile_sizes

# dtype -> the maximum logarithm of a factor within a block. Factors are between e^-STEEPEST and
# e^STEEPEST, and must not lose x's precision.
STEEPEST = {torch.float32: 60.0, torch.bfloat16: 60.0, torch.float16: 6.0}


class PiecesLaunch(NamedTuple):
    piece: int  # elements of keys or values that a program loads at a time
    num_warps: int
    num_stages: int
    registers: int  # maximum per thread


SOLVE = PiecesLaunch(64, 4, 1, 255)


@triton.jit
def _is_steep(
    totals, SIZE: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, STEEPEST: tl.constexpr
):
    """Return 1 if an element decays by more than 2 STEEPEST in a block of SIZE tokens, else 0."""
    first = tl.arange(0, CHUNK // SIZE)[:, None] * SIZE * KEYS + tl.arange(0, KEYS)[None, :]
    decrease = tl.load(totals + first) - tl.load(totals + first + (SIZE - 1) * KEYS)
    return (tl.max(tl.max(decrease, axis=1), axis=0) > 2 * STEEPEST).to(tl.int32)


@triton.jit
def _products(
    queries, keys, totals, first, last,
    KEYS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Return decayed keys @ keys^T and queries @ keys^T, [CHUNK, CHUNK] each.

    They are valid for earlier keys of the same block, with HALVES those in its other half.

    first, last: [CHUNK], the first and last token of each token's block. With HALVES, `first` is
        the first token of the block's second half.
    """
    dtype = keys.dtype.element_ty
    steps = tl.arange(0, CHUNK)
    of_keys = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_queries = tl.zeros([CHUNK, CHUNK], tl.float32)
    for origin in range(0, KEYS, PIECE):
        dims = (origin + tl.arange(0, PIECE))[None, :]
        tile = steps[:, None] * KEYS + dims
        reference = tl.load(totals + first[:, None] * KEYS + dims)
        if not HALVES:
            reference = 0.5 * (reference + tl.load(totals + last[:, None] * KEYS + dims))
        total = tl.load(totals + tile) - reference
        since = tl.exp(-tl.abs(total) if HALVES else total)
        until = since if HALVES else tl.exp(-total)
        k = tl.load(keys + tile).to(tl.float32)
        earlier = tl.trans((k * until).to(dtype))
        of_keys = tl.dot((k * since).to(dtype), earlier, of_keys, input_precision="ieee")
        q = tl.load(queries + tile).to(tl.float32)
        of_queries = tl.dot((q * since).to(dtype), earlier, of_queries, input_precision="ieee")
    return of_keys, of_queries


@triton.jit
def _pairs(
    queries, keys, totals,
    KEYS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, STEEPEST: tl.constexpr,
):  # fmt: skip
    """Return decayed keys @ earlier keys^T and queries @ keys^T, [CHUNK, CHUNK] each.

    Pairs with later keys are zero. queries, keys, totals: those of a chunk and head.
    """
    tl.static_assert(CHUNK == 64)
    steps = tl.arange(0, CHUNK)
    later, earlier = steps[:, None], steps[None, :]
    halvings = _is_steep(totals, 64, KEYS, CHUNK, STEEPEST)
    halvings += _is_steep(totals, 32, KEYS, CHUNK, STEEPEST)
    halvings += _is_steep(totals, 16, KEYS, CHUNK, STEEPEST)
    if halvings == 3:
        halvings += _is_steep(totals, 8, KEYS, CHUNK, STEEPEST)
        halvings += _is_steep(totals, 4, KEYS, CHUNK, STEEPEST)
        halvings += _is_steep(totals, 2, KEYS, CHUNK, STEEPEST)
    bits = 6 - halvings  # blocks have 2^bits tokens
    first = (steps >> bits) << bits
    of_keys, of_queries = _products(
        queries, keys, totals, first, first + (1 << bits) - 1, KEYS, CHUNK, PIECE, False
    )
    of_keys = tl.where(later > earlier, of_keys, 0.0)
    of_queries = tl.where(later >= earlier, of_queries, 0.0)
    for bits in range(6 - halvings, 6):  # halves of 2^bits tokens
        border = ((steps >> bits) | 1) << bits
        between_keys, between_queries = _products(
            queries, keys, totals, border, border, KEYS, CHUNK, PIECE, True
        )
        # Larger halves overwrite the pairs that are further apart.
        apart = (later >> bits) > (earlier >> bits)
        of_keys = tl.where(apart, between_keys, of_keys)
        of_queries = tl.where(apart, between_queries, of_queries)
    return of_keys, of_queries


# `a` is specialised, as a stride divisible by 16 allows loads of 16 bytes.
@triton.jit(
    do_not_specialize=["b_stride", "num_tokens"],
    do_not_specialize_on_alignment=["query_start", "counts", "b"],
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
    totals,  # [slots, HEADS, CHUNK, KEYS] float32: cumulative log decays in the chunk
    overlaps,  # [slots, HEADS, CHUNK, CHUNK] of x's dtype: decayed queries @ earlier keys^T
    query_start,
    counts,
    a_stride,
    b_stride,
    num_tokens,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    KEY: tl.constexpr,
    KEYS: tl.constexpr,  # padded KEY
    VALUES: tl.constexpr,  # padded VALUE
    CHUNK: tl.constexpr,
    KEY_PIECE: tl.constexpr,
    VALUE_PIECE: tl.constexpr,
    STEEPEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    slot = tl.program_id(1)
    entry, begin, first, length = slot_of(query_start, counts, num_tokens, slot, CHUNK)
    if (entry >= tl.load(counts + 1)) | (first >= length):
        return
    dtype = keys.dtype.element_ty
    steps = tl.arange(0, CHUNK)
    there = first + steps < length
    token = (begin + first + steps).to(tl.int64)
    at = (slot.to(tl.int64) * HEADS + head) * CHUNK
    queries += at * KEYS
    keys += at * KEYS
    weights += at * KEYS
    totals += at * KEYS
    values += at * VALUES
    rate = -tl.exp(tl.load(decay + head))
    for origin in range(0, KEYS, KEY_PIECE):
        dims = origin + tl.arange(0, KEY_PIECE)
        own = head * KEY + dims
        mask = there[:, None] & (dims < KEY)[None, :]
        step = tl.load(a + (token * a_stride)[:, None] + own[None, :], mask=mask, other=0.0)
        step = step.to(tl.float32) + tl.load(bias + own, mask=dims < KEY, other=0.0)[None, :]
        total = tl.cumsum(tl.where(mask, rate * softplus(step), 0.0), axis=0)
        tl.store(totals + steps[:, None] * KEYS + dims[None, :], total)
    tl.debug_barrier()  # other threads read these sums
    of_keys, of_queries = _pairs(queries, keys, totals, KEYS, CHUNK, KEY_PIECE, STEEPEST)
    square = at * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    tl.store(overlaps + square, of_queries.to(dtype))
    beta = tl.load(b + token * b_stride + head, mask=there, other=0.0).to(tl.float32)
    beta = MOST * tl.sigmoid(beta)
    inverse = unit_lower_inverse(of_keys * beta[:, None], CHUNK, PRECISION) * beta[None, :]
    inverse = inverse.to(dtype)
    for origin in range(0, VALUES, VALUE_PIECE):
        tile = steps[:, None] * VALUES + (origin + tl.arange(0, VALUE_PIECE))[None, :]
        u = tl.dot(inverse, tl.load(values + tile), input_precision="ieee")
        tl.store(values + tile, u.to(dtype))
    tl.debug_barrier()  # other threads have read queries and keys
    for origin in range(0, KEYS, KEY_PIECE):
        dims = origin + tl.arange(0, KEY_PIECE)
        tile = steps[:, None] * KEYS + dims[None, :]
        total = tl.load(totals + tile)
        whole = tl.load(totals + (CHUNK - 1) * KEYS + dims)
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
        HEADS=heads.key_heads,
        MOST=heads.most,
        KEY=heads.key_size,
        **sizes,
        CHUNK=CHUNK,
        KEY_PIECE=min(SOLVE.piece, sizes["KEYS"]),
        VALUE_PIECE=min(SOLVE.piece, sizes["VALUES"]),
        STEEPEST=STEEPEST[x.dtype],
        PRECISION="ieee" if x.element_size() > 2 else "tf32",
        num_warps=SOLVE.num_warps,
        num_stages=SOLVE.num_stages,
        maxnreg=SOLVE.registers,
    )
    handed = Handed(queries, keys, weights, values, totals, overlaps)
    pass_and_norm(inputs, out, meta, handed)
