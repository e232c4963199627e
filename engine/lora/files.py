"""list_tensors, read_tensors: read an adapter's tensors from its file.

The functions use few large operations, as Python code on this thread may delay a running step.
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
    """List the tensors of the adapter's file, in the order of the file. Raises AdapterError."""
    try:
        return read_safetensors(file_in(folder, WEIGHTS_FILE))
    except ConfigError as error:
        raise AdapterError(error.message) from None


def read_tensors(
    stored: Sequence[StoredTensor], digest: Callable[[memoryview], None]
) -> list[Tensor]:
    """Read the values of all tensors from `list_tensors`, in their stored dtypes.

    digest: called with the bytes of the whole file.
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

    The error names the file if values become infinite only by LoRA's scale.

    copied: all values as they will be used, in the final dtype and with LoRA's scale.
    """
    if not torch.isfinite(copied).all():
        for tensor, value in zip(stored, values, strict=True):
            if not torch.isfinite(value.to(copied.dtype)).all():
                raise AdapterError(f"{tensor.file}: tensor {tensor.name} holds NaN or infinity")
        raise AdapterError(f"{stored[0].file}: values times the scale are infinite")
