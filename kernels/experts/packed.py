"""Experts with packed weights: as `grouped`, whatever the number of tokens, but codes become 16-bit
numbers on their way to the matrix units, as in `kernels.gemm.packed.dot`.

The weight is the left operand, so that the few pairs of an expert fill the short side of the units'
tiles.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.gate import code, gated
from kernels.experts.grouped import _find, by_expert
from kernels.experts.reference import PackedExperts
from kernels.experts.sorting import Sorted
from kernels.gemm.packed.codes import E2M1_CODE, bytes_fit, code_of, constants, scaled_floats
from kernels.gemm.packed.dot import LOWERED, add_step, quick
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight


class Tile(NamedTuple):
    pairs: int  # of one expert
    outs: int  # rows of the weight; of gate_up so many of the gate's and as many of the up's
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    up: Tile
    down: Tile


# The pairs that an expert has on average -> tiles, the first that fits: what a sweep of
# bench.kernels.experts found on an H200 with MXFP4, at 0.5 to 64.
TILES: tuple[tuple[float, Tiles], ...] = (
    (1, Tiles(Tile(16, 64, 2, 4), Tile(16, 128, 4, 4))),
    (10, Tiles(Tile(16, 64, 2, 2), Tile(16, 128, 2, 2))),
    (24, Tiles(Tile(32, 32, 1, 2), Tile(16, 128, 2, 2))),
    (48, Tiles(Tile(64, 128, 8, 2), Tile(32, 128, 8, 4))),
    (float("inf"), Tiles(Tile(64, 128, 4, 2), Tile(64, 128, 4, 2))),
)
# Where a row's numbers may not depend on how many rows there are.
FIXED = Tiles(Tile(32, 64, 4, 3), Tile(32, 64, 4, 3))


@triton.jit
def _packed_up_kernel(
    x,  # [tokens, WIDTH]
    weights,  # [pairs]
    order,
    starts,
    codes,  # of PackedWeight [EXPERTS * 2 * SIZE, WIDTH]; without gates half as many rows
    scale,
    offset,
    table,
    bias,  # [EXPERTS, 2 * SIZE]
    inner,  # [pairs, SIZE], in sorted order
    limit,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGH: tl.constexpr,
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    BASE: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least EXPERTS
    PAIRS: tl.constexpr,
    OUTS: tl.constexpr,
    WORDS: tl.constexpr,  # words or codes of a row at a time
    EVEN: tl.constexpr,
    QUICK: tl.constexpr,
    WHOLE: tl.constexpr,  # a scale is an output's
    HOW0: tl.constexpr,
    HOW1: tl.constexpr,
    HOW2: tl.constexpr,
    HOW3: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    FIELDS: tl.constexpr = 4 if BITS == 4 else 1
    RUN: tl.constexpr = SPAN // 4
    tiles: tl.constexpr = (SIZE + OUTS - 1) // OUTS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, place, behind = _find(starts, tl.program_id(0) // tiles, EXPERTS, BLOCK, PAIRS)
    if expert == EXPERTS:
        return
    row = place + tl.arange(0, PAIRS)
    exists = row < behind
    pair = tl.load(order + row, mask=exists, other=0)
    out = tl.program_id(0) % tiles * OUTS + tl.arange(0, OUTS)
    has = out < SIZE
    EACH: tl.constexpr = SIZE if ACT == 4 else 2 * SIZE  # 4: without gates
    source = expert.to(tl.int64) * EACH + out
    element = tl.arange(0, WORDS)
    if BITS == 4:
        column = element // RUN * SPAN + element % RUN
        column = tl.multiple_of(tl.max_contiguous(column, RUN), RUN)
    else:
        column = element
    x_at = x + (pair // CHOSEN).to(tl.int64)[None, :] * WIDTH + column[:, None]
    gate_at = codes + source[:, None] * (WIDTH // FIELDS) + element[None, :]
    up_at = gate_at + SIZE * (WIDTH // FIELDS)
    gate_groups = source // BAND * (WIDTH // GROUP)
    up_groups = (source + SIZE) // BAND * (WIDTH // GROUP)
    gate = tl.zeros([OUTS, PAIRS], tl.float32)
    up = tl.zeros([OUTS, PAIRS], tl.float32)
    for start in range(0, WIDTH, WORDS * FIELDS):
        gate = add_step(
            gate, start, gate_at, x_at, WIDTH, has, exists, gate_groups, scale, offset, table,
            BITS, CODE, BASE, OFFSET, GROUP, SPAN, WORDS, EVEN, QUICK, False, WHOLE,
            HOW0, HOW1, HOW2, HOW3, PRECISION,
        )  # fmt: skip
        if ACT != 4:
            up = add_step(
                up, start, up_at, x_at, WIDTH, has, exists, up_groups, scale, offset, table,
                BITS, CODE, BASE, OFFSET, GROUP, SPAN, WORDS, EVEN, QUICK, False, WHOLE,
                HOW0, HOW1, HOW2, HOW3, PRECISION,
            )  # fmt: skip
    if QUICK and BITS == 4 and CODE == 1:
        gate *= LOWERED
        up *= LOWERED
    if QUICK and BITS == 8 and WHOLE:
        gate *= tl.load(scale + source, mask=has, other=0.0)[:, None]
        if ACT != 4:
            up *= tl.load(scale + source + SIZE, mask=has, other=0.0)[:, None]
    if WEIGH:
        weight = tl.load(weights + pair, mask=exists, other=0.0)[None, :]
        gate *= weight
        up *= weight
    if BIAS:
        gate += tl.load(bias + source, mask=has, other=0.0).to(tl.float32)[:, None]
        if ACT != 4:
            up += tl.load(bias + source + SIZE, mask=has, other=0.0).to(tl.float32)[:, None]
    value = gated(gate, up, limit, ACT).to(inner.dtype.element_ty)
    at = row.to(tl.int64)[None, :] * SIZE + out[:, None]
    tl.store(inner + at, value, mask=has[:, None] & exists[None, :])


@triton.jit
def _packed_down_kernel(
    inner,  # [pairs, SIZE], in sorted order
    weights,  # [pairs]
    order,
    starts,
    codes,  # of PackedWeight [EXPERTS * WIDTH, SIZE]
    scale,
    offset,
    table,
    bias,  # [EXPERTS, WIDTH]
    given,  # [pairs, WIDTH]
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGH: tl.constexpr,
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    BASE: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTS: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    QUICK: tl.constexpr,
    WHOLE: tl.constexpr,  # a scale is an output's
    HOW0: tl.constexpr,
    HOW1: tl.constexpr,
    HOW2: tl.constexpr,
    HOW3: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    FIELDS: tl.constexpr = 4 if BITS == 4 else 1
    RUN: tl.constexpr = SPAN // 4
    tiles: tl.constexpr = (WIDTH + OUTS - 1) // OUTS
    # Sorted before the launch before this one.
    expert, place, behind = _find(starts, tl.program_id(0) // tiles, EXPERTS, BLOCK, PAIRS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if expert == EXPERTS:
        return
    row = place + tl.arange(0, PAIRS)
    exists = row < behind
    out = tl.program_id(0) % tiles * OUTS + tl.arange(0, OUTS)
    has = out < WIDTH
    source = expert.to(tl.int64) * WIDTH + out
    element = tl.arange(0, WORDS)
    if BITS == 4:
        column = element // RUN * SPAN + element % RUN
        column = tl.multiple_of(tl.max_contiguous(column, RUN), RUN)
    else:
        column = element
    x_at = inner + row.to(tl.int64)[None, :] * SIZE + column[:, None]
    at = codes + source[:, None] * (SIZE // FIELDS) + element[None, :]
    groups = source // BAND * (SIZE // GROUP)
    acc = tl.zeros([OUTS, PAIRS], tl.float32)
    for start in range(0, SIZE, WORDS * FIELDS):
        acc = add_step(
            acc, start, at, x_at, SIZE, has, exists, groups, scale, offset, table,
            BITS, CODE, BASE, OFFSET, GROUP, SPAN, WORDS, EVEN, QUICK, False, WHOLE,
            HOW0, HOW1, HOW2, HOW3, PRECISION,
        )  # fmt: skip
    if QUICK and BITS == 4 and CODE == 1:
        acc *= LOWERED
    if QUICK and BITS == 8 and WHOLE:
        acc *= tl.load(scale + source, mask=has, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias + source, mask=has, other=0.0).to(tl.float32)[:, None]
    pair = tl.load(order + row, mask=exists, other=0)
    if not WEIGH:
        acc *= tl.load(weights + pair, mask=exists, other=0.0)[None, :]
    place_out = pair.to(tl.int64)[None, :] * WIDTH + out[:, None]
    mask = has[:, None] & exists[None, :]
    tl.store(given + place_out, acc.to(given.dtype.element_ty), mask=mask)


def tiles_for(pairs: int, experts: int) -> Tiles:
    return next(tiles for most, tiles in TILES if pairs / experts <= most)


def _floats_fit(x: Tensor, weight: PackedWeight) -> bool:
    """Whether `scaled_floats` gives these codes their scale without a digit lost: of powers of two,
    or of numbers that bfloat16 has."""
    form = weight.form
    plain = code_of(weight) == E2M1_CODE and form.scale == torch.bfloat16
    return x.is_cuda and x.dtype == torch.bfloat16 and plain and form.offset == "none"


def _options(x: Tensor, weight: PackedWeight, tile: Tile, experts: int) -> dict[str, Any]:
    four = weight.form.bits == 4
    words = 32 if four else 128
    step = 4 * words if four else words
    how, warps = quick(x, weight, words), tile.num_warps
    if _floats_fit(x, weight):
        how = [scaled_floats(at) for at in range(4)]
    else:  # registers for sums of a group beside those of all
        warps = max(warps, tile.pairs * tile.outs // 1024)
    # A scale and an offset for each code are on their way too.
    stages = 2 if not how and weight.form.group % step else tile.num_stages
    return {
        "BLOCK": triton.next_power_of_2(experts),
        "PAIRS": tile.pairs,
        "OUTS": tile.outs,
        "WORDS": words,
        "EVEN": weight.shape[1] % step == 0,
        "QUICK": bool(how),
        "WHOLE": bytes_fit(weight),
        **{f"HOW{i}": how[i] if how else "" for i in range(4)},
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": warps,
        "num_stages": stages,
        **constants(weight),
        **pdl(x.device),
    }


def _grid(pairs: int, experts: int, tile: Tile, outs: int) -> tuple[int]:
    """An expert that is met has at most one block that is not full."""
    return ((min(pairs, experts) + pairs // tile.pairs) * triton.cdiv(outs, tile.outs),)


def packed_up(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, pairs: Sorted, tile: Tile
) -> Tensor:
    """act(gate) * up of each pair: [pairs, size], in sorted order."""
    weight = stack.gate_up
    experts, size, width = stack.count, stack.down.shape[1], weight.shape[1]
    inner = x.new_empty((ids.numel(), size))
    _packed_up_kernel[_grid(ids.numel(), experts, tile, size)](
        x,
        weights,
        pairs.order,
        pairs.starts,
        weight.codes,
        weight.scale,
        weight.offset,
        weight.table,
        stack.gate_up_bias,
        inner,
        stack.limit,
        EXPERTS=experts,
        CHOSEN=ids.shape[1],
        SIZE=size,
        WIDTH=width,
        ACT=code(stack.act),
        BIAS=stack.gate_up_bias is not None,
        WEIGH=stack.weigh_input,
        **_options(x, weight, tile, experts),
    )
    return inner


def packed_down(
    inner: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, pairs: Sorted, tile: Tile
) -> Tensor:
    """inner of `packed_up` -> what each pair's expert gives, weighted: [pairs, hidden], in the
    order of ids."""
    weight = stack.down
    experts, size, width = stack.count, weight.shape[1], stack.gate_up.shape[1]
    given = inner.new_empty((ids.numel(), width))
    _packed_down_kernel[_grid(ids.numel(), experts, tile, width)](
        inner,
        weights,
        pairs.order,
        pairs.starts,
        weight.codes,
        weight.scale,
        weight.offset,
        weight.table,
        stack.down_bias,
        given,
        EXPERTS=experts,
        SIZE=size,
        WIDTH=width,
        BIAS=stack.down_bias is not None,
        WEIGH=stack.weigh_input,
        **_options(inner, weight, tile, experts),
    )
    return given


def packed_experts(
    x: Tensor,  # [tokens, hidden], any number of them
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    residual: Tensor | None,
    tiles: Tiles | None = None,
) -> Tensor:
    """See `kernels.reference.Kernels.packed_experts`."""
    tiles = tiles or tiles_for(ids.numel(), stack.total or stack.count)
    return by_expert(x, weights, ids, stack, stack.count, residual, packed_up, packed_down, tiles)
