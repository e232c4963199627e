"""Matrix products of several tokens with packed weights: codes become 16-bit numbers on their way
to the matrix units.

The weight is the left operand, so that a few tokens fill the short side of the units' tiles. With
few tiles the columns are divided among programs, and a second kernel adds what they found.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gemm.packed_codes import constants, eight_bits, nibble
from kernels.packed import PackedWeight
from kernels.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl

_FLOAT = torch.float32


@triton.jit
def _scaled(value, scale, offset, group, exists, BASE: tl.constexpr, OFFSET: tl.constexpr):
    s = tl.load(scale + group, mask=exists, other=0.0).to(tl.float32)
    if OFFSET == 0:
        y = value * s - BASE * s
    else:
        o = tl.load(offset + group, mask=exists, other=0.0).to(tl.float32)
        o = (o - BASE * s) if OFFSET == 1 else (o - BASE) * s
        y = value * s + o
    return y


@triton.jit
def _packed_dot_kernel(
    x,  # [tokens, columns]
    codes,  # [rows, columns / 8] int32, or [rows, columns]
    scale,  # [rows / BAND, columns / GROUP]
    offset,
    table,
    bias,
    residual,  # [tokens, rows]
    out,  # [tokens, rows]; SPLIT > 1: float32 [SPLIT, tokens, rows]
    tokens,
    rows,
    columns,
    pitch,  # columns of codes: the compiler shall know what divides it
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    BASE: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,  # words or codes of a row at a time
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # no column sticks out
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    FIELDS: tl.constexpr = 8 if BITS == 4 else 1
    RUN: tl.constexpr = SPAN // 8
    STEP: tl.constexpr = WIDTH * FIELDS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    element = tl.arange(0, WIDTH)
    if BITS == 4:
        column = element // RUN * SPAN + element % RUN
        column = tl.multiple_of(tl.max_contiguous(column, RUN), RUN)  # else x is read by twos
    else:
        column = element
    row_mask, token_mask = row < rows, token < tokens
    at = codes + row.to(tl.int64)[:, None] * pitch + element[None, :]
    x_at = x + token.to(tl.int64)[None, :] * columns + column[:, None]
    groups = (row // BAND).to(tl.int64) * (columns // GROUP)
    steps = tl.cdiv(columns, STEP)
    each = tl.cdiv(steps, SPLIT)
    begin = split * each * STEP
    end = tl.minimum(begin + each * STEP, columns)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(begin, end, STEP):
        exists = row_mask[:, None]
        x_mask = token_mask[None, :]
        if not EVEN:
            inside = start + element * FIELDS < columns
            exists = exists & inside[None, :]
            x_mask = x_mask & inside[:, None]
        w = tl.load(at + start // FIELDS, mask=exists, other=0)
        if GROUP % STEP == 0:
            group = groups[:, None] + start // GROUP
            has = row_mask[:, None]
        else:
            group = groups[:, None] + ((start + element * FIELDS) // GROUP)[None, :]
            has = exists
        if BITS == 4:
            for field in tl.static_range(8):
                value = nibble(w, table, field, CODE)
                value = _scaled(value, scale, offset, group, has, BASE, OFFSET)
                other = tl.load(x_at + start + field * RUN, mask=x_mask, other=0.0)
                acc = tl.dot(value.to(other.dtype), other, acc, input_precision=PRECISION)
        else:
            value = _scaled(eight_bits(w, CODE), scale, offset, group, has, BASE, OFFSET)
            other = tl.load(x_at + start, mask=x_mask, other=0.0)
            acc = tl.dot(value.to(other.dtype), other, acc, input_precision=PRECISION)
    place = token.to(tl.int64)[None, :] * rows + row[:, None]
    mask = row_mask[:, None] & token_mask[None, :]
    if SPLIT > 1:
        tl.store(out + split.to(tl.int64) * tokens * rows + place, acc, mask=mask)
    else:
        if BIAS:
            acc += tl.load(bias + row, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        if ADD:
            acc += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _packed_sum_kernel(
    parts,  # float32 [SPLIT, count]
    bias,  # [rows]
    residual,  # [count]
    out,  # [count]
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
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(parts + split * count + at, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + at % rows, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _packed_expand_kernel(
    codes,
    scale,
    offset,
    table,
    out,  # [rows, columns]
    rows,
    columns,
    pitch,
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    BASE: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    FIELDS: tl.constexpr = 8 if BITS == 4 else 1
    RUN: tl.constexpr = SPAN // 8
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = (row < rows)[:, None] & (element * FIELDS < columns)[None, :]
    wide = row.to(tl.int64)[:, None]
    w = tl.load(codes + wide * pitch + element[None, :], mask=exists, other=0)
    group = (row // BAND).to(tl.int64)[:, None] * (columns // GROUP)
    group += (element * FIELDS // GROUP)[None, :]
    if BITS == 4:
        column = element // RUN * SPAN + element % RUN
        for field in tl.static_range(8):
            value = nibble(w, table, field, CODE)
            value = _scaled(value, scale, offset, group, exists, BASE, OFFSET)
            place = out + wide * columns + (column + field * RUN)[None, :]
            tl.store(place, value.to(out.dtype.element_ty), mask=exists)
    else:
        value = _scaled(eight_bits(w, CODE), scale, offset, group, exists, BASE, OFFSET)
        place = out + wide * columns + element[None, :]
        tl.store(place, value.to(out.dtype.element_ty), mask=exists)


def tile(bits: int, tokens: int) -> tuple[int, int, int, int, int]:
    """(ROWS, TOKENS, words or codes of a row, warps, stages)."""
    width = 16 if bits == 4 else 128
    if tokens <= 64:
        return 64, max(16, triton.next_power_of_2(tokens)), width, 4, 5
    return 128, 64, width, 8, 4


def splits(programs: int, steps: int, sms: int) -> int:
    """So many that multiprocessors have up to two programs, of two steps at least, each."""
    found = 1
    while found < 8 and 2 * found * programs <= 2 * sms and 4 * found <= steps:
        found *= 2
    return found


def packed_dot(
    x: Tensor,  # [tokens, in]
    weight: PackedWeight,  # [out, in]
    residual: Tensor | None = None,  # like the result, and overwritten by it
    config: tuple[int, int, int, int, int] | None = None,
    split: int = 0,  # 0: as many as there should be
) -> Tensor:
    """x @ weight.T + bias + residual: [tokens, out], in x's dtype."""
    tokens = x.shape[0]
    rows, columns = weight.shape
    num_rows, num_tokens, width, warps, stages = config or tile(weight.form.bits, tokens)
    grid = (triton.cdiv(rows, num_rows), triton.cdiv(tokens, num_tokens))
    steps = triton.cdiv(columns, width * (8 if weight.form.bits == 4 else 1))
    split = split or splits(grid[0] * grid[1], steps, num_sms(x.device))
    out = x.new_empty((tokens, rows)) if residual is None else residual
    target = out
    if split > 1:
        target = x.new_empty((split, tokens, rows), dtype=_FLOAT)
    extras = {"ADD": residual is not None, "BIAS": weight.bias is not None}
    alone = {"ADD": False, "BIAS": False}
    _packed_dot_kernel[(*grid, split)](
        x,
        weight.codes,
        weight.scale,
        weight.offset,
        weight.table,
        weight.bias,
        residual,
        target,
        tokens,
        rows,
        columns,
        weight.codes.shape[1],
        ROWS=num_rows,
        TOKENS=num_tokens,
        WIDTH=width,
        SPLIT=split,
        EVEN=columns % (width * (8 if weight.form.bits == 4 else 1)) == 0,
        PRECISION="ieee" if x.dtype == _FLOAT else "tf32",
        num_warps=warps,
        num_stages=stages,
        **(extras if split == 1 else alone),
        **constants(weight),
        **pdl(x.device),
    )
    if split > 1:
        count = tokens * rows
        _packed_sum_kernel[(triton.cdiv(count, 1024),)](
            target,
            weight.bias,
            residual,
            out,
            count,
            rows,
            SPLIT=split,
            BLOCK=1024,
            **extras,
            **pdl(x.device),
        )
    return out


def expand(weight: PackedWeight, like: Tensor) -> Tensor:
    """The weights [out, in] in like's dtype."""
    rows, columns = weight.shape
    out = like.new_empty((rows, columns))
    width = 64 if weight.form.bits == 4 else 256
    fields = 8 if weight.form.bits == 4 else 1
    _packed_expand_kernel[(triton.cdiv(rows, 8), triton.cdiv(columns, width * fields))](
        weight.codes,
        weight.scale,
        weight.offset,
        weight.table,
        out,
        rows,
        columns,
        weight.codes.shape[1],
        ROWS=8,
        WIDTH=width,
        num_warps=4,
        **constants(weight),
    )
    return out
