"""Mixer: the description of a recurrent layer. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from engine.architectures.by_layer import FULL
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention

LINEAR = "linear_attention"
CHUNK = 64  # tokens of a prompt that the kernels compute together


def padded(size: int) -> int:
    """Return the size to which a kernel pads an axis: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


class Mixer(Protocol):
    """The description of a recurrent layer: frozen, and equal for layers that are alike.

    `engine.layers.recurrent.block` has the layer of each description.
    """

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a request's one to three float32 state tensors.

        They are the last inputs of a convolution, the layer's sums over all tokens, and updates
        that are not yet in these sums.
        """
        ...

    @property
    def chunk_elements(self) -> tuple[int, int]:
        """The elements of buffers that a prompt's CUDA kernels need for each CHUNK tokens.

        The first number counts elements of the activations' dtype, the second float32 elements. (0,
        0) means that the layer computes token by token.
        """
        ...

    def undivided(self, ranks: int) -> str:
        """Return why this number of ranks cannot divide the layer; "" = it can."""
        ...

    def of_rank(self, ranks: int) -> "Mixer":
        """Return one rank's part of the layer; all ranks have equal parts."""
        ...


def mixing(plain: "LayerAttention", mixer: Mixer) -> "LayerAttention":
    """Return a layer that has the mixer instead of attention."""
    return replace(plain, mixer=mixer, attends=False)


def mixed_kinds(
    config: Reader, layers: int, names: Mapping[str, str], default: Sequence[str] | None = None
) -> list[str]:
    """Return the kind of each layer, one of the values of `names`, by layer_types.

    names: the file's names -> ours, FULL among ours.
    default: the file's names where layer_types is missing; None = missing is an error.
    Raises ConfigError for other names, or if no layer has keys and values.
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
