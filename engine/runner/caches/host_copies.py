"""CpuCopies and CudaCopies: slots of host memory for KV blocks, and how blocks get there and back.

A slot has the block's rows of every cache (the model's, and a drafter's) one after the other, so a
copy is one call for each block and cache. The bytes of a block do not depend on what its layers
keep: latents, quantised keys and windows are all copied alike. Snapshots of recurrent states have
slots of their own, which are filled in the same way.

Of several ranks each has its own slots, for its part of each block, under the same numbers
(`engine.runner.ranked_runner.RankedCopies`).

On CUDA the timeline of a store, and of a step and a load that take the same block afterwards:

 host     step n waited for | store(block) | launch n+1, which writes the block
 stores   ................... copy --------> event
 device   ........................................ waits for the event | step n+1
 loads    ........................................ waits for the event | copy ----> event, polled

The scheduler stores a block when no step in flight uses it, so that the copy waits for nothing. On
the CPU copies are done when the call returns.
"""

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.runner.caches.cache_memory import pin, pinned_bytes, unpin
from engine.runner.caches.kv_cache import KVCache
from engine.runner.caches.state_cache import StateCache
from kernels.block_copies import copy_rows

logger = logging.getLogger("manta.engine")

FIRST_OF_OTHERS = 1 << 20  # the lowest number of a slot that another process owns
_QUEUE_BYTES = 8 << 30  # bytes of stores that may wait to be copied
_PIECE = 32  # blocks of a copy to the host after which a CUDA event is recorded
_PROBED = 64  # blocks whose loads are timed at the start
_WORTH_TIMING = 1 << 22  # bytes; copies of fewer bytes take the time of a launch

Pairs = Sequence[tuple[int, int]]


