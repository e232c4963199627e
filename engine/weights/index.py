"""What tensors a model folder holds, from headers alone. Damaged files are refused by name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError
from engine.weights.pickled import read_pickled
from engine.weights.stored import StoredTensor, file_error

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
    # of tensors that are never read
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "I16": torch.int16,
    "I64": torch.int64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # as the safetensors library


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint by name.

    Of safetensors if there are any, else of pickled shards. model.safetensors.index.json decides
    which files count if it is there, else model.safetensors, else every *.safetensors;
    pytorch_model.bin likewise. Raises ConfigError naming the file, and the tensor where there is
    one.
    """
    for stem, suffix, read in _FORMATS:
        listed: dict[str, str] | None = None
        index_file = folder / f"{stem}{suffix}.index.json"
        if index_file.exists():
            listed = _read_weight_map(index_file)
            files = [folder / name for name in sorted(set(listed.values()))]
        elif (folder / f"{stem}{suffix}").exists():
            files = [folder / f"{stem}{suffix}"]
        else:
            pattern = f"*{suffix}" if suffix == ".safetensors" else f"{stem}*{suffix}"
            files = sorted(folder.glob(pattern))
        if files:
            return _read_files(folder, files, listed, index_file, read)
    raise ConfigError(
        f"{folder}: no *.safetensors file in the model folder, and no pytorch_model*.bin",
        param="model",
    )


def _read_files(
    folder: Path,
    files: list[Path],
    listed: dict[str, str] | None,
    index_file: Path,
    read: Callable[[Path], list[StoredTensor]],
) -> dict[str, StoredTensor]:
    """listed: tensor -> name of its file, if the index says so."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if listed is not None and not file.exists():
            raise file_error(file, f"is missing, {index_file.name} lists it")
        for tensor in read(file):
            if tensor.name in tensors:
                other = tensors[tensor.name].file.name
                raise file_error(file, f"tensor {tensor.name} is also in {other}")
            tensors[tensor.name] = tensor
    if listed is None:
        return tensors
    for name, file_name in listed.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise file_error(
                folder / file_name, f"tensor {name} is missing, {index_file.name} lists it"
            )
    return {name: tensors[name] for name in tensors if name in listed}


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file, in file order. Raises ConfigError if header and size disagree."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise file_error(
                    file, f"truncated or not safetensors: {size} bytes, header {length}"
                )
            header = json.loads(stream.read(length), object_pairs_hook=_once)
    except OSError as error:
        raise file_error(file, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise file_error(file, f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise file_error(file, "the header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = [_stored(file, name, value, 8 + length) for name, value in header.items()]
    tensors.sort(key=lambda tensor: tensor.offset)
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the one before" if tensor.offset < end else "leaves a hole before it"
            raise file_error(file, f"tensor {tensor.name} {what}")
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise file_error(
                file, f"truncated: tensor {tensor.name} ends at byte {end}, the file at {size}"
            )
    if end != size:
        raise file_error(file, f"{size - end} bytes after the last tensor")
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a JSON object. Raises ValueError for a name that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in found if names.count(name) > 1)} is there twice")
    return found


def _stored(file: Path, name: str, value: Any, data_start: int) -> StoredTensor:
    try:
        code, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        sizes_are_ints = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise file_error(file, f"tensor {name}: malformed header entry") from None
    if not sizes_are_ints:
        raise file_error(file, f"tensor {name}: malformed shape or offsets")
    if code not in DTYPES:
        raise file_error(
            file, f"tensor {name}: dtype {code} is not supported; supported: {', '.join(DTYPES)}"
        )
    dtype = DTYPES[code]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise file_error(
            file, f"tensor {name}: {end - begin} bytes do not hold shape {list(shape)} of {code}"
        )
    return StoredTensor(name, file, dtype, shape or (1,), data_start + begin, end - begin)


def _read_weight_map(index_file: Path) -> dict[str, str]:
    try:
        listed = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise file_error(index_file, f"cannot be read: {error!r}") from None
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise file_error(index_file, "weight_map must map tensor names to file names")
    for name in set(listed.values()):
        if Path(name).name != name:
            raise file_error(index_file, f"{name!r} is not a file name of this folder")
    return listed


# Of their names: the stem, the ending, and what reads one file.
_FORMATS: tuple[tuple[str, str, Callable[[Path], list[StoredTensor]]], ...] = (
    ("model", ".safetensors", read_header),
    ("pytorch_model", ".bin", read_pickled),
)
