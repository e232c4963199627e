"""Mixer: the description of a recurrent layer in a record. No torch here."""

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
    """Return the size that a kernel makes of an axis: a power of 2 that the matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length())


class Mixer(Protocol):
    """The record of a recurrent layer: frozen, and equal where the layers are alike.

    `engine.layers.recurrent.block` has the layer of each record.
    """

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a request's one to three float32 tensors.

        The tensors are the last inputs of a convolution, the layer's sums over all tokens, and what
        is not yet in these sums.
        """
        ...

    @property
    def chunk_elements(self) -> tuple[int, int]:
        """The numbers of elements that the launches of a prompt on CUDA hand on for each CHUNK
        tokens.

        The first number is of elements of the activations' type, the second of float32 ones. (0,
        0): tokens are walked.
        """
        ...

    def undivided(self, ranks: int) -> str:
        """Return why so many ranks cannot divide the layer; "" = they can."""
        ...

    def of_rank(self, ranks: int) -> "Mixer":
        """Return one rank's part of the layer, which is like that of every other rank."""
        ...


def mixing(plain: "LayerAttention", mixer: Mixer) -> "LayerAttention":
    """Return a layer that has the mixer in the place of attention."""
    return replace(plain, mixer=mixer, attends=False)


def mixed_kinds(
    config: Reader, layers: int, names: Mapping[str, str], default: Sequence[str] | None = None
) -> list[str]:
    """Return one of the values of `names` for each layer, as layer_types says.

    names: the file's names -> ours, FULL among ours.
    default: the file's names where layer_types is missing; None = an error.
    Raises ConfigError for a file that names others, or no layer with keys and values.
    """
    kinds = config.get("layer_types")
    if kinds is None and default is not None:
        kinds = default
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) != layers:
        raise config.error("layer_types", f"must name the attention of each of {layers} layers")
    if unknown := sorted({str(kind) for kind in kinds} - {*names}):
        raise config.error("layer_types", f"{unknown[0]!r} is not supported")
    layer_kinds = [names[kind] for kind in kinds]
    if FULL not in layer_kinds:
        raise config.error("layer_types", f"a model without a layer of {FULL} is not supported")
    return layer_kinds
