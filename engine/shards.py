"""Finds a checkpoint's weight files and reads safetensors headers, without torch.

Damaged files are refused by name.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from engine.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
# beginning of a Git LFS pointer, which read as a header length exceeds any file
_LFS_START = b"version "


class Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def file(self) -> Path: ...


T = TypeVar("T", bound=Named)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a safetensors header: bytes [offset, offset + num_bytes) of the file.

    code: the tensor's dtype as safetensors names it.
    """

    name: str
    file: Path
    code: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def file_error(file: Path, message: str) -> ConfigError:
    return ConfigError(f"{file}: {message}", param="model")


def read_headers(folder: Path) -> dict[str, Entry]:
    """Return name -> tensor of a folder's safetensors; {} for other kinds of files.

    Raises ConfigError naming a file that is missing, truncated or not safetensors.
    """
    shards = find_shards(folder)
    if shards is None or shards.suffix != SAFETENSORS:
        return {}
    return read_shards(shards, read_header)


SAFETENSORS, PICKLED = ".safetensors", ".bin"
# (stem, suffix) of file names; the first kind that exists is used. Files with other names may have
# the same weights in a publisher's own layout, or an adapter.
_KINDS = (("model", SAFETENSORS), ("pytorch_model", PICKLED), ("", SAFETENSORS))


@dataclass(frozen=True, slots=True)
class Shards:
    """The weight files of a folder.

    listed: tensor name -> file name by the index; None without an index.
    index: the name of the index file.
    """

    suffix: str
    files: list[Path]
    listed: dict[str, str] | None = None
    index: str = ""


def find_shards(folder: Path) -> Shards | None:
    """Find the weight files of a folder; return None if there are none.

    The first kind found is used. The order is model.safetensors.index.json, model.safetensors,
    model*.safetensors, then the same for pytorch_model*.bin, then every *.safetensors.
    Raises ConfigError naming a missing file.
    """
    for stem, suffix in _KINDS:
        if (shards := _of_kind(folder, stem, suffix)) is not None:
            return shards
    return None


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that `find_shards` finds; [] if there are none."""
    shards = find_shards(folder)
    return [] if shards is None else shards.files


def _of_kind(folder: Path, stem: str, suffix: str) -> Shards | None:
    single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
    if index.exists():
        listed = _read_weight_map(index)
        files = [folder / name for name in sorted(set(listed.values()))]
        missing = next((file for file in files if not file.exists()), None)
        if missing is None:
            return Shards(suffix, files, listed, index.name)
        # kept only if the single file does not exist: saving one over shards leaves their index
        # behind
        if not single.exists():
            raise file_error(missing, f"is missing, {index.name} lists it")
    files = [single] if single.exists() else sorted(folder.glob(f"{stem}*{suffix}"))
    _check_count(files)
    return Shards(suffix, files) if files else None


def read_shards(shards: Shards, read: Callable[[Path], list[T]]) -> dict[str, T]:
    """Read the tensors of all files; return name -> tensor.

    A tensor that the index does not list, or lists in another file, is ignored.

    read: returns the tensors of one file.
    Raises ConfigError naming the file, and the tensor if there is one.
    """
    listed = shards.listed
    tensors: dict[str, T] = {}
    for file in shards.files:
        for tensor in read(file):
            if listed is not None and listed.get(tensor.name) != file.name:
                continue
            if tensor.name in tensors:
                other = tensors[tensor.name].file.name
                raise file_error(file, f"tensor {tensor.name} is also in {other}")
            tensors[tensor.name] = tensor
    for name, file_name in (listed or {}).items():
        if name not in tensors:
            file = shards.files[0].with_name(file_name)
            raise file_error(file, f"tensor {name} is missing, {shards.index} lists it")
    return tensors


def _check_count(files: list[Path]) -> None:
    """Raise ConfigError unless numbered files, such as model-00001-of-00003, are complete."""
    names = {file.name for file in files}
    for file in files:
        if match := re.fullmatch(r"(.+-)(\d+)(-of-)(\d+)(\..+)", file.name):
            begin, digits, of, count, end = match.groups()
            for number in range(1, int(count) + 1):
                name = f"{begin}{number:0{len(digits)}}{of}{count}{end}"
                if name not in names:
                    raise file_error(file.with_name(name), f"is missing beside {file.name}")


def read_header(file: Path) -> list[Entry]:
    """Return the tensors of one file, in file order.

    Raises ConfigError if header and size disagree.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == _LFS_START:
                raise file_error(
                    file, "is a pointer of Git LFS and not safetensors; `git lfs pull` fetches it"
                )
            length = int.from_bytes(start, "little")
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
    tensors = [_entry(file, name, value, 8 + length) for name, value in header.items()]
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
    """Make a dict of a JSON object's pairs. Raises ValueError for a name that occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in values if names.count(name) > 1)} is there twice")
    return values


def _entry(file: Path, name: str, value: Any, data_start: int) -> Entry:
    try:
        code, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        sizes_are_ints = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise file_error(file, f"tensor {name}: malformed header entry") from None
    if not sizes_are_ints:
        raise file_error(file, f"tensor {name}: malformed shape or offsets")
    return Entry(name, file, code, shape, data_start + begin, end - begin)


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
