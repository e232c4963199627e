"""ImageRows: the embeddings of images that replace those of placeholder tokens in a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Encoder(Protocol):
    """The interface of a vision encoder, which computes embeddings of images from pixels."""

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        """Return the concatenated embeddings of images.

        pixels: uint8 [tiles, height, width, 3] of each image, on the device.
        """
        ...

    def shape_of(self, size: int) -> tuple[int, int, int]:
        """Return the shape (tiles, height, width) of pixels that give at most `size` embeddings."""
        ...


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The image embeddings of a step, in the order of `tokens`.

    tokens: [n] int64, indices of the image tokens in the step.
    rows: [n, hidden_size * (1 + levels)]: the input of the first layer, then the vectors to add
        after each of the first layers (DeepStack).
    """

    tokens: Tensor
    rows: Tensor

    def enter(self, residual: Tensor) -> Tensor:
        """Write the embeddings into `residual` [num_tokens, hidden], the first layer's input.

        Returns `residual`.
        """
        return residual.index_copy_(0, self.tokens, self._level(0, residual))

    def after(self, layer: int, residual: Tensor) -> Tensor:
        """Add a layer's DeepStack vectors, if there are any, to the residual [num_tokens,
        hidden_size].

        The result is a new tensor, because a norm computed in advance (`RMSNorm.ahead`) refers to
        the old one.
        """
        if (layer + 2) * residual.shape[1] > self.rows.shape[1]:
            return residual
        return residual.index_add(0, self.tokens, self._level(layer + 1, residual))

    def _level(self, level: int, residual: Tensor) -> Tensor:
        size = residual.shape[1]
        return self.rows[:, level * size : (level + 1) * size].to(residual.dtype)
