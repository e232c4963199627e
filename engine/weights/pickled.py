"""read_pickled: lists the tensors of pickled shards (`pytorch_model*.bin`).

No code of the shards is executed, and no tensor data is read. torch's weights-only unpickler gives
the offset of each tensor in the file.
"""

import re
import zipfile
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.shards import file_error
from engine.weights.stored import StoredTensor


def read_pickled(file: Path) -> list[StoredTensor]:
    """Return the tensors of one file.

    Raises ConfigError for a file that is damaged, holds anything but tensors, or has a format that
    cannot be read in place.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        with FakeTensorMode():
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise file_error(file, f"cannot be read: {error.strerror}") from None
    except zipfile.BadZipFile:
        raise file_error(
            file, "truncated, or written by a torch before 1.6; save it as safetensors"
        ) from None
    except Exception as error:  # the unpickler may raise any exception on a damaged file
        raise file_error(file, f"cannot be read as weights alone: {_reason(error)}") from None
    if not stored:
        raise file_error(file, "is a compressed archive; save it as safetensors")
    if not isinstance(tensors, dict):
        raise file_error(file, f"must hold a dictionary of tensors, not {type(tensors).__name__}")
    return [_stored(file, str(name), value) for name, value in tensors.items()]


def _reason(error: Exception) -> str:
    """Return the error's reason without torch's advice to run the file's code."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it wants {match[1]}, and nothing in a file is run; save it as safetensors"
    return str(error).split("\n")[0][:200]


def _stored(file: Path, name: str, value: object) -> StoredTensor:
    if not isinstance(value, torch.Tensor):
        raise file_error(file, f"{name}: not a tensor but {type(value).__name__}")
    if not value.is_contiguous():
        raise file_error(file, f"tensor {name}: is not contiguous; save the model as safetensors")
    begin = getattr(value.untyped_storage(), "_checkpoint_offset", None)
    if begin is None:
        raise file_error(file, f"tensor {name}: is not in the file")
    offset = begin + value.storage_offset() * value.itemsize
    return StoredTensor(name, file, value.dtype, tuple(value.shape) or (1,), offset, value.nbytes)
