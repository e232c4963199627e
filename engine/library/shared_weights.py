"""SharedWeights: copies a trainer's tensors to shared memory, for engines on the same node."""

from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class SharedWeights:
    """A copy of tensors in one segment of shared memory, which a `with` block frees at its end.

    update_info: the message by which engines find the tensors, an argument of `LLM.update_weights`
        and `Client.take_weights` after `init_weight_transfer({})`.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors to shared memory. Raises OSError.

        tensors: (name, tensor) pairs on any device.
        """
        pairs = [(name, tensor.detach().contiguous()) for name, tensor in tensors]
        self._memory = SharedMemory(create=True, size=max(1, sum(t.nbytes for _, t in pairs)))
        segment = torch.frombuffer(self._memory.buf, dtype=torch.uint8)
        handles, start = [], 0
        for _, tensor in pairs:
            segment[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
            handles.append({"cpu": {"name": self._memory.name, "offset": start}})
            start += tensor.nbytes
        self.update_info: dict[str, Any] = {
            "names": [name for name, _ in pairs],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in pairs],
            "shapes": [list(tensor.shape) for _, tensor in pairs],
            "ipc_handles": handles,
        }

    def close(self) -> None:
        """Release the memory. Call this once all engines have answered."""
        self._memory.close()
        self._memory.unlink()

    def __enter__(self) -> "SharedWeights":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
