"""Dense decoders with full attention in all layers."""

from tests.parity.cases.case import Case
from tests.parity.cases.rewriting import (
    as_decilm,
    baichuan,
    chatglm,
    decilm,
    exaone3,
    internlm1,
    internlm2,
    minicpm,
    orion,
    qwen1,
    wrapped,
)
from tests.parity.cases.settings import GPT, GRANITE, HALF, SHORT, YARN

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [1.5 + i * 0.3 for i in range(6)],
    "short_factor": [1.0 + i * 0.1 for i in range(6)],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
_G = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}

CASES: dict[str, Case] = {
    "llama": Case("llama"),
    "llama, biases, tied": Case(
        "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama 1": Case("llama", architecture="LLaMAForCausalLM"),
    "iquest-coder": Case("iquestcoder", {"head_dim": 16}),
    "internlm 3": Case("internlm3", {"head_dim": 16, "qkv_bias": True, "bias": True}),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral 3 small": Case(
        "mistral",
        {"sliding_window": None, "head_dim": 24},
        architecture="Mistral3ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "qwen 2": Case("qwen2"),
    "qwen 2.5 vl": Case(
        "qwen2",
        architecture="Qwen2_5_VLForConditionalGeneration",
        rewrite=wrapped("model.language_model."),
    ),
    "qwen 3": Case("qwen3", {"head_dim": 24}),
    "mimo": Case("qwen2", architecture="MiMoForCausalLM"),
    "seed-oss": Case(
        "seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": False}
    ),
    "ernie 4.5": Case("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "helium": Case("helium", {"head_dim": 16}),
    "hunyuan": Case("hunyuan_v1_dense", {"head_dim": 16}),
    "granite": Case("granite", GRANITE),
    "hyperclova x": Case("hyperclovax", {**GRANITE, "logits_scaling": 0.125}),
    "arcee": Case("arcee"),
    "apertus": Case("apertus"),
    "nemotron": Case("nemotron"),
    "jais 2": Case("jais2"),
    "gemma 1": Case("gemma", {"head_dim": 24}),
    "phi 2": Case("phi", {"partial_rotary_factor": 0.5}),
    "phi 3": Case("phi3"),
    "phi 4 mini": Case(
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": _LONG,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": Case("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "stablelm 2 12b": Case(
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25},
    ),
    "starcoder 2": Case("starcoder2", {"sliding_window": None}),
    "glm 4 hf": Case("glm", {"head_dim": 16, "rope_parameters": HALF, "attention_bias": True}),
    "glm 4 0414": Case("glm4", {"head_dim": 16, "rope_parameters": HALF, "attention_bias": True}),
    "chatglm": Case(
        "glm",
        {
            "head_dim": 16,
            "rope_parameters": {**HALF, "rope_theta": 5e5},
            "attention_bias": True,
        },
        architecture="ChatGLMModel",
        rewrite=chatglm,
    ),
    "olmo 1": Case("olmo", {"clip_qkv": 1.0}),
    "olmo 2": Case("olmo2"),
    "cohere": Case("cohere", {"logit_scale": 0.25}),
    "cohere r+": Case("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "qwen 1": Case(
        "qwen2", {"num_key_value_heads": 4}, architecture="QWenLMHeadModel", rewrite=qwen1
    ),
    "baichuan 7b": Case(
        "llama", {"num_key_value_heads": 4}, architecture="BaiChuanForCausalLM", rewrite=baichuan
    ),
    "internlm 1": Case(
        "llama", {"attention_bias": True}, architecture="InternLMForCausalLM", rewrite=internlm1
    ),
    "internlm 2": Case("llama", architecture="InternLM2ForCausalLM", rewrite=internlm2),
    "minicpm": Case(
        "granite",
        {**GRANITE, "attention_multiplier": 0.25},
        architecture="MiniCPMForCausalLM",
        rewrite=minicpm,
    ),
    "orion": Case(
        "stablelm", {"partial_rotary_factor": 1.0}, architecture="OrionForCausalLM", rewrite=orion
    ),
    "exaone 3": Case("llama", architecture="ExaoneForCausalLM", rewrite=exaone3),
    "nemotron super": Case(
        "llama",
        {"num_key_value_heads": 4, "intermediate_size": 512},
        architecture="DeciLMForCausalLM",
        rewrite=decilm,
        logits=as_decilm,
    ),
    "xverse": Case("llama", architecture="XverseForCausalLM"),
    "gpt-neox": Case("gpt_neox", {"rotary_pct": 0.25}, drop=("num_key_value_heads",)),
    "gpt-neox, in turns": Case(
        "gpt_neox",
        {"rotary_pct": 1.0, "use_parallel_residual": False},
        drop=("num_key_value_heads",),
    ),
    "gpt-j": Case("gptj", {**_G, "rotary_dim": 8}, drop=SHORT),
    "codegen": Case("codegen", {**_G, "rotary_dim": 8}, drop=SHORT),
    "falcon 7b": Case(
        "falcon",
        {"multi_query": True, "parallel_attn": True, "bias": False, "alibi": False},
        drop=GPT,
    ),
    "falcon 40b": Case(
        "falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": False}, drop=GPT
    ),
    "falcon 11b": Case(
        "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        drop=GPT,
    ),
    # Layers without rotary embedding, or with learned positions.
    "smollm 3": Case("smollm3", {"tie_word_embeddings": True, "no_rope_layer_interval": 2}),
    "gpt-2": Case("gpt2", _G, drop=SHORT),
    "starcoder": Case("gpt_bigcode", {**_G, "multi_query": True}, drop=SHORT),
    "starcoder, all heads": Case("gpt_bigcode", {**_G, "multi_query": False}, drop=SHORT),
    "opt": Case("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, drop=GPT),
    "opt 350m": Case(
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        drop=GPT,
    ),
    "ministral 3": Case("ministral3", {"head_dim": 16, "rope_parameters": YARN}),
}
