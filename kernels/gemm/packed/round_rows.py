"""Rows of x in 8 bits with a scale each, with the norm before it where there is one: what products
take whose weights have 8 bits too."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl

E4M3 = torch.float8_e4m3fn
TOP = {E4M3: 448.0, torch.int8: 127.0}  # the largest number that a row has


@triton.jit
def _round_rows_kernel(
    x,  # [tokens, size]
    norm,  # [size]
    out,  # [tokens, size] e4m3 or int8
    scales,  # [tokens] float32
    eps,
    size,
    NORM: tl.constexpr,
    TOP: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    if NORM:
        weight = tl.load(norm + cols, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + token * size + cols, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / size + eps) * weight.to(tl.float32)
    # Zeros alone have any scale.
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / TOP, 1e-12)
    rounded = tl.minimum(tl.maximum(value / scale, -TOP), TOP)
    if WHOLE:
        # 1.5 * 2^23 leaves no bit for what is behind the point.
        rounded = (rounded + 12582912.0) - 12582912.0
    tl.store(out + token * size + cols, rounded.to(out.dtype.element_ty), mask=mask)
    tl.store(scales + token, scale)


def round_rows(
    x: Tensor, norm: Tensor | None = None, eps: float = 0.0, to: torch.dtype = E4M3
) -> tuple[Tensor, Tensor]:
    """rms_norm(x), or x, of x [tokens, size], with a scale a row: the numbers in `to`, a key of
    TOP, and float32 [tokens, 1], which is the row's largest magnitude / TOP."""
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=to, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _round_rows_kernel[(tokens,)](
        x,
        norm,
        out,
        scales,
        eps,
        size,
        NORM=norm is not None,
        TOP=TOP[to],
        WHOLE=to == torch.int8,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **pdl(x.device),
    )
    return out, scales
