"""Llama 4: three of four layers have chunked attention and rotary embeddings.

The fourth has full attention without rotary embeddings. Routing weights multiply the experts' input
instead of the output.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import CHUNK, FULL, layer_types, rotary_layers
from engine.architectures.dense.llama import LAYER, LLAMA, NEIGHBOURS
from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig

_MLP = f"{LAYER}feed_forward."
_SHARED = f"{_MLP}shared_expert."


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention; rotary ones may have chunks, and norms of queries and keys.

    The norm has no weight and covers a whole head, so it commutes with the rotary embedding.
    """
    rotary = rotary_layers(config, layers)
    kinds = layer_types(config, layers, lambda i: CHUNK if rotary[i] else FULL)
    chunk = config.size_or_none("attention_chunk_size") or 0
    temperature = None
    if config.flag("attn_temperature_tuning", True):
        temperature = (config.number("attn_scale", 0.1), config.size("floor_scale", 8192), 1)
    plain = replace(plain, qk_norm=config.flag("use_qk_norm", True))
    still = replace(plain, rope=None, qk_norm=False, temperature=temperature)
    return [
        replace(plain if is_rotary else still, chunk=chunk if kind == CHUNK else 0)
        for is_rotary, kind in zip(rotary, kinds, strict=True)
    ]


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    """Read the experts: in every interleave_moe_layer_step-th layer, or in moe_layers."""
    step = config.size("interleave_moe_layer_step", 1)
    layers: Iterable[int] | None = config.listed("moe_layers", int)
    if layers is None:
        layers = range(step - 1, model.num_layers, step)
    experts = read_experts(
        config, model, layers, score="sigmoid", renormalise=False, weigh_input=True
    )
    return None if experts is None else replace(experts, shared_size=experts.size)


ARCHITECTURES = (
    Architecture(
        "Llama4ForCausalLM",
        {
            **LLAMA,
            **NEIGHBOURS,
            "q_norm": CheckpointTensor(()),
            "k_norm": CheckpointTensor(()),
            "gate_up": CheckpointTensor((f"{_MLP}gate_proj", f"{_MLP}up_proj")),
            "down": CheckpointTensor((f"{_MLP}down_proj",)),
            "router": CheckpointTensor((f"{_MLP}router",)),
            "experts_gate_up": CheckpointTensor((f"{_MLP}experts.gate_up_proj",), transposed=True),
            "experts_down": CheckpointTensor((f"{_MLP}experts.down_proj",), transposed=True),
            "shared_gate_up": CheckpointTensor((f"{_SHARED}gate_proj", f"{_SHARED}up_proj")),
            "shared_down": CheckpointTensor((f"{_SHARED}down_proj",)),
        },
        models="Llama 4 (Scout, Maverick)",
        model_type="llama4_text",
        switches={"qk_norm": always("head")},
        keys={
            "intermediate_size": "intermediate_size_mlp",
            "moe_intermediate_size": "intermediate_size",
            "num_experts": "num_local_experts",
        },
        # The multimodal models' files on the hub omit some of these keys.
        attention=_attention,
        experts=_experts,
    ),
)
