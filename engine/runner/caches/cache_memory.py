"""CacheMemory: allocates caches; on the host, pages cost nothing until they are used."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class CacheMemory:
    """The allocator of caches, which are filled with zeros.

    An attention tile may load a slot that was never written, and 0 * NaN would be NaN.
    """

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros of this shape on the device."""
        size = math.prod(shape) * dtype.itemsize
        if device.type == "cpu" and size:  # numpy's view of an empty array has no strides
            # numpy gets zero pages from the kernel, which cost nothing until a block is first used.
            raw = np.zeros(size, np.uint8)
            return torch.from_numpy(raw).view(dtype).view(*shape)
        return torch.zeros(*shape, dtype=dtype, device=device)

    def release(self, address: int) -> None:
        """Release a cache at this address that nothing uses any more."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