class HostSlots:
    """Slots of host memory, each for one item of the device: a KV block, or a snapshot.

    parts: functions that return the device memory of the items, uint8 [rows, items, bytes of a
        row] each.
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
        self.least = parts[0]().shape[1] if parts else 0  # items that always have memory
        self.num_bytes = sum(part().shape[0] * part().shape[2] for part in parts)
        size = count * self.num_bytes  # 0 bytes on a stage whose layers keep no keys
        if memory is None:
            memory = pinned_bytes(max(size, 1), device)
        else:
            pin(memory, device)
        self.memory = memory[:size]
        self.slots = self.memory.view(count, self.num_bytes)
        self._device = device
        self._others: dict[int, Tensor] = {}  # first slot of attached memory -> slots
        # first slot of own or attached memory -> its address
        self._addresses = {0: self.memory.data_ptr()}
        # first slot of attached memory -> finalizer that unpins the memory
        self._ends: dict[int, weakref.finalize[..., HostSlots]] = {}
        self._numbers = itertools.count(FIRST_OF_OTHERS, FIRST_OF_OTHERS)
        self._unpin_at_end(self.memory)

    @classmethod
    def of_blocks(
        cls,
        caches: Sequence[KVCache],
        count: int,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> "HostSlots":
        """Return slots for blocks of caches, which all have the same block ids."""
        slots = cls([_blocks_of(cache) for cache in caches], count, device, memory)
        slots.least = min(cache.least for cache in caches)
        return slots

    @classmethod
    def of_states(cls, states: StateCache, count: int, device: torch.device) -> "HostSlots":
        """Return slots for rows and snapshots of recurrent states."""
        return cls([_states_of(storage) for storage in states.storages], count, device)

    def attach(self, memory: memoryview) -> int:
        """Pin another process's slots of equal size; return the number of the first one.

        Called from any thread. Raises RuntimeError if the memory cannot be pinned.
        """
        other = torch.from_numpy(np.frombuffer(memory, np.uint8))
        pin(other, self._device)
        first = next(self._numbers)
        self._addresses[first] = other.data_ptr()
        self._others[first] = other.view(-1, self.num_bytes)
        self._ends[first] = self._unpin_at_end(other)
        return first

    def _unpin_at_end(self, memory: Tensor) -> "weakref.finalize[..., HostSlots]":
        """Return a finalizer that unpins the memory when these slots are freed or it is called.

        The end of the process does not run it.
        """
        end = weakref.finalize(self, unpin, memory, self._device)
        end.atexit = False
        return end

    def detach(self, first: int) -> None:
        """Forget attached slots, which no copy uses."""
        del self._others[first], self._addresses[first]
        self._ends.pop(first)()

    def slot(self, number: int) -> Tensor:
        """Return the bytes of a slot, uint8 [num_bytes]."""
        place = number % FIRST_OF_OTHERS
        return self.slots[number] if number == place else self._others[number - place][place]

    def address(self, number: int) -> int:
        """Return the address of a slot."""
        place = number % FIRST_OF_OTHERS
        return self._addresses[number - place] + place * self.num_bytes


def _blocks_of(cache: KVCache) -> Callable[[], Tensor]:
    # asked for each time, as an engine without memory gets other storage
    return lambda: cache.storage.flatten(0, 1).view(torch.uint8)


def _states_of(storage: Tensor) -> Callable[[], Tensor]:
    items = storage.flatten(2).view(torch.uint8)
    return lambda: items


def _ends(blocks: Iterable[int], states: Iterable[int]) -> frozenset[int]:
    """Return one set of numbers: n for block n, -1 - n for snapshot n."""
    return frozenset(blocks).union(-1 - slot for slot in states)


class CpuCopies:
    """The copies of an engine on the CPU (`engine.scheduling.memory.host_plan.HostCopies`).

    num_states: slots for snapshots that all ranks have, even if this one has no recurrent layer.
    """

    def __init__(
        self, blocks: HostSlots, states: HostSlots | None = None, num_states: int = 0
    ) -> None:
        self.blocks = blocks
        self.states = states
        self.num_states = num_states
        self._done: list[tuple[int, bool]] = []
        self._lost: frozenset[int] = frozenset()  # slots whose last store failed
        self.load_rate = self.store_seconds = self.load_seconds = 0.0

    @property
    def storing(self) -> bool:
        """Whether a copy to the host is in flight."""
        return False

    def room(self) -> int:
        return self.blocks.count

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        began = time.perf_counter()
        slots = _ends((slot for _, slot in pairs), (slot for _, slot in states))
        self._lost -= slots
        try:
            self._copy(self.blocks, pairs, to_host=True)
            if self.states is not None:
                self._copy(self.states, states, to_host=True)
        except Exception:
            logger.warning("KV blocks were not copied to the host", exc_info=True)
            self._lost |= slots
            return False
        self.store_seconds += time.perf_counter() - began
        return True

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        began = time.perf_counter()
        try:
            if self._lost & _ends((slot for slot, _ in pairs), (slot for slot, _ in states)):
                raise RuntimeError("they had not got there")
            self._copy(self.blocks, _reversed(pairs), to_host=False)
            if self.states is not None:
                self._copy(self.states, _reversed(states), to_host=False)
        except Exception:
            logger.warning("KV blocks were not loaded from the host", exc_info=True)
            self._done.append((ticket, False))
            return False
        seconds = time.perf_counter() - began
        self.load_seconds += seconds
        size = _size(self, pairs, states)
        if size >= _WORTH_TIMING:
            self.load_rate = size / seconds
        self._done.append((ticket, True))
        return True

    @torch.inference_mode()
    def _copy(self, slots: HostSlots, pairs: Pairs, *, to_host: bool) -> None:
        at, places = 0, [(item, slots.slot(slot)) for item, slot in pairs]
        for part in slots.parts:
            items = part()
            rows, _, width = items.shape
            for item, slot in places:
                place = slot[at : at + rows * width].view(rows, width)
                if to_host:
                    place.copy_(items[:, item])
                else:
                    items[:, item].copy_(place)
            at += rows * width

    def finished(self) -> list[tuple[int, bool]]:
        done, self._done = self._done, []
        return done

    def before(self, batch: Batch) -> None:
        """Do nothing, as all copies are done."""

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing, as all copies are done."""


def _reversed(pairs: Pairs) -> Pairs:
    return [(item, slot) for slot, item in pairs]


@dataclass(slots=True)
class _Copy:
    """A copy in flight, with the device items and host slots that it uses (`_ends`)."""

    ticket: int  # ticket of the load; 0 = a store
    items: frozenset[int]
    slots: frozenset[int]
    size: int  # bytes
    began: torch.cuda.Event
    done: torch.cuda.Event
    failed: bool = False


