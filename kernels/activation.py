"""Triton kernels of activations: act(x), act(gate) * up of a matmul's halves, x * sigmoid(gate)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl

_BLOCK = 1024  # elements per program
# Name of an activation -> the kernels' constexpr ACT.
CODES = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}


@triton.jit
def _act(x, ACT: tl.constexpr):
    if ACT == 0:
        y = x * tl.sigmoid(x)
    elif ACT == 1:
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == 2:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = tl.maximum(x, 0.0)
        if ACT == 4:
            y = y * y
    return y


@triton.jit
def _gated_kernel(gate_up, out, size, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(gate_up + token * 2 * size + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * size + cols, (_act(gate, ACT) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _plain_kernel(x, out, count, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, _act(value, ACT).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _xielu_kernel(x, parameters, out, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    beta = tl.load(parameters + 2).to(tl.float32)
    eps = tl.load(parameters + 3).to(tl.float32)
    positive = _softplus(tl.load(parameters).to(tl.float32))
    negative = beta + _softplus(tl.load(parameters + 1).to(tl.float32))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    low = tl.minimum(value, eps)
    # expm1(low): near zero exp(low) - 1 cancels, so use the first terms of its Taylor series.
    series = low * (1.0 + low * (0.5 + low * (1.0 / 6.0)))
    expm1 = tl.where(low > -0.01, series, tl.exp(low) - 1.0)
    y = tl.where(value > 0, positive * value * value, (expm1 - value) * negative) + beta * value
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_opened_kernel(
    given,  # [tokens, SIZE]
    x,  # [tokens, HIDDEN]
    gate,  # [HIDDEN]
    residual,  # [tokens, SIZE]
    out,  # [tokens, SIZE]
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `add_opened`; a program computes one token's gate, and multiplies the token's row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in tl.static_range(0, HIDDEN, BLOCK):
        mask = start + column < HIDDEN
        value = tl.load(x + token * HIDDEN + start + column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(gate + start + column, mask=mask, other=0.0).to(tl.float32)
        total += value * weight
    opened = tl.sigmoid(tl.sum(total, axis=0))
    for start in tl.static_range(0, SIZE, BLOCK):
        mask = start + column < SIZE
        at = token * SIZE + start + column
        value = tl.load(given + at, mask=mask, other=0.0).to(tl.float32) * opened
        if ADD:
            value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid_mul_kernel(
    x,  # [tokens, WIDTH]
    gate,  # [tokens, heads, SIZE] with strides ROW, EACH and 1
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    EACH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = gate + token * ROW + column // SIZE * EACH + column % SIZE
    # Round the factor to x's dtype, as torch does when it stores the factor.
    dtype = x.dtype.element_ty
    factor = tl.sigmoid(tl.load(source, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    target = x + token * WIDTH + column
    value = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (value * factor.to(tl.float32)).to(dtype), mask=mask)


def _gated(gate_up: Tensor, name: str) -> Tensor:
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
            ACT=CODES[name],
            BLOCK=block,
            num_warps=max(1, block // 256),
            **pdl(out.device),
        )
    return out


def activation(x: Tensor, name: str) -> Tensor:
    """Return act(x) in a new tensor; names and dtypes are those of `Kernels.activation`."""
    out = torch.empty_like(x)
    count = x.numel()
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        _plain_kernel[grid](x, out, count, ACT=CODES[name], BLOCK=_BLOCK, **pdl(x.device))
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x by sigmoid(gate) in place, as `Kernels.sigmoid_mul` defines; return x.

    gate: [tokens, heads, size], with the elements of a head contiguous.
    """
    tokens, width = x.shape
    if tokens:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _sigmoid_mul_kernel[(tokens, triton.cdiv(width, block))](
            x,
            gate,
            WIDTH=width,
            SIZE=gate.shape[2],
            EACH=gate.stride(1),
            ROW=gate.stride(0),
            BLOCK=block,
            num_warps=max(1, block // 256),
            **pdl(x.device),
        )
    return x


def add_opened(given: Tensor, x: Tensor, gate: Tensor, residual: Tensor | None) -> Tensor:
    """Multiply each row of `given` by its sigmoid(x @ gate.T), a scalar (`Kernels.add_opened`).

    The product is added to residual in place, or overwrites `given` if residual is None. Returns
    the tensor that was written. The result is batch-invariant.
    """
    out = given if residual is None else residual
    tokens, size = given.shape
    if tokens:
        _add_opened_kernel[(tokens,)](
            given,
            x,
            gate,
            residual,
            out,
            HIDDEN=x.shape[1],
            SIZE=size,
            ADD=residual is not None,
            BLOCK=min(2048, triton.next_power_of_2(max(size, x.shape[1]))),
            num_warps=8,
            **pdl(out.device),
        )
    return out


def xielu(x: Tensor, parameters: Tensor) -> Tensor:
    """Return xIELU of x in a new tensor; parameters: see `Kernels.xielu`."""
    out = torch.empty_like(x)
    count = x.numel()
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        _xielu_kernel[grid](x, parameters, out, count, BLOCK=_BLOCK, **pdl(x.device))
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(first half) * second half: [num_tokens, 2 * size] -> [num_tokens, size]."""
    return _gated(gate_up, "silu")


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(first half), in its tanh form, * second half: [n, 2 * size] -> [n, size]."""
    return _gated(gate_up, "gelu_pytorch_tanh")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(first half), exact form with the error function, * second half.

    [num_tokens, 2 * size] -> [num_tokens, size].
    """
    return _gated(gate_up, "gelu")


def relu_mul(gate_up: Tensor) -> Tensor:
    """Return relu(first half) * second half: [num_tokens, 2 * size] -> [num_tokens, size]."""
    return _gated(gate_up, "relu")
