"""GGUFContainer, GGUFFile: an open GGUF file with its metadata and tensors."""

import mmap
import struct
from collections.abc import Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.architectures import ARCHITECTURES, GGUFS, Architecture, Gguf
from engine.errors import ConfigError

TOWER = "clip"  # general.architecture of files with vision encoders
_NAMES = tuple(dict.fromkeys(layout.name for layout in GGUFS))


class GGUFContainer:
    """An open GGUF file of any kind. Raises ConfigError if it is damaged."""

    def __init__(self, path: Path) -> None:
        # Imported here, as the import would delay `manta --help` by 0.3 s.
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
        from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

        class Checked(GGUFReader):
            # The library's method creates an array per element, which takes two seconds for a small
            # vocabulary's tokens and merges. The garbage collections that this causes stop a
            # router's streams for 0.2 s each.
            def _get_field_parts(
                self, orig_offs: int, raw_type: int
            ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
                if raw_type != GGUFValueType.ARRAY:
                    return super()._get_field_parts(orig_offs, raw_type)
                start = orig_offs + 12
                element, count = self._get(orig_offs, np.uint32), self._get(start - 8, np.uint64)
                kind = GGUFValueType(element[0])
                values: Any
                if kind == GGUFValueType.STRING:
                    values, end = _strings(self.data, start, int(count[0]), count.dtype.byteorder)
                else:
                    dtype = np.dtype(self.gguf_scalar_to_np[kind])
                    end = start + int(count[0]) * dtype.itemsize
                    values = self._get(start, dtype, int(count[0]))
                if end > len(self.data):
                    raise ValueError(f"an array ends at byte {end}, the file at {len(self.data)}")
                return end - orig_offs, [values], [0], [GGUFValueType.ARRAY, kind]

            def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
                for field in fields:
                    _, name, _, dims, kind, offset = field.parts
                    tensor = f"{path}: tensor {bytes(name).decode()!r}"
                    if int(kind[0]) not in set(map(int, GGMLQuantizationType)):
                        raise ConfigError(
                            f"{tensor} is of type {kind[0]}, which is not known", param="model"
                        )
                    width, size = GGML_QUANT_SIZES[GGMLQuantizationType(int(kind[0]))]
                    end = int(offset[0]) + start_offs + prod(map(int, dims)) // width * size
                    if end > len(self.data):
                        raise ConfigError(
                            f"{tensor} of shape {[int(n) for n in reversed(dims)]} ends at byte "
                            f"{end}, the file at {len(self.data)}; download it again",
                            param="model",
                        )
                super()._build_tensors(start_offs, fields)

        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path} is not a GGUF file", param="model")
            version = int.from_bytes(file.read(4), "little")
        if version & 0xFFFF and version not in READER_SUPPORTED_VERSIONS:
            known = " and ".join(map(str, READER_SUPPORTED_VERSIONS))
            raise ConfigError(
                f"{path}: version {version} of GGUF is not known; {known} are", param="model"
            )
        try:
            self._reader = Checked(path)
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
            name = self.get("general.architecture")
        except ConfigError:
            raise
        except Exception as error:
            # The library may raise any exception for a damaged file.
            raise ConfigError(
                f"{path} is damaged or cut short ({error}); download it again", param="model"
            ) from error
        self.architecture = str(name)
        if len(self._tensors) != len(self._reader.tensors):
            raise self.error("a tensor is there twice; download it again")

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.path.name}: {message}", param="model")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the metadata value of a key; `default` if it is missing."""
        field = self._reader.get_field(key)
        try:
            if field is None:
                return default
            last: Any = field.parts[-1]
            # `Checked` has already read lists of strings.
            return last if isinstance(last, list) else field.contents()
        except (ValueError, IndexError, OverflowError) as error:
            raise self.error(f"{key} is damaged ({error}); download it again") from None

    def own(self, key: str, default: Any = None) -> Any:
        """Return the metadata value of a key under the architecture's prefix.

        A list with one integer per layer becomes that integer; ConfigError is raised if the layers
        differ. A float32 becomes the shortest decimal that rounds to it, as in the checkpoint's
        config.json.
        """
        value = self.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and type(value[0]) is int:
            if any(item != value[0] for item in value):
                raise self.error(
                    f"{self.architecture}.{key} differs by layer, which is not supported"
                )
            return value[0]
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        """Return the metadata value of a key under the architecture's prefix, in the form of `own`.

        Raises ConfigError if the key is missing.
        """
        value = self.own(key)
        if value is None:
            raise self.error(f"has no {self.architecture}.{key}")
        return value

    # ---- Tensors

    @property
    def names(self) -> Mapping[str, object]:
        return self._tensors

    def has(self, tensor: str) -> bool:
        return tensor in self._tensors

    def kind(self, tensor: str) -> str:
        """Return the name of the tensor's type, such as "F32" or "Q4_K"."""
        return str(self._tensors[tensor].tensor_type.name)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the tensor's shape in elements, rows first. Raises ConfigError if it is
        missing."""
        if tensor not in self._tensors:
            raise self.error(f"tensor {tensor!r} is missing")
        return tuple(int(size) for size in reversed(self._tensors[tensor].shape))

    def data(self, tensor: str) -> NDArray[Any]:
        """Return the tensor's data as stored: bytes [rows, bytes of a row], or elements if the type
        is a float."""
        return self._tensors[tensor].data

    def give_back(self, data: NDArray[Any]) -> None:
        """Release the mapped memory of an array from `data`, or of some of its rows; later reads
        load it again.

        Does nothing if the system has no madvise.
        """
        whole: Any = self._reader.data
        begin = data.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        end = min(begin + data.nbytes, whole.nbytes)
        begin -= begin % mmap.PAGESIZE
        if isinstance(whole.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            whole.base.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def unpacked(self, tensor: str, data: NDArray[Any]) -> NDArray[np.float32]:
        """Return dequantised rows of a tensor. Raises ConfigError if a value is not finite.

        data: the rows as stored, from `data`.
        """
        from gguf.quants import dequantize

        values = dequantize(data, self._tensors[tensor].tensor_type)
        values = values.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise self.error(f"tensor {tensor!r} has values that are not finite")
        return values


class GGUFFile(GGUFContainer):
    """The open GGUF file of a text model.

    Raises ConfigError if the file is damaged, of an unknown architecture, a vision encoder, or one
    of several parts of a model.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if self.architecture == TOWER:
            raise self.error(
                "has the tower of a model that sees, and no model; give the model's own file "
                "beside it, which finds this one"
            )
        if self.architecture not in _NAMES:
            near = get_close_matches(self.architecture, _NAMES, 1, cutoff=0.0)[0]
            raise self.error(
                f"GGUF architecture {self.architecture!r} is not supported; the nearest that is: "
                f"{near}. All that are: {', '.join(_NAMES)}"
            )
        if int(self.get("split.count", 1)) > 1:
            raise self.error(
                f"one of {self.get('split.count')} parts of a model; join them with llama.cpp's "
                "gguf-split --merge, and give the result"
            )
        self.layout: Gguf = next(
            layout for layout in GGUFS if layout.name == self.architecture and layout.when(self)
        )
        self.record: Architecture = ARCHITECTURES[self.layout.architecture]


def _strings(data: NDArray[Any], start: int, count: int, order: str) -> tuple[list[str], int]:
    """Return `count` strings, each stored after its length in 8 bytes, and the offset of their end.

    data: bytes of the file. start: offset of the first length.
    order: byte order of the lengths, in the notation of struct.
    """
    length, items = struct.Struct(f"{order}Q"), []
    # A memoryview is used, because indexing the array would create an array each time.
    with data.data as view:
        for _ in range(count):
            end = start + 8 + length.unpack_from(view, start)[0]
            items.append(str(view[start + 8 : end], "utf-8"))
            start = end
    return items, start
