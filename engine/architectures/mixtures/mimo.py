"""MiMo-V2: windows with sinks, full layers with fewer KV heads, values narrower than keys.

The first layer is dense, the others have mixtures of experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL, WINDOW, layer_types, of_layers, rope_of
from engine.architectures.dense.llama import LAYER, without
from engine.architectures.mixtures.families import DEEPSEEK, ROUTED
from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention: by default full in the first and every sixth, else windowed.

    transformers' files have layer_types. The hub's files have hybrid_layer_pattern (1 = a window),
    with a window size that does not count the token itself.
    """
    pattern = of_layers(config, "hybrid_layer_pattern", layers, int)
    if pattern is None:
        pattern = [int(i > 0 and (i + 1) % 6 > 0) for i in range(layers)]
    kinds = layer_types(config, layers, lambda i: WINDOW if pattern[i] else FULL)
    window = config.size_or_none("sliding_window_size")
    window = config.size("sliding_window", 129) if window is None else window + 1
    width = config.size("v_head_dim", 128)
    plain = replace(plain, attended_scale=config.number("attention_value_scale", 1.0))
    full = replace(plain, value_size=width, sinks=config.flag("add_full_attention_sink_bias"))
    local = replace(
        plain,
        num_heads=config.size("swa_num_attention_heads", plain.num_heads),
        num_kv_heads=config.size("swa_num_key_value_heads", 2 * plain.num_kv_heads),
        head_dim=config.size("swa_head_dim", plain.head_dim),
        value_size=config.size("swa_v_head_dim", width),
        window=window,
        rope=rope_of(config, WINDOW, plain, config.number("swa_rope_theta", 10000.0)),
        sinks=config.flag("add_swa_attention_sink_bias", True),
    )
    if local.head_dim != plain.head_dim:
        message = f"{local.head_dim} is not supported, only head_dim, which is {plain.head_dim}"
        raise config.error("swa_head_dim", message)
    for layer, keys in ((full, ""), (local, "swa_")):
        if layer.value_size > layer.head_dim:
            message = f"{layer.value_size} is more than a key's {layer.head_dim} elements"
            raise config.error(f"{keys}v_head_dim", message)
        if layer.num_heads % layer.num_kv_heads:
            message = f"{layer.num_kv_heads} does not divide {layer.num_heads} heads"
            raise config.error(f"{keys}num_key_value_heads", message)
    return [local if kind == WINDOW else full for kind in kinds]


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    """Read the experts, by default in all layers but the first.

    transformers' files have mlp_layer_types; the hub's files have moe_layer_freq (1 = experts).
    """
    count = model.num_layers
    named = of_layers(config, "mlp_layer_types", count, str)
    if named is None:
        sparse = of_layers(config, "moe_layer_freq", count, int) or [i > 0 for i in range(count)]
    else:
        sparse = [kind == "sparse" for kind in named]
    return read_experts(
        config,
        model,
        (i for i in range(count) if sparse[i]),
        score="sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )


ARCHITECTURES = (
    Architecture(
        "MiMoV2FlashForCausalLM",
        {
            **without(DEEPSEEK, "q_norm", "k_norm", "shared_gate_up", "shared_down"),
            "sinks": CheckpointTensor((f"{LAYER}self_attn.attention_sink_bias",)),
        },
        models="MiMo-V2-Flash",
        model_type="mimo_v2_flash",
        switches={
            "norm_eps": lambda config: config.number(
                "layernorm_epsilon", config.number("rms_norm_eps", 1e-5)
            ),
            "out_bias": always(False),
        },
        keys=ROUTED,
        defaults={"partial_rotary_factor": 0.334},
        only={
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "n_shared_experts": (None, 0),
        },
        ignored=("*.rotary_emb.inv_freq", "model.mtp.*"),
        attention=_attention,
        experts=_experts,
    ),
)
