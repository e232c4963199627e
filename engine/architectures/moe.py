"""Experts: the description of a mixture of experts, and its reader for most models."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config_reader import Reader
from kernels.experts.routing import Routing

if TYPE_CHECKING:
    from engine.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of a model.

    layers: the decoder layers that have experts.
    count: the number of experts in a layer.
    size: the inner width of an expert.
    act, limit, weigh_input: see `kernels.experts.reference.ExpertWeights`.
    bias: whether the experts' matrices have biases.
    router_bias: whether the router has a bias.
    shared_size: the inner width of the shared expert, an MLP for all tokens; 0 = none.
    shared_gate: whether the shared expert's output is multiplied by the sigmoid of a projection.
    beside_mlp: whether layers add the outputs of experts and an MLP, with separate norms.
    ahead: whether the experts' output is added after the MLP of the next layer, which has no
        experts. The experts read the input of their layer's MLP.
    same: the number of zero experts, which return their input and are numbered last.
    """

    layers: tuple[int, ...]
    count: int
    size: int
    routing: Routing
    act: str = "silu"
    limit: float = 0.0
    weigh_input: bool = False
    bias: bool = False
    router_bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    beside_mlp: bool = False
    ahead: bool = False
    same: int = 0

    @property
    def choices(self) -> int:
        """The number of experts among which the router chooses, including zero experts."""
        return self.count + self.same


def read_experts(
    config: Reader,
    model: "ModelConfig",
    layers: Iterable[int] | None = None,
    *,
    score: str = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    jitter: float = 0.0,
    **others: Any,
) -> Experts | None:
    """Read a mixture of experts from config.json; None if no layer has experts.

    There are num_experts experts, of which num_experts_per_tok are chosen for a token. Without
    moe_intermediate_size an expert has the width of an MLP.

    layers: the layers with experts; None = all.
    score, renormalise, scale, jitter: see `kernels.experts.routing.Routing`.
    others: further fields of Experts.
    Raises ConfigError for contradictory values.
    """
    layers = tuple(range(model.num_layers) if layers is None else layers)
    if not layers:
        return None
    count, chosen = one_size(config, "num_experts"), one_size(config, "num_experts_per_tok")
    if chosen > count:
        raise config.error("num_experts_per_tok", f"{chosen} of {count} experts cannot be chosen")
    size = model.intermediate_size
    if config.get("moe_intermediate_size") is not None:
        size = one_size(config, "moe_intermediate_size")
    groups, top_groups = config.size("n_group", 1), config.size("topk_group", 1)
    if count % groups or top_groups > groups or chosen > top_groups * (count // groups):
        raise config.error(
            "n_group",
            f"{chosen} of {count} experts cannot be chosen from {top_groups} of {groups} groups",
        )
    routing = Routing(
        chosen, score, renormalise, scale, groups, top_groups, min(2, count // groups), jitter
    )
    fields = {"act": model.hidden_act, **others}
    return Experts(layers, count, size, routing, **fields)


def one_size(config: Reader, key: str) -> int:
    """Return the size under a key, for which some files have a list of equal sizes."""
    value = config.get(key)
    if isinstance(value, list) and value and all(size == value[0] for size in value):
        config = Reader({key: value[0]}, config.path)
    return config.size(key)
