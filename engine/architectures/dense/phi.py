"""Phi, StableLM and StarCoder 2: layer norms with biases, and partly rotary heads."""

from engine.architectures.by_layer import windowed
from engine.architectures.dense.llama import LAYER, LLAMA, ungated, without
from engine.architectures.record import Architecture, CheckpointTensor, Read, always
from engine.config_reader import Reader


def _eps(key: str) -> Read:
    return lambda config: config.number(key, 1e-5)


def _heads(config: Reader) -> str:
    return "heads" if config.flag("qk_layernorm") else ""


def _shared(config: Reader) -> str:
    return "shared" if config.flag("use_parallel_residual") else ""


ARCHITECTURES = (
    Architecture(
        "PhiForCausalLM",
        {
            **without(ungated(LLAMA, "mlp.fc1"), "mlp_norm"),
            "out": CheckpointTensor((f"{LAYER}self_attn.dense",)),
            "down": CheckpointTensor((f"{LAYER}mlp.fc2",)),
            "norm": CheckpointTensor(("model.final_layernorm",)),
        },
        models="Phi 1, 1.5 and 2",
        model_type="phi",
        switches={
            "norm": always("layer"),
            "norm_bias": always(True),
            "norm_eps": _eps("layer_norm_eps"),
            "parallel": always("shared"),
            "qkv_bias": always(True),
            "out_bias": always(True),
            "mlp_bias": always(True),
            "head_bias": always(True),
        },
        only={"qk_layernorm": (False,)},
    ),
    Architecture(
        "Phi3ForCausalLM",
        {
            **LLAMA,
            "qkv": CheckpointTensor((f"{LAYER}self_attn.qkv_proj",)),
            "gate_up": CheckpointTensor((f"{LAYER}mlp.gate_up_proj",)),
        },
        models="Phi 3, 3.5 and 4 (dense)",
        model_type="phi3",
        attention=windowed,
    ),
    Architecture(
        "StableLmForCausalLM",
        {
            **LLAMA,
            "q_norm": CheckpointTensor((f"{LAYER}self_attn.q_layernorm.norms.{{h}}",)),
            "k_norm": CheckpointTensor((f"{LAYER}self_attn.k_layernorm.norms.{{h}}",)),
        },
        models="StableLM 2",
        model_type="stablelm",
        switches={
            "norm": always("layer"),
            "norm_bias": always(True),
            "norm_eps": _eps("layer_norm_eps"),
            "qkv_bias": lambda config: config.flag("use_qkv_bias"),
            "qk_norm": _heads,
            "parallel": _shared,
        },
    ),
    Architecture(
        "Starcoder2ForCausalLM",
        {
            **ungated(LLAMA, "mlp.c_fc"),
            "down": CheckpointTensor((f"{LAYER}mlp.c_proj",)),
        },
        models="StarCoder 2",
        model_type="starcoder2",
        switches={
            "norm": always("layer"),
            "norm_bias": always(True),
            "norm_eps": _eps("norm_epsilon"),
        },
        keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        attention=windowed,
    ),
)
