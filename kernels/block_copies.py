"""copy_rows: copies of equally spaced rows between pinned host memory and a CUDA device.

A KV block is one row in each layer's keys and values. These rows are far apart on the device, and
contiguous on the host. One call of CUDA's driver lets the device's copy engine copy such a block,
which occupies no multiprocessor and needs no intermediate buffer. The driver is called through
ctypes, so no extension module is compiled.
"""

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

MAX_PITCH = (1 << 31) - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of all GPUs so far
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver infers from an address whether it is the host's


class _Copy2D(ctypes.Structure):
    """The driver's struct CUDA_MEMCPY2D."""

    _fields_ = [
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_uint),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver. Raises RuntimeError."""
    _check(name, getattr(_driver(), name)(*arguments))


def _check(name: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode()} (error {code})")


def copy_rows(
    places: Iterable[tuple[int, int]],
    target_pitch: int,
    source_pitch: int,
    width: int,
    height: int,
    stream: int,
) -> None:
    """Enqueue copies, each of `height` rows of `width` bytes; the call does not wait for them.

    places: (target, source) addresses of each copy's first row; host memory must be pinned.
    target_pitch, source_pitch: bytes from a row to the next, at least `width`.
    stream: torch's `Stream.cuda_stream`.
    Raises RuntimeError.
    """
    if max(target_pitch, source_pitch) > MAX_PITCH:
        for target, source in places:
            for row in range(height):
                ends = target + row * target_pitch, source + row * source_pitch
                addresses = map(ctypes.c_uint64, ends)
                call("cuMemcpyAsync", *addresses, ctypes.c_size_t(width), _at(stream))
        return
    copy = _Copy2D(
        source_type=_UNIFIED,
        source_pitch=source_pitch,
        target_type=_UNIFIED,
        target_pitch=target_pitch,
        width=width,
        height=height,
    )
    # All copies share one struct, as a call reads it before it returns.
    enqueue, record, queue = _driver().cuMemcpy2DAsync_v2, ctypes.byref(copy), _at(stream)
    for copy.target, copy.source in places:
        if code := enqueue(record, queue):
            _check("cuMemcpy2DAsync_v2", code)


def _at(stream: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream)
