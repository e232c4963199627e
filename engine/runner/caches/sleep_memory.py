"""SleepMemory: the memory of an engine that can sleep, with weights in host memory or dropped.

All addresses stay the same. So nothing is rebuilt after a wake: captured graphs and programs are
valid once the memory is mapped again. During a sleep a GPU still holds its context, the data of
rows and adapter slots, and the graphs' memory.
"""

import gc
import math
import mmap
import types
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError, EngineDead
from engine.messages import CACHES, PARTS, WEIGHTS
from engine.parallel.group import TensorParallelGroup
from engine.runner.caches.cache_memory import CacheMemory, pinned_bytes, unpin
from kernels.device_memory import Region
from kernels.dispatch import Kernels

GIB = 1 << 30
_SLAB = GIB  # bytes; weights are grouped in regions of about this size
_ALIGNMENT = 512  # bytes, torch's own alignment of allocations


class SleepMemory(CacheMemory):
    """The memory of an engine that can sleep, on the CPU.

    Weights stay in place, and caches free their pages.
    """

    num_bytes = 0  # bytes of device memory outside torch's allocator

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}  # address -> pages of a cache

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return super().zeros(shape, dtype, device)
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = torch.from_numpy(np.frombuffer(pages, np.uint8))
        self._maps[raw.data_ptr()] = pages
        return raw.view(dtype).view(*shape)

    def release(self, address: int) -> None:
        self._maps.pop(address, None)

    def keep(self, model: object, host_bytes: int, *, written: bool) -> None:
        """Move the loaded model's tensors into memory that can be freed for a sleep.

        host_bytes: free bytes of host memory.
        written: whether weight updates may change some of the tensors later.
        Raises ConfigError if the host has no room for the tensors.
        """

    def changing(self) -> None:
        """Discard host copies of the weights, before an update changes the weights."""

    def changed(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Record which bytes an update of the weights wrote, as (address, number of bytes)."""

    def sleep(self, parts: Collection[str] = PARTS, *, drop: bool = False) -> None:
        """Free the device memory of weights, caches or both; no step may be in flight.

        parts: the parts to free, some of `PARTS`. The contents of caches are lost.
        drop: whether the weights that each update writes are dropped, not copied to host memory.
        """
        if CACHES in parts:
            for pages in self._maps.values():
                pages.madvise(mmap.MADV_DONTNEED)

    def wake(self, parts: Collection[str] = PARTS) -> None:
        """Allocate the freed device memory of `parts` again, with zeros in the caches.

        Raises EngineDead if there is no room.
        """


class Pages(Protocol):
    """The interface of `kernels.device_memory.Region` that this module uses."""

    size: int
    bytes: Tensor
    held: bool

    def take_pages(self) -> None: ...
    def give_pages(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Storage:
    """The place of one weight storage's bytes in a region."""

    region: Pages
    offset: int
    size: int

    @property
    def bytes(self) -> Tensor:
        return self.region.bytes[self.offset : self.offset + self.size]


class CudaSleepMemory(SleepMemory):
    """The memory of an engine that can sleep, on CUDA.

    Pages are returned to the driver. The first sleep copies the weights to pinned host memory, and
    the copy is kept, so that further sleeps copy nothing. A sleep that drops the weights copies
    only tensors that no update has written, such as rotary tables. Before the first update it
    copies everything.
    """

    def __init__(
        self, device: torch.device, make: Callable[[int, torch.device], Pages] = Region
    ) -> None:
        self._device = device
        self._make = make
        self._weights: list[Pages] = []
        self._storages: list[_Storage] = []
        self._updated: set[int] = set()  # addresses of storages that each update writes
        # (storage, host copy) of the tensors that a dropping sleep has kept
        self._others: list[tuple[_Storage, Tensor]] = []
        self._dropped = False
        self._caches: dict[int, Pages] = {}  # address -> pages of a cache
        self._copies: list[Tensor] = []  # copies of _weights in host memory
        self._written = False
        self._stale = True  # whether the copies are older than the weights

    @property
    def num_bytes(self) -> int:  # type: ignore[override]
        return sum(pages.size for pages in (*self._weights, *self._caches.values()) if pages.held)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return super().zeros(shape, dtype, device)
        region = self._make(size, device)
        region.bytes.zero_()
        self._caches[region.bytes.data_ptr()] = region
        return region.bytes[:size].view(dtype).view(*shape)

    def release(self, address: int) -> None:
        region = self._caches.pop(address, None)
        if region is not None:
            self._finish_work()
            region.close()

    @torch.inference_mode()
    def keep(self, model: object, host_bytes: int, *, written: bool) -> None:
        storages: dict[int, list[Tensor]] = {}
        for tensor in tensors_of(model, self._device):
            if tensor.untyped_storage().nbytes():
                storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        size = sum(_storage_bytes(tensors) for tensors in storages.values())
        if size > host_bytes:
            raise ConfigError(
                f"sleep_in_host_memory: the weights need {size / GIB:.2f} GiB of host memory while "
                f"the model sleeps, and {host_bytes / GIB:.2f} GiB are free. Ways out: leave it "
                "out, a machine with more memory, or a smaller model",
                param="sleep_in_host_memory",
            )
        self._written = written
        slab: list[list[Tensor]] = []
        filled = 0
        while storages:
            _, tensors = storages.popitem()
            slab.append(tensors)
            filled += _storage_bytes(tensors)
            if filled >= _SLAB or not storages:
                self._move(slab, filled)
                filled = 0

    def _move(self, slab: list[list[Tensor]], size: int) -> None:
        """Move the tensors of the given storages into a new region of `size` bytes.

        slab: the tensors of each storage. The list is emptied, so that nothing refers to old
            storages.
        """
        region = self._make(size, self._device)
        self._weights.append(region)
        at = 0
        while slab:
            tensors = slab.pop()
            old = tensors[0].untyped_storage()
            storage = _Storage(region, at, old.nbytes())
            self._storages.append(storage)
            storage.bytes.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(old))
            for tensor in tensors:
                offset = at // tensor.element_size() + tensor.storage_offset()
                shape, stride = tensor.shape, tensor.stride()
                tensor.set_(region.bytes.untyped_storage(), offset, shape, stride)
            at += _storage_bytes(tensors, old.nbytes())
            del tensors, old
        self._finish_work()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def changing(self) -> None:
        self._stale = True

    def changed(self, ranges: Iterable[tuple[int, int]]) -> None:
        written = sorted(ranges)
        for storage in self._storages:
            begin = storage.region.bytes.data_ptr() + storage.offset
            reached, at = begin, bisect_left(written, (begin, 0))
            while at < len(written) and written[at][0] <= reached:
                reached = max(reached, sum(written[at]))
                at += 1
            if reached >= begin + storage.size:
                self._updated.add(begin)

    @torch.inference_mode()
    def sleep(self, parts: Collection[str] = PARTS, *, drop: bool = False) -> None:
        self._finish_work()
        freed: list[Pages] = []
        if WEIGHTS in parts:
            self._copy_out(drop=drop)
            freed += self._weights
        if CACHES in parts:
            freed += self._caches.values()
        for region in freed:
            region.give_pages()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _copy_out(self, *, drop: bool) -> None:
        """Copy the weights to host memory; with `drop` only tensors that no update writes."""
        self._dropped = drop and bool(self._updated)
        if self._dropped:
            for copy in self._copies:
                unpin(copy, self._device)
            self._copies, self._stale = [], True
            self._others = [
                (storage, storage.bytes.to("cpu", copy=True))
                for storage in self._storages
                if storage.region.bytes.data_ptr() + storage.offset not in self._updated
            ]
        elif self._stale or self._written:
            self._stale = False
            device = self._device
            self._copies = self._copies or [
                pinned_bytes(pages.size, device) for pages in self._weights
            ]
            for region, copy in zip(self._weights, self._copies, strict=True):
                copy.copy_(region.bytes, non_blocking=True)
            self._finish_work()

    @torch.inference_mode()
    def wake(self, parts: Collection[str] = PARTS) -> None:
        try:
            if WEIGHTS in parts:
                self._copy_in()
            for region in self._caches.values() if CACHES in parts else ():
                region.take_pages()
                region.bytes.zero_()
        except torch.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info(self._device)
            size = sum(pages.size for pages in (*self._weights, *self._caches.values()))
            raise EngineDead(
                f"the model cannot wake: it needs {size / GIB:.2f} GiB, and beside the "
                f"{self.num_bytes / GIB:.2f} GiB that it has got {free / GIB:.2f} of "
                f"{total / GIB:.2f} GiB are free. Ways out: free what other processes hold of the "
                "device, or lower memory_fraction of the models that share it",
                code="device_taken",
            ) from None
        self._finish_work()

    def _copy_in(self) -> None:
        """Map pages for the weights again, and copy the weights from host memory.

        A region is copied while the pages of the next one are mapped.
        """
        for index, region in enumerate(self._weights):
            region.take_pages()
            if not self._dropped:
                region.bytes.copy_(self._copies[index], non_blocking=True)
        if self._dropped:
            for storage, copy in self._others:
                storage.bytes.copy_(copy)
            self._others = []

    def _finish_work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def sleep_memory(device: torch.device) -> SleepMemory:
    return CudaSleepMemory(device) if device.type == "cuda" else SleepMemory()


def _storage_bytes(tensors: Sequence[Tensor], num_bytes: int = -1) -> int:
    """Return the bytes that the tensors' storage takes in a region.

    num_bytes: the size of the storage; -1 = ask the first tensor.
    """
    size = tensors[0].untyped_storage().nbytes() if num_bytes < 0 else num_bytes
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def tensors_of(root: object, device: torch.device) -> Iterator[Tensor]:
    """Yield each tensor on the device that is reachable from an object through references.

    Kernel back ends and groups of ranks are skipped, as their tensors are not the model's.
    """
    seen, to_visit = {id(root)}, [root]
    while to_visit:
        owner = to_visit.pop()
        if isinstance(owner, Tensor):
            if owner.device == device:
                yield owner
            continue
        if isinstance(owner, types.ModuleType | type | Kernels | TensorParallelGroup):
            continue
        # Of a function only the closure is followed, as it also refers to its whole module.
        inside = (owner.__closure__,) if isinstance(owner, types.FunctionType) else (owner,)
        for referent in gc.get_referents(*inside):
            if id(referent) not in seen:
                seen.add(id(referent))
                to_visit.append(referent)
