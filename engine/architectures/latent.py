"""Latent: the description of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434).

This module also has the tensor names and readers of config.json. No torch here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import alike
from engine.architectures.record import CheckpointTensor, Read, Rows
from engine.config_reader import Reader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.config.model_config import LayerAttention, ModelConfig

NORM_EPS = 1e-6  # epsilon of the latents' norms, independent of the file's epsilon for other norms
_ATTENTION = "model.layers.{i}.self_attn."


@dataclass(frozen=True, slots=True)
class Latent:
    """The latent attention of a layer, which caches one latent vector for each token.

    Keys and values of all heads are computed from the latent by matmuls.

    rank: elements of the latent.
    rope: elements of the rotary key that all heads share; the cache stores it after the latent.
    nope: non-rotary elements of a head's query and key, before its `rope` rotary elements.
    value: elements of a head's value.
    query_rank: elements of the latent from which queries are computed; 0 = from the hidden state.
    neighbours: whether the elements of a rotary pair are adjacent in the checkpoint.
    query_factor: factor on the query's latent after its norm.
    factor: factor on the key-value latent after its norm.
    """

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int = 0
    neighbours: bool = True
    query_factor: float = 1.0
    factor: float = 1.0


# Entries for `Architecture.computed`: the cache has a single head, a latent and its rotary key.
ONE_KEY_HEAD: Mapping[str, Read] = {
    "num_key_value_heads": lambda config: 1,
    "head_dim": lambda config: config.size("kv_lora_rank") + config.size("qk_rope_head_dim"),
    "rotary_dim": lambda config: config.size("qk_rope_head_dim"),
}


def latent_attention(
    config: Reader, plain: "LayerAttention", layers: int
) -> Sequence["LayerAttention"]:
    """Return the attention of all layers: `plain` with latent attention."""
    return alike(config, latent_layer(config, plain), layers)


def latent_layer(config: Reader, plain: "LayerAttention") -> "LayerAttention":
    """Return `plain` with latent attention, whose scores are multiplied by yarn's squared
    mscale."""
    heads = config.size("num_attention_heads")
    latent = Latent(
        config.size("kv_lora_rank"),
        config.size("qk_rope_head_dim"),
        config.size("qk_nope_head_dim"),
        config.size("v_head_dim", config.size("hidden_size") // heads),
        config.size_or_none("q_lora_rank") or 0,
        config.flag("rope_interleave", True),
    )
    scale = (latent.nope + latent.rope) ** -0.5 * _mscale(config) ** 2
    return replace(plain, latent=latent, scale=scale)


def _mscale(config: Reader) -> float:
    rope = config.inner("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return 1.0
    factor, all_dim = rope.number("factor", 1.0), rope.number("mscale_all_dim", 0.0)
    return 0.1 * all_dim * math.log(factor) + 1.0 if all_dim and factor > 1 else 1.0


def _last_halves(latent: Latent, before: int, heads: int) -> "NDArray[np.int64]":
    """Return, for each row in Manta's order, the stored row, for heads that end with rotary
    elements.

    In Manta's order the first elements of all rotary pairs of a head come before the second
    elements.

    before: the number of a head's elements before the `latent.rope` rotary elements.
    heads: the number of heads.
    """
    import numpy as np

    rows = np.arange(heads * (before + latent.rope)).reshape(heads, -1)
    if latent.neighbours:
        rotary = rows[:, before:].reshape(heads, -1, 2).swapaxes(1, 2).reshape(heads, -1)
        rows = np.concatenate((rows[:, :before], rotary), axis=1)
    return rows.ravel()


def _of(model: "ModelConfig") -> Latent:
    return next(layer.latent for layer in model.attention if layer.latent is not None)


def _queries(model: "ModelConfig") -> "NDArray[np.int64]":
    return _last_halves(_of(model), _of(model).nope, model.num_heads)


def _behind(queries: Rows) -> Rows:
    """Return a function that returns the stored row order of a merged matrix.

    The matrix has queries first, then the latent and the rotary key that heads share.

    queries: returns the stored order of the queries' rows.
    """

    def rows(model: "ModelConfig") -> "NDArray[np.int64]":
        import numpy as np

        before = queries(model)
        return np.concatenate((before, len(before) + _last_halves(_of(model), _of(model).rank, 1)))

    return rows


def _query_latents(model: "ModelConfig") -> "NDArray[np.int64]":
    import numpy as np

    return np.arange(_of(model).query_rank)


_KV_A = f"{_ATTENTION}kv_a_proj_with_mqa"
# A model has qkv; if queries have a separate latent, it has qkv_a, query_norm and q_b instead.
LATENT: Mapping[str, CheckpointTensor] = {
    "qkv": CheckpointTensor((f"{_ATTENTION}q_proj", _KV_A), _behind(_queries)),
    "qkv_a": CheckpointTensor((f"{_ATTENTION}q_a_proj", _KV_A), _behind(_query_latents)),
    "query_norm": CheckpointTensor((f"{_ATTENTION}q_a_layernorm",)),
    "q_b": CheckpointTensor((f"{_ATTENTION}q_b_proj",), _queries),
    "latent_norm": CheckpointTensor((f"{_ATTENTION}kv_a_layernorm",)),
    "kv_b": CheckpointTensor((f"{_ATTENTION}kv_b_proj",)),
}
# Biases are not supported, as some of these matrices are fused and no model has biases.
UNBIASED = {"attention_bias": (False,)}
