"""CacheMemory and pinned_bytes: allocate caches, and pinned host memory.

On the host, pages take no memory until they are used.
"""

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def pinned_bytes(size: int, device: torch.device) -> Tensor:
    """Allocate host memory, uint8 [size], pinned if the device is a CUDA device.

    The memory has exactly this size, where torch would round up to a power of two. It has huge
    pages if the system supports them, as these are pinned many times faster.
    Raises RuntimeError if the memory cannot be pinned.
    """
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.from_numpy(np.frombuffer(pages, np.uint8))
    pin(memory, device)
    return memory


def pin(memory: Tensor, device: torch.device) -> None:
    """Pin host memory (uint8) if the device is a CUDA device. Raises RuntimeError."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)
    if int(code):
        gib = len(memory) / (1 << 30)
        raise RuntimeError(f"{gib:.2f} GiB of host memory cannot be pinned: {code}")


def unpin(memory: Tensor, device: torch.device) -> None:
    """Undo `pin`, so that the memory can be freed."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class CacheMemory:
    """The allocator of caches, which it fills with zeros.

    An attention tile may load a slot that was never written, and 0 * NaN would be NaN.
    """

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of zeros on the device."""
        size = math.prod(shape) * dtype.itemsize
        if device.type == "cpu" and size:  # numpy's view of an empty array has no strides
            # numpy gets zero pages from the kernel, which take no memory until a block is first
            # used.
            raw = np.zeros(size, np.uint8)
            return torch.from_numpy(raw).view(dtype).view(*shape)
        return torch.zeros(*shape, dtype=dtype, device=device)

    def release(self, address: int) -> None:
        """Return a dropped cache's memory to the device. address: the cache's address."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
