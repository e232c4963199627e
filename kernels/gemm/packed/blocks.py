"""Matmuls of 8-bit floats with a scale for each block of the weight and each group of a row of x.

Each group of inputs is one matmul on tensor cores. The group's sums are scaled and added in
float32, because tensor cores accumulate in lower precision.

The weight is the left operand, so that a few tokens fill the short side of the MMA tile. With few
tiles the columns are divided among programs (split-K), and a second kernel adds the sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gemm.packed.dot import add_parts
from kernels.gemm.packed.round_rows import E4M3
from kernels.launch.device import compute_capability
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.packed import PackedWeight


@triton.jit
def _block_dot_kernel(
    x,  # e4m3 [tokens, columns]
    x_scale,  # [columns / GROUP, pitch]
    codes,  # e4m3 [rows, columns]
    scale,  # [rows / GROUP, columns / GROUP]
    bias,  # [rows]
    residual,  # [tokens, rows]
    out,  # [tokens, rows]; PARTS: float32 [shares, tokens, rows]
    tokens,
    pitch,
    rows,
    columns,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr,  # outputs and inputs of a block, inputs of a group
    ROWS: tl.constexpr,  # outputs per program; divides GROUP
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,  # whether the columns are split (split-K), so out has partial sums
    PDL: tl.constexpr,
):
    # Consecutive programs compute different tokens with the same weights, so that L2 is hit.
    down = tl.cdiv(tokens, TOKENS)
    first = (tl.program_id(0) // down) * ROWS
    row = first + tl.arange(0, ROWS)
    token = (tl.program_id(0) % down) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(1)
    column = tl.arange(0, GROUP)
    row_mask, token_mask = row < rows, token < tokens
    groups = columns // GROUP
    share = tl.cdiv(groups, tl.num_programs(1))
    begin = split * share
    end = tl.minimum(begin + share, groups)
    at = codes + row.to(tl.int64)[:, None] * columns + column[None, :]
    x_at = x + token.to(tl.int64)[None, :] * columns + column[:, None]
    scales = scale + (first // GROUP).to(tl.int64) * groups
    x_scales = x_scale + token
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Load scales one group ahead, because loading a scale takes longer than a matmul.
    at_most = groups - 1
    ahead = tl.minimum(begin, at_most)
    s = tl.load(x_scales + ahead.to(tl.int64) * pitch, mask=token_mask, other=0.0)
    s *= tl.load(scales + ahead)
    for group in range(begin, end):
        w = tl.load(at + group * GROUP, mask=row_mask[:, None], other=0.0)
        a = tl.load(x_at + group * GROUP, mask=token_mask[None, :], other=0.0)
        ahead = tl.minimum(group + 1, at_most)
        next_s = tl.load(x_scales + ahead.to(tl.int64) * pitch, mask=token_mask, other=0.0)
        next_s *= tl.load(scales + ahead)
        acc += tl.dot(w, a) * s[None, :]
        s = next_s
    place = token.to(tl.int64)[None, :] * rows + row[:, None]
    mask = row_mask[:, None] & token_mask[None, :]
    if PARTS:
        tl.store(out + split.to(tl.int64) * tokens * rows + place, acc, mask=mask)
    else:
        if BIAS:
            acc += tl.load(bias + row, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        if ADD:
            acc += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


def fits(x: Tensor, weight: PackedWeight) -> bool:
    """Whether `block_linear` supports x and the weight: e4m3 with one float32 scale per 128 x 128
    block, in a format that also quantises x, and 16-bit x on a device with e4m3 matmuls."""
    form = weight.form
    return (
        form.code == "e4m3"
        and form.rows > 1
        and form.scale == torch.float32
        and x.dtype in (torch.bfloat16, torch.float16)
        and form.rounds(compute_capability(x.device))
    )


def tile(tokens: int, outputs: int, sms: int) -> tuple[int, int, int, int]:
    """Return (ROWS, TOKENS, warps, stages), the fastest in a sweep over llama-8b's matrices.

    The sweep was on one H200. With 64 tokens a tile has 128 outputs if such tiles are enough to
    occupy most multiprocessors.
    """
    width = min(64, max(16, triton.next_power_of_2(tokens)))
    many = 4 * triton.cdiv(outputs, 128) * triton.cdiv(tokens, width) >= 3 * sms
    if width == 32 or (width == 64 and many):
        return 128, width, 4, 4
    return 64, width, 4, 3


def splits(size: int, programs: int, groups: int, sms: int) -> int:
    """Return the number of splits (split-K) of a row's groups, the fastest in a sweep.

    size: elements of a tile; it limits a multiprocessor to two, three or four programs.
    programs: the number of programs without splits.
    groups: groups of a row; each program computes at least eight.
    """
    most = 2 if size > 4096 else 3 if size > 1024 else 4
    count = 1
    while count < 8 and 2 * count * programs <= most * sms and 16 * count <= groups:
        count *= 2
    return count


def block_linear(
    rows: Tensor,  # e4m3 [tokens or more, in], from `round_rows` with the weight's group
    scales: Tensor,  # scales of the rows
    weight: PackedWeight,  # [out, in]
    tokens: int,
    dtype: torch.dtype,
    residual: Tensor | None = None,  # [tokens, out], overwritten by the result
    config: tuple[int, int, int, int] | None = None,
    split: int = 0,  # parts of the columns; 0: chosen by the sizes
) -> Tensor:
    """Return (rows * scales) @ weight.T + bias + residual of the first tokens: [tokens, out] in
    dtype.
    """
    outputs, columns = weight.shape
    group = weight.form.group
    sms = num_sms(rows.device)
    num_rows, num_tokens, warps, stages = config or tile(tokens, outputs, sms)
    programs = triton.cdiv(tokens, num_tokens) * triton.cdiv(outputs, num_rows)
    split = split or splits(num_rows * num_tokens, programs, columns // group, sms)
    out = rows.new_empty((tokens, outputs), dtype=dtype) if residual is None else residual
    target = out
    if split > 1:
        target = rows.new_empty((split, tokens, outputs), dtype=torch.float32)
    alone = split == 1
    _block_dot_kernel[(programs, split)](
        rows,
        scales,
        weight.codes.view(E4M3),
        weight.scale,
        weight.bias,
        residual,
        target,
        tokens,
        scales.stride(1),
        outputs,
        columns,
        ADD=alone and residual is not None,
        BIAS=alone and weight.bias is not None,
        GROUP=group,
        ROWS=num_rows,
        TOKENS=num_tokens,
        PARTS=split > 1,
        num_warps=warps,
        num_stages=stages,
        **pdl(rows.device),
    )
    if not alone:
        add_parts(target, weight.bias, residual, out)
    return out
