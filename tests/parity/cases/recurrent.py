"""Decoders that mix layers with states and layers of attention."""

from typing import Any

from tests.parity.cases.case import Case
from tests.parity.cases.rewriting import stacked, wrapped
from tests.parity.cases.settings import CHOSEN

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    # A state whose query is far from all keys gives little, which its norm makes large again with
    # all that was rounded.
    "rms_norm_eps": 1e-2,
}
_DELTA_EXPERTS = {
    **_DELTA,
    **CHOSEN,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
# Three layers of Gated DeltaNet and one of gated attention.
DELTA: dict[str, Case] = {
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
    # A state that gives little has a norm make it large again, with all that was rounded.
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
MIXED: dict[str, Case] = {
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
}
