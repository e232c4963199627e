"""Region: device memory (CUDA) whose address stays while its pages are given back and taken again.

Tensors over a region, and whatever has noted their addresses (recorded graphs, descriptors of
copies), are right again once it has pages. The driver's virtual memory calls are called through
ctypes: nothing is built.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

_OUT_OF_MEMORY = 2
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_PEER_ACCESS = (2, 3)  # CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, _NATIVE_ATOMIC_SUPPORTED


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """The driver's struct CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    """The driver's struct CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver. Raises torch.OutOfMemoryError, RuntimeError."""
    code = getattr(_driver(), name)(*arguments)
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the device is out of memory")
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode()} (error {code})")


def reaches(device: int, peer: int) -> bool:
    """Whether kernels of a device may read, write and signal in the memory of another, as over
    NVLink. Numbers are torch's. Raises RuntimeError."""
    if device == peer:
        return True
    able = ctypes.c_int()
    for what in _PEER_ACCESS:
        _call("cuDeviceGetP2PAttribute", ctypes.byref(able), what, device, peer)
        if not able.value:
            return False
    return True


class Region:
    """A region of CUDA device memory, of `size` bytes or a little more, whose pages can be given
    back.

    It begins with pages, whose content is undefined.

    bytes: all of it, uint8 [size]. It, and what lies over it, must not be used while `held` is
    False. Raises torch.OutOfMemoryError.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        location = _Location(_ON_DEVICE, device.index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        step = ctypes.c_size_t()
        _call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(step),
            ctypes.byref(self._properties),
            _RECOMMENDED,
        )
        self.size = -(-max(size, 1) // step.value) * step.value
        self._size = ctypes.c_size_t(self.size)
        self._address = ctypes.c_uint64()
        _call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            self._size,
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self.held = False
        try:
            self.take_pages()
        except BaseException:
            _call("cuMemAddressFree", self._address, self._size)
            raise
        self.bytes: Tensor = torch.as_tensor(self, device=device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 3,
        }

    def take_pages(self) -> None:
        """Map pages to the region; their content is undefined.

        Raises torch.OutOfMemoryError; then the region has no pages.
        """
        handle = ctypes.c_uint64()
        create = (ctypes.byref(handle), self._size, ctypes.byref(self._properties))
        try:
            _call("cuMemCreate", *create, ctypes.c_uint64(0))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch's cache may hold enough free memory
            _call("cuMemCreate", *create, ctypes.c_uint64(0))
        zero = ctypes.c_size_t(0)
        try:
            _call("cuMemMap", self._address, self._size, zero, handle, ctypes.c_uint64(0))
        finally:
            _call("cuMemRelease", handle)  # mapped pages outlive the handle
        _call(
            "cuMemSetAccess",
            self._address,
            self._size,
            ctypes.byref(self._access),
            ctypes.c_size_t(1),
        )
        self.held = True

    def give_pages(self) -> None:
        """Give the pages back. Nothing on the device may be using them."""
        if self.held:
            _call("cuMemUnmap", self._address, self._size)
            self.held = False

    def close(self) -> None:
        """Give the address back too. No tensor over it may be left but its own."""
        self.give_pages()
        _call("cuMemAddressFree", self._address, self._size)
        del self.bytes
