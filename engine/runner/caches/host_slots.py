"""HostSlots: pinned slots of host memory, each for a KV block or a snapshot of recurrent states.

A slot has a block's bytes of every cache (the model's, and a drafter's) one after the other, so a
copy is one call for each block and cache. Latents, quantised KV and windows are all copied as
bytes. Snapshots have separate slots, which are filled in the same way.

Slots for other replicas on the machine may also be GPU memory (`HostSlots.add_device`).
"""

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.runner.caches.cache_memory import pin, pinned_bytes, unpin
from engine.runner.caches.kv_cache import KVCache
from engine.runner.caches.state_cache import StateCache

FIRST_OF_OTHERS = 1 << 20  # the lowest number of a slot that another process owns


class DeviceMemory(Protocol):
    """Device memory of this process, or memory of another process that this one has opened."""

    address: int

    def close(self) -> None:
        """Free or unmap the memory."""
        ...


class _Area(NamedTuple):
    """The addresses of one process's slots: `num_host` of host memory, then device memory."""

    num_host: int
    host: int  # address
    device: int = 0


class HostSlots:
    """Slots of host memory, each for one item of the device: a KV block, or a snapshot.

    parts: a function for each cache that returns the device memory of all items, uint8
        [tensors, items, bytes of an item in one tensor].
    num_bytes: size of an item.
    Raises RuntimeError if the memory cannot be pinned.
    """

    def __init__(
        self,
        parts: Sequence[Callable[[], Tensor]],
        count: int,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> None:
        """Allocate pinned memory for `count` slots, or pin the given memory, uint8."""
        self.parts = parts
        self.count = count
        self.least = parts[0]().shape[1] if parts else 0  # number of items that are always mapped
        self.num_bytes = sum(part().shape[0] * part().shape[2] for part in parts)
        size = count * self.num_bytes  # 0 bytes on a pipeline stage whose layers have no KV
        if memory is None:
            memory = pinned_bytes(max(size, 1), device)
        else:
            pin(memory, device)
        self.memory = memory[:size]
        self.slots = self.memory.view(count, self.num_bytes)
        self._device = device
        # first slot of own or attached memory -> its addresses
        self._areas = {0: _Area(count, self.memory.data_ptr())}
        # first slot of attached memory -> finalizer that unpins or closes the memory
        self._ends: dict[int, weakref.finalize[..., HostSlots]] = {}
        self._numbers = itertools.count(FIRST_OF_OTHERS, FIRST_OF_OTHERS)
        self._at_end(unpin, self.memory, self._device)

    @classmethod
    def of_blocks(
        cls,
        caches: Sequence[KVCache],
        count: int,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> "HostSlots":
        """Return slots for the blocks of caches, which share block ids."""
        slots = cls([_blocks_of(cache) for cache in caches], count, device, memory)
        slots.least = min(cache.least for cache in caches)
        return slots

    @classmethod
    def of_states(cls, states: StateCache, count: int, device: torch.device) -> "HostSlots":
        """Return slots for recurrent states, which are copied from and to rows and snapshots."""
        return cls([_states_of(storage) for storage in states.storages], count, device)

    def attach(self, memory: memoryview) -> int:
        """Pin another process's host slots, of equal size; return the number of the first one here.

        Called from any thread. Raises RuntimeError if the memory cannot be pinned.
        """
        other = torch.from_numpy(np.frombuffer(memory, np.uint8))
        pin(other, self._device)
        first = next(self._numbers)
        self._areas[first] = _Area(len(other) // self.num_bytes, other.data_ptr())
        self._ends[first] = self._at_end(unpin, other, self._device)
        return first

    def add_device(self, memory: DeviceMemory) -> None:
        """Add slots in this process's device memory, which other processes may open.

        These slots are numbered after those in host memory.
        """
        self._areas[0] = self._areas[0]._replace(device=memory.address)
        self._at_end(memory.close)

    def attach_device(self, memory: DeviceMemory, count: int) -> int:
        """Add another process's slots in device memory; return the number of its first slot here.

        Called from any thread.

        count: number of that process's host slots, which are numbered first and are not read.
        """
        first = next(self._numbers)
        self._areas[first] = _Area(count, 0, memory.address)
        self._ends[first] = self._at_end(memory.close)
        return first

    def _at_end(
        self, function: Callable[..., None], *arguments: object
    ) -> "weakref.finalize[..., HostSlots]":
        """Return a finalizer that calls a function when this object is freed, but not at exit."""
        end = weakref.finalize(self, function, *arguments)
        end.atexit = False
        return end

    def detach(self, first: int) -> None:
        """Unregister attached slots, which no copy uses."""
        del self._areas[first]
        self._ends.pop(first)()

    def on_device(self, numbers: Sequence[int]) -> bool:
        """Whether the slots of a copy are in device memory, not in host memory."""
        if not numbers:
            return False
        place, area = self._place_of(numbers[0])
        return place >= area.num_host

    def slot(self, number: int) -> Tensor:
        """Return the bytes of a host slot, uint8 [num_bytes]."""
        if not self.num_bytes:  # a pipeline stage whose layers have no KV
            return torch.empty(0, dtype=torch.uint8)
        pages = (ctypes.c_uint8 * self.num_bytes).from_address(int(self.addresses([number])[0]))
        return torch.frombuffer(pages, dtype=torch.uint8)

    def addresses(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the int64 addresses of slots, all of one process and one kind of memory."""
        place, (num_host, address, device) = self._place_of(numbers[0])
        first = numbers[0] - place
        if place >= num_host:
            first, address = first + num_host, device
        return address + (np.array(numbers, np.int64) - first) * self.num_bytes

    def _place_of(self, number: int) -> tuple[int, _Area]:
        """Return a slot's index among its process's slots, and the addresses of that process."""
        place = number % FIRST_OF_OTHERS
        return place, self._areas[number - place]


def _blocks_of(cache: KVCache) -> Callable[[], Tensor]:
    # evaluated at each copy, as the storage is replaced after a shortage of memory
    return lambda: cache.storage.flatten(0, 1).view(torch.uint8)


def _states_of(storage: Tensor) -> Callable[[], Tensor]:
    items = storage.flatten(2).view(torch.uint8)
    return lambda: items
