"""Linear layers on the CPU: weights are packed once, and multiplied with float32 activations.

Library matmuls reorder the weight on every call. So `kernels.cpu.gemm.dense` is tried first. If it
does not support the machine or weight, FBGEMM reads 16-bit weights, packed as float16, and computes
in float32. A bfloat16 weight is exact in float16 unless its magnitude is below 6e-5; then the
absolute error is up to 3e-8.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.codegen.processor import CompilerUnavailable
from kernels.cpu.gemm.dense import PackedLinear

Packed = Callable[[Tensor], Tensor]
FLOAT16_MAX = 65504.0


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear | Packed | None:
    """Pack weight [out, in] into a function from float32 [n, in] to float32 [n, out].

    Returns None if no function supports the weight and is faster than torch.nn.functional.linear.
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
