"""Falcon-H1: attention and Mamba-2 in parallel in each layer, with multipliers throughout."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.dense.llama import LAYER, LLAMA
from engine.architectures.record import Architecture, CheckpointTensor
from engine.architectures.recurrent.mamba2 import mamba2_mixer, mamba2_tensors
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention, with the multipliers of config.json.

    The multiplier of the layer's input applies to queries, keys and values, and so twice to scores
    and once to the output.
    """
    into = config.number("attention_in_multiplier", 1.0)
    mixer = mamba2_mixer(config)
    through = config.number("ssm_in_multiplier", 1.0)
    mixer = replace(
        mixer,
        factors=tuple(through * factor for factor in _factors(config, "ssm_multipliers", 5)),
        out_factor=config.number("ssm_out_multiplier", 1.0),
        normed=config.flag("mamba_rms_norm"),
        gate_last=config.flag("mamba_norm_before_gate", True),
    )
    layer = replace(
        plain,
        scale=plain.scale * into * into * config.number("key_multiplier", 1.0),
        attended_scale=into * config.number("attention_out_multiplier", 1.0),
        mixer=mixer,
    )
    return [layer] * layers


def _factors(config: Reader, key: str, count: int) -> tuple[float, ...]:
    """Return the `count` factors under a key; all ones without the key.

    Raises ConfigError for another number of factors.
    """
    factors = config.get(key, [1.0] * count)
    if not isinstance(factors, list | tuple) or len(factors) != count:
        raise config.error(key, f"must be a list of {count} numbers, got {factors!r}")
    numbers = Reader({f"{key}[{i}]": factor for i, factor in enumerate(factors)}, config.path)
    return tuple(numbers.number(factor) for factor in numbers.values)


def _mlp_factors(config: Reader) -> tuple[float, ...]:
    return _factors(config, "mlp_multipliers", 2)


_FORWARD = f"{LAYER}feed_forward."
ARCHITECTURES = (
    Architecture(
        "FalconH1ForCausalLM",
        {
            **LLAMA,
            **mamba2_tensors(f"{LAYER}mamba."),
            "mlp_norm": CheckpointTensor((f"{LAYER}pre_ff_layernorm",)),
            "gate_up": CheckpointTensor((f"{_FORWARD}gate_proj", f"{_FORWARD}up_proj")),
            "down": CheckpointTensor((f"{_FORWARD}down_proj",)),
            "norm": CheckpointTensor(("model.final_layernorm",)),
        },
        models="Falcon-H1 (0.5B, 1.5B, 3B, 7B, 34B)",
        model_type="falcon_h1",
        switches={
            "embedding_scale": lambda config: config.number("embedding_multiplier", 1.0),
            "logit_scale": lambda config: config.number("lm_head_multiplier", 1.0),
            "mlp_factors": _mlp_factors,
        },
        # Biases are not supported, as multipliers are folded into scales that do not apply to
        # biases.
        only=dict.fromkeys(
            ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), (False, None)
        ),
        attention=_attention,
    ),
)
