"""RMS norm, gated norm and layer norm as Triton kernels: float32, one program per row or group."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl


@triton.jit
def _rms_norm_kernel(
    x, weight, out, eps, size, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * size
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    scale = tl.load(weight + cols, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row + cols, mask=mask, other=0.0).to(tl.float32)
    rms = tl.sqrt(tl.sum(value * value, axis=0) / size + eps)
    normed = (value / rms * scale.to(tl.float32)).to(out.dtype.element_ty)
    if ADD:
        before = tl.load(out + row + cols, mask=mask, other=0.0).to(tl.float32)
        normed = (before + normed.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row + cols, normed, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, add_to: Tensor | None = None) -> Tensor:
    """Return x / rms(x) * weight over the last axis of x, rounded to x's dtype.

    x: [..., size].
    add_to: a tensor of x's shape and dtype, to which the result is added in place.
    """
    out = torch.empty_like(x) if add_to is None else add_to
    size = x.shape[-1]
    rows = x.numel() // size
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm_kernel[(rows,)](
            x,
            weight,
            out,
            eps,
            size,
            ADD=add_to is not None,
            BLOCK=block,
            # 16 bytes (8 elements) per thread: a single row needs as many warps as possible.
            num_warps=max(1, min(16, block // 256)),
            **pdl(x.device),
        )
    return out


@triton.jit(do_not_specialize=["gate_stride"])
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    eps,
    gate_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    GATE_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    cols += tl.program_id(1) * SIZE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + token * GROUPS * SIZE + cols, mask=mask, other=0.0)
    by = tl.load(gate + token * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    by *= tl.sigmoid(by)
    if not GATE_LAST:
        value *= by
    if NORM:
        value = value / tl.sqrt(tl.sum(value * value, axis=0) / SIZE + eps)
        value *= tl.load(weight + cols, mask=mask, other=0.0)
    if GATE_LAST:
        value *= by
    tl.store(out + token * GROUPS * SIZE + cols, value.to(out.dtype.element_ty), mask=mask)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    groups: int,
    eps: float,
    gate_last: bool = False,
) -> Tensor:
    """Return the gated RMS norm of each of `groups` equal parts of a row, in gate's dtype.

    Arguments are those of `Kernels.gated_norm`.
    """
    rows, inner = x.shape
    size = inner // groups
    out = gate.new_empty(x.shape)
    if rows:
        block = triton.next_power_of_2(size)
        _gated_norm_kernel[(rows, groups)](
            x,
            gate,
            x if weight is None else weight,
            out,
            eps,
            gate.stride(0),
            GROUPS=groups,
            SIZE=size,
            NORM=weight is not None,
            GATE_LAST=gate_last,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
            **pdl(x.device),
        )
    return out


@triton.jit
def _layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    eps,
    size,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row + cols, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, value - tl.sum(value, axis=0) / size, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    if WEIGHT:
        y *= tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + cols, y.to(out.dtype.element_ty), mask=mask)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axis of x."""
    out = torch.empty_like(x)
    size = x.shape[-1]
    rows = x.numel() // size
    if rows:
        block = triton.next_power_of_2(size)
        _layer_norm_kernel[(rows,)](
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            out,
            eps,
            size,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
            **pdl(x.device),
        )
    return out
