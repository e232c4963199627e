"""Matmuls whose operands are both 8-bit integers.

Sums are exact, so results are batch-invariant. Scales, bias and residual are applied at the end, in
float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.device import compute_capability
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.packed import PackedWeight

FIXED = (64, 128, 128, 4, 3)  # the deterministic mode's tile, for any number of rows
_TOGETHER = 8  # tiles of rows of x that use the same weights at the same time, from L2


@triton.jit
def _int8_dot_kernel(
    x,  # int8 [tokens, columns]
    x_scale,  # [tokens]
    codes,  # int8 [rows, columns]
    scale,  # [rows]
    bias,  # [rows]
    residual,  # [tokens, rows]
    out,  # [tokens, rows]; SPLIT > 1: int32 [SPLIT, tokens, rows]
    tokens,
    rows,
    columns,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    down, along = tl.cdiv(tokens, TOKENS), tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    band = program // (TOGETHER * along)
    height = tl.minimum(down - band * TOGETHER, TOGETHER)
    inside = program % (TOGETHER * along)
    token = (band * TOGETHER + inside % height) * TOKENS + tl.arange(0, TOKENS)
    row = (inside // height) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    column = tl.arange(0, STEP)
    token_mask, row_mask = token < tokens, row < rows
    x_at = x + token.to(tl.int64)[:, None] * columns + column[None, :]
    at = codes + row.to(tl.int64)[None, :] * columns + column[:, None]
    share = tl.cdiv(tl.cdiv(columns, STEP), SPLIT) * STEP
    begin = split * share
    end = tl.minimum(begin + share, columns)
    total = tl.zeros([TOKENS, ROWS], tl.int32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(begin, end, STEP):
        exists = column < columns - start
        a = tl.load(x_at + start, mask=token_mask[:, None] & exists[None, :], other=0)
        w = tl.load(at + start, mask=row_mask[None, :] & exists[:, None], other=0)
        total = tl.dot(a, w, total, out_dtype=tl.int32)
    place = token.to(tl.int64)[:, None] * rows + row[None, :]
    mask = token_mask[:, None] & row_mask[None, :]
    if SPLIT > 1:
        tl.store(out + split.to(tl.int64) * tokens * rows + place, total, mask=mask)
    else:
        y = total.to(tl.float32) * tl.load(x_scale + token, mask=token_mask, other=0.0)[:, None]
        y *= tl.load(scale + row, mask=row_mask, other=0.0)[None, :]
        if BIAS:
            y += tl.load(bias + row, mask=row_mask, other=0.0).to(tl.float32)[None, :]
        if ADD:
            y += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _int8_sum_kernel(
    parts,  # int32 [SPLIT, tokens, rows]
    x_scale,
    scale,
    bias,
    residual,
    out,
    count,
    rows,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.int32)
    for split in tl.static_range(SPLIT):
        total += tl.load(parts + split * count + at, mask=mask, other=0)
    y = total.to(tl.float32) * tl.load(x_scale + at // rows, mask=mask, other=0.0)
    y *= tl.load(scale + at % rows, mask=mask, other=0.0)
    if BIAS:
        y += tl.load(bias + at % rows, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


def fits(weight: PackedWeight, x: Tensor) -> bool:
    """Whether `int8_linear` supports the weight: 8-bit integers with one scale per output.

    The format must also quantise x, and the device must have 8-bit integer matmuls.
    """
    form = weight.form
    return (
        form.code == "int"
        and form.group == weight.shape[1]
        and form.scale == torch.float32
        and form.rounds(compute_capability(x.device))
    )


def tile(tokens: int) -> tuple[int, int, int, int, int]:
    """Return (TOKENS, ROWS, STEP, warps, stages), which were not tuned on a device."""
    if tokens <= 64:
        return max(16, triton.next_power_of_2(tokens)), 64, 128, 4, 4
    if tokens <= 256:
        return 128, 128, 128, 8, 4
    return 128, 256, 128, 8, 3


def _splits(programs: int, steps: int, sms: int) -> int:
    """Return the number of splits (split-K) of a row's steps.

    Splits give each multiprocessor at most one program, and each program at least four steps.
    programs: the number of programs without splits.
    """
    count = 1
    while count < 8 and 2 * count * programs <= sms and 8 * count <= steps:
        count *= 2
    return count


def int8_linear(
    rows: Tensor,  # int8 [tokens, in], from `round_rows`
    scales: Tensor,  # scales of the rows
    weight: PackedWeight,  # [out, in]
    dtype: torch.dtype,
    residual: Tensor | None = None,  # [tokens, out], overwritten by the result
    config: tuple[int, int, int, int, int] | None = None,
    split: int = 0,  # parts of the columns; 0: chosen by the sizes
) -> Tensor:
    """Return (rows * scales) @ weight.T + bias + residual: [tokens, out] in dtype."""
    tokens = rows.shape[0]
    outputs, columns = weight.shape
    num_tokens, num_rows, step, warps, stages = config or tile(tokens)
    programs = triton.cdiv(tokens, num_tokens) * triton.cdiv(outputs, num_rows)
    split = split or _splits(programs, triton.cdiv(columns, step), num_sms(rows.device))
    out = rows.new_empty((tokens, outputs), dtype=dtype) if residual is None else residual
    target = out
    if split > 1:
        target = rows.new_empty((split, tokens, outputs), dtype=torch.int32)
    behind = {"ADD": residual is not None, "BIAS": weight.bias is not None}
    _int8_dot_kernel[(programs, split)](
        rows,
        scales,
        weight.codes,
        weight.scale,
        weight.bias,
        residual,
        target,
        tokens,
        outputs,
        columns,
        TOKENS=num_tokens,
        ROWS=num_rows,
        STEP=step,
        SPLIT=split,
        TOGETHER=_TOGETHER,
        num_warps=warps,
        num_stages=stages,
        **behind,
        **pdl(rows.device),
    )
    if split > 1:
        count = tokens * outputs
        _int8_sum_kernel[(triton.cdiv(count, 1024),)](
            target,
            scales,
            weight.scale,
            weight.bias,
            residual,
            out,
            count,
            outputs,
            SPLIT=split,
            BLOCK=1024,
            **behind,
            **pdl(rows.device),
        )
    return out
