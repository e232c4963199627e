"""Gated activations: act(gate) * up, the halves of one matrix product's output."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.pdl import gdc_launch_dependents, gdc_wait, pdl


@triton.jit
def _gated_kernel(gate_up, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(gate_up + token * 2 * size + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + cols, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3)
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        act = gate * tl.sigmoid(gate)
    tl.store(out + token * size + cols, (act * up).to(out.dtype.element_ty), mask=mask)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    tokens = out.numel() // size
    if tokens:
        block = min(1024, triton.next_power_of_2(size))
        grid = (tokens, triton.cdiv(size, block))
        _gated_kernel[grid](
            gate_up,
            out,
            size,
            GELU=gelu,
            BLOCK=block,
            num_warps=max(1, block // 256),
            **pdl(out.device),
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]: silu(first half) * second half."""
    return _gated(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]: gelu(first half), tanh form, * second half."""
    return _gated(gate_up, gelu=True)
