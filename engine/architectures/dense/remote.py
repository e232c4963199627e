"""Models whose code is only in their own repositories, such as Baichuan and InternLM."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.dense.alibi import slopes
from engine.architectures.dense.llama import LAYER, LLAMA
from engine.architectures.layout import grouped
from engine.architectures.record import Architecture, CheckpointTensor, Read, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention

_QWEN = "transformer.h.{i}."
_PACKED = {**LLAMA, "qkv": CheckpointTensor((f"{LAYER}self_attn.W_pack",))}
_NORMED_HEAD = 125696  # vocabulary size of Baichuan 2, whose LM head has normalised rows


def _baichuan(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention; the 13B, identified by its forty heads, has ALiBi."""
    if plain.num_heads == 40:
        plain = replace(plain, rope=None, slopes=slopes(plain.num_heads))
    return [plain] * layers


def _baichuan_record(name: str, models: str) -> Architecture:
    return Architecture(
        name,
        _PACKED,
        models=models,
        switches={
            "max_positions": lambda config: config.size(
                "model_max_length", config.size("max_position_embeddings", 4096)
            ),
            "unit_head": lambda config: config.size("vocab_size") == _NORMED_HEAD,
        },
        attention=_baichuan,
    )


MINICPM: Mapping[str, Read] = {
    "embedding_scale": lambda config: config.number("scale_emb", 1.0),
    "residual_scale": lambda config: (
        config.number("scale_depth", 1.0) / config.size("num_hidden_layers") ** 0.5
    ),
    "logit_scale": lambda config: config.number("dim_model_base", 1.0) / config.size("hidden_size"),
}

ARCHITECTURES = (
    Architecture(
        "QWenLMHeadModel",
        {
            "embedding": CheckpointTensor(("transformer.wte",)),
            "attention_norm": CheckpointTensor((f"{_QWEN}ln_1",)),
            "qkv": CheckpointTensor((f"{_QWEN}attn.c_attn",)),
            "out": CheckpointTensor((f"{_QWEN}attn.c_proj",)),
            "mlp_norm": CheckpointTensor((f"{_QWEN}ln_2",)),
            "gate_up": CheckpointTensor((f"{_QWEN}mlp.w2", f"{_QWEN}mlp.w1")),
            "down": CheckpointTensor((f"{_QWEN}mlp.c_proj",)),
            "norm": CheckpointTensor(("transformer.ln_f",)),
            "head": CheckpointTensor(("lm_head",)),
        },
        models="Qwen 1",
        model_type="qwen",
        switches={
            "intermediate_size": lambda config: config.size("intermediate_size") // 2,
            "qkv_bias": always(True),
            "hidden_act": always("silu"),
        },
        # seq_length is the limit, as beyond it the model's code changes the rotary embedding with
        # the text's length, also for cached keys.
        keys={
            "head_dim": "kv_channels",
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layer_norm_epsilon",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        only={"no_bias": (True,)},
        ignored=("*.rotary_emb.inv_freq", "transformer.visual.*"),
    ),
    _baichuan_record("BaiChuanForCausalLM", "Baichuan 7B"),
    _baichuan_record("BaichuanForCausalLM", "Baichuan 13B, Baichuan 2"),
    Architecture(
        "InternLMForCausalLM",
        LLAMA,
        models="InternLM 1",
        model_type="internlm",
        keys={"attention_bias": "bias"},
        defaults={"bias": True},
    ),
    Architecture(
        "InternLM2ForCausalLM",
        {
            "embedding": CheckpointTensor(("model.tok_embeddings",)),
            "attention_norm": CheckpointTensor((f"{LAYER}attention_norm",)),
            "qkv": CheckpointTensor((f"{LAYER}attention.wqkv",), grouped),
            "out": CheckpointTensor((f"{LAYER}attention.wo",)),
            "mlp_norm": CheckpointTensor((f"{LAYER}ffn_norm",)),
            "gate_up": CheckpointTensor((f"{LAYER}feed_forward.w1", f"{LAYER}feed_forward.w3")),
            "down": CheckpointTensor((f"{LAYER}feed_forward.w2",)),
            "norm": CheckpointTensor(("model.norm",)),
            "head": CheckpointTensor(("output",)),
        },
        models="InternLM 2 and 2.5",
        model_type="internlm2",
        keys={"attention_bias": "bias"},
    ),
    Architecture(
        "MiniCPMForCausalLM",
        LLAMA,
        models="MiniCPM 1 and 2",
        model_type="minicpm",
        switches=MINICPM,
        defaults={"tie_word_embeddings": True},
        only={"num_experts": (0, None)},
    ),
    Architecture(
        "XverseForCausalLM",
        LLAMA,
        models="XVERSE",
        model_type="xverse",
    ),
    Architecture(
        "OrionForCausalLM",
        LLAMA,
        models="Orion 14B",
        model_type="orion",
        switches={
            "norm": always("layer"),
            "norm_bias": always(True),
            "norm_eps": lambda config: config.number("rms_norm_eps", 1e-5),
        },
    ),
    Architecture(
        "ExaoneForCausalLM",
        {
            "embedding": CheckpointTensor(("transformer.wte",)),
            "attention_norm": CheckpointTensor((f"{_QWEN}ln_1",)),
            "qkv": CheckpointTensor(tuple(f"{_QWEN}attn.attention.{name}_proj" for name in "qkv")),
            "out": CheckpointTensor((f"{_QWEN}attn.attention.out_proj",)),
            "mlp_norm": CheckpointTensor((f"{_QWEN}ln_2",)),
            "gate_up": CheckpointTensor((f"{_QWEN}mlp.c_fc_0", f"{_QWEN}mlp.c_fc_1")),
            "down": CheckpointTensor((f"{_QWEN}mlp.c_proj",)),
            "norm": CheckpointTensor(("transformer.ln_f",)),
            "head": CheckpointTensor(("lm_head",)),
        },
        models="EXAONE 3 and 3.5, EXAONE Deep",
        model_type="exaone",
        keys={
            "num_hidden_layers": "num_layers",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults={"layer_norm_epsilon": 1e-5},
        only={"attention_bias": (False,)},
    ),
)
