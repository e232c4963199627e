"""Routing: the rule by which a router's scores become experts and weights. Needs no torch."""

from dataclasses import dataclass

# An activation that only experts have: see `kernels.experts.reference.ExpertWeights`.
CLAMPED = "clamped_swiglu"
# Activations of experts without gates, whose first matmul is the up projection alone.
UNGATED = ("relu2",)


def up_rows(size: int, act: str) -> int:
    """Return the outputs of an expert's first matmul. size: the width between the two matmuls."""
    return size if act in UNGATED else 2 * size


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a router's logits choose a token's experts.

    chosen: the number of experts per token.
    score: "softmax" or "sigmoid" of the router's logits: the experts with the highest (score +
        correction) are chosen, and their weights are the scores without correction. "mixer":
        Phi-3.5-MoE's sparse mixer with `jitter`, which chooses two experts one after the other.
    renormalise: whether weights are divided by their sum. Then all are multiplied by `scale`.
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
