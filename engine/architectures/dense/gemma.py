"""Gemma: norms multiply by one plus their weight; the embedding is scaled, and the head is tied.

From Gemma 2 on, attention and MLP each have a norm before and after them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL, WINDOW, layer_types, periodic, rope_of
from engine.architectures.dense.llama import LAYER, LLAMA, QK_NORM
from engine.architectures.record import Architecture, CheckpointTensor, Read, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention

SANDWICH: Mapping[str, CheckpointTensor] = {
    **LLAMA,
    "attention_out_norm": CheckpointTensor((f"{LAYER}post_attention_layernorm",)),
    "mlp_norm": CheckpointTensor((f"{LAYER}pre_feedforward_layernorm",)),
    "mlp_out_norm": CheckpointTensor((f"{LAYER}post_feedforward_layernorm",)),
}
_SWITCHES: Mapping[str, Read] = {
    "norm_offset": always(1.0),
    "embedding_scale": lambda config: config.size("hidden_size") ** 0.5,
}


def _scaled(config: Reader, plain: "LayerAttention") -> "LayerAttention":
    return replace(
        plain,
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=config.number_or_none("attn_logit_softcapping") or 0.0,
    )


def _gemma2(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    plain = _scaled(config, plain)
    local = replace(plain, window=config.size("sliding_window"))
    kinds = layer_types(config, layers, lambda i: FULL if i % 2 else WINDOW)
    return [local if kind == WINDOW else plain for kind in kinds]


def _gemma3(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention; windowed ones have a separate rotary base, without scaling."""
    plain = _scaled(config, plain)
    rope = rope_of(config, WINDOW, plain, config.number("rope_local_base_freq", 10000.0))
    local = replace(plain, rope=rope, window=config.size("sliding_window"))
    kinds = periodic(config, layers, 6)
    return [local if kind == WINDOW else plain for kind in kinds]


ARCHITECTURES = (
    Architecture(
        "GemmaForCausalLM",
        LLAMA,
        models="Gemma 1, CodeGemma",
        model_type="gemma",
        # Files have hidden_act "gelu", but the models were trained with the tanh approximation.
        switches={**_SWITCHES, "hidden_act": always("gelu_pytorch_tanh")},
    ),
    Architecture(
        "Gemma2ForCausalLM",
        SANDWICH,
        models="Gemma 2",
        model_type="gemma2",
        switches={
            **_SWITCHES,
            "logit_cap": lambda config: config.number_or_none("final_logit_softcapping"),
        },
        keys={"hidden_act": "hidden_activation"},
        attention=_gemma2,
    ),
    Architecture(
        "Gemma3ForCausalLM",
        {**SANDWICH, **QK_NORM},
        models="Gemma 3",
        model_type="gemma3_text",
        switches={
            **_SWITCHES,
            "qk_norm": always("head"),
            "logit_cap": lambda config: config.number_or_none("final_logit_softcapping"),
        },
        keys={"hidden_act": "hidden_activation"},
        # The multimodal models' files on the hub omit most of these keys.
        attention=_gemma3,
        only={"use_bidirectional_attention": (False, None)},
    ),
)
