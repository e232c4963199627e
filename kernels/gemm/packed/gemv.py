"""Matmuls of a single token with packed weights of 4 and 8 bits (`kernels.gemm.gemv` for packed
codes).

A thread loads 16 bytes of a row at a time, which belong to one group, and the numbers of x in the
order of these codes. So scale and offset are applied once per 16 or 32 weights.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.gemm.gemv import GATES, fused, gated
from kernels.gemm.packed.codes import code_format, eight_bits, nibble
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight


class GemvTile(NamedTuple):
    """The tile of a program."""

    rows: int  # rows of the weight per program; GATED: gate and up rows alternate
    units: int  # units of a row per step
    unit: int  # words or codes of a unit, which a thread loads at once
    whole_steps: bool  # whether tiles divide the rows and the columns, so that no mask is needed


@triton.jit
def _packed_gemv_kernel(
    x,  # [columns]
    codes,  # [rows, columns / 4] int16, or [rows, columns]; GATED: twice the rows
    scale,  # [rows / BAND, columns / GROUP]
    offset,
    table,
    bias,
    norm,  # [columns]
    residual,  # [rows]
    out,  # [rows]
    eps,
    rows,
    columns,
    pitch,  # columns of codes; Triton specialises the kernel on its divisibility by 16
    FUSED: tl.constexpr,  # `kernels.gemm.gemv.Fused`
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    TILE: tl.constexpr,  # `GemvTile`
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = TILE.rows
    UNIT: tl.constexpr = TILE.unit
    UNITS: tl.constexpr = TILE.units
    index = tl.arange(0, ROWS)
    if FUSED.gated:
        mine = tl.program_id(0) * (ROWS // 2) + index // 2
        source = mine + (index % 2) * rows
    else:
        mine = tl.program_id(0) * ROWS + index
        source = mine
    row_mask = mine < rows
    FIELDS: tl.constexpr = 4 if FORMAT.bits == 4 else 1  # codes of an element
    RUN: tl.constexpr = FORMAT.span // 4  # words of a span
    STEP: tl.constexpr = UNITS * UNIT * FIELDS
    unit = tl.arange(0, UNITS)
    element = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    # The column of each word's lowest nibble.
    column = (element // RUN * FORMAT.span + element % RUN) if FORMAT.bits == 4 else element
    at = codes + source.to(tl.int64)[:, None, None] * pitch + element[None, :, :]
    groups = (source // FORMAT.band).to(tl.int64) * (columns // FORMAT.group)
    acc = tl.zeros([ROWS, UNITS], tl.float32)
    squares = tl.zeros([UNITS], tl.float32)
    # Mask whole units, so that masked loads stay 16 bytes wide.
    exists = row_mask[:, None, None] & (unit * (UNIT * FIELDS) < columns)[None, :, None]

    # The first codes depend on no earlier kernel, so load them before gdc_wait.
    if TILE.whole_steps:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=exists, other=0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, columns, STEP):
        at += UNITS * UNIT
        first = start + unit * (UNIT * FIELDS)
        exists = row_mask[:, None, None] & (first + STEP < columns)[None, :, None]
        ahead = tl.load(at, mask=exists, other=0, eviction_policy="evict_first")
        inside = first < columns
        group = groups[:, None] + (first // FORMAT.group)[None, :]
        if TILE.whole_steps:
            s = tl.load(scale + group).to(tl.float32)
        else:
            s = tl.load(scale + group, mask=row_mask[:, None] & inside[None, :], other=0.0)
            s = s.to(tl.float32)
        sums = tl.zeros([UNITS], tl.float32)
        if FORMAT.bits == 4:
            part = tl.zeros([ROWS, UNITS, UNIT], tl.float32)
            x_sums = tl.zeros([UNITS, UNIT], tl.float32)
            for field in tl.static_range(4):
                here = start + column + field * RUN
                value = tl.load(x + here, mask=inside[:, None], other=0.0).to(tl.float32)
                if FUSED.norm:
                    squares += tl.sum(value * value, axis=1)
                    value *= tl.load(norm + here, mask=inside[:, None], other=0.0).to(tl.float32)
                part += nibble(w, table, field, FORMAT.code) * value[None, :, :]
                x_sums += value
            total = tl.sum(part, axis=2)
            if FORMAT.base != 0 or FORMAT.offset != 0:
                sums = tl.sum(x_sums, axis=1)
        else:
            here = start + column
            value = tl.load(x + here, mask=inside[:, None], other=0.0).to(tl.float32)
            if FUSED.norm:
                squares += tl.sum(value * value, axis=1)
                value *= tl.load(norm + here, mask=inside[:, None], other=0.0).to(tl.float32)
            total = tl.sum(eight_bits(w, FORMAT.code) * value[None, :, :], axis=2)
            if FORMAT.base != 0 or FORMAT.offset != 0:
                sums = tl.sum(value, axis=1)
        if FORMAT.base != 0:
            total -= FORMAT.base * sums[None, :]
        if FORMAT.offset != 0:
            o = tl.load(offset + group, mask=row_mask[:, None] & inside[None, :], other=0.0)
            o = o.to(tl.float32) * sums[None, :]
            if FORMAT.offset == 1:
                acc += total * s + o
            else:
                acc += (total + o) * s
        else:
            acc += total * s
        w = ahead

    y = tl.sum(acc, axis=1)
    if FUSED.norm:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / columns + eps)
    if FUSED.bias:
        y += tl.load(bias + source, mask=row_mask, other=0.0).to(tl.float32)
    if FUSED.gated:
        y = gated(y, ROWS, FUSED.gelu)
        outs = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        outs = mine
    out_mask = outs < rows
    if FUSED.add:
        y += tl.load(residual + outs, mask=out_mask, other=0.0).to(tl.float32)
    tl.store(out + outs, y.to(out.dtype.element_ty), mask=out_mask)


def tile(bits: int, rows: int) -> tuple[int, int, int]:
    """Return a program's (rows, 16-byte loads along a row, warps)."""
    if bits == 4:
        return (8, 32, 1) if rows >= 4096 else (4, 32, 1)
    return (4, 64, 1) if rows >= 4096 else (2, 64, 1)


