"""Mixer: the description of a recurrent layer. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from engine.architectures.by_layer import FULL
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention

LINEAR = "linear_attention"
CHUNK = 64  # tokens of a chunk, which kernels compute together in prompts


def padded(size: int) -> int:
    """Return the size to which a kernel pads an axis: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


class Mixer(Protocol):
    """The description of a recurrent layer: frozen, and equal for equal layers.

    `engine.layers.recurrent.block` has the layer of each description.
    """

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a request's one to three float32 state tensors.

        These are the last inputs of a convolution, the recurrent state, and pending updates of the
        state.
        """
        ...

    @property
    def chunk_elements(self) -> tuple[int, int]:
        """The buffer elements that CUDA kernels need for each CHUNK tokens of a prompt.

        The result is (elements of the activations' dtype, float32 elements); (0, 0) if the layer is
        computed token by token.
        """
        ...

    def undivided(self, ranks: int) -> str:
        """Return why the layer cannot be divided among `ranks` ranks; "" = it can."""
        ...

    def of_rank(self, ranks: int) -> "Mixer":
        """Return the description of one rank's part; all ranks have equal parts."""
        ...


def mixing(plain: "LayerAttention", mixer: Mixer) -> "LayerAttention":
    """Return `plain` with the mixer instead of attention."""
    return replace(plain, mixer=mixer, attends=False)


def mixed_kinds(
    config: Reader, layers: int, names: Mapping[str, str], default: Sequence[str] | None = None
) -> list[str]:
    """Return the kind of each layer by layer_types, as one of the values of `names`.

    names: the file's name -> Manta's name of a kind; FULL is among the latter.
    default: the file's names if layer_types is missing; None = that is an error.
    Raises ConfigError for other names, or if no layer has KV.
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
