"""Qwen3-Next and Qwen 3.5: three layers of Gated DeltaNet for each layer of gated attention.

The models are dense, or mixtures of experts with a shared expert.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.dense.llama import LAYER, LLAMA, QK_NORM
from engine.architectures.mixtures.families import QWEN2_MOE, qwen
from engine.architectures.moe import Experts
from engine.architectures.record import Architecture, CheckpointTensor, Mtp, always
from engine.architectures.recurrent.delta_net import DELTA_NET, DELTA_NET_BY_KEY_HEAD, hybrid
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import ModelConfig

_SWITCHES = {"qk_norm": always("head"), "norm_offset": always(1.0)}
_IGNORED = ("*.rotary_emb.inv_freq", "mtp.*", "model.mtp.*")
_MTP = Mtp(
    "mtp.layers.0.",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.fc",
    "mtp.norm",
    count="mtp_num_hidden_layers",
)


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    experts = qwen(config, model)
    if experts is None:
        return None
    shared = config.size("shared_expert_intermediate_size", 512)
    return replace(experts, shared_size=shared, shared_gate=True)


ARCHITECTURES = (
    Architecture(
        "Qwen3NextForCausalLM",
        {**QWEN2_MOE, **QK_NORM, **DELTA_NET_BY_KEY_HEAD},
        models="Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
        model_type="qwen3_next",
        switches=_SWITCHES,
        ignored=_IGNORED,
        # Qwen's config.json has no key for the MTP layer
        mtp=replace(_MTP, count="num_nextn_predict_layers", absent=1),
        attention=hybrid,
        experts=_experts,
    ),
    Architecture(
        "Qwen3_5ForCausalLM",
        {**LLAMA, **QK_NORM, **DELTA_NET},
        models="Qwen 3.5 and 3.6 (dense)",
        model_type="qwen3_5_text",
        switches=_SWITCHES,
        ignored=_IGNORED,
        mtp=_MTP,
        attention=hybrid,
    ),
    Architecture(
        "Qwen3_5MoeForCausalLM",
        {
            **QWEN2_MOE,
            **QK_NORM,
            **DELTA_NET,
            "experts_gate_up": CheckpointTensor((f"{LAYER}mlp.experts.gate_up_proj",)),
            "experts_down": CheckpointTensor((f"{LAYER}mlp.experts.down_proj",)),
        },
        models="Qwen 3.5 and 3.6 (mixtures: 35B-A3B, 122B-A10B, 397B-A17B)",
        model_type="qwen3_5_moe_text",
        switches=_SWITCHES,
        defaults={"norm_topk_prob": True, "intermediate_size": 1},
        ignored=_IGNORED,
        mtp=_MTP,
        attention=hybrid,
        experts=_experts,
    ),
)
