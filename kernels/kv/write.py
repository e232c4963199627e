"""Fused kernel between the qkv projection and attention: split, head norm, rotary, KV write.

A program takes one token and a block of heads of one kind (queries, keys or values). The rotation
pairs element i with i + rotary_dim / 2, so a head is read as two halves and, where only a part of
it is rotated, the remaining elements. For a quantised cache, keys and values are written as codes,
with the scale (and offset) of each head (kernels/kv/quantized.py).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.kv.codes import (
    CodePages,
    by_hadamard,
    code_pages,
    numbers_of,
    store_codes,
    store_numbers,
    words,
)
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import QuantizedKV
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.metadata import AttentionMeta


@triton.jit
def _norm_scale(first, second, rest, eps, HEAD_DIM: tl.constexpr, HAS_REST: tl.constexpr):
    total = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if HAS_REST:
        total += tl.sum(rest * rest, axis=1)
    return (1.0 / tl.sqrt(total / HEAD_DIM + eps))[:, None]


@triton.jit
def _rotated(
    first,
    second,
    rest,
    cos,
    sin,
    norm,
    eps,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HADAMARD: tl.constexpr,
):
    dims = tl.arange(0, HALF)
    half: tl.constexpr = ROTARY_DIM // 2
    if NORM:
        valid = dims < half
        scale = _norm_scale(first, second, rest, eps, HEAD_DIM, REST > 0)
        weight = tl.load(norm + dims, mask=valid, other=0.0).to(tl.float32)
        first *= scale * weight[None, :]
        weight = tl.load(norm + half + dims, mask=valid, other=0.0).to(tl.float32)
        second *= scale * weight[None, :]
        if REST:
            more = ROTARY_DIM + tl.arange(0, REST)
            weight = tl.load(norm + more, mask=more < HEAD_DIM, other=0.0).to(tl.float32)
            rest *= scale * weight[None, :]
    left = first * cos - second * sin
    right = second * cos + first * sin
    if HADAMARD:
        left, right = by_hadamard(left, HADAMARD), by_hadamard(right, HADAMARD)
        if REST:
            rest = by_hadamard(rest, HADAMARD)
    return left, right, rest


@triton.jit
def _store(
    target,
    first,
    second,
    rest,
    mask,
    rest_mask,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    dims = tl.arange(0, HALF)
    half: tl.constexpr = ROTARY_DIM // 2
    dtype = target.dtype.element_ty
    tl.store(target + dims[None, :], first.to(dtype), mask=mask)
    tl.store(target + half + dims[None, :], second.to(dtype), mask=mask)
    if REST:
        more = ROTARY_DIM + tl.arange(0, REST)
        tl.store(target + more[None, :], rest.to(dtype), mask=rest_mask)


@triton.jit
def _bounds(x, count):
    """Return the minimum and the maximum of the first `count` elements of each head."""
    real = (tl.arange(0, x.shape[1]) < count)[None, :]
    low = tl.min(tl.where(real, x, float("inf")), axis=1)
    return low, tl.max(tl.where(real, x, float("-inf")), axis=1)


@triton.jit
def _store_key(
    codes,
    numbers,
    first,
    second,
    rest,
    block,
    in_block,
    exists,
    KIND: tl.constexpr,
    CODE_PAGE: tl.constexpr,
    NUMBER_PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    REST: tl.constexpr,
):
    """Quantise one token's keys and store codes and scales.

    first, second, rest: the keys' two rotated parts and their other elements, [heads, n] each.
    in_block: [heads], rows of the block.
    """
    half: tl.constexpr = ROTARY_DIM // 2
    low, high = _bounds(first, half)
    more_low, more_high = _bounds(second, half)
    low, high = tl.minimum(low, more_low), tl.maximum(high, more_high)
    if REST:
        more_low, more_high = _bounds(rest, HEAD_DIM - ROTARY_DIM)
        low, high = tl.minimum(low, more_low), tl.maximum(high, more_high)
    scale, least = numbers_of(low, high, KIND)
    store_numbers(numbers + block * NUMBER_PAGE, in_block, scale, least, exists, KIND)
    PACKED: tl.constexpr = 2 if KIND == 3 else 1  # elements a byte
    target = codes + block * CODE_PAGE + (in_block * (HEAD_DIM // PACKED))[:, None]
    store_codes(target, first, scale, least, exists, half, KIND)
    store_codes(target + half // PACKED, second, scale, least, exists, half, KIND)
    if REST:
        store_codes(
            target + ROTARY_DIM // PACKED, rest, scale, least, exists, HEAD_DIM - ROTARY_DIM, KIND
        )


class RotarySizes(NamedTuple):
    """The sizes of queries, keys and values with rotary embeddings, as one `tl.constexpr`."""

    num_heads: int
    num_kv_heads: int
    query: int  # stride between queries, in heads: 2 where an output gate follows each query
    head_dim: int
    rotary_dim: int
    block_size: int
    heads: int  # heads per program, a power of two
    half: int  # power of two >= ROTARY_DIM / 2
    rest: int  # power of two >= HEAD_DIM - ROTARY_DIM, or 0
    full: int  # power of two >= HEAD_DIM


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_kv_write_kernel(
    qkv,  # [tokens, (QUERY * NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    cos_sin,
    q_norm,
    k_norm,
    positions,
    slots,
    q_out,
    k_cache,  # keys, or their codes
    v_cache,
    k_numbers,  # int16, if KIND
    v_numbers,
    eps,
    SIZES: tl.constexpr,  # `RotarySizes`
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    CODES: tl.constexpr,  # `CodePages`
    HADAMARD: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    Q_GROUPS: tl.constexpr = (SIZES.num_heads + SIZES.heads - 1) // SIZES.heads
    K_GROUPS: tl.constexpr = (SIZES.num_kv_heads + SIZES.heads - 1) // SIZES.heads
    row = qkv + token * (SIZES.query * SIZES.num_heads + 2 * SIZES.num_kv_heads) * SIZES.head_dim
    slot = tl.load(slots + token)
    position = tl.load(positions + token).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = slot // SIZES.block_size
    offset = slot % SIZES.block_size

    if group >= Q_GROUPS + K_GROUPS:  # values: copied
        v_heads = (group - Q_GROUPS - K_GROUPS) * SIZES.heads + tl.arange(0, SIZES.heads)
        v_dims = tl.arange(0, SIZES.full)
        v_mask = (v_heads < SIZES.num_kv_heads)[:, None] & (v_dims < SIZES.head_dim)[None, :]
        v_first: tl.constexpr = SIZES.query * SIZES.num_heads + SIZES.num_kv_heads
        v_source = row + ((v_first + v_heads) * SIZES.head_dim)[:, None] + v_dims[None, :]
        v_target = (
            v_cache
            + ((block * SIZES.num_kv_heads + v_heads) * SIZES.block_size + offset)[:, None]
            * SIZES.head_dim
        )
        if CODES.kind:
            if slot >= 0:
                value = tl.load(v_source, mask=v_mask, other=0.0).to(tl.float32)
                low, high = _bounds(value, SIZES.head_dim)
                scale, least = numbers_of(low, high, CODES.kind)
                exists = v_heads < SIZES.num_kv_heads
                in_block = v_heads * SIZES.block_size + offset
                words = v_numbers + block * CODES.number_page
                store_numbers(words, in_block, scale, least, exists, CODES.kind)
                PACKED: tl.constexpr = 2 if CODES.kind == 3 else 1
                codes = (
                    v_cache
                    + block * CODES.code_page
                    + (in_block * (SIZES.head_dim // PACKED))[:, None]
                )
                store_codes(codes, value, scale, least, exists, SIZES.head_dim, CODES.kind)
        elif slot >= 0:
            tl.store(v_target + v_dims[None, :], tl.load(v_source, mask=v_mask), mask=v_mask)
    else:
        dims = tl.arange(0, SIZES.half)
        half: tl.constexpr = SIZES.rotary_dim // 2
        valid = dims < half
        angle = cos_sin + position * SIZES.rotary_dim
        cos = tl.load(angle + dims, mask=valid, other=0.0)[None, :]
        sin = tl.load(angle + half + dims, mask=valid, other=0.0)[None, :]
        is_query = group < Q_GROUPS
        heads = tl.where(is_query, group, group - Q_GROUPS) * SIZES.heads + tl.arange(
            0, SIZES.heads
        )
        exists = heads < tl.where(is_query, SIZES.num_heads, SIZES.num_kv_heads)
        mask = exists[:, None] & valid[None, :]
        base = tl.where(is_query, 0, SIZES.query * SIZES.num_heads)
        head = base + heads
        if SIZES.query > 1:
            head = tl.where(is_query, SIZES.query * heads, head)
        source = row + (head * SIZES.head_dim)[:, None]
        first = tl.load(source + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + half + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        rest, rest_mask = first, mask
        if SIZES.rest:
            more = SIZES.rotary_dim + tl.arange(0, SIZES.rest)
            rest_mask = exists[:, None] & (more < SIZES.head_dim)[None, :]
            rest = tl.load(source + more[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        if is_query:
            target = q_out + ((token * SIZES.num_heads + heads) * SIZES.head_dim)[:, None]
            first, second, rest = _rotated(
                first, second, rest, cos, sin, q_norm, eps,
                Q_NORM, SIZES.head_dim, SIZES.rotary_dim, SIZES.half, SIZES.rest, HADAMARD,
            )  # fmt: skip
            _store(
                target,
                first,
                second,
                rest,
                mask,
                rest_mask,
                SIZES.rotary_dim,
                SIZES.half,
                SIZES.rest,
            )
        elif slot >= 0:
            first, second, rest = _rotated(
                first, second, rest, cos, sin, k_norm, eps,
                K_NORM, SIZES.head_dim, SIZES.rotary_dim, SIZES.half, SIZES.rest, HADAMARD,
            )  # fmt: skip
            in_block = heads * SIZES.block_size + offset
            if CODES.kind:
                _store_key(
                    k_cache, k_numbers, first, second, rest, block, in_block, exists,
                    CODES.kind, CODES.code_page, CODES.number_page, SIZES.head_dim,
                    SIZES.rotary_dim, SIZES.rest,
                )  # fmt: skip
            else:
                target = (
                    k_cache
                    + ((block * SIZES.num_kv_heads + heads) * SIZES.block_size + offset)[:, None]
                    * SIZES.head_dim
                )
                _store(
                    target,
                    first,
                    second,
                    rest,
                    mask,
                    rest_mask,
                    SIZES.rotary_dim,
                    SIZES.half,
                    SIZES.rest,
                )


def rope_kv_write(inputs: RopeInputs, meta: AttentionMeta) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to the cache; return the queries.

    Arguments and result are those of `Kernels.rope_kv_write`. A slot of -1 writes no key or value.
    """
    qkv, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, num_heads, gated = inputs
    cos_sin, rows = meta.rotation(cos_sin)
    num_tokens = qkv.shape[0]
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    rotary_dim = cos_sin.shape[-1]
    q = qkv.new_empty((num_tokens, num_heads, head_dim))
    if not num_tokens:
        return q
    codes, hadamard = CodePages(0, 0, 0), 0
    if isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV):
        codes, hadamard = code_pages(k_cache), max(1, k_cache.form.hadamard).bit_length() - 1
        caches = (*(cache.codes for cache in (k_cache, v_cache)), *words(k_cache, v_cache))
    else:
        caches = (k_cache, v_cache, k_cache, v_cache)
    heads = min(8, triton.next_power_of_2(num_kv_heads))
    groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    _rope_kv_write_kernel[(num_tokens, groups)](
        qkv,
        cos_sin,
        q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv,
        rows,
        meta.slots,
        q,
        *caches,
        eps,
        SIZES=RotarySizes(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            query=2 if gated else 1,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            block_size=block_size,
            heads=heads,
            half=triton.next_power_of_2(rotary_dim // 2),
            rest=triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0,
            full=triton.next_power_of_2(head_dim),
        ),
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        CODES=codes,
        HADAMARD=hadamard,
        # With thousands of programs, programmatic dependent launch costs more than it saves.
        **(pdl(q.device) if num_tokens <= 256 else {"PDL": False}),
        num_warps=4,
    )
    return q
