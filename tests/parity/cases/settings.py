"""Parts of transformers' configurations that several tables share."""

# Names that transformers' older classes have for some of these.
GPT = ("intermediate_size", "num_key_value_heads")
BLOOM = (*GPT, "num_hidden_layers", "num_attention_heads")
SHORT = (*BLOOM, "max_position_embeddings", "hidden_size")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0156,
}
TURNS = ["sliding_attention", "full_attention", "sliding_attention"]
SEVEN = {"sliding_window": 7}
CHOSEN = {"num_experts": 6, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
