"""Laguna: softplus gates on attention, by head or by element, and mixtures of experts.

Layers differ in the number of query heads. Windowed layers have a separate rope. The first layer is
dense.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL, WINDOW, layer_types, of_layers, rope_of
from engine.architectures.dense.llama import LAYER, QK_NORM, without
from engine.architectures.mixtures.families import QWEN2_MOE
from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    gating = config.raw("gating", True)
    if gating not in (True, "per-head", "per-element"):
        message = f"{gating!r} is not supported, only True, 'per-head' and 'per-element'"
        raise config.error("gating", message)
    gates = plain.head_dim if gating == "per-element" else 1
    full = replace(plain, softplus_gates=gates)
    local = replace(
        full,
        window=config.size("sliding_window", 512),
        rope=rope_of(config, WINDOW, plain, 10000.0),
    )
    kinds = layer_types(config, layers, lambda i: FULL)
    counts = of_layers(config, "num_attention_heads_per_layer", layers, int)
    attention = []
    for kind, heads in zip(kinds, counts or [plain.num_heads] * layers, strict=True):
        if heads < 1 or heads % plain.num_kv_heads:
            message = f"{heads} is no multiple of {plain.num_kv_heads} key heads"
            raise config.error("num_attention_heads_per_layer", message)
        attention.append(replace(local if kind == WINDOW else full, num_heads=heads))
    return attention


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    """Read the experts, by default in all layers but the first."""
    kinds = of_layers(config, "mlp_layer_types", model.num_layers, str)
    experts = read_experts(
        config,
        model,
        (i for i in range(model.num_layers) if (kinds[i] == "sparse" if kinds else i)),
        score="sigmoid",
        scale=config.number("moe_routed_scaling_factor", 1.0),
    )
    if experts is None:
        return None
    return replace(experts, shared_size=config.size("shared_expert_intermediate_size", 512))


_ROPES = {
    FULL: {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    WINDOW: {"rope_theta": 10000.0},
}
ARCHITECTURES = (
    Architecture(
        "LagunaForCausalLM",
        {
            **without(QWEN2_MOE, "shared_gate"),
            **QK_NORM,
            "gate": CheckpointTensor((f"{LAYER}self_attn.g_proj",)),
            "router_correction": CheckpointTensor((f"{LAYER}mlp.experts.e_score_correction_bias",)),
        },
        models="Laguna",
        model_type="laguna",
        switches={"qk_norm": always("head")},
        computed={
            "rope_parameters": lambda config: config.inner("rope_parameters").values or _ROPES
        },
        only={
            "moe_apply_router_weight_on_input": (False,),
            "moe_router_logit_softcapping": (0.0, 0, None),
        },
        attention=_attention,
        experts=_experts,
    ),
)