def packed_gemv(
    x: Tensor,  # [1, in]
    weight: PackedWeight,  # [out, in]; with a gate [2 * out, in]
    *,
    norm: Tensor | None = None,  # [in]
    eps: float = 0.0,
    gate: str | None = None,  # a key of GATES
    residual: Tensor | None = None,  # [1, out]
    config: tuple[int, int, int] | None = None,
) -> Tensor:
    """Return x @ weight.T for a single token, with a fused norm, gate or residual.

    Returns [1, out] in x's dtype, accumulated in float32.
    """
    assert gate is None or gate in GATES
    form = weight.form
    rows, columns = weight.shape
    num_rows, units, warps = config or tile(form.bits, rows)
    outs = rows // 2 if gate else rows
    per_program = num_rows // 2 if gate else num_rows
    if form.bits == 4:
        unit = min(8, form.span // 4)
        step = units * unit * 4
    else:
        unit = 16
        step = units * unit
    out = x.new_empty((1, outs))
    _packed_gemv_kernel[(triton.cdiv(outs, per_program),)](
        x,
        weight.codes,
        weight.scale,
        weight.offset,
        weight.table,
        weight.bias,
        norm,
        residual,
        out,
        eps,
        outs,
        columns,
        weight.codes.shape[1],
        FUSED=fused(norm, gate, residual, weight.bias),
        TILE=GemvTile(
            rows=num_rows,
            units=units,
            unit=unit,
            whole_steps=columns % step == 0 and outs % per_program == 0,
        ),
        num_warps=warps,
        FORMAT=code_format(weight),
        **pdl(x.device),
    )
    return out