class CudaCopies:
    """The copies of an engine on CUDA (`engine.scheduling.memory.host_plan.HostCopies`).

    num_states: see `CpuCopies`.
    after_steps: whether loads wait for the steps in flight, which may still read blocks that were
        given back behind a window, or a snapshot.
    """

    def __init__(
        self,
        blocks: HostSlots,
        states: HostSlots | None,
        num_states: int,
        device: torch.device,
        *,
        after_steps: bool,
    ) -> None:
        self.blocks = blocks
        self.states = states
        self.num_states = num_states
        self._device = device
        self._after_steps = after_steps
        self.load_rate = self.store_seconds = self.load_seconds = 0.0
        # Each direction has its own copy engine.
        self._store_stream = torch.cuda.Stream(device)
        self._load_stream = torch.cuda.Stream(device)
        self._stores: deque[_Copy] = deque()
        self._loads: deque[_Copy] = deque()
        self._lost: frozenset[int] = frozenset()  # slots whose last store failed
        torch.cuda.synchronize(device)  # the caches are filled before the first copy
        self._probe()

    @property
    def storing(self) -> bool:
        """Whether a copy to the host is in flight."""
        self._take_stored()
        return bool(self._stores)

    def room(self) -> int:
        """Return how many further blocks may be queued, after removing finished stores."""
        self._take_stored()
        queued = sum(store.size for store in self._stores)
        return max(0, _QUEUE_BYTES - queued) // max(1, self.blocks.num_bytes)

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        slots = _ends((slot for _, slot in pairs), (slot for _, slot in states))
        pieces = [(pairs[at : at + _PIECE], ()) for at in range(0, len(pairs), _PIECE)]
        succeeded = True
        for piece, some in [*pieces, ((), states)]:
            if (piece or some) and succeeded:
                succeeded = self._store(piece, some)
        self._lost = self._lost - slots if succeeded else self._lost | slots
        return succeeded

    def _store(self, pairs: Pairs, states: Pairs) -> bool:
        store = self._begin(0, pairs, states, self._store_stream)
        store.failed = not self._copy(pairs, states, self._store_stream, to_host=True)
        store.done.record(self._store_stream)
        self._stores.append(store)  # even after a failure, as some copies may be in flight
        return not store.failed

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        stream = self._load_stream
        if self._after_steps:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        moved, states = _reversed(pairs), _reversed(states)
        self._order(
            stream,
            _ends((block for block, _ in moved), (snapshot for snapshot, _ in states)),
            _ends((slot for _, slot in moved), (slot for _, slot in states)),
        )
        load = self._begin(ticket, moved, states, stream)
        load.failed = bool(self._lost & load.slots) or not self._copy(
            moved, states, stream, to_host=False
        )
        load.done.record(stream)
        self._loads.append(load)
        return not load.failed

    def _begin(self, ticket: int, pairs: Pairs, states: Pairs, stream: torch.cuda.Stream) -> _Copy:
        """Begin a copy on a stream and return it. pairs, states: (item of the device, slot)."""
        items = _ends((item for item, _ in pairs), (item for item, _ in states))
        slots = _ends((slot for _, slot in pairs), (slot for _, slot in states))
        copy = _Copy(
            ticket, items, slots, _size(self, pairs, states), _timing_event(), _timing_event()
        )
        copy.began.record(stream)
        return copy

    def finished(self) -> list[tuple[int, bool]]:
        done = []
        while self._loads and self._loads[0].done.query():
            load = self._loads.popleft()
            seconds = load.began.elapsed_time(load.done) / 1000
            self.load_seconds += seconds
            if load.size >= _WORTH_TIMING and not load.failed and seconds:
                self.load_rate = load.size / seconds
            done.append((load.ticket, not load.failed))
        return done

    def before(self, batch: Batch) -> None:
        """Make the next step wait, on its stream, for stores of the blocks and states it writes.

        On ranks other than 0 it also waits for loads of what it reads, as rank 0 knows only the end
        of its own loads.
        """
        if not (self._stores or self._loads):
            return
        self._take_stored()
        blocks = {block for _, _, block in batch.new_blocks}
        blocks.update(block for prefix in batch.prefixes for block in prefix.blocks)
        states = {new.row for new in batch.new_rows}
        states.update(slot for _, slot in batch.saved_states)
        states.update(slot for _, slot in batch.resumed_states)
        used, stream = _ends(blocks, states), torch.cuda.current_stream(self._device)
        self._order(stream, used, ())
        for load in self._loads:
            if not load.items.isdisjoint(used):
                stream.wait_event(load.done)

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        self._take_stored()
        wanted = _ends(slots, states)
        return all(store.slots.isdisjoint(wanted) for store in self._stores)

    def wait(self) -> None:
        self._store_stream.synchronize()
        self._load_stream.synchronize()

    def _probe(self) -> None:
        """Measure the rate of loads, with the first blocks of caches that nothing uses yet."""
        count = min(_PROBED, self.blocks.least, self.blocks.count)
        pairs = [(number, number) for number in range(count)]
        self.store(pairs)  # the loads below then write the same bytes
        for ticket in range(2):
            self.load(ticket, pairs)
        self.wait()
        self.finished()
        self._take_stored()
        self.store_seconds = self.load_seconds = 0.0

    def _take_stored(self) -> None:
        """Remove the finished copies from `_stores`, and add their time to `store_seconds`."""
        while self._stores and self._stores[0].done.query():
            store = self._stores.popleft()
            self.store_seconds += store.began.elapsed_time(store.done) / 1000

    def _order(
        self, stream: torch.cuda.Stream, items: Collection[int], slots: Collection[int]
    ) -> None:
        """Make a stream wait for the stores from these blocks or states, or to these slots."""
        for store in self._stores:
            if not (store.items.isdisjoint(items) and store.slots.isdisjoint(slots)):
                stream.wait_event(store.done)

    def _copy(
        self, pairs: Pairs, states: Pairs, stream: torch.cuda.Stream, *, to_host: bool
    ) -> bool:
        """Enqueue copies between (item of the device, slot); return False after an error."""
        try:
            _enqueue(self.blocks, pairs, stream.cuda_stream, to_host)
            if self.states is not None:
                _enqueue(self.states, states, stream.cuda_stream, to_host)
        except Exception:
            logger.warning("KV blocks were not copied", exc_info=True)
            return False
        return True


