"""Cohere: attention and MLP read one layer norm without bias; rotary pairs are adjacent."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import periodic
from engine.architectures.dense.llama import LAYER, LLAMA, NEIGHBOURS, without
from engine.architectures.layout import neighbours_in_k, neighbours_in_q
from engine.architectures.record import Architecture, CheckpointTensor, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention

_COHERE = {**without(LLAMA, "mlp_norm"), **NEIGHBOURS}
_SWITCHES = {
    "norm": always("layer"),
    "norm_eps": lambda config: config.number("layer_norm_eps", 1e-5),
    "parallel": always("shared"),
    "logit_scale": lambda config: config.number("logit_scale", 0.0625),
}


def _cohere2(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention: full without rotary embedding, or rotary with a window."""
    full, local = replace(plain, rope=None), plain
    if config.get("sliding_window") is not None:
        local = replace(plain, window=config.size("sliding_window"))
    kinds = periodic(config, layers, 4)
    return [local if kind == "sliding_attention" else full for kind in kinds]


ARCHITECTURES = (
    Architecture(
        "CohereForCausalLM",
        {
            **_COHERE,
            "q_norm": CheckpointTensor((f"{LAYER}self_attn.q_norm",), neighbours_in_q),
            "k_norm": CheckpointTensor((f"{LAYER}self_attn.k_norm",), neighbours_in_k),
        },
        models="Command R, Command R+, Aya",
        model_type="cohere",
        switches={
            **_SWITCHES,
            "qk_norm": lambda config: "heads" if config.flag("use_qk_norm") else "",
        },
    ),
    Architecture(
        "Cohere2ForCausalLM",
        _COHERE,
        models="Command R7B, Command A",
        model_type="cohere2",
        switches=_SWITCHES,
        attention=_cohere2,
    ),
)
