"""StoredTensor: a tensor of a checkpoint on disk, or a tensor that a trainer has sent."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: bytes [offset, offset + num_bytes) of the file, row-major.

    A scalar is a vector of one element.

    held: the whole tensor, contiguous, if it is in memory; offset then counts from its first byte.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    held: Tensor | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor, folder: Path) -> "StoredTensor":
        """Return the StoredTensor of a tensor in memory.

        folder: the folder to which the tensor is being written, for errors.
        """
        shape = tuple(tensor.shape) or (1,)
        return cls(name, folder, tensor.dtype, shape, 0, tensor.nbytes, tensor)

    @property
    def held_bytes(self) -> Tensor:
        """The bytes of a tensor in memory (`held`), uint8 [bytes of the whole tensor]."""
        assert self.held is not None
        return self.held.reshape(-1).view(torch.uint8)

    def one_of_stack(self, index: int, shape: tuple[int, ...]) -> "StoredTensor":
        """Return one of the tensors that are stacked along this tensor's first axis.

        shape: the shape to assume for the whole stack, with one tensor for each index.
        """
        size = self.num_bytes // shape[0]
        offset = self.offset + index * size
        return replace(self, shape=shape[1:], offset=offset, num_bytes=size)
