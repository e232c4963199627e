"""Matmuls whose operands are both 8-bit floats, by torch's scaled matmul."""

import torch
import triton
from torch import Tensor

from kernels.gemm.packed.round_rows import E4M3
from kernels.launch.device import compute_capability
from kernels.launch.pdl import num_sms
from kernels.packed import PackedWeight

_BLOCKS = (12, 9)  # CUDA's first release whose cuBLASLt supports block scales
_FOUR = 4  # cuBLASLt reads block scales in multiples of this along a row or column
_TILE = 128  # outputs, and rows of x, in a tile of cuBLASLt's matmul with block scales


def scaled(rows: Tensor, scales: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return (rows * scales) @ weight.T + bias: [rows, out] in dtype.

    rows, scales: the results of `round_rows` with `group_of(weight)`, including padding rows, which
        the result has, too.
    """
    blocks = weight.form.rows > 1
    return torch._scaled_mm(
        rows,
        weight.codes.view(E4M3).t(),
        scale_a=scales,
        scale_b=weight.scale.t() if blocks else weight.scale.view(1, -1),
        bias=weight.bias,
        out_dtype=dtype,
        use_fast_accum=not blocks,
    )


def pays(tokens: int, weight: PackedWeight) -> bool:
    """Whether `scaled` is faster than `blocks.block_linear` for weights with block scales.

    `scaled` does not split the columns over programs, and always computes whole tiles of rows.
    """
    tiles = triton.cdiv(tokens, _TILE) * triton.cdiv(weight.shape[0], _TILE)
    return 2 * tokens > _TILE and 4 * tiles > num_sms(weight.codes.device)


def group_of(weight: PackedWeight) -> int:
    """Return the number of inputs of x that share a scale, for `round_rows`; 0: a whole row."""
    return weight.form.group if weight.form.rows > 1 else 0


def scales_fit(x: Tensor, weight: PackedWeight) -> bool:
    """Whether torch's scaled matmul, as `scaled` calls it, supports x and the weight.

    x must be bfloat16 on compute capability 9.0. One of two kinds of scales is supported. With a
    scale per row of x and per output, sizes must be multiples of 16. With a scale per 128 inputs of
    a row of x and per block of 128 x 128 weights, blocks must be whole, and there must be no bias.
    """
    form, (outputs, width) = weight.form, weight.shape
    if form.code != "e4m3" or form.scale != torch.float32 or x.dtype != torch.bfloat16:
        return False
    if form.rows == 1:
        sizes = form.group == width and outputs % 16 == 0 and width % 16 == 0
    else:
        sizes = outputs % form.rows == 0 and width % (_FOUR * form.group) == 0
        sizes = sizes and weight.bias is None and _has_blocks()
    return sizes and x.is_cuda and form.rounds(compute_capability(x.device))


def _has_blocks() -> bool:
    major, _, minor = (torch.version.cuda or "0.0").partition(".")
    return (int(major), int(minor)) >= _BLOCKS
