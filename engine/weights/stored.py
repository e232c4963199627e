"""StoredTensor: a tensor of a checkpoint as it lies on disk."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: bytes [offset, offset + num_bytes) of the file, row-major. A single number
    is a vector of one."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def file_error(file: Path, message: str) -> ConfigError:
    return ConfigError(f"{file}: {message}", param="model")
