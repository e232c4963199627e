"""Gemma 4: sliding windows, full layers with other heads, normed values, a factor for each layer.

The E models have per-layer embeddings, and their last layers read the KV of earlier layers. The 26B
has a mixture of experts next to each MLP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.architectures.by_layer import FULL, WINDOW, layer_types, unstretched
from engine.architectures.dense.gemma import SANDWICH
from engine.architectures.dense.llama import LAYER, QK_NORM, QKV
from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor, Read, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig
    from engine.rope import Rope

_TENSORS: Mapping[str, CheckpointTensor] = {
    **SANDWICH,
    **QK_NORM,
    "qk": CheckpointTensor(QKV[:2]),
    "q": CheckpointTensor(QKV[:1]),
    "layer_scale": CheckpointTensor((f"{LAYER}layer_scalar",)),
    "layer_inputs": CheckpointTensor(("model.embed_tokens_per_layer",)),
    "layer_inputs_project": CheckpointTensor(("model.per_layer_model_projection",)),
    "layer_inputs_norm": CheckpointTensor(("model.per_layer_projection_norm",)),
    "layer_input_gate": CheckpointTensor((f"{LAYER}per_layer_input_gate",)),
    "layer_input_out": CheckpointTensor((f"{LAYER}per_layer_projection",)),
    "layer_input_norm": CheckpointTensor((f"{LAYER}post_per_layer_input_norm",)),
    "router": CheckpointTensor((f"{LAYER}router.proj",)),
    "router_norm": CheckpointTensor((f"{LAYER}router.scale",)),
    "expert_scale": CheckpointTensor((f"{LAYER}router.per_expert_scale",)),
    "experts_gate_up": CheckpointTensor((f"{LAYER}experts.gate_up_proj",)),
    "experts_down": CheckpointTensor((f"{LAYER}experts.down_proj",)),
    "mlp_part_norm": CheckpointTensor((f"{LAYER}post_feedforward_layernorm_1",)),
    "experts_norm": CheckpointTensor((f"{LAYER}pre_feedforward_layernorm_2",)),
    "experts_out_norm": CheckpointTensor((f"{LAYER}post_feedforward_layernorm_2",)),
}


def _kinds(config: Reader, layers: int) -> list[str]:
    """Return the kind of each layer; the last layer always is FULL."""
    kinds = layer_types(config, layers, lambda i: WINDOW if (i + 1) % 6 else FULL)
    return [*kinds[:-1], FULL]


_PROPORTIONAL: Mapping[str, Any] = {
    "rope_type": "proportional",
    "partial_rotary_factor": 0.25,
    "rope_theta": 1000000.0,
}


def _ropes(kind: str, default: Mapping[str, Any]) -> Read:
    """Return a reader of the rope_parameters of one kind of layers; `default` if there are none."""
    return lambda config: {**(config.inner("rope_parameters").inner(kind).values or default)}


def _full_rope(config: Reader, plain: "LayerAttention") -> "Rope":
    own = config.inner("full_rope_parameters")
    rope = unstretched(plain, own.number("rope_theta", 1000000.0))
    if own.one_of("rope_type", ("proportional", "default"), "default") == "default":
        return rope
    part, factor = own.number("partial_rotary_factor", 1.0), own.number("factor", 1.0)
    return replace(rope, type="proportional", part=part, factor=factor)


def _full(config: Reader, kinds: Sequence[str]) -> Reader:
    """Return the config values that only full layers have.

    transformers 5 writes these values layer by layer.
    """
    per_layer = config.inner("per_layer_config")
    for key in (str(kinds.index(FULL)), FULL):
        if per_layer.get(key) is not None:
            return per_layer.inner(key)
    values = {"head_dim": config.size("global_head_dim", 512)}
    heads = config.size_or_none("num_global_key_value_heads")
    if config.flag("attention_k_eq_v") and heads is not None:
        values["num_key_value_heads"] = heads
    return Reader(values, config.path)


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    kinds = _kinds(config, layers)
    plain = replace(plain, scale=1.0, value_norm=True)
    own = _full(config, kinds)
    full = replace(
        plain,
        head_dim=own.size("head_dim", plain.head_dim),
        num_kv_heads=own.size("num_key_value_heads", plain.num_kv_heads),
        rope=_full_rope(config, plain),
        value_is_key=config.flag("attention_k_eq_v"),
    )
    local = replace(plain, window=config.size("sliding_window", 512))
    attention = [full if kind == FULL else local for kind in kinds]
    first = layers - _without_keys(config, layers)
    for i in range(first, layers):
        if kinds[i] not in kinds[:first]:
            message = f"no layer before {first} is of {kinds[i]}, whose keys layer {i} would read"
            raise config.error("num_kv_shared_layers", message)
        source = first - 1 - kinds[:first][::-1].index(kinds[i])
        attention[i] = replace(attention[i], keys_of=source, value_is_key=False, value_norm=False)
    return attention


def _without_keys(config: Reader, layers: int) -> int:
    """Return the number of last layers that read other layers' KV."""
    shared = config.count("num_kv_shared_layers")
    if shared >= layers:
        raise config.error("num_kv_shared_layers", f"{shared} of {layers} layers: none has keys")
    return shared


def _mlp_sizes(config: Reader) -> tuple[int, ...]:
    """Return each layer's MLP width, which config.json may double in layers that share KV."""
    size, layers = config.size("intermediate_size"), config.size("num_hidden_layers")
    shared = _without_keys(config, layers)
    wide = 2 if config.flag("use_double_wide_mlp") else 1
    return (size,) * (layers - shared) + (size * wide,) * shared


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    if not config.flag("enable_moe_block"):
        return None
    return read_experts(config, model, beside_mlp=True)


ARCHITECTURES = (
    Architecture(
        "Gemma4ForCausalLM",
        _TENSORS,
        models="Gemma 4 (E2B, E4B, 31B, 26B-A4B)",
        model_type="gemma4_text",
        switches={
            "embedding_scale": lambda config: config.size("hidden_size") ** 0.5,
            "qk_norm": always("head"),
            "logit_cap": lambda config: config.number_or_none("final_logit_softcapping"),
            "mlp_sizes": _mlp_sizes,
            "layer_input_size": lambda config: config.count("hidden_size_per_layer_input"),
            "layer_input_rows": lambda config: config.size("vocab_size_per_layer_input"),
        },
        keys={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
        computed={  # computed in this order, as the second replaces a key that the first reads
            "full_rope_parameters": _ropes(FULL, _PROPORTIONAL),
            "rope_parameters": _ropes(WINDOW, {"rope_theta": 10000.0}),
        },
        # "vision" makes only attention between image tokens bidirectional.
        only={"use_bidirectional_attention": (None, "vision")},
        attention=_attention,
        experts=_experts,
    ),
)
