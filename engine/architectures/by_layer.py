"""How layers attend: what records say of windows, and of layers that do not turn."""

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
    """Of each layer: FULL, WINDOW or CHUNK. default: of layer i, where config.json says nothing."""
    kinds = config.listed("layer_types", str)
    if kinds is None:
        return [default(i) for i in range(layers)]
    if len(kinds) != layers:
        raise config.error("layer_types", f"must name the attention of each of {layers} layers")
    if unknown := sorted({*kinds} - {FULL, WINDOW, CHUNK}):
        raise config.error("layer_types", f"{unknown[0]!r} is not supported")
    return kinds


def periodic(config: Reader, layers: int, period: int) -> list[str]:
    """As layer_types; where the file does not list them, every so many'th layer is a full one, or
    those of "G" in a text like "LLLG". period: where the file says nothing of that either."""
    key = "sliding_window_pattern"
    text = config.get(key)
    if not isinstance(text, str):
        each = config.size(key, period)
        return layer_types(config, layers, lambda i: WINDOW if (i + 1) % each else FULL)
    if not text or {*text} - {"L", "G"}:
        raise config.error(key, f"must be a number, or a text of L and G, got {text!r}")
    return layer_types(config, layers, lambda i: WINDOW if text[i % len(text)] == "L" else FULL)


def three_to_one(i: int) -> str:
    return WINDOW if (i + 1) % 4 else FULL


def turning(config: Reader, layers: int) -> list[bool]:
    """Whether each layer turns: every fourth does not, unless the file says otherwise."""
    each = config.size("no_rope_layer_interval", 4)
    turns = of_layers(config, "no_rope_layers", layers, int)
    return [bool(turn) for turn in turns or ((i + 1) % each != 0 for i in range(layers))]


def of_layers(config: Reader, key: str, layers: int, *kinds: type) -> list[Any] | None:
    """A value of these types for each layer; None where the file says nothing."""
    values = config.listed(key, *kinds)
    if values and len(values) < layers:
        raise config.error(key, f"has {len(values)} layers, the model {layers}")
    return values[:layers] if values else None


def alike(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Every layer attends to all before it."""
    if kinds := {*(config.listed("layer_types", str) or ())} - {FULL}:
        raise config.error("layer_types", f"{sorted(kinds)} is not supported, only {FULL}")
    return [plain] * layers


def windowed(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """All layers have the window, if there is one."""
    return [replace(plain, window=config.size_or_none("sliding_window") or 0)] * layers


def still(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """No layer turns: positions are learned."""
    return [replace(plain, rope=None)] * layers


def unstretched(plain: "LayerAttention", theta: float | None = None) -> "Rope":
    """The layer's rope without scaling."""
    assert plain.rope is not None
    theta = plain.rope.theta if theta is None else theta
    return replace(plain.rope, theta=theta, type="default", factor=1.0, attention_factor=1.0)


def rope_of(
    config: Reader, kind: str, plain: "LayerAttention", theta: float | None = None
) -> "Rope":
    """That of layers of one kind, where rope_parameters has an object for each; where it has none
    for this one, the plain layer's without scaling, from `theta` if that is given."""
    own = config.inner("rope_parameters").get(kind)
    if own is None:
        return unstretched(plain, theta)
    own = config.inner("rope_parameters").inner(kind)
    values = {key: value for key, value in config.values.items() if key != "rope_scaling"}
    return read_rope(Reader({**values, "rope_parameters": own.values}, config.path), plain.head_dim)
