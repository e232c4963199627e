"""Decoders whose MLPs are mixtures of experts, such as Mixtral, Qwen MoE and gpt-oss."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import WINDOW, layer_types, of_layers, windowed
from engine.architectures.dense.llama import (
    GRANITE,
    LAYER,
    LLAMA,
    NEIGHBOURS,
    QK_NORM,
    granite,
    without,
)
from engine.architectures.moe import Experts, one_size, read_experts
from engine.architectures.record import NEXTN, Architecture, CheckpointTensor, always
from engine.config_reader import Reader
from kernels.experts.routing import CLAMPED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.config.model_config import LayerAttention, ModelConfig

_EXPERT = f"{LAYER}mlp.experts.{{e}}."
_BLOCK = f"{LAYER}block_sparse_moe."


def experts_at(
    router: str, gate: str, up: str, down: str, **others: str
) -> dict[str, CheckpointTensor]:
    """Return the tensors of experts whose matrices are separate tensors.

    router: the router's name in the checkpoint, within the layer.
    gate, up, down: the names of an expert's matrices, without ".weight".
    others: Manta's names of further tensors -> the checkpoint's, within the layer.
    """
    names = {
        "router": CheckpointTensor((f"{LAYER}{router}",)),
        "experts_gate_up": CheckpointTensor((f"{gate}.weight", f"{up}.weight")),
        "experts_down": CheckpointTensor((f"{down}.weight",)),
    }
    return names | {
        ours: CheckpointTensor((f"{LAYER}{theirs}",)) for ours, theirs in others.items()
    }


def _shared(name: str) -> dict[str, CheckpointTensor]:
    return {
        "shared_gate_up": CheckpointTensor(
            (f"{LAYER}mlp.{name}.gate_proj", f"{LAYER}mlp.{name}.up_proj")
        ),
        "shared_down": CheckpointTensor((f"{LAYER}mlp.{name}.down_proj",)),
    }


_PROJECTIONS = (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj", f"{_EXPERT}down_proj")
_W = tuple(f"{_BLOCK}experts.{{e}}.{name}" for name in ("w1", "w3", "w2"))
_QWEN: Mapping[str, CheckpointTensor] = {**LLAMA, **experts_at("mlp.gate", *_PROJECTIONS)}
QWEN2_MOE: Mapping[str, CheckpointTensor] = {
    **_QWEN,
    **_shared("shared_expert"),
    "shared_gate": CheckpointTensor((f"{LAYER}mlp.shared_expert_gate",)),
}
_MIXTRAL: Mapping[str, CheckpointTensor] = {
    **without(LLAMA, "gate_up", "down"),
    **experts_at("block_sparse_moe.gate", *_W),
}
DEEPSEEK: Mapping[str, CheckpointTensor] = {
    **_QWEN,
    **QK_NORM,
    **_shared("shared_experts"),
    "router_correction": CheckpointTensor((f"{LAYER}mlp.gate.e_score_correction_bias",)),
}
_GRANITE_MOE: Mapping[str, CheckpointTensor] = {
    **without(LLAMA, "gate_up", "down"),
    "router": CheckpointTensor((f"{_BLOCK}router.layer",)),
    "experts_gate_up": CheckpointTensor((f"{_BLOCK}input_linear.weight",)),
    "experts_down": CheckpointTensor((f"{_BLOCK}output_linear.weight",)),
}


def _mixtral(config: Reader, model: "ModelConfig") -> Experts | None:
    return read_experts(config, model)


def qwen(config: Reader, model: "ModelConfig") -> Experts | None:
    """Read the experts: in every decoder_sparse_step-th layer, except those in mlp_only_layers."""
    step, dense = config.size("decoder_sparse_step", 1), config.listed("mlp_only_layers", int) or ()
    layers = (i for i in range(model.num_layers) if (i + 1) % step == 0 and i not in dense)
    return read_experts(config, model, layers, renormalise=config.flag("norm_topk_prob"))


def _qwen3_vl(config: Reader) -> str:
    """Return the record of Qwen3-VL's mixture of experts.

    Folders converted from GGUF files have a tensor for each expert, and Qwen 3's class name.
    """
    apart = config.get("architectures") == ["Qwen3MoeForCausalLM"]
    return "Qwen3MoeForCausalLM" if apart else "Qwen3MoeForCausalLM, in Qwen3-VL"


def _qwen2(config: Reader, model: "ModelConfig") -> Experts | None:
    experts = qwen(config, model)
    if experts is None:
        return None
    shared = config.size("shared_expert_intermediate_size")
    return replace(experts, shared_size=shared, shared_gate=True)


def deepseek(config: Reader, model: "ModelConfig") -> Experts | None:
    """Read the experts, after first_k_dense_replace dense layers, with sigmoid scores and a bias.

    A shared expert is as wide as n_shared_experts experts together.
    """
    dense = config.count("first_k_dense_replace")
    experts = read_experts(
        config,
        model,
        range(dense, model.num_layers),
        score="sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    if experts is None:
        return None
    return replace(experts, shared_size=experts.size * config.size("n_shared_experts", 1))


def _minimax(config: Reader, model: "ModelConfig") -> Experts | None:
    return read_experts(config, model, score="sigmoid")


def _hy3(config: Reader, model: "ModelConfig") -> Experts | None:
    kinds = of_layers(config, "mlp_layer_types", model.num_layers, str)
    if kinds is None:
        first = config.count("first_k_dense_replace", 1)
        kinds = ["dense" if i < first else "sparse" for i in range(model.num_layers)]
    layers = (i for i, kind in enumerate(kinds) if kind == "sparse")
    scale = config.number("router_scaling_factor", 2.826)
    experts = read_experts(config, model, layers, score="sigmoid", scale=scale)
    if experts is None:
        return None
    return replace(experts, shared_size=experts.size * config.size("num_shared_experts", 1))


def _hunyuan(config: Reader, model: "ModelConfig") -> Experts | None:
    experts = read_experts(config, model)
    if experts is None:
        return None
    shared = 1 if config.get("num_shared_expert") is None else one_size(config, "num_shared_expert")
    return replace(experts, shared_size=experts.size * shared)


def _olmoe(config: Reader, model: "ModelConfig") -> Experts | None:
    return read_experts(config, model, renormalise=config.flag("norm_topk_prob"))


def _granite_shared(config: Reader, model: "ModelConfig") -> Experts | None:
    experts = read_experts(config, model)
    if experts is None:
        return None
    return replace(experts, shared_size=config.count("shared_intermediate_size"))


def _phi(config: Reader, model: "ModelConfig") -> Experts | None:
    if config.size("num_experts_per_tok") != 2:
        raise config.error("num_experts_per_tok", "its router chooses two experts")
    return read_experts(
        config, model, score="mixer", jitter=config.number("router_jitter_noise", 0.01)
    )


def _ernie(config: Reader, model: "ModelConfig") -> Experts | None:
    end = config.get("moe_layer_end_index", -1)
    last = model.num_layers - 1 if end == -1 else config.count("moe_layer_end_index")
    every = config.size("moe_layer_interval", 1)
    layers = (
        i
        for i in range(config.count("moe_layer_start_index", 1), min(last + 1, model.num_layers))
        if (i + 1) % every == 0
    )
    experts = read_experts(config, model, layers)
    if experts is None:
        return None
    return replace(experts, shared_size=experts.size * config.count("moe_num_shared_experts"))


def _gpt_oss(config: Reader, model: "ModelConfig") -> Experts | None:
    return read_experts(
        config,
        model,
        act=CLAMPED,
        limit=config.number("swiglu_limit", 7.0),
        bias=True,
        router_bias=True,
    )


def _in_turns(model: "ModelConfig") -> "NDArray[np.int64]":
    """Return the stored rows of gate and up, which are interleaved row by row."""
    import numpy as np

    assert model.experts is not None
    return np.arange(2 * model.experts.size).reshape(-1, 2).T.ravel()


def _sinks_and_windows(
    config: Reader, plain: "LayerAttention", layers: int
) -> Sequence["LayerAttention"]:
    """Return each layer's attention, with sinks; every other layer, from the first, has a
    window."""
    plain = replace(plain, sinks=True)
    local = windowed(config, plain, 1)[0]
    kinds = layer_types(config, layers, lambda i: "full_attention" if i % 2 else WINDOW)
    return [local if kind == WINDOW else plain for kind in kinds]


def _dots(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    kinds = layer_types(config, layers, lambda i: "full_attention")
    local = windowed(config, plain, 1)[0]
    return [local if kind == WINDOW else plain for kind in kinds]


def _qk_norm(config: Reader) -> str:
    return "head" if config.flag("use_qk_norm") else ""


_LOCAL = {"num_experts": "num_local_experts"}
ROUTED = {"num_experts": "n_routed_experts"}
_ONE_STREAM = {"use_sliding_window": (False,)}
MTP = ("*.rotary_emb.inv_freq", "model.layers.{layers}.*")

ARCHITECTURES = (
    Architecture(
        "MixtralForCausalLM",
        _MIXTRAL,
        models="Mixtral 8x7B and 8x22B",
        model_type="mixtral",
        keys=_LOCAL,
        attention=windowed,
        experts=_mixtral,
    ),
    Architecture(
        "Qwen2MoeForCausalLM",
        QWEN2_MOE,
        models="Qwen 1.5 MoE, Qwen 2 57B-A14B",
        model_type="qwen2_moe",
        switches={"qkv_bias": lambda config: config.flag("qkv_bias", True)},
        only=_ONE_STREAM,
        experts=_qwen2,
    ),
    Architecture(
        "Qwen3MoeForCausalLM",
        {**_QWEN, **QK_NORM},
        models="Qwen 3 30B-A3B, 235B-A22B, Qwen3-Coder",
        model_type="qwen3_moe",
        switches={"qk_norm": always("head")},
        keys=_LOCAL,
        only=_ONE_STREAM,
        experts=qwen,
    ),
    # Only within Qwen3-VL: one tensor has all experts of a layer, stored as [in, out].
    Architecture(
        "Qwen3MoeForCausalLM, in Qwen3-VL",
        {
            **_QWEN,
            **QK_NORM,
            "experts_gate_up": CheckpointTensor(
                (f"{LAYER}mlp.experts.gate_up_proj",), transposed=True
            ),
            "experts_down": CheckpointTensor((f"{LAYER}mlp.experts.down_proj",), transposed=True),
        },
        model_type="qwen3_vl_moe_text",
        variant=_qwen3_vl,
        switches={"qk_norm": always("head")},
        keys=_LOCAL,
        defaults={"norm_topk_prob": True},
        experts=qwen,
    ),
    Architecture(
        "GptOssForCausalLM",
        {
            **without(LLAMA, "gate_up", "down"),
            "sinks": CheckpointTensor((f"{LAYER}self_attn.sinks",)),
            "router": CheckpointTensor((f"{LAYER}mlp.router",)),
            "experts_gate_up": CheckpointTensor(
                (f"{LAYER}mlp.experts.gate_up_proj",), _in_turns, transposed=True
            ),
            "experts_gate_up_bias": CheckpointTensor(
                (f"{LAYER}mlp.experts.gate_up_proj_bias",), _in_turns
            ),
            "experts_down": CheckpointTensor((f"{LAYER}mlp.experts.down_proj",), transposed=True),
            "experts_down_bias": CheckpointTensor((f"{LAYER}mlp.experts.down_proj_bias",)),
        },
        models="gpt-oss",
        model_type="gpt_oss",
        keys=_LOCAL,
        attention=_sinks_and_windows,
        experts=_gpt_oss,
    ),
    Architecture(
        "Glm4MoeForCausalLM",
        DEEPSEEK,
        models="GLM-4.5, 4.6 and 4.7",
        model_type="glm4_moe",
        switches={"qk_norm": _qk_norm, "out_bias": always(False)},
        keys=ROUTED,
        ignored=MTP,
        mtp=NEXTN,
        experts=deepseek,
    ),
    Architecture(
        "SolarOpenForCausalLM",
        without(DEEPSEEK, "q_norm", "k_norm", "gate_up", "down"),
        models="Solar Open",
        model_type="solar_open",
        keys=ROUTED,
        defaults={"intermediate_size": 1},
        experts=deepseek,
    ),
    Architecture(
        "Dots1ForCausalLM",
        DEEPSEEK,
        models="dots.llm1",
        model_type="dots1",
        switches={"qk_norm": always("head")},
        keys=ROUTED,
        attention=_dots,
        experts=deepseek,
    ),
    Architecture(
        "MiniMaxM2ForCausalLM",
        {
            **_MIXTRAL,
            **QK_NORM,
            "router_correction": CheckpointTensor((f"{_BLOCK}e_score_correction_bias",)),
        },
        models="MiniMax-M2",
        model_type="minimax_m2",
        switches={"qk_norm": always("flat")},
        keys=_LOCAL,
        ignored=("*.rotary_emb.inv_freq", "model.mtp*"),
        experts=_minimax,
    ),
    Architecture(
        "HYV3ForCausalLM",
        {
            **LLAMA,
            **QK_NORM,
            **experts_at("mlp.router.gate", *_PROJECTIONS, router_correction="mlp.expert_bias"),
            **_shared("shared_mlp"),
        },
        models="Hy3",
        model_type="hy_v3",
        switches={"qk_norm": always("head")},
        ignored=MTP,
        experts=_hy3,
    ),
    Architecture(
        "HunYuanMoEV1ForCausalLM",
        {
            **without(LLAMA, "gate_up", "down"),
            **experts_at("mlp.gate.wg", *_PROJECTIONS),
            **_shared("shared_mlp"),
            "q_norm": CheckpointTensor((f"{LAYER}self_attn.query_layernorm",)),
            "k_norm": CheckpointTensor((f"{LAYER}self_attn.key_layernorm",)),
        },
        models="HunYuan-A13B",
        model_type="hunyuan_v1_moe",
        switches={"qk_norm": always("head"), "qk_norm_after": always(True)},
        keys={"num_experts_per_tok": "moe_topk"},
        only={"use_qk_norm": (True,), "use_cla": (False,), "use_mixed_mlp_moe": (True,)},
        experts=_hunyuan,
    ),
    Architecture(
        "OlmoeForCausalLM",
        {**without(_QWEN, "gate_up", "down"), **QK_NORM},
        models="OLMoE",
        model_type="olmoe",
        switches={"qk_norm": always("flat")},
        # clipping after the norms is not supported
        only={"clip_qkv": (None,)},
        experts=_olmoe,
    ),
    Architecture(
        "GraniteMoeForCausalLM",
        _GRANITE_MOE,
        models="Granite 3 (1B-A400M, 3B-A800M)",
        model_type="granitemoe",
        switches=GRANITE,
        keys=_LOCAL,
        attention=granite,
        experts=_mixtral,
    ),
    Architecture(
        "GraniteMoeSharedForCausalLM",
        {
            **_GRANITE_MOE,
            "shared_gate_up": CheckpointTensor((f"{LAYER}shared_mlp.input_linear",)),
            "shared_down": CheckpointTensor((f"{LAYER}shared_mlp.output_linear",)),
        },
        models="Granite 3 with a shared expert",
        model_type="granitemoeshared",
        switches=GRANITE,
        keys=_LOCAL,
        attention=granite,
        experts=_granite_shared,
    ),
    Architecture(
        "PhimoeForCausalLM",
        _MIXTRAL,
        models="Phi-3.5-MoE",
        model_type="phimoe",
        switches={
            "norm": always("layer"),
            "norm_bias": always(True),
            "norm_eps": lambda config: config.number("rms_norm_eps", 1e-5),
            "head_bias": lambda config: config.flag("lm_head_bias"),
        },
        keys=_LOCAL,
        attention=windowed,
        experts=_phi,
    ),
    Architecture(
        "PhiMoEForCausalLM",
        _MIXTRAL,
        models="Phi-3.5-MoE, as its files name it",
        switches={
            "norm": always("layer"),
            "norm_bias": always(True),
            "norm_eps": lambda config: config.number("rms_norm_eps", 1e-5),
            "head_bias": lambda config: config.flag("lm_head_bias"),
        },
        keys=_LOCAL,
        attention=windowed,
        experts=_phi,
    ),
    Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            **_QWEN,
            **NEIGHBOURS,
            **_shared("shared_experts"),
            "router_correction": CheckpointTensor(
                (f"{LAYER}mlp.moe_statics.e_score_correction_bias",)
            ),
        },
        models="ERNIE 4.5 (21B-A3B, 300B-A47B)",
        model_type="ernie4_5_moe",
        keys={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "attention_bias": "use_bias",
            "mlp_bias": "use_bias",
        },
        only={"use_bias": (False,)},
        ignored=("*.rotary_emb.inv_freq", "model.mtp_*"),
        experts=_ernie,
    ),
)
