"""ExpertsApart: the experts of a layer as separate linear layers of any linear method.

On the CPU a Python call for each matmul costs little compared with reading its weights.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.experts.reference import activated
from kernels.experts.routing import CLAMPED, UNGATED

if TYPE_CHECKING:
    from engine.quantization.method import LinearMethod


@dataclass(slots=True)
class ExpertsApart:
    """The experts of a layer, each with two states of the linear method.

    gate_up, down: the states, by expert.
    act, limit, weigh_input: as in `ExpertWeights`.
    """

    gate_up: list[Any]
    down: list[Any]
    act: str
    limit: float
    weigh_input: bool


def apply_apart(
    method: "LinearMethod",
    state: ExpertsApart,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None,
) -> Tensor:
    """Return the weighted sum of each token's experts; arguments: see `Kernels.experts`.

    Experts are added in the order of their ids, so that a token's sum does not depend on other
    tokens.
    """
    out = torch.zeros_like(x) if residual is None else residual
    chosen = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(state.down)).tolist()
    begin = 0
    # larger ids are experts of other ranks
    for expert, count in enumerate(counts[: len(state.down)]):
        if not count:
            continue
        pairs = order[begin : begin + count]
        begin += count
        tokens = pairs // chosen
        weight = weights.view(-1)[pairs, None].to(x.dtype)
        mine = x.index_select(0, tokens)
        if state.weigh_input:
            mine = mine * weight
        inner = _activated(method, state, method.apply(state.gate_up[expert], mine))
        out_rows = method.apply(state.down[expert], inner)
        out.index_add_(0, tokens, out_rows if state.weigh_input else out_rows.mul_(weight))
    return out


def _activated(method: "LinearMethod", state: ExpertsApart, gate_up: Tensor) -> Tensor:
    if state.act in UNGATED:
        return method.kernels.activation(gate_up, state.act)
    if state.act != CLAMPED:
        return method.kernels.GATES[state.act](gate_up)
    # In deterministic mode each row is computed separately, as vectorised loops over several rows
    # may round differently.
    rows = []
    for row in gate_up.split(1 if method.kernels.DETERMINISTIC else len(gate_up)):
        rows.append(activated(row, state.act, state.limit))
    return torch.cat(rows)
