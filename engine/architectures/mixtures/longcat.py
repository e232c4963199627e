"""LongCat-Flash: scaled latent attention, and experts some of which return their input.

A layer of the checkpoint is two decoder layers here. The experts read the input of the first
layer's MLP, and their output is added after the second layer's MLP.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import alike
from engine.architectures.dense.llama import LLAMA
from engine.architectures.latent import LATENT, ONE_KEY_HEAD, UNBIASED, latent_layer
from engine.architectures.mixtures.families import ROUTED
from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return latent attention for all layers, with latents scaled by sqrt(hidden size / rank)."""
    config.size("q_lora_rank")  # checks that the key exists; raises ConfigError
    layer = latent_layer(config, plain)
    assert layer.latent is not None
    hidden, latent = config.size("hidden_size"), layer.latent
    latent = replace(
        latent,
        query_factor=(hidden / latent.query_rank) ** 0.5,
        factor=(hidden / latent.rank) ** 0.5,
    )
    return alike(config, replace(layer, latent=latent), layers)


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    """Read the experts: in every other layer, with zero experts, softmax scores and a bias."""
    return read_experts(
        config,
        model,
        range(0, model.num_layers, 2),
        renormalise=False,
        scale=config.number("routed_scaling_factor", 6.0),
        ahead=True,
        same=config.count("zero_expert_num"),
    )


def _of_pair(stored: CheckpointTensor) -> CheckpointTensor:
    """Convert a tensor's names from Llama's or DeepSeek's to LongCat's.

    LongCat's files count two layers as one, so names have "{pair}" and "{half}" instead of "{i}".
    """
    names = []
    for name in stored.names:
        for theirs, ours in (("{i}", "{pair}"), *_HALVES):
            name = name.replace(theirs, ours)
        names.append(name)
    return CheckpointTensor(tuple(names), stored.rows, stored.transposed)


_HALVES = tuple(
    (name, f"{ours}.{{half}}")
    for name, ours in (
        (".self_attn", ".self_attn"),
        (".mlp", ".mlps"),
        (".input_layernorm", ".input_layernorm"),
        (".post_attention_layernorm", ".post_attention_layernorm"),
    )
)
_EXPERT = "model.layers.{pair}.mlp.experts.{e}."
ARCHITECTURES = (
    Architecture(
        "LongcatFlashForCausalLM",
        {
            **{ours: _of_pair(stored) for ours, stored in {**LLAMA, **LATENT}.items()},
            "router": CheckpointTensor(("model.layers.{pair}.mlp.router.classifier",)),
            "router_correction": CheckpointTensor(
                ("model.layers.{pair}.mlp.router.e_score_correction_bias",)
            ),
            "experts_gate_up": CheckpointTensor(
                (f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight")
            ),
            "experts_down": CheckpointTensor((f"{_EXPERT}down_proj.weight",)),
        },
        models="LongCat-Flash",
        model_type="longcat_flash",
        keys={
            **ROUTED,
            "intermediate_size": "ffn_hidden_size",
            "moe_intermediate_size": "expert_ffn_hidden_size",
            "num_experts_per_tok": "moe_topk",
        },
        computed={
            **ONE_KEY_HEAD,
            "num_hidden_layers": lambda config: 2 * config.size("num_layers"),
        },
        only={
            **UNBIASED,
            "router_bias": (False,),
            "zero_expert_type": ("identity", None),
            "attention_method": ("MLA",),
            "mla_scale_q_lora": (True,),
            "mla_scale_kv_lora": (True,),
        },
        ignored=("*.rotary_emb.inv_freq", "model.mtp.*"),
        attention=_attention,
        experts=_experts,
    ),
)
