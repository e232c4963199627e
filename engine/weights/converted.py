"""Converted folders: parameters in the engine's packed layout, so that loading only reads bytes.

A folder has these files:

  config.json, tokenizer, templates   copies of the model's, with the dtype of the conversion
  manta-00001.safetensors, ...        a tensor for each parameter, by its name
  manta.json                          the device, dtype and format, and each tensor's digest
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.weights.index import file_header, read_index
from engine.weights.parameter import Parameter, Source
from engine.weights.stored import StoredTensor
from engine.weights.stream import Loading

MANIFEST = "manta.json"
VERSION = 1  # version of the format; raise it when names, order or types of parameters change
SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a converted folder.

    device: the type of device for which the folder is; norms on the CPU, for example, are float32.
    quantization: the quantisation of the weights; "none" = unquantised.
    """

    version: int
    architecture: str
    device: str
    dtype: str
    quantization: str
    digests: dict[str, str]  # tensor name -> digest (BLAKE2b, 16 bytes in hex)

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Read a folder's manifest; None for a folder that is not converted.

        Raises ConfigError for a manifest that this engine cannot read.
        """
        file = folder / MANIFEST
        if not file.exists():
            return None
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            version = manifest["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error!r}", param="model") from None
        if version != VERSION:
            raise ConfigError(
                f"{file}: is of version {version!r}, and this Manta reads version {VERSION}; "
                "convert the model again with `manta convert`",
                param="model",
            )
        try:
            return cls(**manifest)
        except TypeError as error:
            raise ConfigError(f"{file}: {error}", param="model") from None

    def check(self, folder: Path, device: str, dtype: str) -> None:
        """Raise ConfigError if the folder is for another type of device, or another dtype."""
        for what, converted, asked in (
            ("device", self.device, device),
            ("dtype", self.dtype, dtype),
        ):
            if converted != asked:
                raise ConfigError(
                    f"{folder / MANIFEST}: was converted for {what} {converted}, and the engine is "
                    f"to run with {asked}; set {what}: {converted}, or convert the model again "
                    f"with --{what} {asked}",
                    param=what,
                )


def named(parameters: Iterable[Parameter]) -> Iterator[tuple[str, Parameter]]:
    """Yield (unique name, parameter) pairs; a repeated name gets a number at its end."""
    seen: dict[str, int] = {}
    for parameter in parameters:
        count = seen[parameter.name] = seen.get(parameter.name, 0) + 1
        yield parameter.name if count == 1 else f"{parameter.name}.{count}", parameter


def as_converted(parameter: Parameter, name: str, stored: dict[str, StoredTensor]) -> Parameter:
    """Return a copy of the parameter whose only source is a converted folder's tensor.

    name: the parameter's unique name.
    stored: the folder's tensors by name.
    """
    shape = tuple(parameter.tensor.shape)
    rows = None
    there = stored.get(name)
    # A table of positions may be longer in the folder, as it is cut to the maximum text length.
    if there is not None and there.shape[0] > shape[0] and there.shape[1:] == shape[1:]:
        rows, shape = (0, shape[0]), there.shape
    source = Source(name, shape, rows)
    return replace(parameter, sources=(source,), offset=0.0, scale=1.0)


class Writer:
    """A writer of parameters to files. Each is written once, in any order, from any thread."""

    def __init__(self, folder: Path, parameters: Iterable[Parameter], stem: str = "manta") -> None:
        entries = list(named(parameters))
        self._names = {id(parameter.tensor): name for name, parameter in entries}
        self._places: dict[str, tuple[int, int]] = {}  # name -> (descriptor, offset)
        self._digests: dict[str, str] = {}
        self._lock = Lock()
        self._open: list[int] = []
        self.files: dict[str, str] = {}  # tensor -> name of its file
        for number, shard in enumerate(_shards(entries), 1):
            self._begin(folder / f"{stem}-{number:05}.safetensors", shard)

    def _begin(self, file: Path, shard: Sequence[tuple[str, Parameter]]) -> None:
        header, offsets = file_header((name, parameter.tensor) for name, parameter in shard)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._open.append(descriptor)
        start = os.write(descriptor, header)
        os.ftruncate(descriptor, start + sum(parameter.tensor.nbytes for _, parameter in shard))
        for name, _ in shard:
            self._places[name] = (descriptor, start + offsets[name])
            self.files[name] = file.name

    def write(self, parameter: Parameter) -> None:
        self.write_parameter(self._names[id(parameter.tensor)], parameter.tensor)

    def write_parameter(self, name: str, tensor: Tensor) -> None:
        """Write one parameter.

        tensor: the values, with the parameter's shape and dtype.
        """
        data = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        descriptor, offset = self._places[name]
        while len(data):
            count = os.pwrite(descriptor, data, offset)
            data, offset = data[count:], offset + count
        with self._lock:
            self._digests[name] = digest

    def close(self) -> dict[str, str]:
        """Close the files and return the digests of all written parameters."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()
        return {name: self._digests[name] for name in self._places if name in self._digests}


def _shards(entries: list[tuple[str, Parameter]]) -> Iterator[list[tuple[str, Parameter]]]:
    shard: list[tuple[str, Parameter]] = []
    size = 0
    for entry in entries:
        if shard and size + entry[1].tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry[1].tensor.nbytes
    yield shard


def copy_others(source: Path, target: Path, dtype: str | None) -> None:
    """Copy all files of the model except its weights.

    dtype: the dtype to write into config.json; None = keep it.
    """
    for file in sorted(source.iterdir()):
        wanted = file.suffix in (".json", ".jinja", ".model", ".txt") or "LICENSE" in file.name
        if wanted and file.is_file() and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    if dtype is None:
        return
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if key in section or (
                section is config and key == "torch_dtype" and "dtype" not in section
            ):
                section[key] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def damaged(folder: Path, progress: Callable[[Loading], None] | None = None) -> list[str]:
    """Return the names of a converted folder's tensors whose bytes differ from the digests.

    Raises ConfigError for a folder that is not converted, or that lacks a tensor.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        raise ConfigError(f"{folder}: has no {MANIFEST}; it was not converted", param="model")
    stored = read_index(folder)
    if missing := sorted(set(manifest.digests) - set(stored)):
        raise ConfigError(f"{folder}: tensor {missing[0]} is missing", param="model")
    total = sum(stored[name].num_bytes for name in manifest.digests)
    began, done = time.monotonic(), 0
    names = []
    for name, digest in manifest.digests.items():
        tensor = stored[name]
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            if hashlib.blake2b(file.read(tensor.num_bytes), digest_size=16).hexdigest() != digest:
                names.append(name)
        done += tensor.num_bytes
        if progress is not None:
            progress(Loading(done, total, time.monotonic() - began))
    return names
