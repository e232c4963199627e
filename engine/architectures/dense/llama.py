"""Llama and similar models, and their checkpoints' tensor names, which most models share.

These models have rotary embeddings, RMS norms before attention and MLP, and a gated MLP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.architectures.by_layer import (
    FULL,
    WINDOW,
    layer_types,
    of_layers,
    rotary_layers,
    unstretched,
    windowed,
)
from engine.architectures.layout import neighbours
from engine.architectures.record import Architecture, CheckpointTensor, Mtp, Read, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention

LAYER = "model.layers.{i}."
_MTP = "model.mtp_layers.0."
QKV = tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkv")
LLAMA: Mapping[str, CheckpointTensor] = {
    "embedding": CheckpointTensor(("model.embed_tokens",)),
    "attention_norm": CheckpointTensor((f"{LAYER}input_layernorm",)),
    "qkv": CheckpointTensor(QKV),
    "out": CheckpointTensor((f"{LAYER}self_attn.o_proj",)),
    "mlp_norm": CheckpointTensor((f"{LAYER}post_attention_layernorm",)),
    "gate_up": CheckpointTensor((f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj")),
    "down": CheckpointTensor((f"{LAYER}mlp.down_proj",)),
    "norm": CheckpointTensor(("model.norm",)),
    "head": CheckpointTensor(("lm_head",)),
}
QK_NORM: Mapping[str, CheckpointTensor] = {
    "q_norm": CheckpointTensor((f"{LAYER}self_attn.q_norm",)),
    "k_norm": CheckpointTensor((f"{LAYER}self_attn.k_norm",)),
}
# In these checkpoints the rotary pairs of q and k are adjacent rows.
NEIGHBOURS: Mapping[str, CheckpointTensor] = {"qkv": CheckpointTensor(QKV, neighbours)}


def without(tensors: Mapping[str, CheckpointTensor], *ours: str) -> dict[str, CheckpointTensor]:
    return {name: stored for name, stored in tensors.items() if name not in ours}


def one_llama_layer(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a Llama with one layer, for a drafter with such a layer.

    values: the keys of config.json that describe the layer, such as hidden_size.
    """
    return {
        **values,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def ungated(
    tensors: Mapping[str, CheckpointTensor], up: str = "mlp.up_proj"
) -> dict[str, CheckpointTensor]:
    """Return the tensors for a model with a plain MLP instead of a gated one.

    up: the name of the plain MLP's first matrix.
    """
    return without(tensors, "gate_up") | {"up": CheckpointTensor((f"{LAYER}{up}",))}


def granite(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    return [replace(plain, scale=config.number("attention_multiplier", 1.0))] * layers


def _hyperclovax(
    config: Reader, plain: "LayerAttention", layers: int
) -> Sequence["LayerAttention"]:
    scale = config.number_or_none("attention_multiplier")
    return [plain if scale is None else replace(plain, scale=scale)] * layers


def _granite_swa(
    config: Reader, plain: "LayerAttention", layers: int
) -> Sequence["LayerAttention"]:
    """Return each layer's attention, with a rotary base for each layer; 0 = no rotary embedding."""
    plain = granite(config, plain, 1)[0]
    bases = of_layers(config, "layer_rope_theta", layers, int, float) or [None] * layers
    kinds = layer_types(config, layers, lambda i: WINDOW if i % 4 else FULL)
    attention = []
    for kind, base in zip(kinds, bases, strict=True):
        layer = replace(plain, sinks=True)
        if base is not None:
            layer = replace(layer, rope=unstretched(plain, base) if base else None)
        if kind == WINDOW:
            layer = replace(layer, window=config.size("sliding_window", 128))
        attention.append(layer)
    return attention


def _smollm3(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    return [
        plain if rotary else replace(plain, rope=None) for rotary in rotary_layers(config, layers)
    ]


def _cwm(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    local = replace(plain, window=config.size("sliding_window", 8192))
    kinds = layer_types(config, layers, lambda i: WINDOW if i % 4 else FULL)
    return [local if kind == WINDOW else plain for kind in kinds]


def _ministral(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    local = windowed(config, plain, 1)[0]
    kinds = layer_types(config, layers, lambda i: WINDOW if local.window else FULL)
    return [local if kind == WINDOW else plain for kind in kinds]


def _qwen2(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention.

    With use_sliding_window, layers from max_window_layers on have the window; otherwise none has.
    """
    if not config.flag("use_sliding_window"):
        return [plain] * layers
    local, first = windowed(config, plain, 1)[0], config.count("max_window_layers", 28)
    kinds = layer_types(config, layers, lambda i: WINDOW if i >= first else FULL)
    return [local if kind == WINDOW else plain for kind in kinds]


def _ministral3(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention, with queries scaled up beyond the trained context.

    The factor grows with the logarithm of position / trained context.
    """
    rope = config.inner("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if rope.get("llama_4_scaling_beta"):
        beta = rope.number("llama_4_scaling_beta")
        trained = rope.size(
            "original_max_position_embeddings", config.size("max_position_embeddings")
        )
        plain = replace(plain, temperature=(beta, trained, 0))
    return windowed(config, plain, layers)


GRANITE: Mapping[str, Read] = {
    "embedding_scale": lambda config: config.number("embedding_multiplier", 1.0),
    "residual_scale": lambda config: config.number("residual_multiplier", 1.0),
    "logit_scale": lambda config: 1 / config.number("logits_scaling", 1.0),
}


ARCHITECTURES = (
    Architecture(
        "LlamaForCausalLM",
        LLAMA,
        models="Llama 1-3, Yi, DeepSeek-LLM, TinyLlama, SmolLM 1 and 2, Nemotron-Nano",
        model_type="llama",
    ),
    Architecture("LLaMAForCausalLM", LLAMA, models="Llama 1, as it was first converted"),
    Architecture("IQuestCoderForCausalLM", LLAMA, models="IQuest-Coder", model_type="iquestcoder"),
    Architecture(
        "InternLM3ForCausalLM",
        LLAMA,
        models="InternLM 3",
        model_type="internlm3",
        keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        switches={"out_bias": lambda config: config.flag("mlp_bias")},
    ),
    Architecture(
        "MistralForCausalLM",
        LLAMA,
        models="Mistral 7B, Nemo, Small 3",
        model_type="mistral",
        attention=windowed,
    ),
    Architecture(
        "MinistralForCausalLM",
        LLAMA,
        models="Ministral 8B (2410)",
        model_type="ministral",
        attention=_ministral,
    ),
    Architecture(
        "Ministral3ForCausalLM",
        LLAMA,
        models="Ministral 3, Devstral 2",
        model_type="ministral3",
        attention=_ministral3,
    ),
    Architecture(
        "Qwen2ForCausalLM",
        LLAMA,
        models="Qwen 1.5, 2 and 2.5, DeepSeek-R1-Distill-Qwen",
        model_type="qwen2",
        switches={"qkv_bias": always(True), "out_bias": always(False)},
        attention=_qwen2,
    ),
    Architecture(
        "MiMoForCausalLM",
        LLAMA,
        models="MiMo 7B",
        switches={"qkv_bias": always(True), "out_bias": always(False)},
        attention=_qwen2,
        ignored=("*.rotary_emb.inv_freq", "model.mtp_layers.*"),
        mtp=Mtp(
            _MTP,
            f"{_MTP}token_layernorm",
            f"{_MTP}hidden_layernorm",
            f"{_MTP}input_proj",
            f"{_MTP}final_layernorm",
            hidden_first=True,
        ),
    ),
    Architecture(
        "Qwen3ForCausalLM",
        {**LLAMA, **QK_NORM},
        models="Qwen 3",
        model_type="qwen3",
        switches={"qk_norm": always("head")},
        attention=_qwen2,
    ),
    Architecture(
        "SeedOssForCausalLM",
        LLAMA,
        models="Seed-OSS",
        model_type="seed_oss",
        switches={"out_bias": lambda config: config.flag("attention_out_bias")},
    ),
    Architecture(
        "Ernie4_5ForCausalLM",
        {**LLAMA, **NEIGHBOURS},
        models="ERNIE 4.5 (dense)",
        model_type="ernie4_5",
        keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    ),
    Architecture(
        "PaddleOCRTextModel",
        LLAMA,
        model_type="paddleocr_vl_text",
        keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    ),
    Architecture(
        "HeliumForCausalLM",
        {**LLAMA, **NEIGHBOURS},
        models="Helium",
        model_type="helium",
        switches={"out_bias": always(False)},
    ),
    Architecture(
        "HunYuanDenseV1ForCausalLM",
        {
            **LLAMA,
            "q_norm": CheckpointTensor((f"{LAYER}self_attn.query_layernorm",)),
            "k_norm": CheckpointTensor((f"{LAYER}self_attn.key_layernorm",)),
        },
        models="HunYuan (dense)",
        model_type="hunyuan_v1_dense",
        switches={"qk_norm": always("head"), "qk_norm_after": always(True)},
        only={"use_qk_norm": (True,), "use_cla": (False,), "norm_type": ("rms",)},
    ),
    Architecture(
        "GraniteForCausalLM",
        LLAMA,
        models="Granite 3 and 4 (dense)",
        model_type="granite",
        switches=GRANITE,
        attention=granite,
    ),
    Architecture(
        "GraniteSWAForCausalLM",
        {**LLAMA, "sinks": CheckpointTensor((f"{LAYER}self_attn.sinks",))},
        models="Granite with windows",
        model_type="granite_swa",
        switches=GRANITE,
        attention=_granite_swa,
    ),
    Architecture(
        "HyperCLOVAXForCausalLM",
        {
            **LLAMA,
            "attention_out_norm": CheckpointTensor((f"{LAYER}post_norm1",)),
            "mlp_out_norm": CheckpointTensor((f"{LAYER}post_norm2",)),
        },
        models="HyperCLOVA X SEED Think 14B",
        model_type="hyperclovax",
        # Unlike Granite, the model multiplies logits by logits_scaling.
        switches={
            **GRANITE,
            "logit_scale": lambda config: config.number("logits_scaling", 1.0),
        },
        attention=_hyperclovax,
        only={"use_post_norm": (True,)},
    ),
    Architecture(
        "SmolLM3ForCausalLM",
        LLAMA,
        models="SmolLM 3",
        model_type="smollm3",
        only={"use_sliding_window": (False,)},
        attention=_smollm3,
    ),
    Architecture(
        "CwmForCausalLM",
        LLAMA,
        models="CWM",
        model_type="cwm",
        attention=_cwm,
    ),
    Architecture(
        "ArceeForCausalLM",
        ungated(LLAMA),
        models="AFM (Arcee)",
        model_type="arcee",
    ),
    Architecture(
        "ApertusForCausalLM",
        {
            **ungated(LLAMA),
            **QK_NORM,
            "attention_norm": CheckpointTensor((f"{LAYER}attention_layernorm",)),
            "mlp_norm": CheckpointTensor((f"{LAYER}feedforward_layernorm",)),
            "activation": CheckpointTensor((f"{LAYER}mlp.act_fn",)),
        },
        models="Apertus",
        model_type="apertus",
        switches={"qk_norm": always("head")},
    ),
    Architecture(
        "NemotronForCausalLM",
        ungated(LLAMA),
        models="Nemotron-4, Minitron",
        model_type="nemotron",
        switches={
            "norm": always("layer"),
            "norm_bias": always(True),
            "norm_offset": always(1.0),
            "norm_eps": lambda config: config.number("norm_eps", 1e-5),
        },
    ),
    Architecture(
        "Jais2ForCausalLM",
        ungated(LLAMA),
        models="Jais 2",
        model_type="jais2",
        switches={
            "norm": always("layer"),
            "norm_bias": always(True),
            "norm_eps": lambda config: config.number("layer_norm_eps", 1e-5),
        },
    ),
)
