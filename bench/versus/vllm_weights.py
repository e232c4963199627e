"""Random weights for vLLM with which a step has as much work as in Manta.

vLLM's random weights (`--load-format dummy`) are between -0.001 and 0.001, including norms and
biases, and equal in all layers. Quantised codes are zeros or uninitialised. A router with a bias
(gpt-oss) then gives every token the same few experts, since the bias is a hundred times the GEMM's
output. So a step reads 4 of 32 experts, while a real model and Manta's random one read nearly all.
"""

from typing import Any

import torch
from torch import Tensor, nn

STD = 0.02  # standard deviation of a matrix, as in `engine.weights.parameter.Parameter.std`
NOTE = "normal(0, 0.02), weights of norms 1, biases 0, codes of all values, drawn for each layer"
WORKER = "bench.versus.vllm_worker.Worker"

_SCALES = ("weight_scale", "weight_scale_inv")
_ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2)
# Dtype of stored codes -> root mean square of random codes: MXFP4, 8-bit and 4-bit integers.
_SIZES = {torch.uint8: 2.93, torch.int8: 73.9, torch.int32: 4.64}


def check_drawn(llm: Any) -> None:
    """Check that this module has drawn almost all of vLLM's weights. Raises RuntimeError if not.

    llm: must have been constructed with WORKER.
    """
    for drawn, numbers in llm.collective_rpc("count_drawn"):
        if drawn < 0.99 * numbers or not drawn:
            raise RuntimeError(f"vLLM has {drawn} of {numbers} weights as they were asked for")


@torch.no_grad()
def draw(model: nn.Module) -> tuple[int, int]:
    """Draw a model's weights, biases and scales in place.

    Returns (count of drawn numbers, count of all parameters' numbers). It must be called after vLLM
    has filled all modules, as filling a module fills its submodules again.
    """
    drawn = numbers = 0
    for module in model.modules():
        mine = dict(module.named_parameters(recurse=False))
        for name, parameter in mine.items():
            numbers += parameter.numel()
            if not parameter.is_meta and _draw(name, parameter.data, mine):
                drawn += parameter.numel()
    return drawn, numbers


def _draw(name: str, tensor: Tensor, beside: dict[str, nn.Parameter]) -> bool:
    """Draw one parameter; return False if it was not changed.

    beside: the module's other parameters.
    """
    if name.endswith("bias"):
        tensor.zero_()
    elif name.endswith(_SCALES):
        tensor.fill_(_scale(tensor.dtype, _codes(name, beside)))
    elif not name.endswith(("weight", "weight_packed")):
        return False
    elif tensor.dtype in _ONE_BYTE:
        tensor.copy_(torch.randn(tensor.shape, dtype=torch.bfloat16, device=tensor.device))
    elif not tensor.is_floating_point():
        tensor.view(torch.uint8).random_(0, 256)
    elif tensor.ndim == 1:
        tensor.fill_(1.0)
    else:
        tensor.normal_(0.0, STD)
    return True


def _codes(name: str, beside: dict[str, nn.Parameter]) -> torch.dtype | None:
    """Return the dtype of the weight that a scale belongs to; None without one."""
    stem = name[: name.rindex("weight") + len("weight")]
    kind = beside.get(stem, beside.get(f"{stem}_packed"))
    return None if kind is None else kind.dtype


def _scale(dtype: torch.dtype, codes: torch.dtype | None) -> float:
    """Return the scale for which dequantised weights have about standard deviation STD.

    For scales that are exponents it is the nearest power of two.
    """
    wanted = STD if codes is None else STD / _SIZES.get(codes, 1.0)
    return wanted if dtype.is_floating_point else 127 + round(torch.tensor(wanted).log2().item())
