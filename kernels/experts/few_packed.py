"""Quantised MoE experts for a few tokens, without grouping by expert, like `kernels.experts.few`.

Codes are read as words of 32 bits and x as words of two or four numbers. So a thread has codes and
numbers of x for the same inputs.

The bits of two 4-bit or 8-bit floats are moved to the fields of two bfloat16 numbers, and these are
converted to float32. That takes three operations per code. The resulting exponents are too small by
126 or 120. To make up for this, x is multiplied by one power of two beforehand and the scale by
another, so that no product becomes subnormal in float32. So x may have a magnitude of up to 2^31.
Devices with an instruction that converts 8-bit floats need no such factors, as in
`kernels.gemm.packed.gemv8`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.gate import code, gated
from kernels.experts.mixture import Mixture
from kernels.experts.reference import PackedExperts
from kernels.gemm.packed.codes import E2M1_CODE, E4M3_BITS, E4M3_CODE, code_format
from kernels.gemm.packed.gemv8 import converted, decoder, in_words, number
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight

# Maximum tokens for which `few_packed` is faster than `packed_experts`, in a sweep of
# bench.kernels.experts on one H200, for MXFP4 with 8 of 128 and 4 of 32 experts per token.
MOST = 8


class PairTile(NamedTuple):
    rows: int  # rows of the weight per program
    units: int  # units (a thread's loads) of a row per iteration
    num_warps: int
    ints: int = 2  # 32-bit words of a unit of 8-bit codes
    converts: bool = False  # whether to convert 8-bit floats by the device's instruction


# Tiles for 8-bit weights, from a sweep with e4m3 on an H200. UP8: gate and up. DOWN8: down, as
# (maximum tokens, tile); the first row that fits is used.
UP8 = PairTile(2, 128, 1, ints=4, converts=True)
DOWN8: tuple[tuple[float, PairTile], ...] = (
    (1, PairTile(2, 32, 4, ints=4, converts=True)),
    (float("inf"), PairTile(4, 16, 2, ints=4, converts=True)),
)

_LIFT = 96
# Kind of code -> by how much the exponents of decoded numbers are too small.
_LACKS = {E2M1_CODE: 127, E4M3_CODE: 120, E4M3_BITS: 120}


@triton.jit
def _floats(pairs):
    """Unpack int32 words to their low and their high bfloat16 numbers, as two float32 tensors."""
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -0x10000).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _two(w, table, AT: tl.constexpr, CODE: tl.constexpr):
    """Decode nibble AT of the low and of the high 16-bit halves of words, to two float32 tensors.

    Returns code + 128 for integers, the e2m1 number times 2^-126 for floats, or the table's entry.
    """
    if CODE == 0:
        low, high = _floats(((w >> (4 * AT)) & 0x000F000F) | 0x43004300)
    elif CODE == 1:
        bits = w << (6 - 4 * AT) if AT < 2 else w >> (4 * AT - 6)
        low, high = _floats((bits & 0x01C001C0) | ((w << (12 - 4 * AT)) & -0x7FFF8000))
    else:
        low = tl.load(table + ((w >> (4 * AT)) & 15))
        high = tl.load(table + ((w >> (16 + 4 * AT)) & 15))
    return low, high


@triton.jit
def _four(w, CODE: tl.constexpr):
    """Decode the four bytes of words to four float32 tensors.

    Returns signed integers, or e4m3 numbers times 2^-120.
    """
    if CODE == 0:
        a = w.to(tl.int8).to(tl.float32)
        b = (w >> 8).to(tl.int8).to(tl.float32)
        c = (w >> 16).to(tl.int8).to(tl.float32)
        d = (w >> 24).to(tl.int8).to(tl.float32)
    else:
        shifted = w << 8
        a, c = _floats((shifted & -0x7FFF8000) | ((shifted >> 4) & 0x07F007F0))
        b, d = _floats((w & -0x7FFF8000) | ((w >> 4) & 0x07F007F0))
    return a, b, c, d


class PairShape(NamedTuple):
    """The tile of a program, and the rule by which its codes become numbers."""

    rows: int  # outputs per program
    units: int  # units (a thread's loads) of a row per iteration
    ints: int  # 32-bit words of a unit
    lift: float  # power of two by which x is multiplied, so that no product becomes subnormal
    rest: float  # power of two by which scales are multiplied, to complete the correction
    ptx: str  # PTX that decodes the four codes of a word; "" if there is none


@triton.jit
def _multiply(
    w,  # [rows, units, INTS] int32
    x_at,  # pointers to x's words for the first nibbles, shaped like w or with one row
    inside,
    table,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    TILE: tl.constexpr,  # `PairShape`
    SUMS: tl.constexpr,
):
    """Return dot products [rows, units] of decoded codes and x * TILE.lift.

    A unit is what a thread loads at once (`PairShape`). Also returns the sums of x of each unit,
    which are zeros without SUMS.
    """
    PTX: tl.constexpr = TILE.ptx
    total = tl.zeros(w.shape, tl.float32)
    x_sums = tl.zeros(x_at.shape, tl.float32)
    if FORMAT.bits == 4:
        for field in tl.static_range(4):
            words = tl.load(x_at + field * (FORMAT.span // 8), mask=inside, other=0)
            a, b = number(words, 0, TYPE), number(words, 1, TYPE)
            if SUMS:
                x_sums += a + b
            low, high = _two(w, table, field, FORMAT.code)
            total += low * (a * TILE.lift)
            total += high * (b * TILE.lift)
    else:
        words = tl.load(x_at, mask=inside, other=0)
        a, b = number(words, 0, TYPE), number(words, 1, TYPE)
        c, d = number(words, 2, TYPE), number(words, 3, TYPE)
        if SUMS:
            x_sums += (a + b) + (c + d)
        if PTX != "":
            w0, w1, w2, w3 = converted(w, PTX)
        else:
            w0, w1, w2, w3 = _four(w, FORMAT.code)
        total += w0 * (a * TILE.lift)
        total += w1 * (b * TILE.lift)
        total += w2 * (c * TILE.lift)
        total += w3 * (d * TILE.lift)
    return tl.sum(total, axis=2), tl.sum(x_sums, axis=2)


@triton.jit
def _rows_times_x(
    codes,  # int32
    scale,
    offset,
    table,
    x_at,  # [rows, 1, 1] or [1, 1, 1]: pointers to x's first word (of two or four numbers)
    source,  # [rows]: rows of the weight
    exists,  # [rows]: mask of rows
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    TILE: tl.constexpr,  # `PairShape`
    EARLY: tl.constexpr,  # whether to load the first codes before waiting for x
):
    """Return the dot products of the weight's rows and x: [rows] float32."""
    UNITS: tl.constexpr = TILE.units
    EACH: tl.constexpr = 8 if FORMAT.bits == 4 else 4  # codes of a word
    STEP: tl.constexpr = UNITS * TILE.ints * EACH
    PER: tl.constexpr = 2 if FORMAT.bits == 4 else 4  # numbers in a word of x
    RUN: tl.constexpr = FORMAT.span // 4
    SUMS: tl.constexpr = FORMAT.base != 0 or FORMAT.offset != 0
    WHOLE: tl.constexpr = FORMAT.group == COLUMNS and not SUMS  # one scale for each output
    unit = tl.arange(0, UNITS)
    index = tl.arange(0, TILE.ints)[None, None, :]
    first = unit * (TILE.ints * EACH)  # number of inputs before a unit's codes
    if FORMAT.bits == 4:  # convert the order of 4-bit codes (`Format.span`) to columns of x
        word = unit * (2 * TILE.ints)
        column = word // RUN * FORMAT.span + word % RUN
    else:
        column = first
    at = (
        codes
        + source[:, None, None] * (COLUMNS // EACH)
        + (unit * TILE.ints)[None, :, None]
        + index
    )
    here = x_at + (column // PER)[None, :, None] + index
    groups = (source // FORMAT.band * (COLUMNS // FORMAT.group))[:, None]
    has = exists[:, None] & (first < COLUMNS)[None, :]
    w = tl.load(at, mask=has[:, :, None], other=0, eviction_policy="evict_first")
    if not WHOLE:
        s = tl.load(scale + groups + (first // FORMAT.group)[None, :], mask=has, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([source.shape[0], UNITS], tl.float32)
    for start in range(0, COLUMNS, STEP):
        inside = start + first < COLUMNS
        # Load the next codes and scales while the current ones are used.
        more = exists[:, None] & (start + STEP + first < COLUMNS)[None, :]
        at += UNITS * TILE.ints
        ahead = tl.load(at, mask=more[:, :, None], other=0, eviction_policy="evict_first")
        if not WHOLE:
            group = groups + ((start + STEP + first) // FORMAT.group)[None, :]
            s_ahead = tl.load(scale + group, mask=more, other=0.0)
        total, sums = _multiply(
            w, here + start // PER, inside[None, :, None], table,
            TYPE, FORMAT, TILE, SUMS,
        )  # fmt: skip
        if SUMS:
            total -= FORMAT.base * sums
        if FORMAT.offset != 0:
            has = exists[:, None] & inside[None, :]
            group = groups + ((start + first) // FORMAT.group)[None, :]
            o = tl.load(offset + group, mask=has, other=0.0).to(tl.float32)
            if FORMAT.offset == 2:
                o *= s.to(tl.float32)
            acc += total * s.to(tl.float32) + o * sums
        elif WHOLE:
            acc += total
        else:
            acc += total * (s.to(tl.float32) * TILE.rest)
        w = ahead
        if not WHOLE:
            s = s_ahead
    y = tl.sum(acc, axis=1)
    if WHOLE:
        y *= (
            tl.load(scale + source // FORMAT.band, mask=exists, other=0.0).to(tl.float32)
            * TILE.rest
        )
    return y


@triton.jit
def _few_packed_up_kernel(
    x,  # [tokens, WIDTH], in words of two or four numbers
    weights,  # [tokens, CHOSEN]
    ids,  # [tokens, CHOSEN]
    codes,  # PackedWeight's [experts * 2 * SIZE, WIDTH], in int32; without gates half as many rows
    scale,
    offset,
    table,
    bias,  # [experts, 2 * SIZE]
    inner,  # [tokens * CHOSEN, SIZE]
    limit,
    MIXTURE: tl.constexpr,  # `Mixture`
    EXPERTS: tl.constexpr,  # 0: this rank has all experts; else the id of other ranks' experts
    TILE: tl.constexpr,  # `PairShape`
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    PDL: tl.constexpr,
):
    pair = tl.program_id(1)
    index = tl.arange(0, TILE.rows)
    HALF: tl.constexpr = TILE.rows if MIXTURE.act == 4 else TILE.rows // 2  # 4: without gates
    EACH: tl.constexpr = MIXTURE.size if MIXTURE.act == 4 else 2 * MIXTURE.size
    PER: tl.constexpr = 2 if FORMAT.bits == 4 else 4
    if MIXTURE.act == 4:
        mine = tl.program_id(0) * TILE.rows + index
        row = mine
    else:
        mine = tl.program_id(0) * HALF + index // 2
        row = mine + (index % 2) * MIXTURE.size
    exists = mine < MIXTURE.size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids + pair).to(tl.int64)
    if EXPERTS:
        exists = tl.where(exists, expert, EXPERTS) < EXPERTS
    source = expert * EACH + row
    token = (pair // MIXTURE.chosen + tl.zeros([1, 1, 1], tl.int32)).to(tl.int64)
    y = _rows_times_x(
        codes, scale, offset, table, x + token * (MIXTURE.width // PER), source, exists,
        MIXTURE.width, inner.dtype.element_ty, FORMAT, TILE, False,
    )  # fmt: skip
    if MIXTURE.weigh:
        y *= tl.load(weights + pair)
    if MIXTURE.bias:
        y += tl.load(bias + source, mask=exists, other=0.0).to(tl.float32)
    if MIXTURE.act == 4:
        value = gated(y, y, limit, MIXTURE.act)
    else:
        gate, up = tl.split(tl.reshape(y, (HALF, 2)))
        value = gated(gate, up, limit, MIXTURE.act)
    out = tl.program_id(0) * HALF + tl.arange(0, HALF)
    at_out = inner + pair.to(tl.int64) * MIXTURE.size + out
    tl.store(at_out, value.to(inner.dtype.element_ty), mask=out < MIXTURE.size)


@triton.jit
def _few_packed_down_kernel(
    inner,  # [tokens * CHOSEN, SIZE], in words of two or four numbers
    weights,
    ids,
    codes,  # PackedWeight's [experts * WIDTH, SIZE], in int32
    scale,
    offset,
    table,
    bias,  # [experts, WIDTH]
    residual,  # [tokens, WIDTH]
    out,  # [tokens, WIDTH]
    MIXTURE: tl.constexpr,  # `Mixture`
    ADD: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,  # a power of two, at least CHOSEN
    TILE: tl.constexpr,  # `PairShape`
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    PDL: tl.constexpr,
):
    token = tl.program_id(1)
    index = tl.arange(0, PLACES * TILE.rows)
    PER: tl.constexpr = 2 if FORMAT.bits == 4 else 4
    place = index // TILE.rows
    mine = tl.program_id(0) * TILE.rows + index % TILE.rows
    exists = (place < MIXTURE.chosen) & (mine < MIXTURE.width)
    pair = token * MIXTURE.chosen + tl.minimum(place, MIXTURE.chosen - 1)
    # ids were written two launches ago, so they can be read before gdc_wait.
    expert = tl.load(ids + pair).to(tl.int64)
    if EXPERTS:
        exists &= expert < EXPERTS
    source = expert * MIXTURE.width + mine
    y = _rows_times_x(
        codes, scale, offset, table,
        inner + (pair.to(tl.int64) * (MIXTURE.size // PER))[:, None, None], source, exists,
        MIXTURE.size, out.dtype.element_ty, FORMAT, TILE, PDL,
    )  # fmt: skip
    if MIXTURE.bias:
        y += tl.load(bias + source, mask=exists, other=0.0).to(tl.float32)
    if MIXTURE.weigh:
        y = tl.where(exists, y, 0.0)
    else:
        # Lanes after the last expert have read unrelated values, possibly NaN: drop them.
        y = tl.where(exists, y * tl.load(weights + pair, mask=exists, other=0.0), 0.0)
    total = tl.sum(tl.reshape(y, (PLACES, TILE.rows)), axis=0)
    outs = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    at_out = token.to(tl.int64) * MIXTURE.width + outs
    if ADD:
        total += tl.load(residual + at_out, mask=outs < MIXTURE.width, other=0.0).to(tl.float32)
    tl.store(out + at_out, total.to(out.dtype.element_ty), mask=outs < MIXTURE.width)


def _words_of(weight: PackedWeight) -> int:
    """Return the number of 32-bit words of 4-bit codes that a thread loads at a time."""
    return min(4, weight.form.span // 8)


def _in_one(weight: PackedWeight, units: int) -> int:
    """Return the number of 4-bit codes in `units` units (a thread's loads) of a row."""
    return units * _words_of(weight) * 8


def up_tile(weight: PackedWeight) -> PairTile:
    """Return the tile of the up matmul, from sweeps with one token and with eight.

    A program loads 64 units (a thread's loads) of a row at a time if these divide the row, else 32.
    """
    if weight.form.bits == 8:
        return UP8
    return PairTile(4, 32, 1) if weight.shape[1] % _in_one(weight, 64) else PairTile(2, 64, 1)


def down_tile(weight: PackedWeight, tokens: int) -> PairTile:
    """Return the tile of the down matmul, from sweeps with one token and with eight.

    A program computes some outputs of all experts of a token. With one or two tokens there are few
    programs, so a program loads a short row at once.
    """
    if weight.form.bits == 8:
        return next(tile for most, tile in DOWN8 if tokens <= most)
    if tokens > 2:
        return PairTile(4, 8, 1)
    return PairTile(2, 64, 2) if weight.shape[1] <= _in_one(weight, 64) else PairTile(1, 32, 1)


def _options(weight: PackedWeight, tile: PairTile) -> dict[str, Any]:
    form = code_format(weight)
    eight = weight.form.bits == 8
    assert not eight or weight.form.group % (4 * tile.ints) == 0
    converts = tile.converts and form.code == E4M3_CODE
    ptx = decoder(weight.codes.device) if converts else ""
    lacks = 0 if ptx else _LACKS.get(form.code, 0)
    return {
        "FORMAT": form,
        "TILE": PairShape(
            tile.rows,
            tile.units,
            tile.ints if eight else _words_of(weight),
            lift=2.0 ** (_LIFT if lacks else 0),
            rest=2.0 ** (lacks - _LIFT if lacks else 0),
            ptx=ptx,
        ),
        "num_warps": tile.num_warps,
        **pdl(weight.codes.device),
    }


def _words(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.view(torch.int32 if weight.form.bits == 4 else torch.int64)


def few_packed_fits(x: Tensor, stack: PackedExperts) -> bool:
    """Whether x has 1 to MOST tokens of a 16-bit dtype that can be read as 32-bit words."""
    return 0 < x.shape[0] <= MOST and x.dtype.itemsize == 2 and in_words(x)


def few_packed_up(
    x: Tensor,  # [tokens, hidden]
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    tile: PairTile | None = None,
) -> Tensor:
    """Return act(gate) * up of each (token, expert) pair: [tokens * chosen, size]."""
    weight = stack.gate_up
    tokens, width = x.shape
    chosen, size = ids.shape[1], stack.down.shape[1]
    inner = x.new_empty((tokens * chosen, size))
    tile = tile or up_tile(weight)
    outs = tile.rows * size * stack.count // weight.shape[0]
    _few_packed_up_kernel[(triton.cdiv(size, outs), tokens * chosen)](
        _words(x, weight),
        weights,
        ids,
        weight.codes.view(torch.int32),
        weight.scale,
        weight.offset,
        weight.table,
        stack.gate_up_bias,
        inner,
        stack.limit,
        MIXTURE=Mixture(
            chosen=chosen,
            size=size,
            width=width,
            act=code(stack.act),
            bias=stack.gate_up_bias is not None,
            weigh=stack.weigh_input,
        ),
        EXPERTS=stack.count if stack.total else 0,
        **_options(weight, tile),
    )
    return inner


def few_packed_down(
    inner: Tensor,  # the result of `few_packed_up`
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    residual: Tensor | None,
    tile: PairTile | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts: [tokens, hidden]."""
    weight = stack.down
    tokens, chosen = ids.shape
    width, size = weight.shape[0] // stack.count, weight.shape[1]
    tile = tile or down_tile(weight, tokens)
    out = inner.new_empty((tokens, width)) if residual is None else residual
    _few_packed_down_kernel[(triton.cdiv(width, tile.rows), tokens)](
        _words(inner, weight),
        weights,
        ids,
        weight.codes.view(torch.int32),
        weight.scale,
        weight.offset,
        weight.table,
        stack.down_bias,
        residual,
        out,
        MIXTURE=Mixture(
            chosen=chosen,
            size=size,
            width=width,
            bias=stack.down_bias is not None,
            weigh=stack.weigh_input,
        ),
        ADD=residual is not None,
        EXPERTS=stack.count if stack.total else 0,
        PLACES=triton.next_power_of_2(chosen),
        **_options(weight, tile),
    )
    return out


def few_packed(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    residual: Tensor | None,
    up: PairTile | None = None,
    down: PairTile | None = None,
) -> Tensor:
    """Return the weighted sum of each token's packed experts, for 1 to MOST tokens.

    Arguments are those of `Kernels.packed_experts`. up, down: tiles; None: the default ones.
    """
    inner = few_packed_up(x, weights, ids, stack, up)
    return few_packed_down(inner, weights, ids, stack, residual, down)
