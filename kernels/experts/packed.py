"""MoE experts with packed weights, for any number of tokens, grouped by expert.

The launches are those of `kernels.experts.grouped`. Codes are decoded to 16-bit numbers for tensor
cores, as in `kernels.gemm.packed.dot`.

The weight is the left operand, so that the few (token, expert) pairs of an expert fill the short
side of the MMA tile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.gate import code, gated
from kernels.experts.grouped import _find, by_expert
from kernels.experts.mixture import Mixture
from kernels.experts.reference import PackedExperts
from kernels.experts.sorting import Sorted
from kernels.gemm.packed.codes import E2M1_CODE, code_format, code_of, scaled_floats
from kernels.gemm.packed.dot import LOWERED, add_step, decoding, pair_ptx
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight


class PackedTile(NamedTuple):
    pairs: int  # pairs of one expert
    outs: int  # rows of the weight; for gate_up, as many of the gate and of the up
    num_warps: int
    num_stages: int


class PackedTiles(NamedTuple):
    up: PackedTile
    down: PackedTile


# (maximum mean number of pairs per expert, tiles); the first row that fits is used. The fastest of
# a sweep of bench.kernels.experts on an H200 with MXFP4, at 0.5 to 64 pairs.
TILES: tuple[tuple[float, PackedTiles], ...] = (
    (1, PackedTiles(PackedTile(16, 64, 2, 4), PackedTile(16, 128, 4, 4))),
    (10, PackedTiles(PackedTile(16, 64, 2, 2), PackedTile(16, 128, 2, 2))),
    (24, PackedTiles(PackedTile(32, 32, 1, 2), PackedTile(16, 128, 2, 2))),
    (48, PackedTiles(PackedTile(64, 128, 8, 2), PackedTile(32, 128, 8, 4))),
    (float("inf"), PackedTiles(PackedTile(64, 128, 4, 2), PackedTile(64, 128, 4, 2))),
)
# Tiles of the deterministic mode, the same for any number of rows.
FIXED = PackedTiles(PackedTile(32, 64, 4, 3), PackedTile(32, 64, 4, 3))


class PackedShape(NamedTuple):
    """The tile of a program: `pairs` (token, expert) pairs by `outs` outputs."""

    block: int  # a power of two, at least EXPERTS
    pairs: int
    outs: int
    words: int  # words (of 4-bit codes) or codes (8-bit) of a row per step
    whole_steps: bool  # whether every step's columns exist, so that no mask is needed


@triton.jit
def _packed_up_kernel(
    x,  # [tokens, WIDTH]
    weights,  # [pairs]
    order,
    starts,
    codes,  # PackedWeight's [EXPERTS * 2 * SIZE, WIDTH]; without gates half as many rows
    scale,
    offset,
    table,
    bias,  # [EXPERTS, 2 * SIZE]
    inner,  # [pairs, SIZE], in sorted order
    limit,
    MIXTURE: tl.constexpr,  # `Mixture`
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    TILE: tl.constexpr,  # `PackedShape`
    DECODE: tl.constexpr,  # `dot.Decoding`
    PDL: tl.constexpr,
):
    OUTS: tl.constexpr = TILE.outs
    PAIRS: tl.constexpr = TILE.pairs
    FIELDS: tl.constexpr = 4 if FORMAT.bits == 4 else 1
    RUN: tl.constexpr = FORMAT.span // 4
    tiles: tl.constexpr = (MIXTURE.size + OUTS - 1) // OUTS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, place, behind = _find(
        starts, tl.program_id(0) // tiles, MIXTURE.experts, TILE.block, PAIRS
    )
    if expert == MIXTURE.experts:
        return
    row = place + tl.arange(0, PAIRS)
    exists = row < behind
    pair = tl.load(order + row, mask=exists, other=0)
    out = tl.program_id(0) % tiles * OUTS + tl.arange(0, OUTS)
    has = out < MIXTURE.size
    EACH: tl.constexpr = MIXTURE.size if MIXTURE.act == 4 else 2 * MIXTURE.size  # 4: without gates
    source = expert.to(tl.int64) * EACH + out
    element = tl.arange(0, TILE.words)
    if FORMAT.bits == 4:
        column = element // RUN * FORMAT.span + element % RUN
        column = tl.multiple_of(tl.max_contiguous(column, RUN), RUN)
    else:
        column = element
    x_at = x + (pair // MIXTURE.chosen).to(tl.int64)[None, :] * MIXTURE.width + column[:, None]
    gate_at = codes + source[:, None] * (MIXTURE.width // FIELDS) + element[None, :]
    up_at = gate_at + MIXTURE.size * (MIXTURE.width // FIELDS)
    gate_groups = source // FORMAT.band * (MIXTURE.width // FORMAT.group)
    up_groups = (source + MIXTURE.size) // FORMAT.band * (MIXTURE.width // FORMAT.group)
    gate = tl.zeros([OUTS, PAIRS], tl.float32)
    up = tl.zeros([OUTS, PAIRS], tl.float32)
    for start in range(0, MIXTURE.width, TILE.words * FIELDS):
        gate = add_step(
            gate, start, gate_at, x_at, MIXTURE.width, has, exists, gate_groups, scale, offset,
            table, FORMAT, TILE.words, TILE.whole_steps, DECODE,
        )  # fmt: skip
        if MIXTURE.act != 4:
            up = add_step(
                up, start, up_at, x_at, MIXTURE.width, has, exists, up_groups, scale, offset,
                table, FORMAT, TILE.words, TILE.whole_steps, DECODE,
            )  # fmt: skip
    if DECODE.by_ptx and FORMAT.bits == 4 and FORMAT.code == 1:
        gate *= LOWERED
        up *= LOWERED
    if DECODE.by_ptx and FORMAT.bits == 8 and DECODE.scale_outputs:
        gate *= tl.load(scale + source, mask=has, other=0.0)[:, None]
        if MIXTURE.act != 4:
            up *= tl.load(scale + source + MIXTURE.size, mask=has, other=0.0)[:, None]
    if MIXTURE.weigh:
        weight = tl.load(weights + pair, mask=exists, other=0.0)[None, :]
        gate *= weight
        up *= weight
    if MIXTURE.bias:
        gate += tl.load(bias + source, mask=has, other=0.0).to(tl.float32)[:, None]
        if MIXTURE.act != 4:
            up += tl.load(bias + source + MIXTURE.size, mask=has, other=0.0).to(tl.float32)[:, None]
    value = gated(gate, up, limit, MIXTURE.act).to(inner.dtype.element_ty)
    at = row.to(tl.int64)[None, :] * MIXTURE.size + out[:, None]
    tl.store(inner + at, value, mask=has[:, None] & exists[None, :])


@triton.jit
def _packed_down_kernel(
    inner,  # [pairs, SIZE], in sorted order
    weights,  # [pairs]
    order,
    starts,
    codes,  # PackedWeight's [EXPERTS * WIDTH, SIZE]
    scale,
    offset,
    table,
    bias,  # [EXPERTS, WIDTH]
    given,  # [pairs, WIDTH]
    MIXTURE: tl.constexpr,  # `Mixture`
    FORMAT: tl.constexpr,  # `codes.CodeFormat`
    TILE: tl.constexpr,  # `PackedShape`
    DECODE: tl.constexpr,  # `dot.Decoding`
    PDL: tl.constexpr,
):
    OUTS: tl.constexpr = TILE.outs
    PAIRS: tl.constexpr = TILE.pairs
    WEIGH: tl.constexpr = MIXTURE.weigh
    FIELDS: tl.constexpr = 4 if FORMAT.bits == 4 else 1
    RUN: tl.constexpr = FORMAT.span // 4
    tiles: tl.constexpr = (MIXTURE.width + OUTS - 1) // OUTS
    # The sort ended two launches ago, so its result can be read before gdc_wait.
    expert, place, behind = _find(
        starts, tl.program_id(0) // tiles, MIXTURE.experts, TILE.block, PAIRS
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if expert == MIXTURE.experts:
        return
    row = place + tl.arange(0, PAIRS)
    exists = row < behind
    out = tl.program_id(0) % tiles * OUTS + tl.arange(0, OUTS)
    has = out < MIXTURE.width
    source = expert.to(tl.int64) * MIXTURE.width + out
    element = tl.arange(0, TILE.words)
    if FORMAT.bits == 4:
        column = element // RUN * FORMAT.span + element % RUN
        column = tl.multiple_of(tl.max_contiguous(column, RUN), RUN)
    else:
        column = element
    x_at = inner + row.to(tl.int64)[None, :] * MIXTURE.size + column[:, None]
    at = codes + source[:, None] * (MIXTURE.size // FIELDS) + element[None, :]
    groups = source // FORMAT.band * (MIXTURE.size // FORMAT.group)
    acc = tl.zeros([OUTS, PAIRS], tl.float32)
    for start in range(0, MIXTURE.size, TILE.words * FIELDS):
        acc = add_step(
            acc, start, at, x_at, MIXTURE.size, has, exists, groups, scale, offset, table,
            FORMAT, TILE.words, TILE.whole_steps, DECODE,
        )  # fmt: skip
    if DECODE.by_ptx and FORMAT.bits == 4 and FORMAT.code == 1:
        acc *= LOWERED
    if DECODE.by_ptx and FORMAT.bits == 8 and DECODE.scale_outputs:
        acc *= tl.load(scale + source, mask=has, other=0.0)[:, None]
    if MIXTURE.bias:
        acc += tl.load(bias + source, mask=has, other=0.0).to(tl.float32)[:, None]
    pair = tl.load(order + row, mask=exists, other=0)
    if not WEIGH:
        acc *= tl.load(weights + pair, mask=exists, other=0.0)[None, :]
    place_out = pair.to(tl.int64)[None, :] * MIXTURE.width + out[:, None]
    mask = has[:, None] & exists[None, :]
    tl.store(given + place_out, acc.to(given.dtype.element_ty), mask=mask)


def tiles_for(pairs: int, experts: int) -> PackedTiles:
    return next(tiles for most, tiles in TILES if pairs / experts <= most)


def _floats_fit(x: Tensor, weight: PackedWeight) -> bool:
    """Whether `scaled_floats` can decode the weight: e2m1 codes with bfloat16 scales.

    x must be bfloat16 on a GPU. Then the decoded weights are exact.
    """
    form = weight.form
    plain = code_of(weight) == E2M1_CODE and form.scale == torch.bfloat16
    return x.is_cuda and x.dtype == torch.bfloat16 and plain and form.offset == "none"


def _options(x: Tensor, weight: PackedWeight, tile: PackedTile, experts: int) -> dict[str, Any]:
    four = weight.form.bits == 4
    words = 32 if four else 128
    step = 4 * words if four else words
    block = triton.next_power_of_2(experts)
    ptx, warps = pair_ptx(x, weight, words), tile.num_warps
    if _floats_fit(x, weight):
        ptx = [scaled_floats(at) for at in range(4)]
    else:  # more warps, because the sums of a group need registers besides the total sums
        warps = max(warps, tile.pairs * tile.outs // 1024)
    # Use fewer stages if scales and offsets of each single code are prefetched, too.
    stages = 2 if not ptx and weight.form.group % step else tile.num_stages
    return {
        "FORMAT": code_format(weight),
        "TILE": PackedShape(block, tile.pairs, tile.outs, words, weight.shape[1] % step == 0),
        "DECODE": decoding(x, weight, ptx),
        "num_warps": warps,
        "num_stages": stages,
        **pdl(x.device),
    }


def _grid(pairs: int, experts: int, tile: PackedTile, outs: int) -> tuple[int]:
    """Return the size of a grid that is large enough for any choice of experts.

    Each expert has at most one partly full block of pairs.
    """
    return ((min(pairs, experts) + pairs // tile.pairs) * triton.cdiv(outs, tile.outs),)


def packed_up(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, pairs: Sorted, tile: PackedTile
) -> Tensor:
    """Return act(gate) * up of each (token, expert) pair, sorted as `pairs`: [pairs, size]."""
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
        MIXTURE=Mixture(
            experts=experts,
            chosen=ids.shape[1],
            size=size,
            width=width,
            act=code(stack.act),
            bias=stack.gate_up_bias is not None,
            weigh=stack.weigh_input,
        ),
        **_options(x, weight, tile, experts),
    )
    return inner


def packed_down(
    inner: Tensor,
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    pairs: Sorted,
    tile: PackedTile,
) -> Tensor:
    """Return each (token, expert) pair's weighted result in the order of ids: [pairs, hidden].

    inner: the result of `packed_up`.
    """
    weight = stack.down
    experts, size, width = stack.count, weight.shape[1], stack.gate_up.shape[1]
    pair_outputs = inner.new_empty((ids.numel(), width))
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
        pair_outputs,
        MIXTURE=Mixture(
            experts=experts,
            size=size,
            width=width,
            bias=stack.down_bias is not None,
            weigh=stack.weigh_input,
        ),
        **_options(inner, weight, tile, experts),
    )
    return pair_outputs


def packed_experts(
    x: Tensor,  # [tokens, hidden], any number of them
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    residual: Tensor | None,
    tiles: PackedTiles | None = None,
) -> Tensor:
    """Return the weighted sum of each token's packed experts (`Kernels.packed_experts`)."""
    tiles = tiles or tiles_for(ids.numel(), stack.total or stack.count)
    return by_expert(x, weights, ids, stack, stack.count, residual, packed_up, packed_down, tiles)


def packed_experts_fixed(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, residual: Tensor | None
) -> Tensor:
    """Return the result of `packed_experts` with FIXED tiles, so that it is batch-invariant."""
    return packed_experts(x, weights, ids, stack, residual, FIXED)
