"""Hybrid and recurrent decoders."""

from typing import Any

import torch

from tests.parity.cases.case import Case, Tensors
from tests.parity.cases.rewriting import stacked, wrapped
from tests.parity.cases.settings import CHOSEN

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    # A query far from all keys has a tiny output, whose rounding errors a norm with a small epsilon
    # would magnify.
    "rms_norm_eps": 1e-2,
}
_DELTA_EXPERTS = {
    **_DELTA,
    **CHOSEN,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
# Three layers of Gated DeltaNet and one of gated attention.
DELTA_NET: dict[str, Case] = {
    "qwen 3 next": Case("qwen3_next", {**_DELTA_EXPERTS, "norm_topk_prob": True}),
    "qwen 3.5": Case("qwen3_5_text", _DELTA),
    "qwen 3.5 vl": Case(
        "qwen3_5_text",
        {**_DELTA, "tie_word_embeddings": True},
        architecture="Qwen3_5ForConditionalGeneration",
        rewrite=wrapped("model.language_model."),
    ),
    "qwen 3.5 moe": Case(
        "qwen3_5_moe_text",
        _DELTA_EXPERTS,
        architecture="Qwen3_5MoeForConditionalGeneration",
        rewrite=stacked,
    ),
}
_KIMI: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    **CHOSEN,
    "moe_intermediate_size": 24,
    "rms_norm_eps": 1e-2,
}
_LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_multiple_of": 16,
}
_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    # A norm with a small epsilon would magnify the rounding errors of tiny outputs.
    "rms_norm_eps": 1e-2,
}
_GRANITE_H: dict[str, Any] = {
    **_MAMBA,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "embedding_multiplier": 12.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "shared_intermediate_size": 40,
}
_FALCON: dict[str, Any] = {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128}
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 0.25,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.35, 0.25, 0.8, 0.5, 0.3],
    "mlp_multipliers": [0.9, 0.6],
}
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": [
        "linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention",
    ],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 8,
    "time_step_min": 1e-30,
    "head_dim": 20,
    "layer_norm_epsilon": 1e-2,
}  # fmt: skip
_JAMBA: dict[str, Any] = {
    "num_hidden_layers": 5,
    "attn_layer_period": 4,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "mamba_d_state": 6,
    "mamba_dt_rank": 5,
}
_OLMO: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}


def _by_letters(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Rewrite config.json to its form before transformers 5, with a letter for each layer's
    kind."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    kinds = config.pop("layers_block_type")
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    config["num_hidden_layers"] = len(kinds)
    config["attention_head_dim"] = config.pop("head_dim")
    return tensors


def _as_converted(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Rewrite tensors as OLMo's converter does.

    transformers uses other names of the layers' norms, and cuts the convolution into pieces of one
    size.
    """
    sizes = [config["linear_num_key_heads"] * config["linear_key_head_dim"]] * 2
    sizes.append(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    for number, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{number}."
        if kind == "full_attention":
            norm = tensors.pop(f"{layer}feedforward_layer_norm.weight")
            tensors[f"{layer}post_attention_layernorm.weight"] = norm
            continue
        names = [f"{layer}linear_attn.{letter}_conv1d.weight" for letter in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        tensors |= zip(names, whole.split(sizes), strict=True)
    return tensors


def _kimi_of_hub(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Rewrite config.json as Kimi Linear's own repository has it."""
    kinds, mlps = config.pop("layer_types"), config.pop("mlp_layer_types")
    numbers = {of: [i + 1 for i, kind in enumerate(kinds) if kind == of] for of in {*kinds}}
    config["linear_attn_config"] = {
        "full_attn_layers": numbers["full_attention"],
        "kda_layers": numbers["linear_attention"],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    config["first_k_dense_replace"] = mlps.count("dense")
    config |= {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}
    first = "model.layers.0."
    return {
        name.replace(f"{first}block_sparse_moe.", f"{first}mlp."): tensor
        for name, tensor in tensors.items()
    }


MIXED: dict[str, Case] = {
    "kimi linear": Case("kimi_linear", _KIMI),
    "kimi linear, hub": Case(
        "kimi_linear",
        {**_KIMI, "num_expert_group": 3, "topk_group": 2, "q_lora_rank": 20},
        rewrite=_kimi_of_hub,
    ),
    "lfm 2": Case("lfm2", _LFM2),
    "lfm 2, biases": Case(
        "lfm2",
        {**_LFM2, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    "lfm 2 moe": Case(
        "lfm2_moe",
        {
            **_LFM2,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "granite 4 h": Case(
        "granitemoehybrid", {**_GRANITE_H, "num_local_experts": 6, "intermediate_size": 24}
    ),
    "granite 4 h, dense": Case(
        "granitemoehybrid",
        {
            **_GRANITE_H,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": (0.1, 1.5),
        },
    ),
    "bamba": Case("bamba", {**_MAMBA, "attn_layer_indices": [1], "mamba_conv_bias": False}),
    "falcon h1": Case("falcon_h1", {**_FALCON, **_MULTIPLIERS}),
    "falcon h1, normed": Case(
        "falcon_h1",
        {
            **_FALCON,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_out_multiplier": 0.5,
        },
    ),
    "falcon h1, gated behind": Case(
        "falcon_h1", {**_FALCON, "mamba_rms_norm": True, "tie_word_embeddings": True}
    ),
    "nemotron h": Case("nemotron_h", _NEMOTRON),
    "nemotron 3": Case(
        "nemotron_h",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 6,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
        rewrite=_by_letters,
    ),
    "nemotron h, by letters": Case(
        "nemotron_h",
        {**_NEMOTRON, "use_bias": True, "mlp_bias": True},
        rewrite=_by_letters,
    ),
    "jamba": Case("jamba", _JAMBA),
    "jamba, without experts": Case(
        "jamba", {**_JAMBA, "num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False}
    ),
    "olmo hybrid": Case("olmo_hybrid", _OLMO, rewrite=_as_converted),
    "olmo hybrid, turning": Case(
        "olmo_hybrid",
        {
            **_OLMO,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "linear_allow_neg_eigval": False,
        },
        rewrite=_as_converted,
    ),
}
