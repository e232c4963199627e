"""Packed experts of a few tokens: as `kernels.experts.few`, each (token, expert) pair streams its
expert's codes.

Codes come in words of 32 bits and x in words of two or four numbers, so that a thread has what
belongs together. Two 4-bit or 8-bit floats become two bfloat16 numbers by their place in a word,
whose exponents are too small by 126 or 120, and these two float32 numbers: three operations a code.
x is lifted beforehand and the scale takes the rest, so that no product loses digits at the lower
end of float32's range. Numbers of x may have a magnitude of up to 2^31 there. Where the device
converts 8-bit floats, as in `kernels.gemm.packed.gemv8`, nothing is lifted.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.gate import code, gated
from kernels.experts.reference import PackedExperts
from kernels.gemm.packed.codes import E2M1_CODE, E4M3_BITS, E4M3_CODE, constants
from kernels.gemm.packed.gemv8 import converted, decoder, in_words, number
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight

# Tokens up to which a sweep of bench.kernels.experts on one H200 found less time than with
# `packed_experts`: of MXFP4, with 128 experts of which 8 are chosen, and 32 of which 4 are.
MOST = 8


class Tile(NamedTuple):
    rows: int  # of a program
    units: int  # of a row at a time
    num_warps: int
    ints: int = 2  # of 8-bit codes the 32-bit words of a unit
    converts: bool = False  # 8-bit floats become numbers by the device's instruction


# For weights in 8 bits, of a sweep with e4m3 on an H200: of the first product; of the second, the
# tokens up to which -> tile.
UP8 = Tile(2, 128, 1, ints=4, converts=True)
DOWN8: tuple[tuple[float, Tile], ...] = (
    (1, Tile(2, 32, 4, ints=4, converts=True)),
    (float("inf"), Tile(4, 16, 2, ints=4, converts=True)),
)

_LIFT = 96
# The exponent that a number as decoded lacks, by its kind of code.
_LACKS = {E2M1_CODE: 127, E4M3_CODE: 120, E4M3_BITS: 120}


@triton.jit
def _floats(pairs):
    """Return the low and the high bfloat16 number of each word, in float32."""
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -0x10000).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _two(w, table, AT: tl.constexpr, CODE: tl.constexpr):
    """Nibble AT of the low and of the high halves of words: code + 128; half the e2m1 number of
    `nibble` times 2^-126; or what the table has."""
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
    """The bytes of words in their order: e4m3 numbers times 2^-120, or signed integers."""
    if CODE == 0:
        a = w.to(tl.int8).to(tl.float32)
        b = (w >> 8).to(tl.int8).to(tl.float32)
        c = (w >> 16).to(tl.int8).to(tl.float32)
        d = (w >> 24).to(tl.int8).to(tl.float32)
    else:
        left = w << 8
        a, c = _floats((left & -0x7FFF8000) | ((left >> 4) & 0x07F007F0))
        b, d = _floats((w & -0x7FFF8000) | ((w >> 4) & 0x07F007F0))
    return a, b, c, d


@triton.jit
def _multiply(
    w,  # [rows, units, INTS] int32
    x_at,  # the same, or one row: words of x, of the first nibble
    inside,
    table,
    TYPE: tl.constexpr,
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    SPAN: tl.constexpr,
    LIFT: tl.constexpr,
    SUMS: tl.constexpr,
    HOW: tl.constexpr,  # PTX for four codes of a word; "": there is none
):
    """Return decoded codes times x, lifted, of each unit; SUMS: and the sums of x."""
    total = tl.zeros(w.shape, tl.float32)
    kept = tl.zeros(x_at.shape, tl.float32)
    if BITS == 4:
        for field in tl.static_range(4):
            words = tl.load(x_at + field * (SPAN // 8), mask=inside, other=0)
            a, b = number(words, 0, TYPE), number(words, 1, TYPE)
            if SUMS:
                kept += a + b
            low, high = _two(w, table, field, CODE)
            total += low * (a * LIFT)
            total += high * (b * LIFT)
    else:
        words = tl.load(x_at, mask=inside, other=0)
        a, b = number(words, 0, TYPE), number(words, 1, TYPE)
        c, d = number(words, 2, TYPE), number(words, 3, TYPE)
        if SUMS:
            kept += (a + b) + (c + d)
        if HOW != "":
            w0, w1, w2, w3 = converted(w, HOW)
        else:
            w0, w1, w2, w3 = _four(w, CODE)
        total += w0 * (a * LIFT)
        total += w1 * (b * LIFT)
        total += w2 * (c * LIFT)
        total += w3 * (d * LIFT)
    return tl.sum(total, axis=2), tl.sum(kept, axis=2)


@triton.jit
def _rows_times_x(
    codes,  # int32
    scale,
    offset,
    table,
    x_at,  # [rows, 1, 1], or [1, 1, 1]: where each row's x begins, in words of two or four numbers
    source,  # [rows]: of the weight
    exists,  # [rows]
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    BASE: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    SPAN: tl.constexpr,
    LIFT: tl.constexpr,
    REST: tl.constexpr,
    UNITS: tl.constexpr,
    INTS: tl.constexpr,
    HOW: tl.constexpr,
    EARLY: tl.constexpr,  # x is of the launch before: the first codes come before it is waited for
):
    """[rows] float32: the weight's rows times x."""
    EACH: tl.constexpr = 8 if BITS == 4 else 4  # codes of a word
    STEP: tl.constexpr = UNITS * INTS * EACH
    PER: tl.constexpr = 2 if BITS == 4 else 4  # numbers in a word of x
    RUN: tl.constexpr = SPAN // 4
    SUMS: tl.constexpr = BASE != 0 or OFFSET != 0
    WHOLE: tl.constexpr = GROUP == COLUMNS and not SUMS  # a scale an output
    unit = tl.arange(0, UNITS)
    index = tl.arange(0, INTS)[None, None, :]
    first = unit * (INTS * EACH)  # the inputs of a unit, in a group
    if BITS == 4:  # words of 16 bits are in runs, and a span has four
        word = unit * (2 * INTS)
        column = word // RUN * SPAN + word % RUN
    else:
        column = first
    at = codes + source[:, None, None] * (COLUMNS // EACH) + (unit * INTS)[None, :, None] + index
    here = x_at + (column // PER)[None, :, None] + index
    groups = (source // BAND * (COLUMNS // GROUP))[:, None]
    has = exists[:, None] & (first < COLUMNS)[None, :]
    w = tl.load(at, mask=has[:, :, None], other=0, eviction_policy="evict_first")
    if not WHOLE:
        s = tl.load(scale + groups + (first // GROUP)[None, :], mask=has, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([source.shape[0], UNITS], tl.float32)
    for start in range(0, COLUMNS, STEP):
        inside = start + first < COLUMNS
        # The next codes and scales are on their way while these are used.
        more = exists[:, None] & (start + STEP + first < COLUMNS)[None, :]
        at += UNITS * INTS
        ahead = tl.load(at, mask=more[:, :, None], other=0, eviction_policy="evict_first")
        if not WHOLE:
            group = groups + ((start + STEP + first) // GROUP)[None, :]
            s_ahead = tl.load(scale + group, mask=more, other=0.0)
        total, sums = _multiply(
            w, here + start // PER, inside[None, :, None], table,
            TYPE, BITS, CODE, SPAN, LIFT, SUMS, HOW,
        )  # fmt: skip
        if SUMS:
            total -= BASE * sums
        if OFFSET != 0:
            has = exists[:, None] & inside[None, :]
            group = groups + ((start + first) // GROUP)[None, :]
            o = tl.load(offset + group, mask=has, other=0.0).to(tl.float32)
            if OFFSET == 2:
                o *= s.to(tl.float32)
            acc += total * s.to(tl.float32) + o * sums
        elif WHOLE:
            acc += total
        else:
            acc += total * (s.to(tl.float32) * REST)
        w = ahead
        if not WHOLE:
            s = s_ahead
    y = tl.sum(acc, axis=1)
    if WHOLE:
        y *= tl.load(scale + source // BAND, mask=exists, other=0.0).to(tl.float32) * REST
    return y


@triton.jit
def _few_packed_up_kernel(
    x,  # [tokens, WIDTH], in words of two or four numbers
    weights,  # [tokens, CHOSEN]
    ids,  # [tokens, CHOSEN]
    codes,  # of PackedWeight [experts * 2 * SIZE, WIDTH], in int32; without gates half as many rows
    scale,
    offset,
    table,
    bias,  # [experts, 2 * SIZE]
    inner,  # [tokens * CHOSEN, SIZE]
    limit,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGH: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0: all are here; else pairs of this one are another rank's
    ROWS: tl.constexpr,  # of the weight a program owns: gate and up in turns
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    BASE: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    SPAN: tl.constexpr,
    LIFT: tl.constexpr,
    REST: tl.constexpr,
    UNITS: tl.constexpr,
    INTS: tl.constexpr,
    HOW: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(1)
    index = tl.arange(0, ROWS)
    HALF: tl.constexpr = ROWS if ACT == 4 else ROWS // 2  # 4: without gates
    EACH: tl.constexpr = SIZE if ACT == 4 else 2 * SIZE
    PER: tl.constexpr = 2 if BITS == 4 else 4
    if ACT == 4:
        mine = tl.program_id(0) * ROWS + index
        row = mine
    else:
        mine = tl.program_id(0) * HALF + index // 2
        row = mine + (index % 2) * SIZE
    exists = mine < SIZE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids + pair).to(tl.int64)
    if EXPERTS:
        exists = tl.where(exists, expert, EXPERTS) < EXPERTS
    source = expert * EACH + row
    token = (pair // CHOSEN + tl.zeros([1, 1, 1], tl.int32)).to(tl.int64)
    y = _rows_times_x(
        codes, scale, offset, table, x + token * (WIDTH // PER), source, exists,
        WIDTH, inner.dtype.element_ty, BITS, CODE, BASE, OFFSET, GROUP, BAND, SPAN, LIFT, REST,
        UNITS, INTS, HOW, False,
    )  # fmt: skip
    if WEIGH:
        y *= tl.load(weights + pair)
    if BIAS:
        y += tl.load(bias + source, mask=exists, other=0.0).to(tl.float32)
    if ACT == 4:
        value = gated(y, y, limit, ACT)
    else:
        gate, up = tl.split(tl.reshape(y, (HALF, 2)))
        value = gated(gate, up, limit, ACT)
    out = tl.program_id(0) * HALF + tl.arange(0, HALF)
    at_out = inner + pair.to(tl.int64) * SIZE + out
    tl.store(at_out, value.to(inner.dtype.element_ty), mask=out < SIZE)


@triton.jit
def _few_packed_down_kernel(
    inner,  # [tokens * CHOSEN, SIZE], in words of two or four numbers
    weights,
    ids,
    codes,  # of PackedWeight [experts * WIDTH, SIZE], in int32
    scale,
    offset,
    table,
    bias,  # [experts, WIDTH]
    residual,  # [tokens, WIDTH]
    out,  # [tokens, WIDTH]
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGH: tl.constexpr,
    ADD: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,  # a power of two, at least CHOSEN
    ROWS: tl.constexpr,  # outputs a program owns
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    BASE: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    SPAN: tl.constexpr,
    LIFT: tl.constexpr,
    REST: tl.constexpr,
    UNITS: tl.constexpr,
    INTS: tl.constexpr,
    HOW: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1)
    index = tl.arange(0, PLACES * ROWS)
    PER: tl.constexpr = 2 if BITS == 4 else 4
    place = index // ROWS
    mine = tl.program_id(0) * ROWS + index % ROWS
    exists = (place < CHOSEN) & (mine < WIDTH)
    pair = token * CHOSEN + tl.minimum(place, CHOSEN - 1)
    # The choice is there since before the launch before this one.
    expert = tl.load(ids + pair).to(tl.int64)
    if EXPERTS:
        exists &= expert < EXPERTS
    source = expert * WIDTH + mine
    y = _rows_times_x(
        codes, scale, offset, table, inner + (pair.to(tl.int64) * (SIZE // PER))[:, None, None],
        source, exists,
        SIZE, out.dtype.element_ty, BITS, CODE, BASE, OFFSET, GROUP, BAND, SPAN, LIFT, REST,
        UNITS, INTS, HOW, PDL,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias + source, mask=exists, other=0.0).to(tl.float32)
    if WEIGH:
        y = tl.where(exists, y, 0.0)
    else:
        # What is not there has read another's inner numbers, which need not be any.
        y = tl.where(exists, y * tl.load(weights + pair, mask=exists, other=0.0), 0.0)
    total = tl.sum(tl.reshape(y, (PLACES, ROWS)), axis=0)
    outs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_out = token.to(tl.int64) * WIDTH + outs
    if ADD:
        total += tl.load(residual + at_out, mask=outs < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + at_out, total.to(out.dtype.element_ty), mask=outs < WIDTH)


def _words_of(weight: PackedWeight) -> int:
    """Return the 32-bit words of 4-bit codes in a unit."""
    return min(4, weight.form.span // 8)


def _in_one(weight: PackedWeight, units: int) -> int:
    """Return how many 4-bit codes this many units of a row have."""
    return units * _words_of(weight) * 8


def up_tile(weight: PackedWeight) -> Tile:
    """Return the tile of the up matmul, swept for one token and for eight as `MOST` was.

    A row takes more units at a time where that leaves no turn with less than all its codes.
    """
    if weight.form.bits == 8:
        return UP8
    return Tile(4, 32, 1) if weight.shape[1] % _in_one(weight, 64) else Tile(2, 64, 1)


def down_tile(weight: PackedWeight, tokens: int) -> Tile:
    """Return the tile of the down matmul, whose rows are of each of a token's experts.

    One token and eight were swept. One token has few programs, and takes short rows in one turn.
    """
    if weight.form.bits == 8:
        return next(tile for most, tile in DOWN8 if tokens <= most)
    if tokens > 2:
        return Tile(4, 8, 1)
    return Tile(2, 64, 2) if weight.shape[1] <= _in_one(weight, 64) else Tile(1, 32, 1)


def _options(weight: PackedWeight, tile: Tile) -> dict[str, Any]:
    given = constants(weight)
    eight = weight.form.bits == 8
    assert not eight or weight.form.group % (4 * tile.ints) == 0
    converts = tile.converts and given["CODE"] == E4M3_CODE
    how = decoder(weight.codes.device) if converts else ""
    lacks = 0 if how else _LACKS.get(given["CODE"], 0)
    return {
        **given,
        "LIFT": 2.0 ** (_LIFT if lacks else 0),
        "REST": 2.0 ** (lacks - _LIFT if lacks else 0),
        "ROWS": tile.rows,
        "UNITS": tile.units,
        "INTS": tile.ints if eight else _words_of(weight),
        "HOW": how,
        "num_warps": tile.num_warps,
        **pdl(weight.codes.device),
    }


def _words(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.view(torch.int32 if weight.form.bits == 4 else torch.int64)


def few_packed_fits(x: Tensor) -> bool:
    """Whether the kernels are made for these tokens: numbers of 16 bits that can be read as
    words. How many of them is another question."""
    return x.dtype.itemsize == 2 and in_words(x)


def few_packed_up(
    x: Tensor,  # [tokens, hidden]
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    tile: Tile | None = None,
) -> Tensor:
    """act(gate) * up of each pair: [tokens * chosen, size]."""
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
        CHOSEN=chosen,
        SIZE=size,
        WIDTH=width,
        ACT=code(stack.act),
        BIAS=stack.gate_up_bias is not None,
        WEIGH=stack.weigh_input,
        EXPERTS=stack.count if stack.total else 0,
        **_options(weight, tile),
    )
    return inner


def few_packed_down(
    inner: Tensor,  # of few_packed_up
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    residual: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """[tokens, hidden]: the weighted sum of each token's experts."""
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
        CHOSEN=chosen,
        SIZE=size,
        WIDTH=width,
        BIAS=stack.down_bias is not None,
        WEIGH=stack.weigh_input,
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
    up: Tile | None = None,
    down: Tile | None = None,
) -> Tensor:
    """See `kernels.reference.Kernels.packed_experts`; of a few tokens, of which there is one at
    least."""
    inner = few_packed_up(x, weights, ids, stack, up)
    return few_packed_down(inner, weights, ids, stack, residual, down)
