"""Mixer: what a record says of a layer that keeps a state of each request in the place of keys and
values. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from engine.architectures.by_layer import FULL
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention

LINEAR = "linear_attention"
CHUNK = 64  # tokens


def padded(size: int) -> int:
    """What a kernel makes of an axis: a power of 2 that the matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length())


class Mixer(Protocol):
    """Frozen, and equal where the layers are alike. `engine.layers.recurrent.block` has the layer
    of each."""

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of a request's one to three tensors, float32: the last inputs of a convolution, what the
        layer sums up of all tokens, and what is not yet in there."""
        ...

    @property
    def chunk_elements(self) -> tuple[int, int]:
        """What the launches of a prompt on CUDA hand on of each CHUNK tokens: elements of the
        activations' type, and float32 ones. (0, 0): tokens are walked."""
        ...

    def undivided(self, ranks: int) -> str:
        """Why the layer cannot be divided among so many ranks; "" = it can."""
        ...

    def of_rank(self, ranks: int) -> "Mixer":
        """One rank's part, which is like that of every other one."""
        ...


def mixing(plain: "LayerAttention", mixer: Mixer) -> "LayerAttention":
    """A layer that has the mixer in the place of attention."""
    return replace(plain, mixer=mixer, attends=False)


def mixed_kinds(
    config: Reader, layers: int, names: Mapping[str, str], default: Sequence[str] | None = None
) -> list[str]:
    """Of each layer, one of the values of `names`, by what layer_types says. names: the file's ->
    ours, FULL among ours. default: where the file says nothing; None = an error.

    Raises ConfigError for a file that names others, or no layer with keys and values.
    """
    kinds = config.get("layer_types")
    if kinds is None and default is not None:
        kinds = default
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) != layers:
        raise config.error("layer_types", f"must name the attention of each of {layers} layers")
    if unknown := sorted({str(kind) for kind in kinds} - {*names}):
        raise config.error("layer_types", f"{unknown[0]!r} is not supported")
    found = [names[kind] for kind in kinds]
    if FULL not in found:
        raise config.error("layer_types", f"a model without a layer of {FULL} is not supported")
    return found
