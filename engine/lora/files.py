"""An adapter's tensors, read from its file one by one."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import AdapterError, ConfigError
from engine.lora.peft_config import WEIGHTS_FILE, file_in
from engine.weights.index import StoredTensor, read_header


def list_tensors(folder: Path) -> list[StoredTensor]:
    """What the adapter's file holds, in the order of the file. Raises AdapterError."""
    try:
        return read_header(file_in(folder, WEIGHTS_FILE))
    except ConfigError as error:
        raise AdapterError(error.message) from None


def read_tensors(
    stored: Sequence[StoredTensor], digest: Callable[[bytes], None]
) -> Iterator[tuple[StoredTensor, Tensor]]:
    """All of `list_tensors`, in its order, as they are stored; digest sees every byte of the file.

    Raises AdapterError if the file is not as long as it was.
    """
    path = stored[0].file
    with path.open("rb") as file:
        digest(file.read(stored[0].offset))
        for tensor in stored:
            raw = file.read(tensor.num_bytes)
            if len(raw) < tensor.num_bytes:
                raise AdapterError(f"{path}: the file ended while it was being read")
            digest(raw)
            yield tensor, torch.frombuffer(bytearray(raw), dtype=tensor.dtype).view(tensor.shape)
        if os.fstat(file.fileno()).st_size != file.tell():
            raise AdapterError(f"{path}: the file grew while it was being read")


def check_finite(values: Tensor, tensor: StoredTensor) -> None:
    """values: as they will be computed with. Raises AdapterError."""
    if not torch.isfinite(values).all():
        raise AdapterError(f"{tensor.file}: tensor {tensor.name} holds NaN or infinity")
