"""The functions of `kernels.gemm.packed.candidates`: for each kernel, NAME launches it, and
NAME_fits returns whether it supports a call.

Each function takes x [tokens, in], the weight [out, in] and the operations around the GEMM. A back
end passes only the operations that the candidate fuses.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.gemm import cublaslt
from kernels.gemm.deterministic import linear_fixed
from kernels.gemm.gemv import GATES, fits
from kernels.gemm.packed import blocks as blocks_module
from kernels.gemm.packed import candidates
from kernels.gemm.packed import fp8 as fp8_module
from kernels.gemm.packed import gemv4 as gemv4_module
from kernels.gemm.packed import gemv8 as gemv8_module
from kernels.gemm.packed import int8 as int8_module
from kernels.gemm.packed import mma4 as mma4_module
from kernels.gemm.packed.candidates import LinearCall
from kernels.gemm.packed.dot import expand, packed_dot
from kernels.gemm.packed.few import few_fits as few_tokens_fit
from kernels.gemm.packed.few import packed_few
from kernels.gemm.packed.gemv import packed_gemv
from kernels.gemm.packed.round_rows import E4M3, round_rows
from kernels.packed import PackedWeight


def _rounds(x: Tensor, weight: PackedWeight) -> bool:
    return x.shape[0] >= weight.form.rounded_rows


def _gate_fits(call: LinearCall) -> bool:
    return call.gate is None or call.gate in GATES


def fp8_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    if not (_rounds(x, weight) and fp8_module.scales_fit(x, weight)):
        return False
    return not blocks_module.fits(x, weight) or fp8_module.pays(x.shape[0], weight)


def fp8(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    group = fp8_module.group_of(weight)
    rows = round_rows(x, call.norm, call.eps, E4M3, call.x_gate, group)
    return fp8_module.scaled(*rows, weight, x.dtype)[: x.shape[0]]


def fp8_blocks_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return _rounds(x, weight) and blocks_module.fits(x, weight)


def fp8_blocks(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    group = fp8_module.group_of(weight)
    rows = round_rows(x, call.norm, call.eps, E4M3, call.x_gate, group)
    return blocks_module.block_linear(*rows, weight, x.shape[0], x.dtype, call.residual)


def int8_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return _rounds(x, weight) and int8_module.fits(weight, x)


def int8(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    rows = round_rows(x, call.norm, call.eps, torch.int8, call.x_gate)
    return int8_module.int8_linear(*rows, weight, x.dtype, call.residual)


def mma4_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return mma4_module.mma4_fits(x, weight)


def mma4(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    return mma4_module.mma4(x, weight, gate=call.gate, residual=call.residual)


def gemv8_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return _gate_fits(call) and gemv8_module.gemv8_fits(x, weight, call.norm)


def gemv8(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    return gemv8_module.gemv8(x, weight, **_around(call))


def gemv4_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    # With offsets `gemv4` is not faster than `packed_few`.
    alone = weight.offset is None or not few_tokens_fit(x, weight)
    return alone and _gate_fits(call) and gemv4_module.gemv4_fits(x, weight, call.norm)


def gemv4(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    return gemv4_module.gemv4(x, weight, **_around(call))


def few_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return few_tokens_fit(x, weight)


def few(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    return packed_few(x, weight, call.residual)


def gemv_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return fits(x) and _gate_fits(call)


def gemv(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    return packed_gemv(x, weight, **_around(call))


def _around(call: LinearCall) -> dict[str, Any]:
    """Return a call's norm, eps, gate and residual as keyword arguments of a GEMV."""
    return {"norm": call.norm, "eps": call.eps, "gate": call.gate, "residual": call.residual}


def dot_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return x.shape[0] <= candidates.DECODED_TOKENS


def dot(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    return packed_dot(x, weight, call.residual)


def dequantise_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return True


def dequantise(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    dense, residual = expand(weight, x), call.residual
    if residual is None:
        return cublaslt.linear(x, dense, weight.bias)
    if weight.bias is not None:
        residual += weight.bias
    return cublaslt.linear_add_(x, dense, residual)


def int8_fixed_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return int8_module.fits(weight, x)


def int8_fixed(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    rows = round_rows(x, call.norm, call.eps, torch.int8, call.x_gate)
    fixed = int8_module.FIXED
    return int8_module.int8_linear(*rows, weight, x.dtype, call.residual, fixed, split=1)


def dequantise_fixed_fits(x: Tensor, weight: PackedWeight, call: LinearCall) -> bool:
    return True


def dequantise_fixed(x: Tensor, weight: PackedWeight, call: LinearCall) -> Tensor:
    return linear_fixed(x, expand(weight, x), weight.bias, call.residual)
