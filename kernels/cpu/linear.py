"""Linear layers with 16-bit weights on the CPU: packed once, multiplied with float32 activations.

Plain bf16 products re-order the weight on every call, and without AMX the bf16 dot product of x86
is slower than float32 arithmetic from some ten rows on. `kernels.cpu.gemm` comes first; where it
cannot run, FBGEMM reads packed float16 weights and computes in float32 too; a bfloat16 weight fits
float16 exactly unless it is below 6e-5, where it keeps an absolute error of 3e-8.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import CompilerUnavailable
from kernels.cpu.gemm import PackedLinear

Packed = Callable[[Tensor], Tensor]
FLOAT16_MAX = 65504.0


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear | Packed | None:
    """weight [out, in] -> a function float32 [n, in] -> float32 [n, out].

    None where this build or machine has nothing better than torch.nn.functional.linear, or where
    the weight does not fit.
    """
    if weight.dtype == torch.float32:
        return None
    try:
        if weight.dtype in (torch.bfloat16, torch.float16) and PackedLinear.fits(*weight.shape):
            return PackedLinear(weight, bias)
    except CompilerUnavailable:
        pass
    if not _has_fbgemm() or float(weight.abs().max()) > FLOAT16_MAX:
        return None
    packed = torch.ops.quantized.linear_prepack_fp16(
        weight.float(), None if bias is None else bias.float()
    )
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: multiply(x, packed)


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines
