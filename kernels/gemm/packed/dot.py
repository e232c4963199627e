"""Matmuls of several tokens with packed weights, decoded to 16-bit numbers for tensor cores.

The weight is the left operand, so that few tokens fill the short side of the MMA tile. If there are
few tiles, the input columns are divided among programs (split-K), and a second kernel adds the
partial sums.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gemm.packed import codes
from kernels.gemm.packed.codes import (
    bytes_fit,
    code_format,
    code_of,
    eight_bits,
    four_bytes,
    four_nibbles,
    integers_fit,
    nibble,
    scales_only,
)
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.packed import PackedWeight

_FLOAT = torch.float32
_WORDS = 32  # words of 4-bit codes of a row per step of a program
# `scaled_floats` returns 2^-127 times the e2m1 number of `nibble`. With scales times 2^87 (LIFT)
# the result is 2^-40 times the weight, well within bfloat16's range. LOWERED makes up for 2^-40.
LIFT = tl.constexpr(codes.LIFT)
LOWERED = tl.constexpr(2.0**40)


@triton.jit
def _scales(scale, offset, group, exists, FORMAT: tl.constexpr):
    """Load the scale and offset of groups: a weight is decoded code * scale + offset, in float32.

    group: indices into `scale` and `offset`.
    """
    s = tl.load(scale + group, mask=exists, other=0.0).to(tl.float32)
    if FORMAT.offset == 0:
        o = -FORMAT.base * s
    else:
        o = tl.load(offset + group, mask=exists, other=0.0).to(tl.float32)
        o = (o - FORMAT.base * s) if FORMAT.offset == 1 else (o - FORMAT.base) * s
    return s, o


@triton.jit
def _pairs(words, DECODE: tl.constexpr, AT: tl.constexpr):
    """Decode field AT of each word to bfloat16, two words at a time by inline PTX."""
    return tl.inline_asm_elementwise(
        DECODE.ptx[AT], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _scaled(words, s, DECODE: tl.constexpr, AT: tl.constexpr):
    """Decode field AT of each word and multiply it by its scale `s`, two words at a time by PTX."""
    return tl.inline_asm_elementwise(
        DECODE.ptx[AT], "=r,r,r", [words, s], dtype=tl.bfloat16, is_pure=True, pack=2
    )


class Decoding(NamedTuple):
    """The rule by which packed codes become operands of tensor cores, as one `tl.constexpr`.

    by_ptx: whether inline PTX decodes pairs of codes. A group's sum is then scaled.
    scale_codes: whether decoded codes, not sums, are multiplied by scales. A step is then one
        matmul, not one per nibble.
    scale_outputs: whether there is one scale per output. Sums of 8-bit codes decoded by PTX are
        then scaled after the last step.
    ptx: PTX for each of the four codes of a word; "" where there is none.
    precision: the input precision of `tl.dot` for float32.
    """

    by_ptx: bool
    scale_codes: bool
    scale_outputs: bool
    ptx: tuple[str, ...]
    precision: str


class DotTile(NamedTuple):
    """The tile of a program of `_packed_dot_kernel`."""

    rows: int  # outputs per program
    tokens: int
    width: int  # words (of 4-bit codes) or codes (8-bit) of a row per step
    split: int  # programs among which the columns are divided
    whole_steps: bool  # whether every step's columns exist, so that no mask is needed


@triton.jit
def add_step(
    acc,  # [ROWS, TOKENS] float32
    start,  # the first column
    at,  # [ROWS, WIDTH]: pointers to the codes of column 0
    x_at,  # [WIDTH, TOKENS], or with scale_codes [4 * WIDTH, TOKENS]: pointers into x for column 0
    columns,
    row_mask,
    token_mask,
    groups,  # [ROWS]: index of each row's first scale
    scale,
    offset,
    table,
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    WIDTH: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,  # whether every step's columns exist, so that no mask is needed
    DECODE: tl.constexpr,  # `Decoding`
):
    """Return acc plus the matmul of WIDTH words (4 bits) or codes (8 bits) of each row with x.

    8-bit codes are not scaled if DECODE has `by_ptx` and `scale_outputs`.
    """
    BY_PTX: tl.constexpr = DECODE.by_ptx
    FIELDS: tl.constexpr = 4 if FORMAT.bits == 4 else 1
    RUN: tl.constexpr = FORMAT.span // 4
    STEP: tl.constexpr = WIDTH * FIELDS
    element = tl.arange(0, WIDTH)
    exists = row_mask[:, None]
    x_mask = token_mask[None, :]
    if not WHOLE_STEPS:
        inside = start + element * FIELDS < columns
        exists = exists & inside[None, :]
        x_mask = x_mask & inside[:, None]
    w = tl.load(at + start // FIELDS, mask=exists, other=0)
    if FORMAT.group % STEP == 0:
        group = groups[:, None] + start // FORMAT.group
        has = row_mask[:, None]
    else:
        group = groups[:, None] + ((start + element * FIELDS) // FORMAT.group)[None, :]
        has = exists
    if DECODE.scale_codes:
        s, added = _scales(scale, offset, group, has, FORMAT)
        if BY_PTX:
            even = tl.join(_pairs(w, DECODE, 0), _pairs(w, DECODE, 2))
            odd = tl.join(_pairs(w, DECODE, 1), _pairs(w, DECODE, 3))
        else:
            even = tl.join(nibble(w, table, 0, FORMAT.code), nibble(w, table, 2, FORMAT.code))
            odd = tl.join(nibble(w, table, 1, FORMAT.code), nibble(w, table, 3, FORMAT.code))
        value = tl.reshape(tl.join(even, odd), (w.shape[0], WIDTH, 4))
        value = tl.reshape(tl.permute(value, (0, 2, 1)), (w.shape[0], STEP)).to(tl.float32)
        value *= s
        if FORMAT.offset != 0 or not BY_PTX:  # otherwise PTX has subtracted the zero point
            value += added
        other = tl.load(x_at + start, mask=token_mask[None, :], other=0.0)
        acc = tl.dot(value.to(other.dtype), other, acc)
    elif BY_PTX and FORMAT.bits == 4 and FORMAT.code == 1:
        # Scale by 2^87 before decoding, so that products do not underflow. The caller multiplies
        # the sums by LOWERED.
        s = tl.load(scale + group, mask=has, other=0.0)
        s = tl.inline_asm_elementwise(LIFT, "=r,r", [s], dtype=tl.bfloat16, is_pure=True, pack=2)
        for field in tl.static_range(4):
            other = tl.load(x_at + start + field * RUN, mask=x_mask, other=0.0)
            acc = tl.dot(_scaled(w, s, DECODE, field), other, acc)
    elif BY_PTX and FORMAT.bits == 4:
        s, added = _scales(scale, offset, group, has, FORMAT)
        part = tl.zeros(acc.shape, tl.float32)
        total = tl.zeros(acc.shape, tl.float32)
        ones = tl.full(w.shape, 1.0, tl.bfloat16)
        for field in tl.static_range(4):
            other = tl.load(x_at + start + field * RUN, mask=x_mask, other=0.0)
            part = tl.dot(_pairs(w, DECODE, field), other, part)
            if FORMAT.offset != 0:  # sum x with a matrix of ones
                total = tl.dot(ones, other, total)
        acc += part * s
        if FORMAT.offset != 0:
            acc += total * added
    elif BY_PTX:
        value = tl.inline_asm_elementwise(
            DECODE.ptx[0], "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4
        )
        other = tl.load(x_at + start, mask=x_mask, other=0.0)
        if DECODE.scale_outputs:
            acc = tl.dot(value, other, acc)
        else:
            s, added = _scales(scale, offset, group, has, FORMAT)
            acc += tl.dot(value, other) * s
    elif FORMAT.bits == 4:
        s, added = _scales(scale, offset, group, has, FORMAT)
        for field in tl.static_range(4):
            value = nibble(w, table, field, FORMAT.code) * s + added
            other = tl.load(x_at + start + field * RUN, mask=x_mask, other=0.0)
            acc = tl.dot(value.to(other.dtype), other, acc, input_precision=DECODE.precision)
    else:
        s, added = _scales(scale, offset, group, has, FORMAT)
        value = eight_bits(w, FORMAT.code) * s + added
        other = tl.load(x_at + start, mask=x_mask, other=0.0)
        acc = tl.dot(value.to(other.dtype), other, acc, input_precision=DECODE.precision)
    return acc


@triton.jit
def _packed_dot_kernel(
    x,  # [tokens, columns]
    codes,  # [rows, columns / 4] int16, or [rows, columns]
    scale,  # [rows / BAND, columns / GROUP]
    offset,
    table,
    bias,
    residual,  # [tokens, rows]
    out,  # [tokens, rows]; SPLIT > 1: float32 [shares, tokens, rows]
    tokens,
    rows,
    columns,
    pitch,  # columns of codes; Triton specialises the kernel on its divisibility by 16
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    TILE: tl.constexpr,  # `DotTile`
    DECODE: tl.constexpr,  # `Decoding`
    PDL: tl.constexpr,
):
    SPLIT: tl.constexpr = TILE.split
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    FIELDS: tl.constexpr = 4 if FORMAT.bits == 4 else 1
    RUN: tl.constexpr = FORMAT.span // 4
    STEP: tl.constexpr = TILE.width * FIELDS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    element = tl.arange(0, TILE.width)
    if DECODE.scale_codes:
        column = tl.arange(0, STEP)
    elif FORMAT.bits == 4:
        column = element // RUN * FORMAT.span + element % RUN
        column = tl.multiple_of(tl.max_contiguous(column, RUN), RUN)  # for wide loads of x
    else:
        column = element
    row_mask, token_mask = row < rows, token < tokens
    at = codes + row.to(tl.int64)[:, None] * pitch + element[None, :]
    x_at = x + token.to(tl.int64)[None, :] * columns + column[:, None]
    groups = (row // FORMAT.band).to(tl.int64) * (columns // FORMAT.group)
    share = tl.cdiv(tl.cdiv(columns, STEP), SPLIT) * STEP
    begin = split * share
    end = tl.minimum(begin + share, columns)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(begin, end, STEP):
        acc = add_step(
            acc, start, at, x_at, columns, row_mask, token_mask, groups, scale, offset, table,
            FORMAT, TILE.width, TILE.whole_steps, DECODE,
        )  # fmt: skip
    if DECODE.by_ptx and FORMAT.bits == 8 and DECODE.scale_outputs:
        acc *= tl.load(scale + row, mask=row_mask, other=0.0)[:, None]
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
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # 8 bits: codes of a row per program; 4 bits: spans of a row
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    wide = row.to(tl.int64)[:, None]
    group = (row // FORMAT.band).to(tl.int64)[:, None] * (columns // FORMAT.group)
    if FORMAT.bits == 4:
        RUN: tl.constexpr = FORMAT.span // 4
        word = tl.arange(0, RUN)[None, None, :]
        has = (row < rows)[:, None] & (part * FORMAT.span < columns)[None, :]
        exists = has[:, :, None]
        at = wide * pitch + (part * RUN)[None, :]
        w = tl.load(codes + at[:, :, None] + word, mask=exists, other=0)
        group += (part * FORMAT.span // FORMAT.group)[None, :]
        s, added = _scales(scale, offset, group, has, FORMAT)
        to = wide * columns + (part * FORMAT.span)[None, :]
        for field in tl.static_range(4):
            value = nibble(w, table, field, FORMAT.code) * s[:, :, None] + added[:, :, None]
            place = out + to[:, :, None] + (word + field * RUN)
            tl.store(place, value.to(out.dtype.element_ty), mask=exists)
    else:
        exists = (row < rows)[:, None] & (part < columns)[None, :]
        w = tl.load(codes + wide * pitch + part[None, :], mask=exists, other=0)
        has = exists
        if FORMAT.group % WIDTH == 0:  # a program's codes of a row share one scale
            group += tl.program_id(1) * WIDTH // FORMAT.group
            has = (row < rows)[:, None]
        else:
            group += (part // FORMAT.group)[None, :]
        s, added = _scales(scale, offset, group, has, FORMAT)
        value = eight_bits(w, FORMAT.code) * s + added
        place = out + wide * columns + part[None, :]
        tl.store(place, value.to(out.dtype.element_ty), mask=exists)


def pair_ptx(x: Tensor, weight: PackedWeight, width: int) -> list[str]:
    """Return PTX that decodes pairs of the weight's codes (`Decoding.ptx`), or [] if there is none.

    With bfloat16 x there is PTX for 4-bit integers, and for 8-bit codes without offsets. A step of
    `width` words or codes must share one scale; with 8-bit codes, one scale per output is enough.
    """
    if not (x.is_cuda and x.dtype == torch.bfloat16):
        return []
    group = weight.form.group
    if weight.form.bits == 4:
        fits = integers_fit(weight) and group % (4 * width) == 0
        return four_nibbles(weight) if fits else []
    fits = bytes_fit(weight) or (scales_only(weight) and group % width == 0)
    return [four_bytes(code_of(weight)), "", "", ""] if fits else []


def decoding(
    x: Tensor, weight: PackedWeight, ptx: list[str], scale_codes: bool = False
) -> Decoding:
    """Return the rule by which a kernel decodes the weight. ptx: the result of `pair_ptx`."""
    precision = "ieee" if x.dtype == _FLOAT else "tf32"
    return Decoding(bool(ptx), scale_codes, bytes_fit(weight), tuple(ptx or [""] * 4), precision)


def scale_codes_fits(weight: PackedWeight, step: int) -> bool:
    """Whether a kernel can multiply decoded codes by their scales (`Decoding.scale_codes`).

    A step's words of 4-bit codes must decode to columns in x's order: nibble 0 of all words, then
    nibble 1, and so on. step: columns of a step."""
    return weight.form.bits == 4 and weight.form.span == step and weight.shape[1] % step == 0


def scales_sums(weight: PackedWeight) -> bool:
    """Whether the weight has 8-bit codes whose scales apply to sums of 128 products."""
    eight = weight.form.bits == 8 and not bytes_fit(weight)
    return eight and scales_only(weight) and weight.form.group % 128 == 0


def tile(
    bits: int,
    tokens: int,
    shape: tuple[int, int],
    sms: int,
    scale_codes: bool = False,  # see `packed_dot`
    sums: bool = False,  # the result of `scales_sums`
) -> tuple[int, int, int, int, int]:
    """Return (ROWS, TOKENS, words or codes of a row per step, warps, stages), fastest in sweeps.

    The sweeps were over llama-8b's matrices on one H200. shape: outputs and inputs.
    """
    rows, columns = shape
    if tokens <= 16:
        # Fewer stages leave room for more programs on a multiprocessor.
        many = sums and triton.cdiv(rows, 64) > sms
        return (64, 16, 32, 2, 3) if bits == 4 else (64, 16, 128, 2, 3 if many else 4)
    few = triton.next_power_of_2(min(tokens, 256))
    if bits == 8:
        if few <= 64 or (sums and few == 128):
            return 64, few, 128, 4, 3
        return 128, 128 if sums else 64, 128, 8, 3
    if few == 64 and triton.cdiv(rows, 128) < sms:
        return 64, 64, 32, 4, 4 if columns >= 8192 else 3
    if scale_codes:
        return (64, few, 32, 4, 3) if few == 128 else (128, few, 32, 8, 3)
    return 128, min(few, 128), 32, 4 if few <= 64 else 8, 3


def scale_codes_pays(weight: PackedWeight, tokens: int, sms: int) -> bool:
    """Whether scaling decoded codes (`Decoding.scale_codes`) is faster than scaling sums.

    Scaled codes take one matmul per step. Scaled sums take one matmul per nibble, and with offsets
    another one with ones. Without offsets, scaled codes are faster if tiles of all tokens and 128
    outputs occupy all multiprocessors.
    """
    if weight.form.offset != "none":
        return tokens > 32
    return tokens > 128 and triton.cdiv(weight.shape[0], 128) >= sms


def splits(size: int, programs: int, steps: int, sms: int) -> int:
    """Return the number of splits (split-K) of a row's steps, the fastest in a sweep.

    size: elements of a tile; it limits a multiprocessor to one, two or three programs.
    programs: the number of programs without splits.
    steps: steps of a row; each program computes at least two.
    """
    most = 1 if size > 8192 else 2 if size > 4096 else 3
    count = 1
    while count < 4 and 2 * count * programs <= most * sms and 4 * count <= steps:
        count *= 2
    return count


def packed_dot(
    x: Tensor,  # [tokens, in]
    weight: PackedWeight,  # [out, in]
    residual: Tensor | None = None,  # like the result, and overwritten by it
    config: tuple[int, int, int, int, int] | None = None,
    split: int = 0,  # parts of the columns; 0: chosen by the sizes
    # whether to scale codes instead of groups' sums; None: chosen by `scale_codes_pays`
    scale_codes: bool | None = None,
) -> Tensor:
    """Return x @ weight.T + bias + residual: [tokens, out] in x's dtype."""
    tokens = x.shape[0]
    rows, columns = weight.shape
    bits, sms = weight.form.bits, num_sms(x.device)
    if scale_codes is None:
        scale_codes = scale_codes_pays(weight, tokens, sms)
        scale_codes = scale_codes and scale_codes_fits(weight, 4 * _WORDS)
        scale_codes = scale_codes and bool(pair_ptx(x, weight, _WORDS))
    num_rows, num_tokens, width, warps, stages = config or tile(
        bits, tokens, weight.shape, sms, scale_codes, scales_sums(weight)
    )
    grid = (triton.cdiv(rows, num_rows), triton.cdiv(tokens, num_tokens))
    step = width * (4 if bits == 4 else 1)
    steps = triton.cdiv(columns, step)
    split = split or splits(num_rows * num_tokens, grid[0] * grid[1], steps, sms)
    out = x.new_empty((tokens, rows)) if residual is None else residual
    target = out
    if split > 1:
        target = x.new_empty((split, tokens, rows), dtype=_FLOAT)
    decode = decoding(x, weight, pair_ptx(x, weight, width), scale_codes)
    if not decode.by_ptx and weight.form.group % step:
        stages = 2  # scales and offsets of each code are loaded ahead, too
    alone = split == 1
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
        TILE=DotTile(
            rows=num_rows,
            tokens=num_tokens,
            width=width,
            split=split,
            whole_steps=columns % step == 0,
        ),
        ADD=alone and residual is not None,
        BIAS=alone and weight.bias is not None,
        FORMAT=code_format(weight),
        DECODE=decode,
        num_warps=warps,
        num_stages=stages,
        **pdl(x.device),
    )
    if split > 1:
        add_parts(target, weight.bias, residual, out)
    return out


def add_parts(
    parts: Tensor,  # float32 [split, tokens, out]
    bias: Tensor | None,  # [out]
    residual: Tensor | None,  # [tokens, out]
    out: Tensor,  # [tokens, out]
) -> None:
    """Write to out the sum of split-K's partial results, bias and residual.

    Parts are added in order.
    """
    split, tokens, rows = parts.shape
    count = tokens * rows
    _packed_sum_kernel[(triton.cdiv(count, 1024),)](
        parts,
        bias,
        residual,
        out,
        count,
        rows,
        ADD=residual is not None,
        BIAS=bias is not None,
        SPLIT=split,
        BLOCK=1024,
        **pdl(parts.device),
    )


def expand(weight: PackedWeight, like: Tensor) -> Tensor:
    """Return the dequantised weights [out, in] in the dtype of `like`."""
    form, (rows, columns) = weight.form, weight.shape
    out = like.new_empty((rows, columns))
    # Rows and columns per program, the fastest in a sweep over llama-8b's matrices on one H200.
    num_rows, num_columns = (8, 512) if form.bits == 4 else (16, 256)
    _packed_expand_kernel[(triton.cdiv(rows, num_rows), triton.cdiv(columns, num_columns))](
        weight.codes,
        weight.scale,
        weight.offset,
        weight.table,
        out,
        rows,
        columns,
        weight.codes.shape[1],
        ROWS=num_rows,
        WIDTH=num_columns // form.span if form.bits == 4 else num_columns,
        FORMAT=code_format(weight),
        num_warps=8,
    )
    return out