def _enqueue(slots: HostSlots, pairs: Pairs, stream: int, to_host: bool) -> None:
    at, addresses = 0, [(item, slots.address(slot)) for item, slot in pairs]
    for part in slots.parts:
        items = part()
        (rows, _, width), first, pitch = items.shape, items.data_ptr(), items.stride(0)
        if rows and to_host:
            places = [(at + address, first + item * width) for item, address in addresses]
            copy_rows(places, width, pitch, width, rows, stream)
        elif rows:
            places = [(first + item * width, at + address) for item, address in addresses]
            copy_rows(places, pitch, width, width, rows, stream)
        at += rows * width


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


Copies = CpuCopies | CudaCopies


def _size(copies: Copies, pairs: Pairs, states: Pairs) -> int:
    """Return the bytes of the blocks in `pairs` and the snapshots in `states`."""
    of_states = 0 if copies.states is None else len(states) * copies.states.num_bytes
    return len(pairs) * copies.blocks.num_bytes + of_states


def host_copies(
    caches: Sequence[KVCache],
    num_blocks: int,
    num_states: int,
    device: torch.device,
    *,
    after_steps: bool,
    memory: Tensor | None = None,
) -> Copies:
    """Return the copies of caches to slots, whose memory is taken now.

    caches: the model's caches, which may have states, and others with the same block ids.
    after_steps: see `CudaCopies`.
    memory: host memory to use for the slots of blocks; None = new memory.
    Raises RuntimeError if the memory cannot be pinned.
    """
    blocks = HostSlots.of_blocks(caches, num_blocks, device, memory)
    own = caches[0].states
    states = None if own is None else HostSlots.of_states(own, num_states, device)
    if device.type == "cuda":
        return CudaCopies(blocks, states, num_states, device, after_steps=after_steps)
    return CpuCopies(blocks, states, num_states)
