"""Matmuls of a single token (GEMV), fused with norm, gate or residual: weights are read once.

    y = W x                      plain
    y = W (x / rms(x) * w)       NORM: 1 / rms(x) multiplies the finished sum
    y = act(Wg x) * (Wu x)       GATED: W has the gate's rows, then the up projection's
    y = W x + r                  ADD

A program computes a few outputs over all columns, so no second kernel has to merge results. With
programmatic dependent launch, a program loads its first weights before the previous kernel has
ended; only loads of x wait for the previous kernel.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl


class Fused(NamedTuple):
    """The operations that are fused with a GEMV, as one `tl.constexpr`."""

    norm: bool  # an RMS norm of x
    gated: bool  # act(gate) * up of gate and up rows
    gelu: bool  # the tanh form of GELU, else SiLU
    add: bool  # a residual
    bias: bool


def fused(
    norm: Tensor | None, gate: str | None, residual: Tensor | None, bias: Tensor | None
) -> Fused:
    """Return the operations that a launch fuses: those whose argument is not None.

    gate: a value of GATES, or None.
    """
    return Fused(
        norm=norm is not None,
        gated=gate is not None,
        gelu=gate == "gelu_pytorch_tanh",
        add=residual is not None,
        bias=bias is not None,
    )


@triton.jit
def gated(y, ROWS: tl.constexpr, GELU: tl.constexpr):
    """Return act(gate) * up, [ROWS / 2], for y [ROWS] in which gates and ups alternate."""
    gate, up = tl.split(tl.reshape(y, (ROWS // 2, 2)))
    if GELU:
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3)
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    return gate * up


@triton.jit
def _elements(words, TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the elements of int32 words as float32 [ROWS, COLUMNS].

    words: [ROWS, COLUMNS / 2] of a 16-bit TYPE, or [ROWS, COLUMNS] of float32.

    Prefetched weights are held as words. Triton 3.8 would keep each 16-bit element in a register of
    its own: 167 registers instead of 128, and 1.19 times the time for 6,144 rows.
    """
    if TYPE.primitive_bitwidth == 32:
        return words.to(TYPE, bitcast=True)
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    return tl.reshape(both, (ROWS, COLUMNS)).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _gemv_kernel(
    x,  # [columns]
    weight,  # [rows, columns]; GATED: [2 * rows, columns]
    bias,
    norm,  # [columns]
    residual,  # [rows]
    out,  # [rows]
    eps,
    rows,
    columns,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # rows of W per program; GATED: gate and up rows alternate
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # whether tiles divide the rows and the columns
    PDL: tl.constexpr,
):
    index = tl.arange(0, ROWS)
    if GATED:
        mine = tl.program_id(0) * (ROWS // 2) + index // 2
        source = mine + (index % 2) * rows
    else:
        mine = tl.program_id(0) * ROWS + index
        source = mine
    row_mask = mine < rows
    column = tl.arange(0, COLUMNS)
    PER: tl.constexpr = 32 // weight.dtype.element_ty.primitive_bitwidth
    word = tl.arange(0, COLUMNS // PER)
    at = (
        weight.to(tl.pointer_type(tl.int32))
        + source.to(tl.int64)[:, None] * (columns // PER)
        + word[None, :]
    )
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)

    # The first tile of weights depends on no earlier kernel, so load it before gdc_wait.
    if EVEN:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        first_mask = row_mask[:, None] & (PER * word < columns)[None, :]
        w = tl.load(at, mask=first_mask, other=0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, columns, COLUMNS):
        here = start + column
        if EVEN:
            value = tl.load(x + here).to(tl.float32)
        else:
            value = tl.load(x + here, mask=here < columns, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            if EVEN:
                value *= tl.load(norm + here).to(tl.float32)
            else:
                value *= tl.load(norm + here, mask=here < columns, other=0.0).to(tl.float32)
        at += COLUMNS // PER
        if EVEN:
            ahead = tl.load(at, mask=start + COLUMNS < columns, eviction_policy="evict_first")
        else:
            there = start + COLUMNS + PER * word
            ahead_mask = row_mask[:, None] & (there < columns)[None, :]
            ahead = tl.load(at, mask=ahead_mask, other=0, eviction_policy="evict_first")
        acc += _elements(w, weight.dtype.element_ty, ROWS, COLUMNS) * value[None, :]
        w = ahead

    y = tl.sum(acc, axis=1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / columns + eps)
    if BIAS:
        y += tl.load(bias + source, mask=row_mask, other=0.0).to(tl.float32)
    if GATED:
        y = gated(y, ROWS, GELU)
        outs = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        outs = mine
    out_mask = outs < rows
    if ADD:
        y += tl.load(residual + outs, mask=out_mask, other=0.0).to(tl.float32)
    tl.store(out + outs, y.to(out.dtype.element_ty), mask=out_mask)


# (rows of W, columns) -> (ROWS, COLUMNS, warps), the fastest in a sweep on one H200. Some were
# timed in a whole step. COLUMNS is smaller where 1,024 does not divide the columns.
TILES = {
    (6144, 4096): (16, 512, 4),
    (4096, 4096): (2, 1024, 1),
    (28672, 4096): (2, 1024, 2),
    (4096, 14336): (2, 1024, 1),
    (128256, 4096): (2, 2048, 4),
    (4096, 1024): (2, 512, 1),
    (1024, 2048): (4, 2048, 4),
    (6144, 1024): (4, 512, 1),
    (1024, 3072): (2, 2048, 2),
    (151936, 1024): (4, 512, 1),
    # Qwen3-30B-A3B
    (5120, 2048): (8, 512, 4),
    (2048, 4096): (2, 2048, 2),
    # gpt-oss-20b
    (5120, 2880): (8, 512, 4),
    (2880, 4096): (2, 4096, 4),
    (201088, 2880): (2, 1024, 2),
    # Gemma 3 12B
    (8192, 3840): (8, 256, 4),
    (3840, 4096): (2, 1024, 1),
    (30720, 3840): (8, 256, 2),
    (3840, 15360): (2, 1024, 1),
}


GATES = ("silu", "gelu_pytorch_tanh")  # the gates that the kernel fuses


def tile(rows: int, columns: int) -> tuple[int, int, int]:
    launch = TILES.get((rows, columns))
    if launch is not None:
        return launch
    if rows < 4096:
        return 2, 2048, 4
    return (2, 1024, 1) if columns >= 2048 else (4, 512, 1)


def gemv(
    x: Tensor,  # [1, in]
    weight: Tensor,  # [out, in]; with a gate [2 * out, in]
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,  # [in]
    eps: float = 0.0,
    gate: str | None = None,  # a key of GATES
    residual: Tensor | None = None,  # [1, out]
    config: tuple[int, int, int] | None = None,
) -> Tensor:
    """Return x @ weight.T + bias for a single token, with a fused norm, gate or residual.

    Returns [1, out] in x's dtype, accumulated in float32.
    """
    rows, columns = weight.shape
    num_rows, num_columns, warps = config or tile(rows, columns)
    outs = rows // 2 if gate else rows
    per_program = num_rows // 2 if gate else num_rows
    out = x.new_empty((1, outs))
    _gemv_kernel[(triton.cdiv(outs, per_program),)](
        x,
        weight,
        bias,
        norm,
        residual,
        out,
        eps,
        outs,
        columns,
        NORM=norm is not None,
        GATED=gate is not None,
        GELU=gate == "gelu_pytorch_tanh",
        ADD=residual is not None,
        BIAS=bias is not None,
        ROWS=num_rows,
        COLUMNS=num_columns,
        EVEN=columns % num_columns == 0 and outs % per_program == 0,
        num_warps=warps,
        **pdl(x.device),
    )
    return out


def fits(x: Tensor) -> bool:
    """Whether x is one token of a 16-bit type, for which `gemv` is faster than cuBLAS."""
    return x.shape[0] == 1 and x.dtype in (torch.bfloat16, torch.float16)
