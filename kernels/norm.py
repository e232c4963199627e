"""RMS norm, alone and after a residual add: one program a row, arithmetic in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.pdl import gdc_launch_dependents, gdc_wait, pdl


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, eps, size, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * size
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    scale = tl.load(weight + cols, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row + cols, mask=mask, other=0.0)
    if ADD:
        old = tl.load(residual + row + cols, mask=mask, other=0.0)
        # Round the sum before the norm reads it: what the next layer adds to is what was normed.
        value = (value.to(tl.float32) + old.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + row + cols, value, mask=mask)
    value = value.to(tl.float32)
    rms = tl.sqrt(tl.sum(value * value, axis=0) / size + eps)
    normed = value / rms * scale.to(tl.float32)
    tl.store(out + row + cols, normed.to(out.dtype.element_ty), mask=mask)


def _num_warps(block: int) -> int:
    # 16 bytes a thread (8 elements): a lone row wants every warp it can get.
    return max(1, min(16, block // 256))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis of x [..., size]; a new tensor of x's dtype."""
    out = torch.empty_like(x)
    size = x.shape[-1]
    rows = x.numel() // size
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm_kernel[(rows,)](
            x,
            x,
            weight,
            out,
            eps,
            size,
            ADD=False,
            BLOCK=block,
            num_warps=_num_warps(block),
            **pdl(x.device),
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), written over x and over residual."""
    size = x.shape[-1]
    rows = x.numel() // size
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            x,
            eps,
            size,
            ADD=True,
            BLOCK=block,
            num_warps=_num_warps(block),
            **pdl(x.device),
        )
    return x, residual
