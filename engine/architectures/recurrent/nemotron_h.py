"""Nemotron-H: each layer has one norm and one block.

The block is Mamba-2, attention without rotary embeddings, or an MLP or mixture of experts without
gates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL
from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor
from engine.architectures.recurrent.mamba2 import KINDS, mamba2_mixer, mamba2_tensors
from engine.architectures.recurrent.mixer import LINEAR, mixed_kinds, mixing
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig

_MLP, _EXPERTS = "mlp", "moe"
_KINDS = {**KINDS, _MLP: _MLP, _EXPERTS: _EXPERTS}
_PATTERN = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}


def _layer_types(config: Reader) -> list[str]:
    """Return the kind of each layer; files before transformers 5 have one letter for each layer."""
    kinds = config.listed("layers_block_type", str)
    if kinds is not None:
        return kinds
    pattern = config.get("hybrid_override_pattern", "ME*-")
    if not isinstance(pattern, str) or {*pattern} - {*_PATTERN}:
        raise config.error(
            "hybrid_override_pattern",
            f"must have one of {' '.join(_PATTERN)} for each layer, got {pattern!r}",
        )
    return [_PATTERN[letter] for letter in pattern]


def _kinds(config: Reader) -> list[str]:
    kinds = config.get("layer_types")
    return mixed_kinds(config, len(kinds), _KINDS)


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    full = replace(plain, rope=None)
    by_kind = {FULL: full, LINEAR: mixing(full, mamba2_mixer(config))}
    return [by_kind.get(kind, replace(full, attends=False)) for kind in _kinds(config)]


def _mlp_sizes(config: Reader) -> tuple[int, ...]:
    size = config.size("intermediate_size")
    return tuple(size if kind == _MLP else 0 for kind in _kinds(config))


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    layers = [i for i, kind in enumerate(_kinds(config)) if kind == _EXPERTS]
    if layers and config.get("moe_latent_size") is not None:
        raise config.error(
            "moe_latent_size", "experts of latents are not supported; only models without it are"
        )
    return read_experts(
        config,
        model,
        layers,
        score="sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        shared_size=config.size("moe_shared_expert_intermediate_size", 7688),
    )


_LAYER = "backbone.layers.{i}."
_MIXER = f"{_LAYER}mixer."
_NORM = CheckpointTensor((f"{_LAYER}norm",))
_TENSORS: Mapping[str, CheckpointTensor] = {
    "embedding": CheckpointTensor(("backbone.embeddings",)),
    "attention_norm": _NORM,
    "qkv": CheckpointTensor(tuple(f"{_MIXER}{piece}_proj" for piece in "qkv")),
    "out": CheckpointTensor((f"{_MIXER}o_proj",)),
    **mamba2_tensors(_MIXER),
    "mlp_norm": _NORM,
    "router": CheckpointTensor((f"{_MIXER}gate",)),
    "router_correction": CheckpointTensor((f"{_MIXER}gate.e_score_correction_bias",)),
    "experts_gate_up": CheckpointTensor((f"{_MIXER}experts.{{e}}.up_proj.weight",)),
    "experts_down": CheckpointTensor((f"{_MIXER}experts.{{e}}.down_proj.weight",)),
    "shared_up": CheckpointTensor((f"{_MIXER}shared_experts.up_proj",)),
    "shared_down": CheckpointTensor((f"{_MIXER}shared_experts.down_proj",)),
    "up": CheckpointTensor((f"{_MIXER}up_proj",)),
    "down": CheckpointTensor((f"{_MIXER}down_proj",)),
    "norm": CheckpointTensor(("backbone.norm_f",)),
    "head": CheckpointTensor(("lm_head",)),
}
ARCHITECTURES = (
    Architecture(
        "NemotronHForCausalLM",
        _TENSORS,
        models="Nemotron-H (8B, 47B, 56B), Nemotron Nano 2 (9B, 12B), Nemotron 3 Nano (30B-A3B)",
        model_type="nemotron_h",
        switches={"mlp_sizes": _mlp_sizes},
        computed={
            "layer_types": _layer_types,
            "num_hidden_layers": lambda config: len(config.get("layer_types")),
            "head_dim": lambda config: config.get("attention_head_dim", config.get("head_dim")),
        },
        keys={
            "hidden_act": "mlp_hidden_act",
            "num_experts": "n_routed_experts",
            "rms_norm_eps": "layer_norm_epsilon",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_proj_bias": "use_bias",
        },
        only={
            "mamba_hidden_act": ("silu",),
            "mlp_hidden_act": ("relu2",),
            "sliding_window": (None,),
        },
        renames=(("model.", "backbone."),),
        ignored=("mtp.*",),
        attention=_attention,
        experts=_experts,
    ),
)
