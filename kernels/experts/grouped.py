"""MoE experts for many tokens: a grouped GEMM over (token, expert) pairs sorted by expert.

There are four launches: sort (two launches for many pairs); gate, up and activation; down and the
router's weights; sum over a token's experts with the residual. Grids are upper bounds computed from
the number of pairs, so the host reads nothing back. A program finds its expert in the sort's
prefix sums, and surplus programs end at once.

Large tiles are loaded by the tensor memory accelerator (TMA) where the device has one: a tile of
weights takes one instruction, and gate and up become one matmul of twice the width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.experts.gate import code, gated
from kernels.experts.mixture import Mixture
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.experts.sorting import Sorted, sort
from kernels.launch.device import HOPPER, compute_capability, shared_memory
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl


class Tile(NamedTuple):
    rows: int  # (token, expert) pairs of one expert
    outs: int  # rows of the weight; for gate_up, as many of the gate and of the up
    depth: int  # columns per iteration
    num_warps: int
    num_stages: int
    tma: bool = False  # whether to use the TMA where the device has one
    swap: bool = False  # whether the weight is the left operand, so that pairs are the MMA's N


class Tiles(NamedTuple):
    up: Tile
    down: Tile


# (maximum mean number of pairs per expert, tiles for 16-bit weights); the first row that fits is
# used. From sweeps of bench.kernels.experts: rows up to 24 pairs on an H200 (128 and 512 experts),
# the row of 48 on an H100.
TILES: tuple[tuple[float, Tiles], ...] = (
    (10, Tiles(Tile(16, 64, 128, 4, 3, swap=True), Tile(16, 128, 128, 4, 3))),
    (24, Tiles(Tile(32, 64, 128, 4, 3), Tile(32, 128, 64, 4, 4))),
    (48, Tiles(Tile(64, 64, 128, 4, 4, swap=True), Tile(64, 64, 64, 4, 4))),
    (384, Tiles(Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 4, tma=True))),
    (float("inf"), Tiles(Tile(128, 128, 64, 8, 4, tma=True), Tile(128, 256, 64, 8, 4, tma=True))),
)
# Tiles for 32-bit weights (PLAIN) and for the deterministic mode (FIXED), the same for any number
# of rows.
PLAIN = Tiles(Tile(32, 32, 32, 4, 3), Tile(32, 64, 32, 4, 3))
FIXED = Tiles(Tile(64, 32, 128, 4, 3), Tile(64, 64, 128, 4, 3))


@triton.jit
def _find(starts, block, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Find the expert and the pairs of block number `block`; a block has ROWS pairs of one expert.

    starts: `Sorted.starts`.
    Returns the expert (EXPERTS for a surplus block), the index of the block's first pair in
    `Sorted.order`, and the end index of the expert's pairs.
    """
    expert = tl.arange(0, BLOCK)
    exists = expert < EXPERTS
    first = tl.load(starts + expert, mask=exists, other=0)
    behind = tl.load(starts + expert + 1, mask=exists, other=0)
    blocks = (behind - first + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, axis=0)
    before = (ends <= block) & exists
    index = tl.sum(before.to(tl.int32), axis=0)
    skipped = tl.sum(tl.where(before, blocks, 0), axis=0)
    here = expert == index
    place = tl.sum(tl.where(here, first, 0), axis=0) + (block - skipped) * ROWS
    return index, place, tl.sum(tl.where(here, behind, 0), axis=0)


@triton.jit
def _nothing(ROWS: tl.constexpr, OUTS: tl.constexpr, SWAP: tl.constexpr):
    """Return the initial accumulator of `_add`, zeros."""
    return tl.zeros([OUTS, ROWS] if SWAP else [ROWS, OUTS], tl.float32)


@triton.jit
def _add(xs, ws, acc, SWAP: tl.constexpr):
    """Return acc + xs @ ws^T for xs [ROWS, DEPTH] and ws [OUTS, DEPTH], transposed if SWAP."""
    if SWAP:
        acc = tl.dot(ws, tl.trans(xs), acc, input_precision="ieee")
    else:
        acc = tl.dot(xs, tl.trans(ws), acc, input_precision="ieee")
    return acc


