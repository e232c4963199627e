"""OLMo and EXAONE 4. From OLMo 2 on, norms come after attention and MLP instead of before."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import WINDOW, layer_types, periodic, rope_of, three_to_one
from engine.architectures.dense.llama import LAYER, LLAMA, QK_NORM, without
from engine.architectures.record import Architecture, CheckpointTensor, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention

OUT_NORMS: Mapping[str, CheckpointTensor] = {
    **without(LLAMA, "attention_norm", "mlp_norm"),
    **QK_NORM,
    "attention_out_norm": CheckpointTensor((f"{LAYER}post_attention_layernorm",)),
    "mlp_out_norm": CheckpointTensor((f"{LAYER}post_feedforward_layernorm",)),
}


def _olmo3(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention; only layers without a window may have a scaled rope."""
    rope = rope_of(config, WINDOW, plain)
    local = replace(plain, rope=rope, window=config.size("sliding_window", 4096))
    kinds = layer_types(config, layers, three_to_one)
    return [local if kind == "sliding_attention" else plain for kind in kinds]


def _exaone4(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention.

    If the model has windowed layers, its full layers have no rotary embedding.

    plain: attention by the fields that all models have.
    """
    window = config.size_or_none("sliding_window")
    if window is None:
        return [plain] * layers
    full, local = replace(plain, rope=None), replace(plain, window=window)
    kinds = periodic(config, layers, 4)
    return [local if kind == "sliding_attention" else full for kind in kinds]


ARCHITECTURES = (
    Architecture(
        "OlmoForCausalLM",
        {
            **LLAMA,
            "attention_norm": CheckpointTensor(()),
            "mlp_norm": CheckpointTensor(()),
            "norm": CheckpointTensor(()),
        },
        models="OLMo 1",
        model_type="olmo",
        switches={
            "norm": always("layer"),
            "norm_eps": always(1e-5),
            "qkv_clip": lambda config: config.number_or_none("clip_qkv"),
        },
    ),
    Architecture(
        "Olmo2ForCausalLM",
        OUT_NORMS,
        models="OLMo 2",
        model_type="olmo2",
        switches={"qk_norm": always("flat")},
    ),
    Architecture(
        "Olmo3ForCausalLM",
        OUT_NORMS,
        models="OLMo 3",
        model_type="olmo3",
        switches={"qk_norm": always("flat")},
        attention=_olmo3,
    ),
    Architecture(
        "Exaone4ForCausalLM",
        OUT_NORMS,
        models="EXAONE 4",
        model_type="exaone4",
        switches={"qk_norm": always("head")},
        attention=_exaone4,
    ),
)
