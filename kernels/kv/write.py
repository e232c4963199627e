"""Between the qkv product and attention, in one launch: split, head norm, rotation, KV write.

A program takes one token and a block of heads of one kind (queries, keys or values). The rotation
pairs element i with i + rotary_dim / 2, so a head is read as two halves and, where only part of it
rotates, a rest. Into a cache of fewer bits keys and values go as codes, with the numbers of each
head that its elements ask for (kernels/kv/quantized.py).
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.kv.codes import (
    by_hadamard,
    constants,
    numbers_of,
    store_codes,
    store_numbers,
    words,
)
from kernels.kv.quantized import Cache, QuantizedKV
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
    """The least and the greatest of the first `count` elements of each head."""
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
    """in_block [heads]: rows of the block."""
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


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_kv_write_kernel(
    qkv,  # [tokens, (QUERY * NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    cos_sin,
    q_norm,
    k_norm,
    positions,
    slots,
    q_out,
    k_cache,  # or codes
    v_cache,
    k_numbers,  # int16, if KIND
    v_numbers,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    QUERY: tl.constexpr,  # heads from a query to the next: 2 where its gate follows it
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HEADS: tl.constexpr,  # heads a program, a power of two
    HALF: tl.constexpr,  # power of two >= ROTARY_DIM / 2
    REST: tl.constexpr,  # power of two >= HEAD_DIM - ROTARY_DIM, or 0
    FULL: tl.constexpr,  # power of two >= HEAD_DIM
    KIND: tl.constexpr,  # of codes (kernels/kv/codes.py); 0 = plain
    CODE_PAGE: tl.constexpr,
    NUMBER_PAGE: tl.constexpr,
    HADAMARD: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    K_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    row = qkv + token * (QUERY * NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    slot = tl.load(slots + token)
    position = tl.load(positions + token).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    if group >= Q_GROUPS + K_GROUPS:  # values: copied
        v_heads = (group - Q_GROUPS - K_GROUPS) * HEADS + tl.arange(0, HEADS)
        v_dims = tl.arange(0, FULL)
        v_mask = (v_heads < NUM_KV_HEADS)[:, None] & (v_dims < HEAD_DIM)[None, :]
        v_first: tl.constexpr = QUERY * NUM_HEADS + NUM_KV_HEADS
        v_source = row + ((v_first + v_heads) * HEAD_DIM)[:, None] + v_dims[None, :]
        v_target = (
            v_cache + ((block * NUM_KV_HEADS + v_heads) * BLOCK_SIZE + offset)[:, None] * HEAD_DIM
        )
        if KIND:
            if slot >= 0:
                value = tl.load(v_source, mask=v_mask, other=0.0).to(tl.float32)
                low, high = _bounds(value, HEAD_DIM)
                scale, least = numbers_of(low, high, KIND)
                exists = v_heads < NUM_KV_HEADS
                in_block = v_heads * BLOCK_SIZE + offset
                words = v_numbers + block * NUMBER_PAGE
                store_numbers(words, in_block, scale, least, exists, KIND)
                PACKED: tl.constexpr = 2 if KIND == 3 else 1
                codes = v_cache + block * CODE_PAGE + (in_block * (HEAD_DIM // PACKED))[:, None]
                store_codes(codes, value, scale, least, exists, HEAD_DIM, KIND)
        elif slot >= 0:
            tl.store(v_target + v_dims[None, :], tl.load(v_source, mask=v_mask), mask=v_mask)
    else:
        dims = tl.arange(0, HALF)
        half: tl.constexpr = ROTARY_DIM // 2
        valid = dims < half
        angle = cos_sin + position * ROTARY_DIM
        cos = tl.load(angle + dims, mask=valid, other=0.0)[None, :]
        sin = tl.load(angle + half + dims, mask=valid, other=0.0)[None, :]
        is_query = group < Q_GROUPS
        heads = tl.where(is_query, group, group - Q_GROUPS) * HEADS + tl.arange(0, HEADS)
        exists = heads < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
        mask = exists[:, None] & valid[None, :]
        base = tl.where(is_query, 0, QUERY * NUM_HEADS)
        head = base + heads
        if QUERY > 1:
            head = tl.where(is_query, QUERY * heads, head)
        source = row + (head * HEAD_DIM)[:, None]
        first = tl.load(source + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + half + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        rest, rest_mask = first, mask
        if REST:
            more = ROTARY_DIM + tl.arange(0, REST)
            rest_mask = exists[:, None] & (more < HEAD_DIM)[None, :]
            rest = tl.load(source + more[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        if is_query:
            target = q_out + ((token * NUM_HEADS + heads) * HEAD_DIM)[:, None]
            first, second, rest = _rotated(
                first, second, rest, cos, sin, q_norm, eps,
                Q_NORM, HEAD_DIM, ROTARY_DIM, HALF, REST, HADAMARD,
            )  # fmt: skip
            _store(target, first, second, rest, mask, rest_mask, ROTARY_DIM, HALF, REST)
        elif slot >= 0:
            first, second, rest = _rotated(
                first, second, rest, cos, sin, k_norm, eps,
                K_NORM, HEAD_DIM, ROTARY_DIM, HALF, REST, HADAMARD,
            )  # fmt: skip
            in_block = heads * BLOCK_SIZE + offset
            if KIND:
                _store_key(
                    k_cache, k_numbers, first, second, rest, block, in_block, exists,
                    KIND, CODE_PAGE, NUMBER_PAGE, HEAD_DIM, ROTARY_DIM, REST,
                )  # fmt: skip
            else:
                target = (
                    k_cache
                    + ((block * NUM_KV_HEADS + heads) * BLOCK_SIZE + offset)[:, None] * HEAD_DIM
                )
                _store(target, first, second, rest, mask, rest_mask, ROTARY_DIM, HALF, REST)


def rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Cache,
    v_cache: Cache,
    num_heads: int,
    meta: AttentionMeta,
    *,
    gated: bool = False,
) -> Tensor:
    """See `kernels.reference.Kernels.rope_kv_write`. A slot of -1 writes no key or value."""
    num_tokens = qkv.shape[0]
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    rotary_dim = cos_sin.shape[-1]
    q = qkv.new_empty((num_tokens, num_heads, head_dim))
    if not num_tokens:
        return q
    how: dict[str, Any] = {"KIND": 0, "CODE_PAGE": 0, "NUMBER_PAGE": 0, "HADAMARD": 0}
    if isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV):
        how = constants(k_cache) | {"HADAMARD": max(1, k_cache.form.hadamard).bit_length() - 1}
        caches = (*(each.codes for each in (k_cache, v_cache)), *words(k_cache, v_cache))
    else:
        caches = (k_cache, v_cache, k_cache, v_cache)
    heads = min(8, triton.next_power_of_2(num_kv_heads))
    groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    _rope_kv_write_kernel[(num_tokens, groups)](
        qkv,
        cos_sin,
        q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv,
        meta.positions,
        meta.slots,
        q,
        *caches,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        QUERY=2 if gated else 1,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=block_size,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        HEADS=heads,
        HALF=triton.next_power_of_2(rotary_dim // 2),
        REST=triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0,
        FULL=triton.next_power_of_2(head_dim),
        **how,
        # With thousands of programs the early start costs more than it hides.
        **(pdl(q.device) if num_tokens <= 256 else {"PDL": False}),
        num_warps=4,
    )
    return q
