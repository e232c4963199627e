"""Matmuls x @ weight.T of two to four rows of x, which read the weights once.

A program computes a few outputs, without tensor cores. For two rows of x this is limited only by
memory bandwidth, as it is for four rows of small weights. The next tile's weights are loaded while
the current tile is multiplied, and the first tile's before the kernel that computes x has ended.
For one row `gemv.py` fuses more operations; from eight rows on, cuBLAS is equally fast.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl

MAX_ROWS = 4
SMALL = 2**23  # maximum elements of a weight for which three or four rows are faster than cuBLAS
MEDIUM = 2**26  # maximum elements of a weight for which two rows are faster than cuBLAS


@triton.jit
def _finish(
    acc, bias, residual, out, rows,
    OUT: tl.constexpr, TOKEN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    total = tl.sum(acc, axis=1)
    if BIAS:
        total += tl.load(bias + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + TOKEN * OUT + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    tl.store(out + TOKEN * OUT + rows, total.to(out.dtype.element_ty), mask=rows < OUT)


@triton.jit
def _few_rows_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    TOKENS: tl.constexpr,  # rows of x, 1 .. 4
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    at = weight + rows.to(tl.int64)[:, None] * IN + cols[None, :]
    exists = (rows < OUT)[:, None] & (cols < IN)[None, :]
    # Each weight is used once, so it need not stay in the cache.
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
    _finish(acc0, bias, residual, out, rows, OUT, 0, BIAS, ADD)
    if TOKENS > 1:
        _finish(acc1, bias, residual, out, rows, OUT, 1, BIAS, ADD)
    if TOKENS > 2:
        _finish(acc2, bias, residual, out, rows, OUT, 2, BIAS, ADD)
    if TOKENS > 3:
        _finish(acc3, bias, residual, out, rows, OUT, 3, BIAS, ADD)


def few_rows_fit(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows` supports x and the weight, and is faster than cuBLAS."""
    return (
        x.dim() == 2
        and 2 <= x.shape[0] <= MAX_ROWS
        and weight.numel() <= (MEDIUM if x.shape[0] == 2 else SMALL)
        and weight.element_size() == 2
        and weight.is_contiguous()
    )


def few_rows(
    x: Tensor,  # [1 .. 4, in], contiguous
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,
    residual: Tensor | None = None,  # like the result, and overwritten by it
) -> Tensor:
    """Return x @ weight.T + bias + residual: [rows, out], for one to four rows."""
    tokens = x.shape[0]
    size, width = weight.shape
    out = x.new_empty((tokens, size)) if residual is None else residual
    rows, cols, num_warps = 2, 1024, 2  # fastest in a sweep over whole llama-8b and 0.6b layers
    _few_rows_kernel[(triton.cdiv(size, rows),)](
        x,
        weight,
        bias,
        residual,
        out,
        TOKENS=tokens,
        OUT=size,
        IN=width,
        BIAS=bias is not None,
        ADD=residual is not None,
        ROWS=rows,
        COLS=cols,
        num_warps=num_warps,
        **pdl(x.device),
    )
    return out
