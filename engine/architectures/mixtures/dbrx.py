"""DBRX: layer norms without biases, clipped queries, keys and values, and experts in one tensor."""

from typing import TYPE_CHECKING, Any

from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor, Read, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import ModelConfig

_BLOCK = "transformer.blocks.{i}."
_EXPERTS = f"{_BLOCK}ffn.experts.mlp."


def _inner(key: str, name: str, default: Any) -> Read:
    """Return a reader of a value in a nested object of config.json.

    key: the object's key.
    name: the value's key in the object.
    """
    return lambda config: config.inner(key).get(name, default)


def _rope(config: Reader) -> dict[str, Any]:
    theta = config.inner("attn_config").get("rope_theta")
    parameters = config.inner("rope_parameters").values
    return parameters if theta is None else {"rope_theta": theta}


def _activation(config: Reader) -> str:
    return str(config.inner("ffn_config").inner("ffn_act_fn").get("name", "silu"))


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    power = config.inner("ffn_config").raw("moe_normalize_expert_weights", 1)
    if power not in (1, None):
        message = f"moe_normalize_expert_weights {power!r} is not supported, only 1 or null"
        raise config.error("ffn_config", message)
    return read_experts(config, model, renormalise=power is not None)


ARCHITECTURES = (
    Architecture(
        "DbrxForCausalLM",
        {
            "embedding": CheckpointTensor(("transformer.wte",)),
            "attention_norm": CheckpointTensor((f"{_BLOCK}norm_attn_norm.norm_1",)),
            "qkv": CheckpointTensor((f"{_BLOCK}norm_attn_norm.attn.Wqkv",)),
            "out": CheckpointTensor((f"{_BLOCK}norm_attn_norm.attn.out_proj",)),
            "mlp_norm": CheckpointTensor((f"{_BLOCK}norm_attn_norm.norm_2",)),
            "router": CheckpointTensor((f"{_BLOCK}ffn.router.layer",)),
            "experts_gate_up": CheckpointTensor((f"{_EXPERTS}w1", f"{_EXPERTS}v1")),
            "experts_down": CheckpointTensor((f"{_EXPERTS}w2",), transposed=True),
            "norm": CheckpointTensor(("transformer.norm_f",)),
            "head": CheckpointTensor(("lm_head",)),
        },
        models="DBRX",
        model_type="dbrx",
        switches={
            "norm": always("layer"),
            "norm_eps": always(1e-5),
            "qkv_clip": lambda config: config.inner("attn_config").number_or_none("clip_qkv"),
        },
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        computed={
            "num_key_value_heads": _inner("attn_config", "kv_n_heads", 1),
            "rope_parameters": _rope,
            "hidden_act": _activation,
            "intermediate_size": _inner("ffn_config", "ffn_hidden_size", 3584),
            "num_experts": _inner("ffn_config", "moe_num_experts", 4),
            "num_experts_per_tok": _inner("ffn_config", "moe_top_k", 1),
        },
        experts=_experts,
    ),
)
