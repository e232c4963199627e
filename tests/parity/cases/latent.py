"""Decoders with latent attention (MLA); they have three layers, in mixtures the first one dense."""

from typing import Any

from tests.parity.cases.case import Case, Tensors
from tests.parity.cases.rewriting import wrapped
from tests.parity.cases.settings import ROUTED, YARN

_MLA: dict[str, Any] = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
_MLA_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
_MLA_YARN.pop("llama_4_scaling_beta")
_DENSE_MLA = {
    key: value for key, value in _MLA.items() if key not in {*ROUTED, "first_k_dense_replace"}
}
_LONGCAT = {key: value for key, value in _MLA.items() if key != "first_k_dense_replace"} | {
    "num_layers": 2,
    "head_dim": 8,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 24,
    "moe_topk": 3,
    "zero_expert_num": 3,
    "routed_scaling_factor": 1.5,
}


def _without_zero(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Remove the weights of zero experts, which compute nothing: transformers writes them, and
    published files lack them."""
    count = config["n_routed_experts"]
    nonzero = {}
    for name, tensor in tensors.items():
        _, _, expert = name.partition(".experts.")
        if not expert or int(expert.partition(".")[0]) < count:
            nonzero[name] = tensor
    return nonzero


LATENT: dict[str, Case] = {
    "deepseek v2 lite": Case(
        "deepseek_v2",
        {**_MLA, "q_lora_rank": None, "v_head_dim": 24, "rope_parameters": _MLA_YARN},
    ),
    "deepseek v2": Case(
        "deepseek_v2",
        {
            **_MLA,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    "deepseek v3": Case(
        "deepseek_v3", {**_MLA, "n_group": 3, "topk_group": 2, "rope_parameters": _MLA_YARN}
    ),
    "kimi k2.5": Case(
        "deepseek_v3",
        {**_MLA, "n_group": 1, "topk_group": 1},
        architecture="KimiK25ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "glm 4.7 flash": Case("glm4_moe_lite", _MLA),
    "mistral 4": Case(
        "mistral4",
        {**_MLA, "rope_parameters": YARN},
        network="Mistral4ForCausalLM",
        architecture="Mistral3ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "minicpm 3": Case("minicpm3", {**_DENSE_MLA, "scale_emb": 3.0, "dim_model_base": 16}),
    "longcat flash": Case(
        "longcat_flash",
        _LONGCAT,
        drop=("num_hidden_layers", "intermediate_size"),
        rewrite=_without_zero,
    ),
    "youtu": Case("youtu", _DENSE_MLA),
}
