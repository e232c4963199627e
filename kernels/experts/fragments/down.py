"""The down matmul of MoE experts whose weights are in fragments (`kernels.fragments`).

The result has a row per (token, expert) pair. For a few tokens it has a row per token, summed
over the token's experts.
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
    layout,
    products,
    start_loads,
    summed_indices,
)
from kernels.experts.fragments.tiles import FragmentTile, launch_options
from kernels.experts.mixture import Mixture
from kernels.experts.reference import PackedExperts
from kernels.experts.sorting import Sorted
from kernels.fragments import ROWS
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait


@gluon.jit
def _fragments_down_kernel(
    inner,  # [pairs, SIZE], in sorted order, in words of two numbers
    weights,  # [pairs]
    order,
    starts,
    codes,  # down's int32 [EXPERTS * WIDTH / 16, STEPS, 32, 4]
    scale,  # int16 [.., STEPS, 8, 4]
    bias,  # [EXPERTS, WIDTH]
    given,  # [pairs, WIDTH]
    MIXTURE: gl.constexpr,  # `Mixture`
    BLOCK: gl.constexpr,
    TILE: gl.constexpr,  # `FragmentTile`
    PDL: gl.constexpr,
):
    TILES: gl.constexpr = TILE.tiles
    WEIGH: gl.constexpr = MIXTURE.weigh
    COLUMNS: gl.constexpr = TILE.pairs // 8
    STEPS: gl.constexpr = MIXTURE.size // 64
    EVEN: gl.constexpr = STEPS % (TILE.shares * TILE.ahead) == 0
    EACH: gl.constexpr = MIXTURE.width // 16
    blocks: gl.constexpr = (EACH + TILE.rows * TILES - 1) // (TILE.rows * TILES)
    share, row, lane, at = indices(TILE.shares, TILE.rows)
    block = gl.program_id(0) % blocks
    # The sort ended two launches ago, so its result can be read before gdc_wait.
    expert, place, behind = find(
        starts,
        gl.program_id(0) // blocks,
        MIXTURE.experts,
        BLOCK,
        TILE.pairs,
        TILE.shares * TILE.rows,
    )
    if expert == MIXTURE.experts:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    x_at = ()
    for column in gl.static_range(COLUMNS):
        pair = gl.minimum(place + column * 8 + lane // 4, behind - 1)
        x_at = x_at + (inner + pair.to(gl.int64) * (MIXTURE.size // 2) + lane % 4 * 4 + at,)  # noqa: RUF005
    codes_at, scales_at = (), ()
    for tile in gl.static_range(TILES):
        mine = gl.minimum((block * TILE.rows + row) * TILES + tile, EACH - 1)
        source = expert.to(gl.int64) * EACH + mine
        codes_at = codes_at + (codes + source * (STEPS * 128) + (lane * 4 + at),)  # noqa: RUF005
        scales_at = scales_at + (scale + source * (STEPS * 32) + (lane // 4 * 4 + at),)  # noqa: RUF005
    words, scales = start_loads(
        codes_at, scales_at, share, STEPS, TILES, TILE.shares, TILE.ahead, EVEN
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = products(
        words, scales, codes_at, scales_at, x_at, share, STEPS,
        STEPS, TILES, COLUMNS, TILE.shares, TILE.rows, TILE.ahead, EVEN,
    )  # fmt: skip
    row3, lane3, at3 = summed_indices(TILE.shares, TILE.rows)
    for tile in gl.static_range(TILES):
        out = ((block * TILE.rows + row3) * TILES + tile) * 16 + lane3 // 4 + at3 // 2 * 8
        has = out < MIXTURE.width
        for column in gl.static_range(COLUMNS):
            sorted_at = place + column * 8 + lane3 % 4 * 2 + at3 % 2
            mask = has & (sorted_at < behind)
            pair = gl.load(order + sorted_at, mask=mask, other=0)
            y = gl.sum(acc[tile * COLUMNS + column], axis=0) * LOWERED
            if MIXTURE.bias:
                source = expert.to(gl.int64) * MIXTURE.width + out
                y += gl.load(bias + source, mask=mask, other=0.0).to(gl.float32)
            if not WEIGH:
                y *= gl.load(weights + pair, mask=mask, other=0.0)
            y = y.to(given.dtype.element_ty)
            gl.store(given + pair.to(gl.int64) * MIXTURE.width + out, y, mask=mask)


@gluon.jit
def _fragments_few_down_kernel(
    inner,  # [tokens * CHOSEN, SIZE] in words of two numbers
    weights,  # [tokens * CHOSEN]
    ids,
    codes,  # down's int32 [EXPERTS * WIDTH / 16, STEPS, 32, 4]
    scale,  # int16 [.., STEPS, 8, 4]
    bias,  # [EXPERTS, WIDTH]
    residual,  # [tokens, WIDTH]
    out,  # [tokens, WIDTH]
    OTHERS: gl.constexpr,  # whether id `MIXTURE.experts` stands for experts of other ranks
    MIXTURE: gl.constexpr,  # `Mixture`
    ADD: gl.constexpr,
    TILE: gl.constexpr,  # `FragmentTile`
    PDL: gl.constexpr,
):
    TILES: gl.constexpr = TILE.tiles
    WEIGH: gl.constexpr = MIXTURE.weigh
    L: gl.constexpr = layout(TILE.shares, TILE.rows)
    STEPS: gl.constexpr = MIXTURE.size // 64
    EVEN: gl.constexpr = STEPS % (TILE.shares * TILE.ahead) == 0
    EACH: gl.constexpr = MIXTURE.width // 16
    share, place, lane, at = indices(TILE.shares, TILE.rows)
    token = gl.program_id(1)
    pair = token * MIXTURE.chosen + gl.minimum(place, MIXTURE.chosen - 1)
    # ids were written two launches ago, so they can be read before gdc_wait.
    expert = gl.load(ids + pair)
    steps = gl.where(place < MIXTURE.chosen, STEPS, 0)
    if OTHERS:
        steps = gl.where(expert < MIXTURE.experts, steps, 0)
        expert = gl.minimum(expert, MIXTURE.experts - 1)
    x_at = (inner + pair.to(gl.int64) * (MIXTURE.size // 2) + (lane % 4 * 4 + at),)
    codes_at, scales_at = (), ()
    for tile in gl.static_range(TILES):
        mine = gl.minimum(gl.program_id(0) * TILES + tile, EACH - 1)
        source = expert.to(gl.int64) * EACH + mine
        codes_at = codes_at + (codes + source * (STEPS * 128) + (lane * 4 + at),)  # noqa: RUF005
        scales_at = scales_at + (scale + source * (STEPS * 32) + (lane // 4 * 4 + at),)  # noqa: RUF005
    words, scales = start_loads(
        codes_at, scales_at, share, steps, TILES, TILE.shares, TILE.ahead, EVEN
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = products(
        words, scales, codes_at, scales_at, x_at, share, steps,
        STEPS, TILES, 1, TILE.shares, TILE.rows, TILE.ahead, EVEN,
    )  # fmt: skip
    place3, lane3, at3 = summed_indices(TILE.shares, TILE.rows)
    pair3 = token * MIXTURE.chosen + gl.minimum(place3, MIXTURE.chosen - 1)
    exists = place3 < MIXTURE.chosen
    expert3 = gl.load(ids + pair3)
    if OTHERS:
        exists = exists & (expert3 < MIXTURE.experts)
    T: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, L))
    lane2 = gl.arange(0, 32, layout=gl.SliceLayout(1, T)).expand_dims(1)
    at2 = gl.arange(0, 4, layout=gl.SliceLayout(0, T)).expand_dims(0)
    for tile in gl.static_range(TILES):
        first = (gl.program_id(0) * TILES + tile) * 16
        y = gl.sum(acc[tile], axis=0) * LOWERED
        if MIXTURE.bias:
            source = expert3.to(gl.int64) * MIXTURE.width + first + lane3 // 4 + at3 // 2 * 8
            mask = exists & (first + lane3 // 4 + at3 // 2 * 8 < MIXTURE.width)
            y += gl.load(bias + source, mask=mask, other=0.0).to(gl.float32)
        if not WEIGH:
            y *= gl.load(weights + pair3)
        # Lanes after the last expert have read unrelated values, possibly NaN: drop them.
        total = gl.sum(gl.where(exists, y, 0.0), axis=0)
        mine = first + lane2 // 4 + at2 // 2 * 8
        mask = (mine < MIXTURE.width) & (lane2 % 4 == 0) & (at2 % 2 == 0)
        place_out = token.to(gl.int64) * MIXTURE.width + mine
        if ADD:
            total += gl.load(residual + place_out, mask=mask, other=0.0).to(gl.float32)
        gl.store(out + place_out, total.to(out.dtype.element_ty), mask=mask)


def few_fragments_down(
    inner: Tensor,  # the result of `few_fragments_up`
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    residual: Tensor | None,
    tile: FragmentTile,  # `rows` is ignored: there is one warp for each of a token's experts
) -> Tensor:
    """Return the weighted sum of each token's experts: [tokens, hidden]."""
    weight = stack.down
    tokens, chosen = ids.shape
    width, size = stack.gate_up.shape[1], weight.shape[1]
    out = inner.new_empty((tokens, width)) if residual is None else residual
    places = triton.next_power_of_2(chosen)
    _fragments_few_down_kernel[(triton.cdiv(width, ROWS * tile.tiles), tokens)](
        inner.view(torch.int32),
        weights,
        ids,
        weight.codes,
        weight.scale.view(torch.int16),
        stack.down_bias,
        residual,
        out,
        OTHERS=stack.total > 0,
        MIXTURE=Mixture(
            experts=stack.count,
            chosen=chosen,
            size=size,
            width=width,
            bias=stack.down_bias is not None,
            weigh=stack.weigh_input,
        ),
        ADD=residual is not None,
        **launch_options(tile._replace(rows=places), inner),
    )
    return out


def fragments_down(
    inner: Tensor,
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    pairs: Sorted,
    tile: FragmentTile,
) -> Tensor:
    """Return each (token, expert) pair's weighted result in the order of ids: [pairs, hidden].

    inner: the result of `fragments_up`.
    """
    weight = stack.down
    count, experts, width = ids.numel(), stack.count, stack.gate_up.shape[1]
    pair_outputs = inner.new_empty((count, width))
    blocks = min(count, experts) + count // tile.pairs
    _fragments_down_kernel[(blocks * triton.cdiv(width, ROWS * tile.rows * tile.tiles),)](
        inner.view(torch.int32),
        weights,
        pairs.order,
        pairs.starts,
        weight.codes,
        weight.scale.view(torch.int16),
        stack.down_bias,
        pair_outputs,
        MIXTURE=Mixture(
            experts=experts,
            size=weight.shape[1],
            width=width,
            bias=stack.down_bias is not None,
            weigh=stack.weigh_input,
        ),
        BLOCK=triton.next_power_of_2(experts),
        **launch_options(tile, inner),
    )
    return pair_outputs
