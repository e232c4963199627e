"""ExportedMemory and OpenedMemory: device memory that another process reads (CUDA IPC).

One process allocates the memory and hands on its handle, 64 bytes. Another process of the same
machine opens the handle, and copies from the memory as from its own, over NVLink if it is on
another GPU. The driver keeps the pages until all processes have closed them or have ended. Its
functions are called through ctypes, so no extension module is compiled.
"""

import ctypes

import torch

from kernels.block_copies import call

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """The driver's struct CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class ExportedMemory:
    """Device memory of this process that others may open.

    address: of the first byte. handle: what `OpenedMemory` takes.
    Raises RuntimeError where the device has no room, or no such memory (as some virtual ones).
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        address, handle = ctypes.c_uint64(), _Handle()
        with torch.cuda.device(device):
            _bind()
            call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self.address = address.value
            try:
                call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except RuntimeError:
                self.close()
                raise
        self.handle = bytes(handle)

    def close(self) -> None:
        """Free the memory, which no copy of this process uses."""
        with torch.cuda.device(self._device):
            _bind()
            call("cuMemFree_v2", ctypes.c_uint64(self.address))


class OpenedMemory:
    """The device memory of another process, mapped by its handle.

    address: of the first byte, for this process's device.
    Raises RuntimeError where this device cannot read it, and for a handle that is none.
    """

    def __init__(self, handle: bytes, device: torch.device) -> None:
        if len(handle) != HANDLE_BYTES:
            raise RuntimeError(f"a handle of {len(handle)} bytes instead of {HANDLE_BYTES}")
        self._device = device
        address = ctypes.c_uint64()
        with torch.cuda.device(device):
            _bind()
            call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_PEER_ACCESS),
            )
        self.address = address.value

    def close(self) -> None:
        """Unmap the memory, which no copy of this process uses."""
        with torch.cuda.device(self._device):
            _bind()
            call("cuIpcCloseMemHandle", ctypes.c_uint64(self.address))


def _bind() -> None:
    """Make the device's primary context current in this thread, as the driver's calls expect."""
    torch.cuda.mem_get_info()
