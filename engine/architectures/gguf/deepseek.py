"""The layout of DeepSeek V2's and V3's GGUF files, also those of Kimi: latent attention."""

from collections.abc import Mapping
from typing import Any

from engine.architectures.gguf.record import NORMED, Gguf, Make, Metadata, own


def _scores(default: int) -> Make:
    """Return a function that computes scoring_func, such as "softmax".

    default: the value of expert_gating_func for files without the key.
    """
    names = {1: "softmax", 2: "sigmoid"}

    def scores(file: Metadata) -> str:
        number = int(file.own("expert_gating_func", default))
        return names.get(number, str(number))

    return scores


def _corrected(file: Metadata) -> bool:
    """Whether experts' scores are sigmoids with a correction, as in DeepSeek V3 and not in V2."""
    return _scores(1)(file) == "sigmoid" or file.has(
        f"blk.{file.own('leading_dense_block_count', 0)}.exp_probs_b.bias"
    )


def _groups(key: str, at: int) -> Make:
    """Return a function that computes n_group (at 0) or topk_group (at 1).

    Older files lack the key. The number of experts then identifies DeepSeek V3 and V2, the only
    models of that time with groups.
    """

    def groups(file: Metadata) -> int:
        defaults = {256: (8, 4), 160: (8, 3)}.get(int(file.own("expert_count", 0)), (1, 1))
        return int(file.own(key, defaults[at]))

    return groups


_n_group = _groups("expert_group_count", 0)


def _rotary(file: Metadata) -> int:
    return int(file.need("rope.dimension_count"))


def _of_head(kind: str) -> Make:
    """Return a function that computes the number of elements of a head's key or value.

    Newer files store this number with "_mla" in the metadata key. Without "_mla" they store the
    number of cached elements.

    kind: "key" or "value".
    """
    return lambda file: int(
        file.own(f"attention.{kind}_length_mla") or file.need(f"attention.{kind}_length")
    )


_key_size = _of_head("key")


def _mscale(file: Metadata) -> float | None:
    """Return yarn's mscale, of which files store a tenth; None if the metadata lack it."""
    tenth = file.own("rope.scaling.yarn_log_multiplier")
    return round(10 * tenth, 6) if tenth else None


_SIZES: Mapping[str, Make] = {
    "q_lora_rank": own("attention.q_lora_rank"),
    "qk_rope_head_dim": _rotary,
    "qk_nope_head_dim": lambda file: _key_size(file) - _rotary(file),
    "v_head_dim": _of_head("value"),
    "head_dim": _rotary,
    "num_key_value_heads": own("attention.head_count"),
    "n_group": _n_group,
    "topk_group": _groups("expert_group_used_count", 1),
    **NORMED,
}
_LATENT: Mapping[str, Any] = {
    "stems": {
        "qkv": ("attn_q", "attn_kv_a_mqa"),
        "qkv_a": ("attn_q_a", "attn_kv_a_mqa"),
        "query_norm": ("attn_q_a_norm",),
        "q_b": ("attn_q_b",),
        "latent_norm": ("attn_kv_a_norm",),
        "kv_b": ("attn_kv_b",),
    },
    "keys": {"kv_lora_rank": "attention.kv_lora_rank", "n_shared_experts": "expert_shared_count"},
    "rope": {"mscale": _mscale, "mscale_all_dim": _mscale},
}

DEEPSEEK: tuple[Gguf, ...] = (
    Gguf(
        "DeepseekV3ForCausalLM",
        "deepseek2",
        says={"num_nextn_predict_layers": 0},
        computed={**_SIZES, "scoring_func": _scores(2)},
        when=_corrected,
        **_LATENT,
    ),
    Gguf(
        "DeepseekV2ForCausalLM",
        "deepseek2",
        computed={
            **_SIZES,
            "scoring_func": _scores(1),
            "topk_method": lambda file: "group_limited_greedy" if _n_group(file) > 1 else "greedy",
        },
        **_LATENT,
    ),
)
