"""Mixtures of experts in plain torch: the oracle of every back end."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu

from kernels.experts.routing import CLAMPED, UNGATED, Routing
from kernels.packed import PackedWeight

CLAMPED_ALPHA = 1.702


@dataclass(slots=True)
class ExpertWeights:
    """The stacked weights of a layer's experts on this rank.

    act: a key of `Kernels.GATES`; or CLAMPED: (up + 1) * gate * sigmoid(1.702 * gate), with gate
        at most `limit` and up within [-limit, limit] (gpt-oss); or one of UNGATED, for experts
        down(act(up(x))).
    weigh_input: whether the router's weight multiplies an expert's input, not its output (Llama 4).
    total: the number of experts on all ranks; 0 = this rank has all. The id `count` stands for any
        expert of another rank, which adds nothing to the result.
    """

    gate_up: Tensor  # [experts, 2 * size, hidden]: gate rows, then up rows; up alone without gates
    down: Tensor  # [experts, hidden, size]
    gate_up_bias: Tensor | None  # [experts, 2 * size]
    down_bias: Tensor | None  # [experts, hidden]
    act: str = "silu"
    limit: float = 0.0
    weigh_input: bool = False
    total: int = 0

    @property
    def count(self) -> int:
        return self.down.shape[0]


@dataclass(slots=True)
class PackedExperts:
    """The quantised weights of a layer's experts on this rank, stacked along the rows.

    The other fields are those of `ExpertWeights`.
    """

    gate_up: PackedWeight  # [experts * 2 * size, hidden], without bias
    down: PackedWeight  # [experts * hidden, size], without bias
    gate_up_bias: Tensor | None  # [experts, 2 * size]
    down_bias: Tensor | None  # [experts, hidden]
    act: str = "silu"
    limit: float = 0.0
    weigh_input: bool = False
    total: int = 0

    @property
    def count(self) -> int:
        return self.down.shape[0] // self.gate_up.shape[1]

    def dense(self, dtype: torch.dtype) -> ExpertWeights:
        """Return the experts with dequantised weights."""
        return ExpertWeights(
            self.gate_up.dense(dtype).unflatten(0, (self.count, -1)),
            self.down.dense(dtype).unflatten(0, (self.count, -1)),
            self.gate_up_bias,
            self.down_bias,
            self.act,
            self.limit,
            self.weigh_input,
            self.total,
        )


def route(logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each token's experts: weights [n, chosen] float32, and experts [n, chosen] int32.

    logits: [n, experts].
    correction: [experts] float32, added to scores for choosing experts, but not for their weights.
    """
    logits = logits.float()
    if routing.score == "mixer":
        return _sparse_mixer(logits, routing.jitter)
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    choice = logits if correction is None else scores + correction
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
        top_groups = best.topk(routing.top_groups, dim=-1).indices
        hidden = torch.ones_like(best, dtype=torch.bool).scatter_(-1, top_groups, False)
        choice = grouped.masked_fill(hidden[..., None], float("-inf")).flatten(-2)
    ids = choice.topk(routing.chosen, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_(min=1e-20)
    return weights * routing.scale, ids.int()


def _sparse_mixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Return (weights [n, 2] float32, experts [n, 2] int32), chosen as in Phi-3.5-MoE.

    The weight of the best expert is its softmax among the experts whose logits are close to the
    best logit. The second expert is chosen in the same way from the other experts.
    """
    weights, ids = [], []
    remaining = logits
    for _ in range(2):
        top, chosen = remaining.max(-1, keepdim=True)
        far = (top - logits) / logits.abs().clamp(min=top) > 2 * jitter
        weights.append(remaining.masked_fill(far, float("-inf")).softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        remaining = remaining.scatter(-1, chosen, float("-inf"))
    return torch.cat(weights, -1), torch.cat(ids, -1).int()


def activated(gate_up: Tensor, act: str, limit: float) -> Tensor:
    """Apply an expert's activation to the result of its first matmul: [n, up_rows] -> [n, size]."""
    if act in UNGATED:
        return relu(gate_up).square_()
    gate, up = gate_up.chunk(2, dim=-1)
    if act == CLAMPED:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(CLAMPED_ALPHA * gate)
    functions = {"silu": silu, "gelu": gelu, "relu": relu}
    if act == "gelu_pytorch_tanh":
        return gelu(gate, approximate="tanh") * up
    return functions[act](gate) * up


def experts(
    x: Tensor, weights: Tensor, ids: Tensor, stack: ExpertWeights, residual: Tensor | None
) -> Tensor:
    """Return the weighted sum of each token's experts, plus residual if it is not None."""
    out = torch.zeros_like(x) if residual is None else residual
    for expert in ids.unique().tolist():
        if expert == stack.count:
            continue
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        mine, weight = x.index_select(0, tokens), weights[tokens, place, None].to(x.dtype)
        if stack.weigh_input:
            mine = mine * weight
        bias = None if stack.gate_up_bias is None else stack.gate_up_bias[expert]
        gate_up = linear(mine, stack.gate_up[expert].to(x.dtype), bias)
        bias = None if stack.down_bias is None else stack.down_bias[expert]
        inner = activated(gate_up, stack.act, stack.limit)
        expert_outputs = linear(inner, stack.down[expert].to(x.dtype), bias)
        out.index_add_(0, tokens, expert_outputs if stack.weigh_input else expert_outputs * weight)
    return out
