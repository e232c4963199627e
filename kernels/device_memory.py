"""AddressRange and Region: CUDA device memory at fixed addresses, whose pages can be unmapped.

Once the pages are mapped again, tensors over a range are valid again. So are CUDA graphs and copy
descriptors that hold its addresses. The driver's virtual memory functions are called through
ctypes, so no extension module is compiled.
"""

import ctypes
from functools import cache, cached_property
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
        label, text = ctypes.c_char_p(), ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(label))
        _driver().cuGetErrorString(code, ctypes.byref(text))
        result = (label.value or b"an unknown CUresult").decode()
        raise RuntimeError(f"{name}: {result}: {(text.value or b'').decode()} (error {code})")


def reaches(device: int, peer: int) -> bool:
    """Whether kernels of `device` may read, write and use atomics in the memory of `peer`, as over
    NVLink.

    device, peer: torch's device indices.
    Raises RuntimeError."""
    if device == peer:
        return True
    able = ctypes.c_int()
    for what in _PEER_ACCESS:
        _call("cuDeviceGetP2PAttribute", ctypes.byref(able), what, device, peer)
        if not able.value:
            return False
    return True


class AddressRange:
    """A reserved range of CUDA device addresses, parts of which have mapped pages.

    A new range has no pages. Pages are mapped in chunks; a chunk can only be unmapped as a whole.

    size: number of bytes, rounded up to a multiple of the granule.
    granule: granularity of mappings; the bytes of a chunk are a multiple of it.
    Raises RuntimeError, which names the driver's function and its CUresult.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        assert device.index is not None
        self._device = device
        location = _Location(_ON_DEVICE, device.index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        self.granule = _granule(self._properties)
        self.size = -(-max(size, 1) // self.granule) * self.granule
        self._address = ctypes.c_uint64()
        _call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            ctypes.c_size_t(self.size),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )

    @cached_property
    def bytes(self) -> Tensor:
        """The whole range as a tensor, uint8 [size]. Its first page must be mapped at first use."""
        return torch.as_tensor(self, device=self._device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 3,
        }

    def map(self, offset: int, chunk: int, count: int = 1) -> None:
        """Map pages to `count` chunks of `chunk` bytes, from byte `offset` of the range on.

        The pages' content is undefined.

        Raises torch.OutOfMemoryError; then none of these chunks has pages.
        """
        mapped = 0
        try:
            for mapped in range(count):
                self._map_one(offset + mapped * chunk, chunk)
            mapped = count
            _call(
                "cuMemSetAccess",
                ctypes.c_uint64(self._address.value + offset),
                ctypes.c_size_t(count * chunk),
                ctypes.byref(self._access),
                ctypes.c_size_t(1),
            )
        except BaseException:
            self.unmap(offset, chunk, mapped)
            raise

    def _map_one(self, offset: int, chunk: int) -> None:
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(chunk)
        create = (ctypes.byref(handle), size, ctypes.byref(self._properties))
        _call("cuMemCreate", *create, ctypes.c_uint64(0))
        at, zero = ctypes.c_uint64(self._address.value + offset), ctypes.c_size_t(0)
        try:
            _call("cuMemMap", at, size, zero, handle, ctypes.c_uint64(0))
        finally:
            _call("cuMemRelease", handle)  # mapped pages outlive the handle

    def unmap(self, offset: int, chunk: int, count: int = 1) -> None:
        """Unmap and free the pages of chunks, which nothing on the device may be using.

        Parameters are those of `map`.
        """
        for index in range(count):
            at = ctypes.c_uint64(self._address.value + offset + index * chunk)
            _call("cuMemUnmap", at, ctypes.c_size_t(chunk))

    def close(self) -> None:
        """Free the range of addresses, which must have no pages and no users."""
        self.__dict__.pop("bytes", None)
        _call("cuMemAddressFree", self._address, ctypes.c_size_t(self.size))


def _granule(properties: _Properties) -> int:
    step = ctypes.c_size_t()
    _call(
        "cuMemGetAllocationGranularity",
        ctypes.byref(step),
        ctypes.byref(properties),
        _RECOMMENDED,
    )
    if not step.value:
        raise RuntimeError("cuMemGetAllocationGranularity: the driver named no granularity")
    return step.value


class Region:
    """A region of CUDA device memory, of `size` bytes rounded up, whose pages can be freed.

    The constructor maps its pages, whose content is undefined.

    bytes: all bytes of the region, uint8 [size]; unusable while `held` is False.
    held: whether the region has pages.
    Raises torch.OutOfMemoryError.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._range = AddressRange(size, device)
        self.size = self._range.size
        self.held = False
        try:
            self.take_pages()
        except BaseException:
            self._range.close()
            raise
        self.bytes: Tensor = self._range.bytes

    def take_pages(self) -> None:
        """Map pages to the region; their content is undefined.

        Raises torch.OutOfMemoryError; then the region has no pages.
        """
        try:
            self._range.map(0, self.size)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch's cache may hold enough free memory
            self._range.map(0, self.size)
        self.held = True

    def give_pages(self) -> None:
        """Free the region's pages, which nothing on the device may be using."""
        if self.held:
            self._range.unmap(0, self.size)
            self.held = False

    def close(self) -> None:
        """Free the pages and the addresses; no tensor except `bytes` may use them."""
        self.give_pages()
        del self.bytes
        self._range.close()
