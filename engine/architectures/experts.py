"""Experts: what a record says of a mixture of experts, and the ordinary way to read it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config_reader import Reader
from kernels.experts.routing import Routing

if TYPE_CHECKING:
    from engine.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that stands in the place of an MLP.

    layers: of the decoder, those that have it. count: experts of a layer. size: the inner width of
        one. act, limit, weigh_input: see `kernels.experts.reference.ExpertWeights`.
    bias: of the experts' matrices; router_bias: of the router.
    shared_size: the inner width of an MLP that every token goes through beside its experts; 0 =
        none. shared_gate: what it gives is multiplied by the sigmoid of a product of its own.
    beside_mlp: they stand beside the layer's MLP, with norms of their own.
    ahead: they read what the layer's MLP reads, and what they give is added behind the MLP of the
        next layer, which has none.
    same: experts behind the last one, which give back what they read; the router chooses among all.
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
        """Of the router."""
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
    """num_experts of moe_intermediate_size, of which a token gets num_experts_per_tok; where the
    file has no such width, an expert is as wide as an MLP. layers: None = all. others: fields of
    Experts. None if no layer has any.

    Raises ConfigError for a file that contradicts itself.
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
    made = {"act": model.hidden_act, **others}
    return Experts(layers, count, size, routing, **made)


def one_size(config: Reader, key: str) -> int:
    """A size that some files repeat for each layer."""
    value = config.get(key)
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        config = Reader({key: value[0]}, config.path)
    return config.size(key)
