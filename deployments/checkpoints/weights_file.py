"""WrittenTensor, write_weights: write a safetensors file tensor by tensor, without torch."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError

Progress = Callable[[str, int, int], None]
"""(what is done, how much of it, out of how much), called from one thread."""

_CODES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor to be written to the safetensors file.

    code: safetensors' name of its type, such as "BF16".
    data: yields the tensor's bytes, row-major, in slices.
    """

    name: str
    code: str
    shape: list[int]
    num_bytes: int
    data: Callable[[], Iterator[bytes | memoryview]]

    @classmethod
    def of(
        cls,
        name: str,
        dtype: str,
        shape: list[int],
        data: Callable[[], Iterator[bytes | memoryview]],
    ) -> "WrittenTensor":
        """Return a tensor of floats. dtype: "float32", "float16" or "bfloat16"."""
        code, width = _CODES[dtype]
        return cls(name, code, shape, width * math.prod(shape), data)


def cast(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Convert values to one of the types of `WrittenTensor.of`; bfloat16 is returned as 16-bit
    integers with the same bits."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    # bfloat16 is the upper half of float32, rounded to nearest, ties to even.
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_weights(
    tensors: Sequence[WrittenTensor], target: Path, progress: Progress | None
) -> None:
    """Write tensors to a safetensors file. Raises ConfigError if the disk is too small."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.code,
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    free = shutil.disk_usage(target.parent).free
    if free < offset + (64 << 20):
        raise ConfigError(
            f"the unpacked model needs {offset / 2**30:.2f} GiB in {target.parent}, "
            f"{free / 2**30:.2f} GiB are free; point MANTA_CACHE at a larger disk",
            param="model",
        )
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for part in tensor.data():
                done += out.write(part)
                if progress is not None:
                    progress("Unpacking weights", done, offset)
