"""StoredTensor: a tensor of a checkpoint on disk."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: bytes [offset, offset + num_bytes) of the file, row-major.

    A single number is a vector of one element.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def one_of_stack(self, index: int, shape: tuple[int, ...]) -> "StoredTensor":
        """Return one of the tensors stacked along this tensor's first axis.

        shape: the shape to assume for this tensor.
        """
        size = self.num_bytes // shape[0]
        offset = self.offset + index * size
        return replace(self, shape=shape[1:], offset=offset, num_bytes=size)