class GroupedShape(NamedTuple):
    """The tile of a program, as one `tl.constexpr`; other fields are those of `Tile`."""

    block: int  # a power of two, at least EXPERTS
    rows: int
    outs: int
    depth: int
    tma: bool
    swap: bool


@triton.jit
def _grouped_up_kernel(
    x,  # [tokens, WIDTH]
    weights,  # [pairs]
    order,
    starts,
    gate_up,  # [EXPERTS, 2 * SIZE, WIDTH]; without gates half as many rows
    described,  # TMA: descriptor of gate_up as [EXPERTS * 2, SIZE, WIDTH]
    bias,  # [EXPERTS, 2 * SIZE]
    inner,  # [pairs, SIZE], in sorted order
    x_scale,  # SCALED: [tokens]
    scale,  # SCALED: [EXPERTS, 2 * SIZE]
    limit,
    MIXTURE: tl.constexpr,  # `Mixture`
    SCALED: tl.constexpr,  # whether x and weights are quantised, with one scale per row
    TILE: tl.constexpr,  # `GroupedShape`
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = (MIXTURE.size + TILE.outs - 1) // TILE.outs
    HALVES: tl.constexpr = 1 if MIXTURE.act == 4 else 2  # 4: without gates
    block = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * TILE.outs
    column = first + tl.arange(0, TILE.outs)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, place, behind = _find(starts, block, MIXTURE.experts, TILE.block, TILE.rows)
    if expert == MIXTURE.experts:
        return
    row = place + tl.arange(0, TILE.rows)
    exists = row < behind
    pair = tl.load(order + row, mask=exists, other=0)
    depth = tl.arange(0, TILE.depth)
    x_at = x + (pair // MIXTURE.chosen).to(tl.int64)[:, None] * MIXTURE.width + depth[None, :]
    source = expert.to(tl.int64) * (HALVES * MIXTURE.size) + column
    if TILE.tma:
        both = _nothing(TILE.rows, HALVES * TILE.outs, TILE.swap)
        for start in range(0, MIXTURE.width, TILE.depth):
            # Rows without a pair read the token of pair 0; their results are not used.
            if MIXTURE.width % TILE.depth == 0:
                xs = tl.load(x_at + start)
            else:
                xs = tl.load(x_at + start, mask=(start + depth < MIXTURE.width)[None, :], other=0.0)
            ws = tl.reshape(
                described.load([expert * HALVES, first, start]), (HALVES * TILE.outs, TILE.depth)
            )
            both = _add(xs, ws, both, TILE.swap)
        if TILE.swap:
            both = tl.trans(both)
        if MIXTURE.act == 4:
            gate = both
            up = both
        else:
            gate, up = tl.split(tl.permute(tl.reshape(both, (TILE.rows, 2, TILE.outs)), (0, 2, 1)))
    else:
        gate_at = gate_up + source[:, None] * MIXTURE.width + depth[None, :]
        up_at = gate_at + MIXTURE.size * MIXTURE.width
        gate = _nothing(TILE.rows, TILE.outs, TILE.swap)
        up = _nothing(TILE.rows, TILE.outs, TILE.swap)
        for start in range(0, MIXTURE.width, TILE.depth):
            inside = (start + depth < MIXTURE.width)[None, :]
            mask = (
                inside
                if MIXTURE.size % TILE.outs == 0
                else (column < MIXTURE.size)[:, None] & inside
            )
            xs = tl.load(x_at + start, mask=exists[:, None] & inside, other=0.0)
            gates = tl.load(gate_at + start, mask=mask, other=0.0)
            gate = _add(xs, gates, gate, TILE.swap)
            if MIXTURE.act != 4:
                ups = tl.load(up_at + start, mask=mask, other=0.0)
                up = _add(xs, ups, up, TILE.swap)
        if TILE.swap:
            gate = tl.trans(gate)
            up = tl.trans(up)
    if SCALED:
        of_x = tl.load(x_scale + pair // MIXTURE.chosen, mask=exists, other=0.0)[:, None]
        gate *= of_x * tl.load(scale + source, mask=column < MIXTURE.size, other=0.0)[None, :]
        if MIXTURE.act != 4:
            up *= (
                of_x
                * tl.load(scale + source + MIXTURE.size, mask=column < MIXTURE.size, other=0.0)[
                    None, :
                ]
            )
    if MIXTURE.weigh:
        weight = tl.load(weights + pair, mask=exists, other=0.0)[:, None]
        gate *= weight
        up *= weight
    if MIXTURE.bias:
        gate += tl.load(bias + source, mask=column < MIXTURE.size, other=0.0).to(tl.float32)[
            None, :
        ]
        if MIXTURE.act != 4:
            of_up = tl.load(bias + source + MIXTURE.size, mask=column < MIXTURE.size, other=0.0)
            up += of_up.to(tl.float32)[None, :]
    value = gated(gate, up, limit, MIXTURE.act).to(inner.dtype.element_ty)
    at = row.to(tl.int64)[:, None] * MIXTURE.size + column[None, :]
    tl.store(inner + at, value, mask=exists[:, None] & (column < MIXTURE.size)[None, :])


@triton.jit
def _grouped_down_kernel(
    inner,  # [pairs, SIZE], in sorted order
    weights,  # [pairs]
    order,
    starts,
    down,  # [EXPERTS, WIDTH, SIZE]
    inner_described,  # TMA: descriptor of inner
    down_described,  # TMA: descriptor of down
    bias,  # [EXPERTS, WIDTH]
    given,  # [pairs, WIDTH]
    inner_scale,  # SCALED: [pairs], in sorted order
    scale,  # SCALED: [EXPERTS, WIDTH]
    MIXTURE: tl.constexpr,  # `Mixture`
    SCALED: tl.constexpr,
    TILE: tl.constexpr,  # `GroupedShape`
    PDL: tl.constexpr,
):
    WEIGH: tl.constexpr = MIXTURE.weigh
    tiles: tl.constexpr = (MIXTURE.width + TILE.outs - 1) // TILE.outs
    # The sort ended two launches ago, so its result can be read before gdc_wait.
    expert, place, behind = _find(
        starts, tl.program_id(0) // tiles, MIXTURE.experts, TILE.block, TILE.rows
    )
    first = tl.program_id(0) % tiles * TILE.outs
    column = first + tl.arange(0, TILE.outs)
    source = expert.to(tl.int64) * MIXTURE.width + column
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if expert == MIXTURE.experts:
        return
    row = place + tl.arange(0, TILE.rows)
    exists = row < behind
    depth = tl.arange(0, TILE.depth)
    x_at = inner + row.to(tl.int64)[:, None] * MIXTURE.size + depth[None, :]
    w_at = down + source[:, None] * MIXTURE.size + depth[None, :]
    acc = _nothing(TILE.rows, TILE.outs, TILE.swap)
    if TILE.tma:
        for start in range(0, MIXTURE.size, TILE.depth):
            # Rows after the expert's pairs belong to other experts; their results are not used.
            xs = inner_described.load([place, start])
            ws = tl.reshape(down_described.load([expert, first, start]), (TILE.outs, TILE.depth))
            acc = _add(xs, ws, acc, TILE.swap)
    else:
        for start in range(0, MIXTURE.size, TILE.depth):
            inside = (start + depth < MIXTURE.size)[None, :]
            mask = (
                inside
                if MIXTURE.width % TILE.outs == 0
                else (column < MIXTURE.width)[:, None] & inside
            )
            xs = tl.load(x_at + start, mask=exists[:, None] & inside, other=0.0)
            ws = tl.load(w_at + start, mask=mask, other=0.0)
            acc = _add(xs, ws, acc, TILE.swap)
    if TILE.swap:
        acc = tl.trans(acc)
    if SCALED:
        of_inner = tl.load(inner_scale + row, mask=exists, other=0.0)[:, None]
        acc *= of_inner * tl.load(scale + source, mask=column < MIXTURE.width, other=0.0)[None, :]
    if MIXTURE.bias:
        acc += tl.load(bias + source, mask=column < MIXTURE.width, other=0.0).to(tl.float32)[
            None, :
        ]
    pair = tl.load(order + row, mask=exists, other=0)
    if not WEIGH:
        acc *= tl.load(weights + pair, mask=exists, other=0.0)[:, None]
    at = pair.to(tl.int64)[:, None] * MIXTURE.width + column[None, :]
    mask = exists[:, None] & (column < MIXTURE.width)[None, :]
    tl.store(given + at, acc.to(given.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(
    given,  # [tokens * CHOSEN, WIDTH]
    ids,  # [tokens * CHOSEN]
    residual,  # [tokens, WIDTH]
    out,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    # 0: this rank has all experts; else the id of other ranks' experts, which have no results here
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = token * CHOSEN + place
        here = exists
        if EXPERTS:
            here = tl.where(exists, tl.load(ids + pair), EXPERTS) < EXPERTS
        total += tl.load(given + pair * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + token * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=exists)


def tiles_for(pairs: int, experts: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return PLAIN
    return next(tiles for most, tiles in TILES if pairs / experts <= most)


class Scales(NamedTuple):
    """The scales of matmuls whose operands are both quantised, one scale for each row."""

    rows: Tensor  # float32, one for each row of x, or of inner
    outputs: Tensor  # float32, one for each row of all experts' weights
    dtype: torch.dtype  # dtype of the result


def _grid(ids: Tensor, experts: int, tile: Tile, outs: int) -> tuple[int]:
    """Return the size of a grid that is large enough for any choice of experts.

    Each expert has at most one partly full block of pairs.
    """
    pairs = ids.numel()
    return ((min(pairs, experts) + pairs // tile.rows) * triton.cdiv(outs, tile.outs),)


def tma_fits(x: Tensor, size: int) -> bool:
    """Whether the TMA can load tiles of matrices whose rows have x's width, or `size` elements.

    Elements must have 16 or 8 bits, rows must be multiples of 16 bytes, and the device must have a
    TMA.
    """
    element_size = x.dtype.itemsize
    if element_size > 2 or x.shape[1] * element_size % 16 or size * element_size % 16:
        return False
    return compute_capability(x.device) >= HOPPER


def _described(matrices: Tensor, halves: int, tile: Tile) -> TensorDescriptor:
    """Return a TMA descriptor of matrices [experts, halves * rows, columns].

    A tile has `outs` rows of each half and `depth` columns. halves: 2 for gate and up, else 1.
    """
    experts, rows, columns = matrices.shape
    halved = matrices.view(experts * halves, rows // halves, columns)
    return TensorDescriptor.from_tensor(halved, [halves, tile.outs, tile.depth])


def _shape(tile: Tile, experts: int, rows: int, x: Tensor, tma: bool) -> dict[str, Any]:
    """Return a launch's constants, with as many pipeline stages as fit into shared memory.

    rows: number of the weight's rows that a program reads per iteration.
    """
    stage = (tile.rows + rows) * tile.depth * x.dtype.itemsize
    block = triton.next_power_of_2(experts)
    return {
        "TILE": GroupedShape(block, tile.rows, tile.outs, tile.depth, tma, tile.swap),
        "num_warps": tile.num_warps,
        "num_stages": max(1, min(tile.num_stages, shared_memory(x.device) // stage)),
    }


def grouped_up(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    stack: ExpertWeights,
    pairs: Sorted,
    tile: Tile,
    scales: Scales | None = None,  # the scales, if x and the weights are quantised
) -> Tensor:
    """Return act(gate) * up of each (token, expert) pair, sorted as `pairs`: [pairs, size]."""
    experts, width, size = stack.down.shape
    inner = x.new_empty((ids.numel(), size), dtype=x.dtype if scales is None else scales.dtype)
    tma = tile.tma and tma_fits(x, size)
    halves = stack.gate_up.shape[1] // size
    _grouped_up_kernel[_grid(ids, experts, tile, size)](
        x,
        weights,
        pairs.order,
        pairs.starts,
        stack.gate_up,
        _described(stack.gate_up, halves, tile) if tma else None,
        stack.gate_up_bias,
        inner,
        None if scales is None else scales.rows,
        None if scales is None else scales.outputs,
        stack.limit,
        MIXTURE=Mixture(
            experts=experts,
            chosen=ids.shape[1],
            size=size,
            width=width,
            act=code(stack.act),
            bias=stack.gate_up_bias is not None,
            weigh=stack.weigh_input,
        ),
        SCALED=scales is not None,
        **_shape(tile, experts, halves * tile.outs, x, tma),
        **pdl(x.device),
    )
    return inner


def grouped_down(
    inner: Tensor,
    weights: Tensor,
    ids: Tensor,
    stack: ExpertWeights,
    pairs: Sorted,
    tile: Tile,
    scales: Scales | None = None,  # the scales, if inner and the weights are quantised
) -> Tensor:
    """Return each (token, expert) pair's weighted result in the order of ids: [pairs, hidden].

    inner: the result of `grouped_up`.
    """
    experts, width, size = stack.down.shape
    dtype = inner.dtype if scales is None else scales.dtype
    pair_outputs = inner.new_empty((ids.numel(), width), dtype=dtype)
    tma = tile.tma and tma_fits(inner, width)
    _grouped_down_kernel[_grid(ids, experts, tile, width)](
        inner,
        weights,
        pairs.order,
        pairs.starts,
        stack.down,
        TensorDescriptor.from_tensor(inner, [tile.rows, tile.depth]) if tma else None,
        _described(stack.down, 1, tile) if tma else None,
        stack.down_bias,
        pair_outputs,
        None if scales is None else scales.rows,
        None if scales is None else scales.outputs,
        MIXTURE=Mixture(
            experts=experts,
            size=size,
            width=width,
            bias=stack.down_bias is not None,
            weigh=stack.weigh_input,
        ),
        SCALED=scales is not None,
        **_shape(tile, experts, tile.outs, inner, tma),
        **pdl(inner.device),
    )
    return pair_outputs


def sum_experts(
    given: Tensor, ids: Tensor, stack: ExpertWeights | PackedExperts, residual: Tensor | None
) -> Tensor:
    """Return the sum of `given` over each token's experts: [tokens, hidden].

    given: [tokens * chosen, hidden], results of (token, expert) pairs.
    residual: if not None, the sum is added to it in place, and it is returned.
    """
    width = given.shape[1]
    tokens, chosen = ids.shape
    out = given.new_empty((tokens, width)) if residual is None else residual
    columns = min(1024, triton.next_power_of_2(width))
    _sum_kernel[(tokens, triton.cdiv(width, columns))](
        given,
        ids,
        residual,
        out,
        CHOSEN=chosen,
        WIDTH=width,
        ADD=residual is not None,
        EXPERTS=stack.count if stack.total else 0,
        BLOCK=columns,
        num_warps=4,
        **pdl(given.device),
    )
    return out


def by_expert(
    x: Tensor,  # [tokens, hidden], any number of them
    weights: Tensor,
    ids: Tensor,
    stack: Any,  # ExpertWeights, or PackedExperts
    experts: int,
    residual: Tensor | None,
    up: Callable[..., Tensor],  # the first matmul: `grouped_up` or a function with its arguments
    down: Callable[..., Tensor],  # the second: `grouped_down` or a function with its arguments
    tiles: Any,  # tiles of both matmuls
) -> Tensor:
    """Return the weighted sum of each token's experts, by two matmuls over pairs sorted by expert.

    See `kernels.reference.Kernels.experts`. experts: the number of experts on this rank.
    """
    if not x.shape[0]:
        return torch.empty_like(x) if residual is None else residual
    pairs = sort(ids, experts)
    inner = up(x, weights, ids, stack, pairs, tiles.up)
    pair_outputs = down(inner, weights, ids, stack, pairs, tiles.down)
    return sum_experts(pair_outputs, ids, stack, residual)


def grouped(
    x: Tensor,  # [tokens, hidden], any number of them
    weights: Tensor,
    ids: Tensor,
    stack: ExpertWeights,
    residual: Tensor | None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts (`Kernels.experts`)."""
    experts = stack.down.shape[0]
    tiles = tiles or tiles_for(ids.numel(), stack.total or experts, x.dtype)
    return by_expert(x, weights, ids, stack, experts, residual, grouped_up, grouped_down, tiles)


def grouped_fixed(
    x: Tensor, weights: Tensor, ids: Tensor, stack: ExpertWeights, residual: Tensor | None
) -> Tensor:
    """Return the result of `grouped` with FIXED tiles, so that it is batch-invariant."""
    return grouped(x, weights, ids, stack, residual, FIXED)
