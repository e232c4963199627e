"""GLM and ChatGLM: half of each head is rotary, in adjacent pairs; gate and up are one matrix."""

from collections.abc import Mapping

from engine.architectures.dense.llama import LAYER, LLAMA, NEIGHBOURS
from engine.architectures.layout import neighbours
from engine.architectures.record import Architecture, CheckpointTensor, Read, always
from engine.config_reader import Reader

_GLM: Mapping[str, CheckpointTensor] = {
    **LLAMA,
    **NEIGHBOURS,
    "gate_up": CheckpointTensor((f"{LAYER}mlp.gate_up_proj",)),
}
_GLM4: Mapping[str, CheckpointTensor] = {
    **_GLM,
    "attention_out_norm": CheckpointTensor((f"{LAYER}post_self_attn_layernorm",)),
    "mlp_out_norm": CheckpointTensor((f"{LAYER}post_mlp_layernorm",)),
}
_CHAT_LAYER = "transformer.encoder.layers.{i}."
_CHATGLM: Mapping[str, CheckpointTensor] = {
    "embedding": CheckpointTensor(("transformer.embedding.word_embeddings",)),
    "attention_norm": CheckpointTensor((f"{_CHAT_LAYER}input_layernorm",)),
    "qkv": CheckpointTensor((f"{_CHAT_LAYER}self_attention.query_key_value",), neighbours),
    "out": CheckpointTensor((f"{_CHAT_LAYER}self_attention.dense",)),
    "mlp_norm": CheckpointTensor((f"{_CHAT_LAYER}post_attention_layernorm",)),
    "gate_up": CheckpointTensor((f"{_CHAT_LAYER}mlp.dense_h_to_4h",)),
    "down": CheckpointTensor((f"{_CHAT_LAYER}mlp.dense_4h_to_h",)),
    "norm": CheckpointTensor(("transformer.encoder.final_layernorm",)),
    "head": CheckpointTensor(("transformer.output_layer",)),
}


def _kv_heads(config: Reader) -> int:
    if config.flag("multi_query_attention"):
        return config.size("multi_query_group_num")
    return config.size("num_attention_heads")


def _stretched(config: Reader) -> dict[str, object]:
    """Convert rope_ratio, a factor on the rotary base, to rope_parameters.

    In ChatGLM2's long model rope_ratio divides positions instead.
    """
    ratio = config.number("rope_ratio", 1.0)
    if ratio != 1 and "chatglm2" in str(config.get("_name_or_path", "")).lower():
        return {"rope_type": "linear", "rope_theta": 10000.0, "factor": ratio}
    return {"rope_type": "default", "rope_theta": 10000.0 * ratio}


_CHATGLM_SWITCHES: Mapping[str, Read] = {
    "num_kv_heads": _kv_heads,
    "qkv_bias": lambda config: config.flag("add_qkv_bias") or config.flag("add_bias_linear"),
    "out_bias": lambda config: config.flag("add_bias_linear"),
    "mlp_bias": lambda config: config.flag("add_bias_linear"),
    "hidden_act": always("silu"),
}
_CHATGLM_KEYS = {
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "head_dim": "kv_channels",
    "vocab_size": "padded_vocab_size",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
}


def _chatglm(name: str, models: str) -> Architecture:
    return Architecture(
        name,
        _CHATGLM,
        models=models,
        switches=_CHATGLM_SWITCHES,
        keys=_CHATGLM_KEYS,
        computed={"rope_parameters": _stretched},
        defaults={"partial_rotary_factor": 0.5, "layernorm_epsilon": 1e-5},
        only={
            "rmsnorm": (True,),
            "post_layer_norm": (True,),
            "apply_residual_connection_post_layernorm": (False,),
            "pre_seq_len": (None,),
        },
        ignored=("*.rotary_pos_emb.inv_freq",),
    )


ARCHITECTURES = (
    Architecture(
        "GlmForCausalLM",
        _GLM,
        models="GLM-4-9B (hf), GLM-Edge",
        model_type="glm",
        switches={"out_bias": always(False)},
    ),
    Architecture(
        "Glm4ForCausalLM",
        _GLM4,
        models="GLM-4 and GLM-Z1 (0414)",
        model_type="glm4",
        switches={"out_bias": always(False)},
    ),
    Architecture(
        "Glm4vTextModel",
        _GLM4,
        model_type="glm4v_text",
        switches={"qkv_bias": always(True), "out_bias": always(False)},
    ),
    _chatglm("ChatGLMModel", "ChatGLM 2 and 3, GLM-4-9B-Chat"),
    _chatglm("ChatGLMForConditionalGeneration", "GLM-4-9B-Chat, as newer files name it"),
)
