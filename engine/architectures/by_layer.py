"""Readers of each layer's attention: windows, chunks, and layers without rotary embeddings."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.config_reader import Reader
from engine.rope import read_rope

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention
    from engine.rope import Rope

FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"


def layer_types(config: Reader, layers: int, default: Callable[[int], str]) -> list[str]:
    """Return the attention of each layer: FULL, WINDOW or CHUNK.

    default: layer number -> attention, used if config.json has no layer_types.
    """
    kinds = config.listed("layer_types", str)
    if kinds is None:
        return [default(i) for i in range(layers)]
    if len(kinds) != layers:
        raise config.error("layer_types", f"must name the attention of each of {layers} layers")
    if unknown := sorted({*kinds} - {FULL, WINDOW, CHUNK}):
        raise config.error("layer_types", f"{unknown[0]!r} is not supported")
    return kinds


def periodic(config: Reader, layers: int, period: int) -> list[str]:
    """Return the attention of each layer by layer_types or sliding_window_pattern.

    The pattern is a period, whose last layer is FULL, or a repeated string like "LLLG", in which
    "G" means FULL. All other layers are WINDOW.

    period: the period if config.json has neither key.
    """
    key = "sliding_window_pattern"
    text = config.get(key)
    if not isinstance(text, str):
        length = config.size(key, period)
        return layer_types(config, layers, lambda i: WINDOW if (i + 1) % length else FULL)
    if not text or {*text} - {"L", "G"}:
        raise config.error(key, f"must be a number, or a text of L and G, got {text!r}")
    return layer_types(config, layers, lambda i: WINDOW if text[i % len(text)] == "L" else FULL)


def three_to_one(i: int) -> str:
    return WINDOW if (i + 1) % 4 else FULL


def rotary_layers(config: Reader, layers: int) -> list[bool]:
    """Return for each layer whether it has rotary embeddings, by no_rope_layers.

    Without this key every no_rope_layer_interval-th layer, by default every fourth, has none.
    """
    interval = config.size("no_rope_layer_interval", 4)
    flags = of_layers(config, "no_rope_layers", layers, int)
    return [bool(flag) for flag in flags or ((i + 1) % interval != 0 for i in range(layers))]


def of_layers(config: Reader, key: str, layers: int, *kinds: type) -> list[Any] | None:
    """Return the list under `key` in config.json, cut to one value for each layer.

    The result is None if config.json lacks the list. Raises ConfigError for a list that is too
    short, or a value of another type.

    layers: the number of layers.
    kinds: the types of the values.
    """
    values = config.listed(key, *kinds)
    if values and len(values) < layers:
        raise config.error(key, f"has {len(values)} layers, the model {layers}")
    return values[:layers] if values else None


def alike(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return the attention `plain` for all layers.

    Raises ConfigError if layer_types has other kinds of attention.
    """
    if kinds := {*(config.listed("layer_types", str) or ())} - {FULL}:
        raise config.error("layer_types", f"{sorted(kinds)} is not supported, only {FULL}")
    return [plain] * layers


def windowed(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return the attention of all layers: `plain` with config.json's sliding window, if any."""
    return [replace(plain, window=config.size_or_none("sliding_window") or 0)] * layers


def still(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return the attention of all layers: `plain` without rotary embeddings, for learned
    positions."""
    return [replace(plain, rope=None)] * layers


def unstretched(plain: "LayerAttention", theta: float | None = None) -> "Rope":
    """Return the layer's rope without scaling.

    theta: the rope's base; None = the layer's own.
    """
    assert plain.rope is not None
    theta = plain.rope.theta if theta is None else theta
    return replace(plain.rope, theta=theta, type="default", factor=1.0, attention_factor=1.0)


def rope_of(
    config: Reader, kind: str, plain: "LayerAttention", theta: float | None = None
) -> "Rope":
    """Return the rope of one kind of layers, from rope_parameters with an object for each kind.

    If there is no object for this kind, the result is the plain layer's rope without scaling.

    theta: the base in that case; None = the plain layer's base.
    """
    own = config.inner("rope_parameters").get(kind)
    if own is None:
        return unstretched(plain, theta)
    own = config.inner("rope_parameters").inner(kind)
    values = {key: value for key, value in config.values.items() if key != "rope_scaling"}
    return read_rope(Reader({**values, "rope_parameters": own.values}, config.path), plain.head_dim)
