"""DeepSeek V2 and V3, and similar models: latent attention and mixtures of experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import of_layers
from engine.architectures.dense.llama import LAYER, without
from engine.architectures.latent import LATENT, ONE_KEY_HEAD, UNBIASED, latent_attention
from engine.architectures.mixtures.families import DEEPSEEK, MTP, ROUTED, deepseek
from engine.architectures.moe import Experts
from engine.architectures.record import NEXTN, Architecture, CheckpointTensor
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig

_TENSORS = {**without(DEEPSEEK, "q_norm", "k_norm"), **LATENT}
_UNCORRECTED = without(_TENSORS, "router_correction")
_GROUPED = "group_limited_greedy"


def _v2(config: Reader, model: "ModelConfig") -> Experts | None:
    """Read the experts, which are routed by softmax, and by groups only with group_limited_greedy.

    The score of a group is that of its best expert.
    """
    experts = _softmax(config, model)
    if experts is None:
        return None
    routing = replace(experts.routing, renormalise=False, group_best=1)
    if config.get("topk_method", "greedy") != _GROUPED:
        routing = replace(routing, groups=1, top_groups=1)
    return replace(experts, routing=routing)


def _softmax(config: Reader, model: "ModelConfig") -> Experts | None:
    experts = deepseek(config, model)
    return experts and replace(experts, routing=replace(experts.routing, score="softmax"))


def _glm_lite(config: Reader, model: "ModelConfig") -> Experts | None:
    kinds = of_layers(config, "mlp_layer_types", model.num_layers, str)
    if kinds is None:
        return deepseek(config, model)
    experts = deepseek(config, model)
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    return experts and (replace(experts, layers=layers) if layers else None)


def _mistral4(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return latent attention for all layers; queries are scaled by position as in Llama 4."""
    rope = config.inner("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if rope.get("llama_4_scaling_beta") is not None:
        trained = rope.size(
            "original_max_position_embeddings", config.size("max_position_embeddings")
        )
        plain = replace(plain, temperature=(rope.number("llama_4_scaling_beta"), trained, 0))
    return latent_attention(config, plain, layers)


ARCHITECTURES = (
    Architecture(
        "DeepseekV2ForCausalLM",
        _UNCORRECTED,
        models="DeepSeek V2, V2.5, V2-Lite, Coder-V2",
        model_type="deepseek_v2",
        keys=ROUTED,
        computed=ONE_KEY_HEAD,
        only={
            **UNBIASED,
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", _GROUPED),
            "norm_topk_prob": (False,),
            "moe_layer_freq": (1,),
        },
        attention=latent_attention,
        experts=_v2,
    ),
    Architecture(
        "DeepseekV3ForCausalLM",
        _TENSORS,
        models="DeepSeek V3, V3.1 and R1, Kimi-K2, Moonlight",
        model_type="deepseek_v3",
        keys=ROUTED,
        computed=ONE_KEY_HEAD,
        only={
            **UNBIASED,
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        ignored=MTP,
        mtp=NEXTN,
        attention=latent_attention,
        experts=deepseek,
    ),
    Architecture(
        "Glm4MoeLiteForCausalLM",
        _TENSORS,
        models="GLM-4.7-Flash",
        model_type="glm4_moe_lite",
        keys=ROUTED,
        defaults={"first_k_dense_replace": 1},
        computed=ONE_KEY_HEAD,
        only={**UNBIASED, "topk_method": ("noaux_tc",)},
        ignored=MTP,
        mtp=NEXTN,
        attention=latent_attention,
        experts=_glm_lite,
    ),
    Architecture(
        "Mistral4ForCausalLM",
        {
            **_UNCORRECTED,
            "experts_gate_up": CheckpointTensor((f"{LAYER}mlp.experts.gate_up_proj",)),
            "experts_down": CheckpointTensor((f"{LAYER}mlp.experts.down_proj",)),
        },
        models="Mistral 4",
        model_type="mistral4",
        keys=ROUTED,
        computed=ONE_KEY_HEAD,
        only={**UNBIASED, "n_group": (1, None)},
        attention=_mistral4,
        experts=_softmax,
    ),
)
