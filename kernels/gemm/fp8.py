"""Products of 8-bit floats on both sides, by torch's scaled product: x is rounded row by row, with
the norm before it where there is one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.packed import PackedWeight
from kernels.pdl import gdc_launch_dependents, gdc_wait, pdl

E4M3 = torch.float8_e4m3fn
MAX = 448.0  # the largest e4m3 number


@triton.jit
def _round_rows_kernel(
    x,  # [tokens, size]
    norm,  # [size]
    out,  # [tokens, size] e4m3
    scales,  # [tokens] float32
    eps,
    size,
    NORM: tl.constexpr,
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
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / 448.0, 1e-12)
    rounded = tl.minimum(tl.maximum(value / scale, -448.0), 448.0)
    tl.store(out + token * size + cols, rounded.to(tl.float8e4nv), mask=mask)
    tl.store(scales + token, scale)


def round_rows(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """rms_norm(x), or x, of x [tokens, size], in e4m3 with a scale a row: the numbers, and float32
    [tokens, 1], which is the row's largest magnitude / 448."""
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=E4M3, device=x.device)
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
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **pdl(x.device),
    )
    return out, scales


def scaled(rows: Tensor, scales: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """(rows * scales) @ weight.T + bias: [tokens, out] in dtype. rows, scales: of `round_rows`."""
    return torch._scaled_mm(
        rows,
        weight.codes.view(E4M3).t(),
        scale_a=scales,
        scale_b=weight.scale.view(1, -1),
        bias=weight.bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def scales_fit(x: Tensor, weight: PackedWeight) -> bool:
    """Whether `scaled` is made for these: torch's product with scales of rows and outputs takes
    bfloat16, sizes of multiples of 16 and a device of compute capability 9.0."""
    form, (outputs, width) = weight.form, weight.shape
    return (
        form.code == "e4m3"
        and form.rows == 1
        and form.group == width
        and form.scale == torch.float32
        and x.dtype == torch.bfloat16
        and outputs % 16 == 0
        and width % 16 == 0
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )
