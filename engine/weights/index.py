"""read_index: lists the tensors of a model folder, from the headers of its files.

Errors name the damaged file.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.shards import PICKLED, Entry, file_error, find_shards, read_header, read_shards
from engine.weights.pickled import read_pickled
from engine.weights.stored import StoredTensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,  # blocks of a GGUF file
    "I32": torch.int32,  # words of packed integers
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,  # scales: powers of two
    # dtypes of tensors that are never read
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "I16": torch.int16,
    "I64": torch.int64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def file_header(tensors: Iterable[tuple[str, Tensor]]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and each tensor's offset from the header's end."""
    entries: dict[str, dict[str, Any]] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in tensors:
        offsets[name], end = end, end + tensor.nbytes
        place = [offsets[name], end]
        shape = list(tensor.shape)
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": shape, "data_offsets": place}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of the checkpoint by name.

    Raises ConfigError as `find_shards` does.
    """
    shards = find_shards(folder)
    if shards is None:
        raise ConfigError(
            f"{folder}: no *.safetensors file in the model folder, and no pytorch_model*.bin",
            param="model",
        )
    return read_shards(shards, read_pickled if shards.suffix == PICKLED else read_safetensors)


def read_safetensors(file: Path) -> list[StoredTensor]:
    """Return the tensors of one file, in file order.

    Raises ConfigError if header and size disagree.
    """
    return [_stored(entry) for entry in read_header(file)]


def _stored(entry: Entry) -> StoredTensor:
    if entry.code not in DTYPES:
        raise file_error(
            entry.file,
            f"tensor {entry.name}: dtype {entry.code} is not supported; supported: "
            f"{', '.join(DTYPES)}",
        )
    dtype = DTYPES[entry.code]
    if entry.num_bytes != math.prod(entry.shape) * dtype.itemsize:
        raise file_error(
            entry.file,
            f"tensor {entry.name}: {entry.num_bytes} bytes do not hold shape "
            f"{list(entry.shape)} of {entry.code}",
        )
    shape = entry.shape or (1,)
    return StoredTensor(entry.name, entry.file, dtype, shape, entry.offset, entry.num_bytes)
