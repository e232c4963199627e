"""Routing: how the scores of a router become experts and their weights. No torch here."""

from dataclasses import dataclass

# An activation of experts alone: see `kernels.experts.reference.ExpertWeights`.
CLAMPED = "clamped_swiglu"
# Activations of experts without gates, whose first product has the up's rows alone.
UNGATED = ("relu2",)


def up_rows(size: int, act: str) -> int:
    """Return the rows of an expert's first matmul, whose inner width is `size`."""
    return size if act in UNGATED else 2 * size


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a router's logits choose a token's experts. chosen: their number.

    score: "softmax" or "sigmoid" of the router's logits; the chosen ones are the highest scores
        plus the correction, if there is one, and the weights are the scores without it. "mixer"
        takes two experts in turn, as Phi-3.5-MoE's sparse mixer with this jitter.
    renormalise: weights are divided by their sum, then all are multiplied by `scale`.
    groups: experts of the top_groups groups alone can be chosen; a group counts as the sum of its
        `group_best` best scores.
    """

    chosen: int
    score: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    jitter: float = 0.0
