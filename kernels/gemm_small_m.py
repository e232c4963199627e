"""x @ weight.T for a few rows of x: weights streamed once, at the speed of memory.

A program takes a few rows of the weight and multiplies on the plain units, which keep up with memory for up to four
rows of x. The next tile's weights are on their way while this one's are used, and the first tile's before the kernel
that makes x has ended. From eight rows on the library's matrix products are as fast (see `kernels.bench`).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.pdl import gdc_launch_dependents, gdc_wait, pdl

MAX_ROWS = 4


@triton.jit
def _finish(
    acc, bias, out, rows, OUT: tl.constexpr, TOKEN: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    total = tl.sum(acc, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    tl.store(out + TOKEN * OUT + rows, total.to(out.dtype.element_ty), mask=rows < OUT)


@triton.jit
def _few_rows_kernel(
    x,
    weight,
    bias,
    out,
    TOKENS: tl.constexpr,  # rows of x, 1 .. 4
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    at = weight + rows.to(tl.int64)[:, None] * IN + cols[None, :]
    exists = (rows < OUT)[:, None] & (cols < IN)[None, :]
    # Each weight is used once: leave the caches to the activations.
    ahead = tl.load(at, mask=exists, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc0 = tl.zeros([ROWS, COLS], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for start in range(0, IN, COLS):
        tile = ahead.to(tl.float32)
        exists = (rows < OUT)[:, None] & (start + COLS + cols < IN)[None, :]
        ahead = tl.load(at + start + COLS, mask=exists, other=0.0, eviction_policy="evict_first")
        here = start + cols < IN
        x_at = x + start + cols
        acc0 += tile * tl.load(x_at, mask=here, other=0.0).to(tl.float32)[None, :]
        if TOKENS > 1:
            acc1 += tile * tl.load(x_at + IN, mask=here, other=0.0).to(tl.float32)[None, :]
        if TOKENS > 2:
            acc2 += tile * tl.load(x_at + 2 * IN, mask=here, other=0.0).to(tl.float32)[None, :]
        if TOKENS > 3:
            acc3 += tile * tl.load(x_at + 3 * IN, mask=here, other=0.0).to(tl.float32)[None, :]
    _finish(acc0, bias, out, rows, OUT, 0, HAS_BIAS)
    if TOKENS > 1:
        _finish(acc1, bias, out, rows, OUT, 1, HAS_BIAS)
    if TOKENS > 2:
        _finish(acc2, bias, out, rows, OUT, 2, HAS_BIAS)
    if TOKENS > 3:
        _finish(acc3, bias, out, rows, OUT, 3, HAS_BIAS)


class _Shape(NamedTuple):
    rows: int  # of the weight, a program
    cols: int  # a tile
    num_warps: int


def _shape(tokens: int, width: int) -> _Shape:
    """Decision rule from `python -m kernels.bench` (llama-8b and qwen3-0.6b shapes)."""
    if width < 2048:
        return _Shape(4, 512, 2)
    return _Shape(2, 2048, 4)


def takes_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows` is made for these: up to four rows, a contiguous 16-bit weight."""
    return (
        x.dim() == 2
        and 1 <= x.shape[0] <= MAX_ROWS
        and weight.element_size() == 2
        and weight.is_contiguous()
    )


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [1 .. 4, in] @ weight [out, in].T + bias."""
    tokens = x.shape[0]
    size, width = weight.shape
    shape = _shape(tokens, width)
    out = x.new_empty((tokens, size))
    _few_rows_kernel[(triton.cdiv(size, shape.rows),)](
        x.contiguous(),
        weight,
        x if bias is None else bias,
        out,
        TOKENS=tokens,
        OUT=size,
        IN=width,
        HAS_BIAS=bias is not None,
        ROWS=shape.rows,
        COLS=shape.cols,
        num_warps=shape.num_warps,
        **pdl(x.device),
    )
    return out
