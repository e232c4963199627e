"""AdapterUploader: copies adapters from host memory to the device, beside the step loop."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Of each of two buffers. One engine of the device does all copies to it, each whole: a step's small
# upload waits for the piece before it, 0.1 to 0.2 ms; of 16 MB it would be half a millisecond.
STAGING_BYTES = 4 << 20


class AdapterUploader:
    """The copies of adapters to the device, on a stream of their own; for one thread at a time.

    They go through memory that is pinned once, because pinning would hold up steps that run. On the
    CPU they are plain copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._lanes = [
                (torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            ]

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy (source, target) pairs, contiguous and of one dtype, and return when the copies are
        done.

        No step may use the targets.
        """
        if self.device.type != "cuda":
            for source, target in pairs:
                target.copy_(source)
            return
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                self._send(source.view(-1), target.view(-1))
        for _, done in self._lanes:
            done.synchronize()

    def _send(self, source: Tensor, target: Tensor) -> None:
        """One buffer is filled while the other is on its way."""
        step = STAGING_BYTES // source.element_size()
        for at in range(0, source.numel(), step):
            piece = source[at : at + step]
            self._lanes.reverse()
            buffer, done = self._lanes[0]
            done.synchronize()
            staged = buffer[: piece.nbytes].view(source.dtype)
            staged.copy_(piece)
            target[at : at + step].copy_(staged, non_blocking=True)
            done.record()
