"""MoE experts for a few tokens, without grouping by expert: each (token, expert) pair is a GEMV.

There are two launches. The first computes the gate and up matmuls and the activation. The second
computes the down matmul, multiplies its results by the router's weights, and adds them up with the
residual. If several pairs have the same expert, its weights are read again from the L2 cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.gate import code, gated
from kernels.experts.reference import ExpertWeights
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl

MOST = 4  # maximum tokens; with more, grouping pairs by expert is faster

# (ROWS, COLUMNS, warps), the fastest in sweeps on an H200 (UP) and an H100 (DOWN). DOWN_OF_FEW
# is for up to four experts per token (gpt-oss), DOWN for more (Qwen3-30B-A3B: 8, Qwen3-Next: 10).
UP = (2, 1024, 4)
DOWN_OF_FEW = (1, 512, 4)
DOWN = (1, 128, 4)


@triton.jit
def _few_up_kernel(
    x,  # [tokens, WIDTH]
    weights,  # [tokens, CHOSEN]
    ids,  # [tokens, CHOSEN]
    gate_up,  # [experts, 2 * SIZE, WIDTH]; without gates half as many rows
    bias,  # [experts, 2 * SIZE]
    inner,  # [tokens * CHOSEN, SIZE]
    limit,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGH: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0: this rank has all experts; else the id of other ranks' experts
    ROWS: tl.constexpr,  # rows of gate_up per program, gate and up alternating
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(1)
    index = tl.arange(0, ROWS)
    HALF: tl.constexpr = ROWS if ACT == 4 else ROWS // 2  # 4: without gates
    EACH: tl.constexpr = SIZE if ACT == 4 else 2 * SIZE
    if ACT == 4:
        mine = tl.program_id(0) * ROWS + index
        source = mine
    else:
        mine = tl.program_id(0) * HALF + index // 2
        source = mine + (index % 2) * SIZE
    exists = mine < SIZE
    column = tl.arange(0, COLUMNS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids + pair).to(tl.int64)
    if EXPERTS:
        exists = tl.where(exists, expert, EXPERTS) < EXPERTS
    x_at = x + (pair // CHOSEN).to(tl.int64) * WIDTH + column
    row = expert * EACH + source
    at = gate_up + row[:, None] * WIDTH + column[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    mask = exists[:, None] & (column < WIDTH)[None, :]
    weight = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    for start in range(0, WIDTH, COLUMNS):
        value = tl.load(x_at + start, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        # Load the next tile while this one is used.
        mask = exists[:, None] & (start + COLUMNS + column < WIDTH)[None, :]
        ahead = tl.load(at + start + COLUMNS, mask=mask, other=0.0, eviction_policy="evict_first")
        acc += weight.to(tl.float32) * value[None, :]
        weight = ahead
    y = tl.sum(acc, axis=1)
    if WEIGH:
        y *= tl.load(weights + pair)
    if BIAS:
        y += tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
    if ACT == 4:
        value = gated(y, y, limit, ACT)
    else:
        gate, up = tl.split(tl.reshape(y, (HALF, 2)))
        value = gated(gate, up, limit, ACT)
    out = tl.program_id(0) * HALF + tl.arange(0, HALF)
    at_out = inner + pair.to(tl.int64) * SIZE + out
    tl.store(at_out, value.to(inner.dtype.element_ty), mask=out < SIZE)


@triton.jit
def _few_down_kernel(
    inner,  # [tokens * CHOSEN, SIZE]
    weights,
    ids,
    down,  # [experts, WIDTH, SIZE]
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
    ROWS: tl.constexpr,  # outputs per program
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1)
    index = tl.arange(0, PLACES * ROWS)
    place = index // ROWS
    mine = tl.program_id(0) * ROWS + index % ROWS
    exists = (place < CHOSEN) & (mine < WIDTH)
    column = tl.arange(0, COLUMNS)
    pair = token * CHOSEN + tl.minimum(place, CHOSEN - 1)
    # ids were written two launches ago, so they can be read before gdc_wait. So can weights, which
    # are loaded while the previous launch still runs.
    expert = tl.load(ids + pair).to(tl.int64)
    if EXPERTS:
        exists &= expert < EXPERTS
    row = expert * WIDTH + mine
    at = down + row[:, None] * SIZE + column[None, :]
    inner_at = inner + pair.to(tl.int64)[:, None] * SIZE + column[None, :]
    mask = exists[:, None] & (column < SIZE)[None, :]
    weight = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if COLUMNS >= SIZE:
        value = tl.load(inner_at, mask=mask, other=0.0).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * value, axis=1)
    else:
        # Sum eight columns per register; with one column, tiles of 16 rows would spill.
        acc = tl.zeros([PLACES * ROWS, COLUMNS // 8], tl.float32)
        for start in range(0, SIZE, COLUMNS):
            here = exists[:, None] & (start + column < SIZE)[None, :]
            value = tl.load(inner_at + start, mask=here, other=0.0).to(tl.float32)
            mask = exists[:, None] & (start + COLUMNS + column < SIZE)[None, :]
            ahead = tl.load(
                at + start + COLUMNS, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            product = tl.reshape(weight.to(tl.float32) * value, (PLACES * ROWS, COLUMNS // 8, 8))
            acc += tl.sum(product, axis=2)
            weight = ahead
        y = tl.sum(acc, axis=1)
    if BIAS:
        y += tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
    if not WEIGH:
        y *= tl.load(weights + pair, mask=exists, other=0.0)
    total = tl.sum(tl.reshape(y, (PLACES, ROWS)), axis=0)
    outs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_out = token.to(tl.int64) * WIDTH + outs
    if ADD:
        total += tl.load(residual + at_out, mask=outs < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + at_out, total.to(out.dtype.element_ty), mask=outs < WIDTH)


def few_up(
    x: Tensor,  # [1 .. MOST, hidden]
    weights: Tensor,
    ids: Tensor,
    stack: ExpertWeights,
    config: tuple[int, int, int] = UP,
) -> Tensor:
    """Return act(gate) * up of each (token, expert) pair: [tokens * chosen, size]."""
    tokens, width = x.shape
    chosen, size = ids.shape[1], stack.down.shape[2]
    inner = x.new_empty((tokens * chosen, size))
    rows, columns, warps = config
    outs = rows * size // stack.gate_up.shape[1]
    _few_up_kernel[(triton.cdiv(size, outs), tokens * chosen)](
        x,
        weights,
        ids,
        stack.gate_up,
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
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
        **pdl(x.device),
    )
    return inner


def few_down(
    inner: Tensor,  # the result of `few_up`
    weights: Tensor,
    ids: Tensor,
    stack: ExpertWeights,
    residual: Tensor | None,
    config: tuple[int, int, int] | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts: [tokens, hidden]."""
    tokens, chosen = ids.shape
    _, width, size = stack.down.shape
    out = inner.new_empty((tokens, width)) if residual is None else residual
    places = triton.next_power_of_2(chosen)
    rows, columns, warps = config or (DOWN_OF_FEW if places <= 4 else DOWN)
    _few_down_kernel[(triton.cdiv(width, rows), tokens)](
        inner,
        weights,
        ids,
        stack.down,
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
        PLACES=places,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
        **pdl(inner.device),
    )
    return out


def few_fits(x: Tensor, stack: ExpertWeights) -> bool:
    """Whether x has 1 to MOST tokens, for which `few` is faster than grouping pairs by expert."""
    return 0 < x.shape[0] <= MOST


def few(
    x: Tensor, weights: Tensor, ids: Tensor, stack: ExpertWeights, residual: Tensor | None
) -> Tensor:
    """Return the weighted sum of each token's experts, for 1 to MOST tokens (`Kernels.experts`)."""
    return few_down(few_up(x, weights, ids, stack), weights, ids, stack, residual)
