"""Routing: the rule by which a router's logits choose experts and their weights. Needs no torch."""

from dataclasses import dataclass

# An activation that only MoE experts use: see `kernels.experts.reference.ExpertWeights`.
CLAMPED = "clamped_swiglu"
# Activations of experts without gates, whose first matmul is the up projection alone.
UNGATED = ("relu2",)


def up_rows(size: int, act: str) -> int:
    """Return the number of outputs of an expert's first matmul.

    size: the width between the two matmuls. act: name of the activation.
    """
    return size if act in UNGATED else 2 * size


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a router's logits choose a token's experts.

    chosen: the number of experts per token.
    score: "softmax" or "sigmoid" of the router's logits: the experts with the highest (score +
        correction) are chosen, and their weights are the scores without correction. "mixer":
        Phi-3.5-MoE's sparse mixer with `jitter`, which chooses two experts one after the other.
    renormalise: whether weights are divided by their sum.
    scale: factor by which all weights are then multiplied.
    groups: number of groups of experts. Only experts of the best `top_groups` groups can be chosen;
        a group's rank is by the sum of its `group_best` highest scores.
    """

    chosen: int
    score: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    jitter: float = 0.0
