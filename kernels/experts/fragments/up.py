"""The gate and up matmul of MoE experts whose weights are in fragments (`kernels.fragments`).

The result is act(gate) * up of each (token, expert) pair.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.experts.fragments.products import (
    LOWERED,
    find,
    indices,
    products,
    start_loads,
    summed_indices,
)
from kernels.experts.fragments.tiles import FragmentTile, launch_options
from kernels.experts.gate import code, gated
from kernels.experts.mixture import Mixture
from kernels.experts.reference import PackedExperts
from kernels.experts.sorting import Sorted
from kernels.fragments import ROWS
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait


@gluon.jit
def _fragments_up_kernel(
    x,  # [tokens, WIDTH] in words of two numbers
    weights,  # [pairs]
    ids,  # [pairs]: expert ids if LONE, else `Sorted.order`
    starts,
    codes,  # gate_up's int32 [EXPERTS * 2 * SIZE / 16, STEPS, 32, 4]; without gates half
    scale,  # int16 [.., STEPS, 8, 4]
    bias,  # [EXPERTS, 2 * SIZE]
    inner,  # [pairs, SIZE]: in the order of expert ids if LONE, else sorted by expert
    limit,
    LONE: gl.constexpr,  # whether a program computes a single pair
    OTHERS: gl.constexpr,  # LONE: whether id `MIXTURE.experts` stands for experts of other ranks
    MIXTURE: gl.constexpr,  # `Mixture`
    BLOCK: gl.constexpr,
    TILE: gl.constexpr,  # `FragmentTile`
    PDL: gl.constexpr,
):
    TILES: gl.constexpr = TILE.tiles
    COLUMNS: gl.constexpr = TILE.pairs // 8
    HALVES: gl.constexpr = 1 if MIXTURE.act == 4 else 2  # 4: without gates
    COUNT: gl.constexpr = HALVES * TILES
    STEPS: gl.constexpr = MIXTURE.width // 64
    EVEN: gl.constexpr = STEPS % (TILE.shares * TILE.ahead) == 0
    EACH: gl.constexpr = MIXTURE.size // 16  # tiles
    blocks: gl.constexpr = (EACH + TILE.rows * TILES - 1) // (TILE.rows * TILES)
    share, row, lane, at = indices(TILE.shares, TILE.rows)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = gl.program_id(0) % blocks
    if LONE:
        place = gl.program_id(0) // blocks
        behind = place + 1
        expert = gl.load(ids + place)
        steps = STEPS
        if OTHERS:
            steps = gl.where(expert < MIXTURE.experts, STEPS, 0)
            expert = gl.minimum(expert, MIXTURE.experts - 1)
    else:
        expert, place, behind = find(
            starts,
            gl.program_id(0) // blocks,
            MIXTURE.experts,
            BLOCK,
            TILE.pairs,
            TILE.shares * TILE.rows,
        )
        if expert == MIXTURE.experts:
            return
        steps = STEPS
    x_at = ()
    for column in gl.static_range(COLUMNS):
        if LONE:
            token = place // MIXTURE.chosen + lane * 0
        else:
            pair = gl.load(ids + gl.minimum(place + column * 8 + lane // 4, behind - 1))
            token = pair // MIXTURE.chosen
        x_at = x_at + (x + token.to(gl.int64) * (MIXTURE.width // 2) + lane % 4 * 4 + at,)  # noqa: RUF005
    codes_at, scales_at = (), ()
    for tile in gl.static_range(TILES):
        mine = gl.minimum((block * TILE.rows + row) * TILES + tile, EACH - 1)
        for half in gl.static_range(HALVES):
            source = (expert.to(gl.int64) * HALVES + half) * EACH + mine
            codes_at = codes_at + (codes + source * (STEPS * 128) + (lane * 4 + at),)  # noqa: RUF005
            scales_at = scales_at + (  # noqa: RUF005
                scale + source * (STEPS * 32) + (lane // 4 * 4 + at),
            )
    words, scales = start_loads(
        codes_at, scales_at, share, steps, COUNT, TILE.shares, TILE.ahead, EVEN
    )
    acc = products(
        words, scales, codes_at, scales_at, x_at, share, steps,
        STEPS, COUNT, COLUMNS, TILE.shares, TILE.rows, TILE.ahead, EVEN,
    )  # fmt: skip
    row3, lane3, at3 = summed_indices(TILE.shares, TILE.rows)
    for tile in gl.static_range(TILES):
        out = ((block * TILE.rows + row3) * TILES + tile) * 16 + lane3 // 4 + at3 // 2 * 8
        has = out < MIXTURE.size
        source = expert.to(gl.int64) * (HALVES * MIXTURE.size) + out
        for column in gl.static_range(COLUMNS):
            sorted_at = place + column * 8 + lane3 % 4 * 2 + at3 % 2
            mask = has & (sorted_at < behind)
            gate = gl.sum(acc[HALVES * tile * COLUMNS + column], axis=0) * LOWERED
            if HALVES == 2:
                up = gl.sum(acc[(HALVES * tile + 1) * COLUMNS + column], axis=0) * LOWERED
            else:
                up = gate
            if MIXTURE.weigh:
                if LONE:
                    weight = gl.load(weights + sorted_at, mask=mask, other=0.0)
                else:
                    pair = gl.load(ids + sorted_at, mask=mask, other=0)
                    weight = gl.load(weights + pair, mask=mask, other=0.0)
                gate = gate * weight
                up = up * weight
            if MIXTURE.bias:
                gate += gl.load(bias + source, mask=mask, other=0.0).to(gl.float32)
                if HALVES == 2:
                    up += gl.load(bias + source + MIXTURE.size, mask=mask, other=0.0).to(gl.float32)
            value = gated(gate, up, limit, MIXTURE.act).to(inner.dtype.element_ty)
            gl.store(inner + sorted_at.to(gl.int64) * MIXTURE.size + out, value, mask=mask)


def _up(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    order: Sorted | None,
    stack: PackedExperts,
    tile: FragmentTile,
) -> Tensor:
    """Return act(gate) * up of each (token, expert) pair: [pairs, size].

    order: the order of the result's rows; None: the order of ids.
    """
    weight = stack.gate_up
    pairs, experts, size = ids.numel(), stack.count, stack.down.shape[1]
    inner = x.new_empty((pairs, size))
    blocks = pairs if order is None else min(pairs, experts) + pairs // tile.pairs
    _fragments_up_kernel[(blocks * triton.cdiv(size, ROWS * tile.rows * tile.tiles),)](
        x.view(torch.int32),
        weights,
        ids if order is None else order.order,
        None if order is None else order.starts,
        weight.codes,
        weight.scale.view(torch.int16),
        stack.gate_up_bias,
        inner,
        stack.limit,
        LONE=order is None,
        OTHERS=stack.total > 0,
        MIXTURE=Mixture(
            experts=experts,
            chosen=ids.shape[1],
            size=size,
            width=weight.shape[1],
            act=code(stack.act),
            bias=stack.gate_up_bias is not None,
            weigh=stack.weigh_input,
        ),
        BLOCK=triton.next_power_of_2(experts),
        **launch_options(tile, x),
    )
    return inner


def few_fragments_up(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, tile: FragmentTile
) -> Tensor:
    """Return act(gate) * up of each (token, expert) pair: [tokens * chosen, size]."""
    return _up(x, weights, ids, None, stack, tile)


def fragments_up(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, pairs: Sorted, tile: FragmentTile
) -> Tensor:
    """Return act(gate) * up of each (token, expert) pair, sorted as `pairs`: [pairs, size]."""
    return _up(x, weights, ids, pairs, stack, tile)
