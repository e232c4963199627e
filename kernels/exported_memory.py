"""ExportedMemory and OpenedMemory: device memory that another process reads (CUDA IPC).

One process allocates the memory and sends its handle of 64 bytes. Another process of the same
machine opens the handle, and copies from the memory as from its own, over NVLink from another GPU.
The driver frees the pages once all processes have closed the memory or have ended. The driver's
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
    """Device memory of this process that other processes can open.

    address: address of the first byte. handle: the bytes from which `OpenedMemory` opens it.
    Raises RuntimeError if the device is out of memory, or does not support CUDA IPC.
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
        """Free the memory; no copy of this process may be using it."""
        with torch.cuda.device(self._device):
            _bind()
            call("cuMemFree_v2", ctypes.c_uint64(self.address))


class OpenedMemory:
    """The device memory of another process, mapped by its handle.

    address: address of the first byte on this process's device.
    Raises RuntimeError if this device cannot read the memory, or the handle is invalid.
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
        """Unmap the memory; no copy of this process may be using it."""
        with torch.cuda.device(self._device):
            _bind()
            call("cuIpcCloseMemHandle", ctypes.c_uint64(self.address))


def _bind() -> None:
    """Make the device's primary context current in this thread; the driver's calls need it."""
    torch.cuda.mem_get_info()
