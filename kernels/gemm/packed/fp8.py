"""Products of 8-bit floats on both sides, by torch's scaled product."""

import torch
from torch import Tensor

from kernels.gemm.packed.round_rows import E4M3
from kernels.packed import PackedWeight


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
        and form.group == width
        and form.scale == torch.float32
        and x.dtype == torch.bfloat16
        and outputs % 16 == 0
        and width % 16 == 0
        and x.is_cuda
        and form.rounds(torch.cuda.get_device_capability(x.device))
    )
