"""AdapterUploader: copies adapters from host memory to the device while steps run."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Bytes of each of two buffers. One copy engine does all copies to the device in sequence. So a
# step's small upload may wait 0.1 to 0.2 ms for a copy of 4 MB; 16 MB would take half a
# millisecond.
STAGING_BYTES = 4 << 20


class AdapterUploader:
    """A copier with a separate CUDA stream and two pinned buffers, for one thread at a time.

    Pinning memory would stall running steps, so the buffers are pinned once. On the CPU tensors are
    copied directly.
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
        """Copy each source to its target, and return when all copies are done.

        pairs: (source, target), contiguous and of one dtype; no step may use the targets.
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
        """Copy a tensor to the device in chunks; one buffer is filled while the other is copied."""
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
