"""RMS norm, router matmul and choice of experts for a few tokens, in one launch.

Each program computes the logits of a few experts. The program that finishes last chooses experts.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts import topk
from kernels.experts.few import MOST
from kernels.experts.routing import Routing
from kernels.experts.topk import choose_experts
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl

_WIDEST = 8192  # maximum width of x, as a program has a whole row of x in registers


class RouteTile(NamedTuple):
    """The tile of a program, as one `tl.constexpr`."""

    rows: int  # experts whose logits a program computes
    columns: int  # a power of two, at least WIDTH
    block: int  # a power of two, at least CHOICE.experts
    places: int  # a power of two, at least CHOICE.chosen


class Choice(NamedTuple):
    """The rule by which experts are chosen, as one `tl.constexpr`."""

    experts: int
    chosen: int
    sigmoid: bool
    correct: bool
    renormalise: bool


@triton.jit
def _few_route_kernel(
    x,  # [tokens, WIDTH]
    norm,  # [WIDTH]
    router,  # [EXPERTS, WIDTH]
    bias,  # [EXPERTS]
    correction,
    normed,  # [tokens, WIDTH]
    logits,  # [tokens, EXPERTS] float32
    arrived,  # [tokens], zeros before and after
    weights,  # [tokens, CHOSEN]
    ids,
    eps,
    scale,
    CHOICE: tl.constexpr,  # `Choice`
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,  # `RouteTile`
    PDL: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    column = tl.arange(0, TILE.columns)
    inside = column < WIDTH
    # Load the router's weights before waiting for the kernel that computes x.
    mask = (row < CHOICE.experts)[:, None] & inside[None, :]
    rows = tl.load(router + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    factor = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps) * factor
    rounded = value.to(normed.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed + token * WIDTH + column, rounded, mask=inside)
    logit = tl.sum(rows.to(tl.float32) * rounded.to(tl.float32)[None, :], axis=1)
    if BIAS:
        logit += tl.load(bias + row, mask=row < CHOICE.experts, other=0.0).to(tl.float32)
    tl.store(logits + token * CHOICE.experts + row, logit, mask=row < CHOICE.experts)
    tl.debug_barrier()  # all threads' stores must precede the arrival
    before = tl.atomic_add(arrived + token, 1, sem="release")
    if before == tl.num_programs(0) - 1:
        tl.atomic_xchg(arrived + token, 0, sem="acquire")
        tl.debug_barrier()
        expert = tl.arange(0, TILE.block)
        at = logits + token * CHOICE.experts + expert
        every = tl.load(at, mask=expert < CHOICE.experts, other=float("-inf"))
        choose_experts(
            every, correction, weights, ids, token, scale,
            CHOICE.experts, CHOICE.chosen, CHOICE.sigmoid, CHOICE.correct, CHOICE.renormalise,
            TILE.block, TILE.places,
        )  # fmt: skip


@lru_cache
def _counters(device: torch.device) -> Tensor:
    """Return a device's counters, by which a program knows that it finishes last.

    All launches share the counters: launches run one after the other, and reset them to zero.
    """
    return torch.zeros(MOST, dtype=torch.int32, device=device)


def few_route_fits(x: Tensor, routing: Routing) -> bool:
    return 0 < x.shape[0] <= MOST and x.shape[1] <= _WIDEST and topk.fits(routing)


def few_route(
    x: Tensor,  # [1 .. MOST, hidden]
    norm: Tensor,
    eps: float,
    router: Tensor,
    bias: Tensor | None,
    routing: Routing,
    correction: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rms_norm(x), and weights and ids of each token's experts (`Kernels.norm_route`)."""
    tokens, width = x.shape
    experts, chosen = router.shape[0], routing.chosen
    normed = torch.empty_like(x)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    weights = torch.empty((tokens, chosen), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, chosen), dtype=torch.int32, device=x.device)
    rows = max(1, min(4, experts // 32))
    columns = triton.next_power_of_2(width)
    _few_route_kernel[(triton.cdiv(experts, rows), tokens)](
        x,
        norm,
        router,
        bias,
        correction,
        normed,
        logits,
        _counters(x.device),
        weights,
        ids,
        eps,
        routing.scale,
        CHOICE=Choice(
            experts=experts,
            chosen=chosen,
            sigmoid=routing.score == "sigmoid",
            correct=correction is not None,
            renormalise=routing.renormalise,
        ),
        WIDTH=width,
        BIAS=bias is not None,
        TILE=RouteTile(
            rows=rows,
            columns=columns,
            block=triton.next_power_of_2(experts),
            places=triton.next_power_of_2(chosen),
        ),
        num_warps=4 if rows * columns <= 8192 else 8,
        **pdl(x.device),
    )
    return normed, weights, ids
