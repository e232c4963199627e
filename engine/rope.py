"""Rope: the rotary embedding of a model, and its keys in config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.config_reader import Reader
from engine.errors import ConfigError

# "mrope" equals "default" for text, whose three positions are equal. "dynamic" differs only beyond
# max_position_embeddings, which is not supported. "su" is an old name of longrope.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "su", "dynamic", "mrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding. Fields after ``factor`` only matter for the types in their comments.

    dim: the number of rotary elements, the first ones of a head; 0 = all.
    """

    theta: float
    type: str = "default"
    dim: int = 0
    factor: float = 1.0  # ratio of the context length to that of training
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # factor of cosines and sines: yarn, longrope
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    part: float = 1.0  # proportional: the share of pairs that rotate
    # longrope, [dim / 2]: divisors of frequencies if the maximum length is that of the original
    # training, and if it is longer
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def read_rope(config: Reader, head_dim: int) -> Rope:
    """Read the rotary embedding of config.json.

    transformers 5 writes rope_parameters, with one object for each type of layer if these differ.
    Earlier versions wrote rope_theta and rope_scaling.
    """
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    read = config.inner(key)
    if isinstance(read.get("full_attention"), dict):
        read = read.inner("full_attention")
    if read.get("rope_type") is None and read.get("type") is not None:
        read.values = {**read.values, "rope_type": read.values["type"]}
    kind = read.one_of("rope_type", ROPE_TYPES, "default")
    theta = read.number("rope_theta", config.number("rope_theta", 10000.0))
    part = read.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    dim = config.size_or_none("rotary_dim") or int(head_dim * part)
    rope = Rope(theta, dim=0 if dim == head_dim else dim)
    if kind == "dynamic" and read.get("alpha") is not None:
        return replace(rope, theta=theta * read.number("alpha") ** (dim / (dim - 2)))
    if kind in ("default", "mrope", "dynamic"):
        return rope
    if kind in ("longrope", "su"):
        return _longrope(config, read, replace(rope, type="longrope"), head_dim)
    rope = replace(rope, type=kind, factor=read.number("factor"))
    if kind == "linear":
        return rope
    original = read.size(
        "original_max_position_embeddings",
        config.get("original_max_position_embeddings", config.size("max_position_embeddings")),
    )
    rope = replace(rope, original_max_positions=original)
    if kind == "llama3":
        return replace(
            rope,
            low_freq_factor=read.number("low_freq_factor"),
            high_freq_factor=read.number("high_freq_factor"),
        )
    return replace(
        rope,
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(read, rope.factor),
        truncate=bool(read.get("truncate", True)),
    )


def _longrope(config: Reader, read: Reader, rope: Rope, head_dim: int) -> Rope:
    """Read a longrope embedding (Ding et al. 2024).

    If the maximum length exceeds the original context, the long factors apply from the first token
    on, because keys in the cache cannot be rotated again.
    """
    positions = config.size("max_position_embeddings")
    # Phi 3 has this key at the top level, which takes precedence.
    original = config.size(
        "original_max_position_embeddings",
        read.size("original_max_position_embeddings", positions),
    )
    factors = []
    for key in ("short_factor", "long_factor"):
        values = read.get(key)
        half = (rope.dim or head_dim) // 2
        if not isinstance(values, list) or len(values) != half:
            raise read.error(key, f"must be a list of {half} numbers")
        factors.append(tuple(float(value) for value in values))
    stretch = read.number("factor", positions / original)
    scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return replace(
        rope,
        original_max_positions=original,
        attention_factor=read.number("attention_factor", scale),
        short_factors=factors[0],
        long_factors=factors[1],
    )


def _yarn_attention_factor(read: Reader, factor: float) -> float:
    if read.get("attention_factor") is not None:
        return read.number("attention_factor")

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if read.get("mscale") and read.get("mscale_all_dim"):
        return scale(read.number("mscale")) / scale(read.number("mscale_all_dim"))
    return scale(1.0)


def stretch_positions(config: Reader, positions: int, scaling: Mapping[str, Any]) -> int:
    """Replace config.json's rope scaling by the setting; return the new number of positions.

    positions: the number without the setting.
    scaling: EngineConfig.rope_scaling.
    """
    settings = Reader(dict(scaling), "rope_scaling")
    kind = settings.get("rope_type")
    if kind not in _STRETCHES:
        raise ConfigError(
            f"rope_scaling: rope_type: must be one of {', '.join(_STRETCHES)}, got {kind!r}; "
            "others change the keys of earlier tokens with a text's length, or need tables",
            param="rope_scaling",
        )
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = config.get(key) or {}
    full = parameters.get("full_attention")
    own = full if isinstance(full, dict) else parameters
    original = own.get("original_max_position_embeddings", positions)
    merged = {**_LLAMA3, "original_max_position_embeddings": original, **scaling}
    merged |= {name: own[name] for name in _NOT_OF_SCALING if name in own and name not in scaling}
    config.values[key] = merged if own is parameters else {**parameters, "full_attention": merged}
    made_read = Reader(merged, "rope_scaling")
    original = made_read.size("original_max_position_embeddings")
    return max(positions, int(original * made_read.number("factor")))


_STRETCHES = ("yarn", "linear", "llama3")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_NOT_OF_SCALING = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
