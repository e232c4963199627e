"""OLMo Hybrid: three layers of Gated DeltaNet for each layer of attention.

DeltaNet layers have norms before mixer and MLP; attention layers have them after, as in OLMo 3.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL
from engine.architectures.dense.llama import LAYER
from engine.architectures.dense.olmo import OUT_NORMS
from engine.architectures.record import Architecture, CheckpointTensor, always
from engine.architectures.recurrent.delta_net import read_delta_net
from engine.architectures.recurrent.mixer import LINEAR, mixed_kinds, mixing
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    default = [FULL if i % 4 == 3 else LINEAR for i in range(layers)]
    if FULL not in default:
        default[-1] = FULL
    kinds = mixed_kinds(config, layers, {FULL: FULL, LINEAR: LINEAR}, default)
    # Published models have no rotary embeddings: rope_theta is null.
    if config.inner("rope_parameters").raw("rope_theta", config.get("rope_theta")) is None:
        plain = replace(plain, rope=None)
    mixer = replace(
        read_delta_net(config),
        negative=config.flag("linear_allow_neg_eigval", True),
        norm_eps=1e-5,
    )
    return [plain if kind == FULL else mixing(plain, mixer) for kind in kinds]


def _key_size(config: Reader) -> int:
    heads = config.size("linear_num_key_heads")
    return config.size("linear_key_head_dim", int(0.75 * config.size("hidden_size") / heads))


def _absent(model: "ModelConfig", layer: int) -> Collection[str]:
    if model.attention[layer].attends:
        return "attention_norm", "mlp_norm"
    return "attention_out_norm", "mlp_out_norm"


_LINEAR = f"{LAYER}linear_attn."
_TENSORS: Mapping[str, CheckpointTensor] = {
    **OUT_NORMS,
    "attention_norm": CheckpointTensor((f"{LAYER}attention_layer_norm",)),
    "mlp_norm": CheckpointTensor((f"{LAYER}feedforward_layer_norm",)),
    "delta_in": CheckpointTensor(tuple(f"{_LINEAR}{letter}_proj" for letter in "qkvgba")),
    "delta_conv": CheckpointTensor(tuple(f"{_LINEAR}{letter}_conv1d.weight" for letter in "qkv")),
    "delta_decay": CheckpointTensor((f"{_LINEAR}A_log",)),
    "delta_bias": CheckpointTensor((f"{_LINEAR}dt_bias",)),
    "delta_norm": CheckpointTensor((f"{_LINEAR}o_norm.weight",)),
    "delta_out": CheckpointTensor((f"{_LINEAR}o_proj",)),
}
ARCHITECTURES = (
    Architecture(
        "OlmoHybridForCausalLM",
        _TENSORS,
        models="OLMo Hybrid 7B",
        model_type="olmo_hybrid",
        switches={"qk_norm": always("flat")},
        computed={
            "linear_num_key_heads": lambda config: config.size(
                "linear_num_key_heads", config.size("num_attention_heads")
            ),
            "linear_num_value_heads": lambda config: config.size(
                "linear_num_value_heads", config.size("num_attention_heads")
            ),
            "linear_key_head_dim": _key_size,
            "linear_value_head_dim": lambda config: config.size(
                "linear_value_head_dim", 2 * config.size("linear_key_head_dim")
            ),
        },
        attention=_attention,
        absent=_absent,
    ),
)
