"""list_tensors, read_tensors: read an adapter's tensors from its file.

They use few large operations, because Python code of this thread may make a running step wait.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import AdapterError, ConfigError
from engine.lora.peft_config import WEIGHTS_FILE, file_in
from engine.weights.index import read_safetensors
from engine.weights.stored import StoredTensor


def list_tensors(folder: Path) -> list[StoredTensor]:
    """Return the tensors of the adapter's file, in the order of the file. Raises AdapterError."""
    try:
        return read_safetensors(file_in(folder, WEIGHTS_FILE))
    except ConfigError as error:
        raise AdapterError(error.message) from None


def read_tensors(
    stored: Sequence[StoredTensor], digest: Callable[[memoryview], None]
) -> list[Tensor]:
    """Read the values of all tensors of `list_tensors`, as they are stored.

    digest: a function that is called with the whole file's bytes.
    Raises AdapterError if the file's length has changed.
    """
    path, size = stored[0].file, stored[-1].offset + stored[-1].num_bytes
    data = torch.empty(size, dtype=torch.uint8)
    raw: memoryview = data.numpy().data
    with path.open("rb", buffering=0) as file:
        at = 0
        while at < size:
            count = file.readinto(raw[at:])
            if not count:
                raise AdapterError(f"{path}: the file ended while it was being read")
            at += count
        if os.fstat(file.fileno()).st_size != size:
            raise AdapterError(f"{path}: the file grew while it was being read")
    digest(raw)
    values = []
    for tensor in stored:
        piece = data[tensor.offset : tensor.offset + tensor.num_bytes]
        if tensor.offset % tensor.dtype.itemsize:
            piece = piece.clone()
        values.append(piece.view(tensor.dtype).view(tensor.shape))
    return values


def check_finite(stored: Sequence[StoredTensor], values: Sequence[Tensor], copied: Tensor) -> None:
    """Raise AdapterError naming the tensor that holds a NaN or infinity.

    copied: all values, in the dtype in which they will be used.
    """
    if not torch.isfinite(copied).all():
        for tensor, value in zip(stored, values, strict=True):
            if not torch.isfinite(value.to(copied.dtype)).all():
                raise AdapterError(f"{tensor.file}: tensor {tensor.name} holds NaN or infinity")
        raise AdapterError(f"{stored[0].file}: values times the scale are infinite")
