"""Top-k choice of MoE experts in one launch: scores from router logits, best experts, weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.routing import Routing
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl


@triton.jit
def choose_experts(
    logit,  # [BLOCK] float32; -inf where there is no expert
    correction,
    weights,
    ids,
    token,
    scale,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECT: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Choose one token's CHOSEN experts by score, and store their ids and weights.

    Scores are the softmax of `logit`, or its sigmoid (SIGMOID). With CORRECT, `correction`
    [EXPERTS] is added for the choice, but not to weights. RENORMALISE: the weights sum to 1 before
    they are multiplied by `scale`. Results go to row `token` of `ids` and `weights` [n, CHOSEN].
    PLACES: a power of two, at least CHOSEN.
    """
    expert = tl.arange(0, BLOCK)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        score = tl.exp(logit - tl.max(logit, axis=0))
        score = score / tl.sum(score, axis=0)
    choice = logit
    if CORRECT:
        added = tl.load(correction + expert, mask=expert < EXPERTS, other=0.0)
        choice = tl.where(expert < EXPERTS, score + added, float("-inf"))
    place = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    weight = tl.zeros([PLACES], tl.float32)
    for i in tl.static_range(CHOSEN):
        # Among NaNs the argmax may be any index; keep it a valid expert.
        best = tl.minimum(tl.argmax(choice, axis=0), EXPERTS - 1)
        mine = tl.sum(tl.where(expert == best, score, 0.0), axis=0)
        chosen = tl.where(place == i, best, chosen)
        weight = tl.where(place == i, mine, weight)
        choice = tl.where(expert == best, float("-inf"), choice)
    if RENORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, axis=0), 1e-20)
    at = token * CHOSEN + place
    tl.store(weights + at, weight * scale, mask=place < CHOSEN)
    tl.store(ids + at, chosen, mask=place < CHOSEN)


@triton.jit
def _topk_kernel(
    logits,  # [tokens, EXPERTS]
    bias,  # [EXPERTS], of the router
    correction,  # [EXPERTS]
    weights,  # [tokens, CHOSEN]
    ids,  # [tokens, CHOSEN]
    scale,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECT: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,  # experts, padded
    PLACES: tl.constexpr,  # a power of two, at least CHOSEN
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = logits + token * EXPERTS + expert
    logit = tl.load(at, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    if BIAS:
        logit += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    choose_experts(
        logit, correction, weights, ids, token, scale,
        EXPERTS, CHOSEN, SIGMOID, CORRECT, RENORMALISE, BLOCK, PLACES,
    )  # fmt: skip


def fits(routing: Routing) -> bool:
    """Whether `topk` computes this routing: experts without groups, and not the sparse mixer."""
    return routing.groups == 1 and routing.score in ("softmax", "sigmoid")


def topk(
    logits: Tensor, routing: Routing, correction: Tensor | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights and ids of each token's experts (`Kernels.route`).

    bias: [experts], the router's bias, to be added to the logits; None: no bias.
    """
    tokens, experts = logits.shape
    chosen = routing.chosen
    weights = torch.empty((tokens, chosen), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, chosen), dtype=torch.int32, device=logits.device)
    if tokens:
        block = triton.next_power_of_2(experts)
        _topk_kernel[(tokens,)](
            logits,
            bias,
            correction,
            weights,
            ids,
            routing.scale,
            EXPERTS=experts,
            CHOSEN=chosen,
            SIGMOID=routing.score == "sigmoid",
            CORRECT=correction is not None,
            RENORMALISE=routing.renormalise,
            BIAS=bias is not None,
            BLOCK=block,
            PLACES=triton.next_power_of_2(chosen),
            num_warps=1 if block <= 128 else 2,
            **pdl(logits.device),
        )
    return weights, ids
