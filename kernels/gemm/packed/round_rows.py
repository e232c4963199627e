"""The quantisation of rows of x to 8 bits, for matmuls with 8-bit weights.

There is a scale per row, or per group of a row's inputs. The preceding norm or gate is fused.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import CODES, _act
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl

E4M3 = torch.float8_e4m3fn
TOP = {E4M3: 448.0, torch.int8: 127.0}  # dtype -> the largest number of a quantised row
_PADDED = 16  # rows of group scales are padded to a multiple of this; cuBLASLt needs 4


@triton.jit
def _round_rows_kernel(
    x,  # [tokens, size]; GATE: [tokens, 2 * size], the gate's half before the up's
    norm,  # [size]
    out,  # [tokens, size] e4m3 or int8
    scales,  # [tokens] float32; GROUP: [size / GROUP, pitch]
    eps,
    pitch,
    size,
    NORM: tl.constexpr,
    GATE: tl.constexpr,  # an ACT of `kernels.activation`, or -1: there is none
    TOP: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: a whole row
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
    if GATE < 0:
        value = tl.load(x + token * size + cols, mask=mask, other=0.0).to(tl.float32)
    else:
        gate_at = x + token * 2 * size + cols
        gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_at + size, mask=mask, other=0.0).to(tl.float32)
        # Round to x's dtype like the separate activation kernel, so that both give equal numbers.
        value = (_act(gate, GATE) * up).to(x.dtype.element_ty).to(tl.float32)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / size + eps) * weight.to(tl.float32)
    # A row of zeros may have any scale.
    if GROUP == 0:
        scale = tl.maximum(tl.max(tl.abs(value), axis=0) / TOP, 1e-12)
        tl.store(scales + token, scale)
        rounded = value / scale
    else:
        GROUPS: tl.constexpr = BLOCK // GROUP
        parts = tl.reshape(value, (GROUPS, GROUP))
        scale = tl.maximum(tl.max(tl.abs(parts), axis=1) / TOP, 1e-12)
        group = tl.arange(0, GROUPS)
        tl.store(scales + group * pitch + token, scale, mask=group * GROUP < size)
        rounded = tl.reshape(parts / scale[:, None], (BLOCK,))
    rounded = tl.minimum(tl.maximum(rounded, -TOP), TOP)
    if WHOLE:
        # Round to an integer: at 1.5 * 2^23 a float32 has no fraction bits.
        rounded = (rounded + 12582912.0) - 12582912.0
    tl.store(out + token * size + cols, rounded.to(out.dtype.element_ty), mask=mask)


def round_rows(
    x: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    to: torch.dtype = E4M3,
    gate: str | None = None,
    group: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantise x, optionally normed or gated first, to 8 bits.

    Returns (numbers [tokens, size], float32 scales). A scale is the largest magnitude / TOP.

    x: [tokens, size], or with a gate [tokens, 2 * size].
    to: dtype of the numbers, a key of TOP.
    gate: a key of `Kernels.GATES`; not together with a norm.
    group: inputs that share a scale, a power of two that divides size; 0 = a whole row. Scales are
        [tokens, 1] for rows, [tokens, size / group] for groups, contiguous along the tokens. With
        groups both results are padded to a multiple of 16 rows; padding rows are undefined.
    """
    assert norm is None or gate is None
    tokens, size = x.shape
    if gate is not None:
        size //= 2
    assert not group or size % group == 0
    count, pitch = (size // group, -(-tokens // _PADDED) * _PADDED) if group else (1, tokens)
    out = torch.empty(pitch, size, dtype=to, device=x.device)
    scales = torch.empty(count, pitch, dtype=torch.float32, device=x.device).t()
    block = triton.next_power_of_2(size)
    _round_rows_kernel[(tokens,)](
        x,
        norm,
        out,
        scales,
        eps,
        # unused without groups; a constant avoids kernels for each divisibility of `tokens`
        pitch if group else 0,
        size,
        NORM=norm is not None,
        GATE=-1 if gate is None else CODES[gate],
        TOP=TOP[to],
        WHOLE=to == torch.int8,
        GROUP=group,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **pdl(x.device),
    )
    return out, scales
