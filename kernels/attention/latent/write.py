"""The preparation of latent attention in one launch: norm, rotary embedding, write to the cache."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMeta


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _latent_write_kernel(
    q,
    latents,
    norm,
    cos_sin,
    positions,
    slots,
    q_out,  # [tokens, NUM_HEADS, NOPE + ROPE]
    cache,
    eps,
    q_stride,  # of tokens
    latent_stride,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program
    NOPES: tl.constexpr,  # power of two >= NOPE
    RANKS: tl.constexpr,
    HALF: tl.constexpr,  # power of two >= ROPE / 2
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    half: tl.constexpr = ROPE // 2
    rotary = tl.arange(0, HALF)
    valid = rotary < half
    angle = cos_sin + position * ROPE
    cos = tl.load(angle + rotary, mask=valid, other=0.0)
    sin = tl.load(angle + half + rotary, mask=valid, other=0.0)
    dtype = q_out.dtype.element_ty
    if group == 0:
        slot = tl.load(slots + token)
        if slot >= 0:
            row = latents + token * latent_stride
            target = cache + slot * (RANK + ROPE)  # blocks are contiguous
            dims = tl.arange(0, RANKS)
            mask = dims < RANK
            latent = tl.load(row + dims, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(norm + dims, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(latent * latent, axis=0) / RANK
            normed = latent * tl.rsqrt(mean + eps) * weight
            tl.store(target + dims, normed.to(cache.dtype.element_ty), mask=mask)
            first = tl.load(row + RANK + rotary, mask=valid, other=0.0).to(tl.float32)
            second = tl.load(row + RANK + half + rotary, mask=valid, other=0.0).to(tl.float32)
            rotated = first * cos - second * sin
            tl.store(target + RANK + rotary, rotated.to(cache.dtype.element_ty), mask=valid)
            rotated = second * cos + first * sin
            tl.store(target + RANK + half + rotary, rotated.to(cache.dtype.element_ty), mask=valid)
    else:
        heads = (group - 1) * HEADS + tl.arange(0, HEADS)
        exists = (heads < NUM_HEADS)[:, None]
        source = q + token * q_stride + (heads * (NOPE + ROPE))[:, None]
        into = q_out + ((token * NUM_HEADS + heads) * (NOPE + ROPE))[:, None]
        dims = tl.arange(0, NOPES)
        mask = exists & (dims < NOPE)[None, :]
        tl.store(into + dims[None, :], tl.load(source + dims[None, :], mask=mask), mask=mask)
        mask = exists & valid[None, :]
        at = NOPE + rotary[None, :]
        low = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + half + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(into + at, (low * cos[None, :] - high * sin[None, :]).to(dtype), mask=mask)
        tl.store(into + half + at, (high * cos[None, :] + low * sin[None, :]).to(dtype), mask=mask)


def latent_write(
    q: Tensor,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    """Norm and rotate latents, write them to the cache, and return rotated queries in new memory.

    Arguments are those of `Kernels.latent_write`. A slot of -1 writes no latent.
    """
    num_tokens, num_heads, head_dim = q.shape
    rank, rope = norm.shape[0], cos_sin.shape[1]
    out = q.new_empty(q.shape)
    if not num_tokens:
        return out
    heads = 8
    _latent_write_kernel[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
        q,
        latents,
        norm,
        cos_sin,
        meta.positions,
        meta.slots,
        out,
        cache,
        eps,
        q.stride(0),
        latents.stride(0),
        NUM_HEADS=num_heads,
        NOPE=head_dim - rope,
        RANK=rank,
        ROPE=rope,
        HEADS=heads,
        NOPES=triton.next_power_of_2(head_dim - rope),
        RANKS=triton.next_power_of_2(rank),
        HALF=triton.next_power_of_2(rope // 2),
        num_warps=4,
    )
    return out
