"""Mixtures of experts. Models have three layers unless a case says otherwise, and some layers are
dense where the architecture has dense ones."""

from typing import Any

from tests.parity.cases.case import Case, Tensors
from tests.parity.cases.rewriting import qwen3_vl_moe, wrapped
from tests.parity.cases.settings import CHOSEN, GRANITE, HALF, LOCAL, ROUTED, SEVEN, SHORT, YARN

_LLAMA4 = {
    **LOCAL,
    "num_experts_per_tok": 1,
    "intermediate_size": 24,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 7,
    "floor_scale": 4,
}
_LLAMA4_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
_MIMO = {
    **ROUTED,
    **SEVEN,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 10,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}

_LAGUNA = {
    **CHOSEN,
    **SEVEN,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "num_attention_heads_per_layer": [4, 6, 4],
    "moe_routed_scaling_factor": 1.5,
}


def _of_hub(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Rewrite config.json as MiMo-V2-Flash's own repository has it."""
    kinds, dense = config.pop("layer_types"), config.pop("mlp_layer_types")
    ropes = config.pop("rope_parameters")
    config.update(
        hybrid_layer_pattern=[int(kind == "sliding_attention") for kind in kinds],
        moe_layer_freq=[int(kind == "sparse") for kind in dense],
        sliding_window_size=config.pop("sliding_window") - 1,
        rope_theta=ropes["full_attention"]["rope_theta"],
        swa_rope_theta=ropes["sliding_attention"]["rope_theta"],
        partial_rotary_factor=0.334,
        layernorm_epsilon=config.pop("rms_norm_eps"),
        routed_scaling_factor=None,
        swa_num_key_value_heads=2 * config["num_key_value_heads"],
        swa_num_attention_heads=config["num_attention_heads"],
        swa_head_dim=config["head_dim"],
        swa_v_head_dim=config["v_head_dim"],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        n_shared_experts=None,
    )
    return tensors


EXPERTS: dict[str, Case] = {
    "mixtral": Case("mixtral", LOCAL),
    "qwen 2 moe": Case(
        "qwen2_moe",
        {
            **CHOSEN,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen 3 moe": Case(
        "qwen3_moe",
        {**CHOSEN, "moe_intermediate_size": 24, "head_dim": 24, "norm_topk_prob": True},
    ),
    "qwen 3 vl moe": Case(
        "qwen3_moe",
        {**CHOSEN, "moe_intermediate_size": 24, "head_dim": 24, "norm_topk_prob": True},
        architecture="Qwen3VLMoeForConditionalGeneration",
        rewrite=qwen3_vl_moe,
    ),
    "gpt-oss": Case("gpt_oss", {**LOCAL, **SEVEN, "head_dim": 16}),
    "glm 4.5": Case("glm4_moe", {**ROUTED, "attention_bias": True, "routed_scaling_factor": 1.5}),
    "glm 4.6": Case(
        "glm4_moe", {**ROUTED, "use_qk_norm": True, "n_group": 3, "topk_group": 2, "head_dim": 24}
    ),
    "solar open": Case("solar_open", {**ROUTED, "head_dim": 16}),
    "dots": Case("dots1", {**ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    "minimax m2": Case("minimax_m2", {**LOCAL, "head_dim": 16, "rope_parameters": HALF}),
    "hy3": Case("hy_v3", {**CHOSEN, "moe_intermediate_size": 24, "head_dim": 16}),
    "hunyuan moe": Case("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": 2, "head_dim": 16}),
    "mimo v2": Case("mimo_v2_flash", _MIMO),
    "mimo v2, hub": Case("mimo_v2_flash", _MIMO, rewrite=_of_hub),
    "laguna": Case("laguna", _LAGUNA),
    "laguna, by element": Case(
        "laguna",
        {
            **_LAGUNA,
            "gating": "per-element",
            "attention_bias": True,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": HALF},
        },
    ),
    "olmoe": Case("olmoe", CHOSEN),
    "llama 4": Case("llama4_text", _LLAMA4),
    "llama 4 scout": Case(
        "llama4_text",
        {**_LLAMA4, "interleave_moe_layer_step": 1, "rope_parameters": _LLAMA4_ROPE},
        architecture="Llama4ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "gemma 4 e2b": Case(
        "gemma4_text",
        {
            **_GEMMA4,
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        calm=0.3,
    ),
    "gemma 4 31b": Case(
        "gemma4_text",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        calm=0.3,
        architecture="Gemma4ForConditionalGeneration",
        rewrite=wrapped("model.language_model."),
    ),
    "gemma 4 26b": Case(
        "gemma4_text",
        {
            **_GEMMA4,
            "num_key_value_heads": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
        calm=0.3,
    ),
    "dbrx": Case(
        "dbrx",
        {
            "d_model": 64,
            "n_layers": 3,
            "n_heads": 4,
            "max_seq_len": 64,
            "attn_config": {"clip_qkv": 1.0, "kv_n_heads": 2, "rope_theta": 1e5},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
        drop=(*SHORT, "intermediate_size", "num_key_value_heads"),
    ),
    "granite moe": Case("granitemoe", {**GRANITE, **LOCAL}),
    "granite moe, shared": Case(
        "granitemoeshared", {**GRANITE, **LOCAL, "shared_intermediate_size": 40}
    ),
    "phi 3.5 moe": Case("phimoe", {**LOCAL, "lm_head_bias": True, "router_jitter_noise": 0.2}),
    "ernie 4.5 moe": Case(
        "ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}
    ),
}
