"""BlockPages: memory for KV blocks that grows and shrinks at fixed addresses.

Each cache reserves addresses for its maximum number of blocks. Its planes (the keys, or the values,
of one layer) are consecutive, and only the first blocks of each are mapped to pages:

 plane 0   [ block 0 | block 1 | ... mapped | ......... addresses alone ]
 plane 1   [ block 0 | block 1 | ... mapped | ......... addresses alone ]

So views and captured CUDA graphs stay valid, and nothing is copied. Pages are mapped and unmapped
in chunks of equal size, the same number in each plane of a cache.

On CUDA new pages are zeroed on a separate stream. On the CPU the system maps zero pages at first
use, so that growing needs no work.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import OutOfMemory
from kernels.device_memory import AddressRange

# Minimum bytes, over all planes of a cache, by which memory grows at once.
STEP_CUDA, STEP_CPU = 256 << 20, 1 << 20


class Addresses(Protocol):
    """The interface of `kernels.device_memory.AddressRange` that this module uses."""

    size: int
    granule: int

    @property
    def bytes(self) -> Tensor: ...

    def close(self) -> None: ...
    def map(self, offset: int, chunk: int, count: int) -> None: ...
    def unmap(self, offset: int, chunk: int, count: int) -> None: ...


class HostRange:
    """An `Addresses` of host memory, whose pages the system maps at first use."""

    granule = mmap.PAGESIZE

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = -(-max(size, 1) // self.granule) * self.granule
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        self._pages = mmap.mmap(-1, self.size, flags)
        self.bytes = torch.from_numpy(np.frombuffer(self._pages, np.uint8))

    def close(self) -> None:
        """Do nothing: the addresses are freed with the last tensor over them."""

    def map(self, offset: int, chunk: int, count: int) -> None:
        """Do nothing: the system maps zero pages at first use."""

    def unmap(self, offset: int, chunk: int, count: int) -> None:
        """Free the pages of [offset, offset + chunk * count); later reads there yield zeros."""
        self._pages.madvise(mmap.MADV_DONTNEED, offset, chunk * count)


@dataclass(slots=True)
class _Planes:
    """The planes of one cache: equal ranges of addresses, whose pages are mapped in chunks.

    addresses: the addresses of all planes.
    count: number of planes.
    stride: bytes from plane to plane.
    width: bytes of a block in one plane.
    chunk: bytes of a plane that are mapped at a time.
    mapped: number of mapped chunks of each plane.
    """

    addresses: Addresses
    count: int
    stride: int
    width: int
    chunk: int
    mapped: int = 0

    def chunks(self, num_blocks: int) -> int:
        return -(-num_blocks * self.width // self.chunk)


class BlockPages:
    """The pages of all caches of an engine, which share block ids.

    `grow` and the function that `retract` returns may run on another thread, one at a time.

    device: the device of the caches.
    most: the maximum number of blocks, for which addresses are reserved.
    make: a function (bytes, device) -> reserved addresses.
    step: minimum bytes, over all planes of a cache, by which memory grows at once.
    """

    def __init__(
        self,
        device: torch.device,
        most: int,
        make: Callable[[int, torch.device], Addresses] | None = None,
        step: int = 0,
    ) -> None:
        cuda = device.type == "cuda"
        self.most = most
        self._device = device
        self._make = make or (AddressRange if cuda else HostRange)
        self._step = step or (STEP_CUDA if cuda else STEP_CPU)
        self._caches: list[_Planes] = []
        self._stream = torch.cuda.Stream(device) if cuda else None
        # tables of block ids on a CUDA device, which kernels may read beyond a request's blocks
        self.tables: list[Tensor] = []
        # returns whether copies from freed blocks are in flight
        self.copying: Callable[[], bool] = lambda: False

    def storage(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, num_blocks: int
    ) -> Tensor:
        """Reserve the addresses of a cache, map its first blocks, and return it as a tensor.

        shape: [slots, tensors, most, elements], the shape of the result.
        num_blocks: number of blocks to map now.
        Raises torch.OutOfMemoryError.
        """
        count = shape[0] * shape[1]
        width = shape[3] * dtype.itemsize
        probe = self._make(1, device)
        granule = probe.granule
        probe.close()
        chunk = max(1, round(self._step / (max(1, count) * granule))) * granule
        stride = -(-shape[2] * width // chunk) * chunk
        planes = _Planes(self._make(count * stride, device), count, stride, width, chunk)
        self._caches.append(planes)
        self._map(planes, max(1, planes.chunks(self.rounded(num_blocks))))
        elements = planes.addresses.bytes[: count * stride].view(dtype)
        strides = (shape[1] * stride, stride, width, dtype.itemsize)
        return elements.as_strided(shape, [size // dtype.itemsize for size in strides])

    def rounded(self, num_blocks: int) -> int:
        """Return num_blocks, rounded up to whole chunks."""
        first = next((planes for planes in self._caches if planes.width), None)
        if first is None:
            return min(self.most, num_blocks)
        return min(self.most, first.chunks(num_blocks) * first.chunk // first.width)

    def num_bytes(self, num_blocks: int) -> int:
        """Return the bytes of pages that num_blocks blocks need."""
        num_blocks = self.rounded(num_blocks)
        return sum(
            planes.count * planes.chunk * max(1, planes.chunks(num_blocks))
            for planes in self._caches
        )

    @property
    def mapped_bytes(self) -> int:
        """The bytes of all mapped pages."""
        return sum(planes.count * planes.chunk * planes.mapped for planes in self._caches)

    @torch.inference_mode()
    def grow(self, num_blocks: int) -> None:
        """Map pages for the first num_blocks blocks, filled with zeros. Raises OutOfMemory."""
        num_blocks = self.rounded(num_blocks)
        before = [planes.mapped for planes in self._caches]
        if self._stream is not None:
            torch.cuda.set_device(self._device)  # sets the CUDA context of this thread
        try:
            for planes in self._caches:
                self._map(planes, max(1, planes.chunks(num_blocks)))
        except torch.OutOfMemoryError as error:
            for planes, mapped in zip(self._caches, before, strict=True):
                self._unmap(planes, mapped)
            raise OutOfMemory(str(error)) from None

    def _map(self, planes: _Planes, chunks: int) -> None:
        """Map pages until each plane has `chunks` chunks. Raises torch.OutOfMemoryError."""
        new = chunks - planes.mapped
        if new <= 0:
            return
        places = [
            plane * planes.stride + planes.mapped * planes.chunk for plane in range(planes.count)
        ]
        done = 0
        try:
            for place in places:
                planes.addresses.map(place, planes.chunk, new)
                done += 1
        except BaseException:
            for place in places[:done]:
                planes.addresses.unmap(place, planes.chunk, new)
            raise
        planes.mapped = chunks
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                for place in places:
                    planes.addresses.bytes[place : place + new * planes.chunk].zero_()
            self._stream.synchronize()

    def _unmap(self, planes: _Planes, chunks: int) -> None:
        """Unmap pages until each plane has `chunks` chunks."""
        old = planes.mapped - chunks
        if old <= 0:
            return
        for plane in range(planes.count):
            place = plane * planes.stride + chunks * planes.chunk
            planes.addresses.unmap(place, planes.chunk, old)
        planes.mapped = chunks

    @torch.inference_mode()
    def retract(self, num_blocks: int) -> Callable[[], None] | None:
        """Prepare to unmap the blocks from num_blocks on, which no request has.

        Later steps no longer read these blocks. Returns a function that waits for the launched
        steps and unmaps the pages; None while copies from freed blocks may be in flight.
        """
        if self.copying():
            return None
        num_blocks = self.rounded(num_blocks)
        for table in self.tables:
            # Table entries after a request's blocks are left from earlier requests, and kernels'
            # tiles load from them.
            table.masked_fill_(table >= num_blocks, 0)
        event = torch.cuda.Event() if self._stream is not None else None
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))

        def unmap() -> None:
            if event is not None:
                torch.cuda.set_device(self._device)
                event.synchronize()
            for planes in self._caches:
                self._unmap(planes, max(1, planes.chunks(num_blocks)))

        return unmap

    def give_all(self) -> None:
        """Unmap all pages, for a sleep; no step may be in flight."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        for planes in self._caches:
            self._unmap(planes, 0)
