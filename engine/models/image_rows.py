"""ImageRows: the embeddings of images that a step's tokens have in place of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Encoder(Protocol):
    """The interface of a vision tower, which computes embeddings of images from pixels."""

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        """Return the embeddings of images, one after the other.

        pixels: uint8 [tiles, height, width, 3] of each image, on the device.
        """
        ...

    def shape_of(self, size: int) -> tuple[int, int, int]:
        """Return (tiles, height, width) of pixels that give about `size` embeddings, not more."""
        ...


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The embeddings of images in a step, in the order of `tokens`.

    tokens: [n] int64, indices of the image tokens in the step.
    rows: [n, hidden_size * (1 + levels)]: a token's input of the first layer, then what is added
        to it after the first layers, one after the other (deepstack).
    """

    tokens: Tensor
    rows: Tensor

    def enter(self, residual: Tensor) -> Tensor:
        """Write the embeddings into `residual` [num_tokens, hidden], the first layer's input.

        Returns `residual`.
        """
        return residual.index_copy_(0, self.tokens, self._level(0, residual))

    def after(self, layer: int, residual: Tensor) -> Tensor:
        """Return the residual [num_tokens, hidden_size] with a layer's level added, if it has one.

        The result is a new tensor, because a norm that was computed ahead (`RMSNorm.ahead`) is the
        old tensor's.
        """
        if (layer + 2) * residual.shape[1] > self.rows.shape[1]:
            return residual
        return residual.index_add(0, self.tokens, self._level(layer + 1, residual))

    def _level(self, level: int, residual: Tensor) -> Tensor:
        size = residual.shape[1]
        return self.rows[:, level * size : (level + 1) * size].to(residual.dtype)
