"""Bucket: collects the tensors of one message of a weight update, in memory shared with the
engine."""

from itertools import accumulate
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from engine.weights.transfers.handles import plain_handle


class Bucket:
    """The tensors of one message to the engine, in memory that both processes share.

    num_bytes: size of the memory; it grows for a larger tensor.
    """

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._used = 0
        self._names: list[str] = []
        self._dtypes: list[str] = []
        self._shapes: list[list[int]] = []
        self._sizes: list[int] = []
        self._memory: SharedMemory | None = None
        self._buffer: torch.Tensor | None = None  # uint8 [_size]
        self._handle: Any = None  # CUDA IPC handle of the buffer

    def has_room(self, tensor: torch.Tensor) -> bool:
        return not self._names or self._used + tensor.nbytes <= self._size

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the bucket, which must have room (`has_room`)."""
        if self._buffer is None or tensor.nbytes > self._size:
            self._size = max(self._size, tensor.nbytes)
            self._allocate(tensor.device)
        assert self._buffer is not None
        end = self._used + tensor.nbytes
        self._buffer[self._used : end].copy_(tensor.contiguous().flatten().view(torch.uint8))
        self._used = end
        self._names.append(name)
        self._dtypes.append(str(tensor.dtype).removeprefix("torch."))
        self._shapes.append(list(tensor.shape))
        self._sizes.append(tensor.nbytes)

    def _allocate(self, device: torch.device) -> None:
        self.close()
        if device.type == "cuda":
            self._buffer = torch.empty(self._size, dtype=torch.uint8, device=device)
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = {uuid: plain_handle(reduce_tensor(self._buffer))}
        else:
            self._memory = SharedMemory(create=True, size=self._size)
            self._buffer = torch.frombuffer(self._memory.buf, dtype=torch.uint8)

    def message(self) -> dict[str, Any]:
        """Return vLLM's update_info of the tensors in the bucket, and empty the bucket.

        `put` must not be called before the engine has answered, as it overwrites the memory.
        """
        info: dict[str, Any] = {
            "names": self._names,
            "dtype_names": self._dtypes,
            "shapes": self._shapes,
        }
        if self._memory is not None:
            name, starts = self._memory.name, accumulate(self._sizes[:-1], initial=0)
            info["ipc_handles"] = [{"cpu": {"name": name, "offset": start}} for start in starts]
        else:
            assert self._buffer is not None
            torch.cuda.synchronize(self._buffer.device)
            info |= {"cuda_handles": [self._handle], "tensor_sizes": self._sizes}
        self._names, self._dtypes, self._shapes, self._sizes = [], [], [], []
        self._used = 0
        return info

    def close(self) -> None:
        self._buffer = self._handle = None
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()
            self._memory = None
