"""Norm and router of some tokens in one launch: a program multiplies a few of them by a few rows of
the router. A library's product of so few columns is launches that wait for each other."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.fetch import fetch
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl


class Tile(NamedTuple):
    most: int  # tokens; 0: never
    rows: int  # tokens of a program
    outs: int  # rows of the router
    depth: int  # columns a turn
    num_warps: int


# Not in use before a GPU has said up to how many tokens it is quicker than norm and library.
TILE = Tile(0, 16, 16, 256, 4)


@triton.jit(do_not_specialize=["tokens"])
def _norm_router_kernel(
    x,  # [tokens, WIDTH]
    norm,  # [WIDTH]
    router,  # [EXPERTS, WIDTH]
    normed,  # [tokens, WIDTH]
    logits,  # [tokens, EXPERTS] float32
    tokens,
    eps,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,  # a power of two, at least WIDTH
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    exists = row < tokens
    depth = tl.arange(0, DEPTH)
    if PDL:
        if tl.program_id(0) == 0:
            fetch(router + tl.minimum(expert, EXPERTS - 1) * WIDTH, WIDTH, AHEAD)
        gdc_wait()
        gdc_launch_dependents()
    at = row.to(tl.int64)[:, None] * WIDTH + depth[None, :]
    router_at = router + expert[:, None] * WIDTH + depth[None, :]
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        mask = exists[:, None] & (start + depth < WIDTH)[None, :]
        value = tl.load(x + at + start, mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(value * value, axis=1)
    rms = tl.sqrt(squares / WIDTH + eps)
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        inside = start + depth < WIDTH
        mask = exists[:, None] & inside[None, :]
        value = tl.load(x + at + start, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(norm + start + depth, mask=inside, other=0.0).to(tl.float32)
        value = (value / rms[:, None] * factor[None, :]).to(normed.dtype.element_ty)
        if tl.program_id(1) == 0:
            tl.store(normed + at + start, value, mask=mask)
        mask = (expert < EXPERTS)[:, None] & inside[None, :]
        rows = tl.load(router_at + start, mask=mask, other=0.0)
        acc = tl.dot(value, tl.trans(rows), acc, input_precision="ieee")
    out = row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    tl.store(logits + out, acc, mask=exists[:, None] & (expert < EXPERTS)[None, :])


def norm_router(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, tile: Tile = TILE
) -> tuple[Tensor, Tensor]:
    """x [tokens, hidden], router [experts, hidden] -> rms_norm(x), rounded to x's dtype, and that
    times the router's rows: [tokens, experts] float32."""
    tokens, width = x.shape
    experts = router.shape[0]
    normed = torch.empty_like(x)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    if tokens:
        _norm_router_kernel[(triton.cdiv(tokens, tile.rows), triton.cdiv(experts, tile.outs))](
            x,
            norm,
            router,
            normed,
            logits,
            tokens,
            eps,
            EXPERTS=experts,
            WIDTH=width,
            ROWS=tile.rows,
            OUTS=tile.outs,
            DEPTH=tile.depth,
            AHEAD=triton.next_power_of_2(width),
            num_warps=tile.num_warps,
            **pdl(x.device),
        )
    return normed, logits
