"""Linear layers on the CPU: packed once, multiplied with float32 activations.

A library's products re-order the weight on every call. `kernels.cpu.gemm.dense` comes first. Where
it cannot run, FBGEMM reads 16-bit weights, packed as float16, and computes in float32 too; a
bfloat16 weight fits float16 exactly unless it is below 6e-5, where it keeps an absolute error of
3e-8.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import CompilerUnavailable
from kernels.cpu.gemm.dense import PackedLinear

Packed = Callable[[Tensor], Tensor]
FLOAT16_MAX = 65504.0


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear | Packed | None:
    """Pack weight [out, in] into a function float32 [n, in] -> float32 [n, out].

    None where this build or machine has nothing better than torch.nn.functional.linear, or where
    the weight does not fit.
    """
    if PackedLinear.fits(*weight.shape):
        try:
            return PackedLinear(weight, bias)
        except CompilerUnavailable:
            pass
    if weight.dtype == torch.float32 or not _has_fbgemm():
        return None
    if float(weight.abs().max()) > FLOAT16_MAX:
        return None
    packed = torch.ops.quantized.linear_prepack_fp16(
        weight.float(), None if bias is None else bias.float()
    )
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: multiply(x, packed)


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines
