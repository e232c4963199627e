"""CpuCopies and CudaCopies: copies of KV blocks between the device and slots of host memory.

Slots for other replicas on the machine may also be GPU memory (`HostSlots.add_device`).

A slot has a block's bytes of every cache (the model's, and a drafter's) one after the other, so a
copy is one call for each block and cache. Latents, quantised KV and windows are all copied as
bytes. Snapshots of recurrent states have separate slots, which are filled in the same way.

Each of several ranks has slots for its part of each block, with the same slot numbers
(`engine.runner.ranked_runner.RankedCopies`).

On CUDA the timeline of a store, and of a step and a load that write the same block afterwards:

 host     step n waited for | store(block) | launch n+1, which writes the block
 stores   ................... copy --------> event
 device   ........................................ waits for the event | step n+1
 loads    ........................................ waits for the event | copy ----> event, polled

The scheduler stores a block when no step in flight uses it, so that the copy can begin at once. On
the CPU copies are done when the call returns.
"""

import ctypes
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import Batch
from engine.runner.caches.cache_memory import pin, pinned_bytes, unpin
from engine.runner.caches.kv_cache import KVCache
from engine.runner.caches.state_cache import StateCache
from kernels.block_copies import copy_rows

logger = logging.getLogger("manta.engine")

FIRST_OF_OTHERS = 1 << 20  # the lowest number of a slot that another process owns
_QUEUE_BYTES = 8 << 30  # maximum bytes of queued stores
_PIECE = 32  # number of blocks of a copy to the host after which a CUDA event is recorded
_PROBED = 64  # number of blocks whose loads are timed at the start
# bytes; smaller copies are dominated by launch overhead, so they are not timed
_WORTH_TIMING = 1 << 22

Pairs = Sequence[tuple[int, int]]


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


def _ends(blocks: Collection[int], states: Collection[int]) -> frozenset[int]:
    """Return blocks and snapshots as one set of numbers: n for block n, -1 - n for snapshot n."""
    numbers = frozenset(blocks)
    return numbers.union(-1 - slot for slot in states) if states else numbers


def _columns(pairs: Pairs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first elements of all pairs, and the second ones."""
    firsts, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    return firsts, seconds


class CpuCopies:
    """The copies of an engine on the CPU (`engine.scheduling.memory.host_plan.HostCopies`).

    num_states: number of slots for snapshots, equal on all ranks, even if this rank has no
        recurrent layer.
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
        slots = _ends(_columns(pairs)[1], _columns(states)[1])
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
            if self._lost & _ends(_columns(pairs)[0], _columns(states)[0]):
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

    def ending(self) -> dict[int, float]:
        return {ticket: 0.0 for ticket, succeeded in self._done if succeeded}

    def before(self, batch: Batch) -> None:
        """Do nothing, as all copies are done."""

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing, as all copies are done."""

    def stores_end(self) -> Callable[[], None]:
        return self.wait

    def loads_end(self) -> Callable[[], None]:
        return self.wait


def _reversed(pairs: Pairs) -> Pairs:
    return [(item, slot) for slot, item in pairs]


@dataclass
class _Copy:
    """A copy in flight, or a piece of one.

    ticket: ticket of the load; 0 = a store.
    blocks, block_slots: the blocks, and the slot of each.
    states, state_slots: the snapshots, and the slot of each.
    size: bytes.
    """

    ticket: int
    blocks: Sequence[int]
    block_slots: Sequence[int]
    states: Sequence[int]
    state_slots: Sequence[int]
    size: int
    began: torch.cuda.Event
    done: torch.cuda.Event
    failed: bool = False
    last: bool = True  # whether it is the last piece of its load

    # computed only if another copy or a step has to be compared with this one

    @cached_property
    def items(self) -> frozenset[int]:
        """The numbers of its device items (see `_ends`)."""
        return _ends(self.blocks, self.states)

    @cached_property
    def slots(self) -> frozenset[int]:
        """The numbers of its slots (see `_ends`)."""
        return _ends(self.block_slots, self.state_slots)


class CudaCopies:
    """The copies of an engine on CUDA (`engine.scheduling.memory.host_plan.HostCopies`).

    num_states: see `CpuCopies`.
    after_steps: whether loads wait for the steps in flight, which may still read the blocks that a
        sliding window has passed, or a snapshot.
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
        torch.cuda.synchronize(device)  # the zeroing of caches is done before the first copy
        self._probe()

    @property
    def storing(self) -> bool:
        """Whether a copy to the host is in flight."""
        self._take_stored()
        return bool(self._stores)

    def room(self) -> int:
        """Remove finished stores from the queue, and return how many more blocks may be queued."""
        self._take_stored()
        queued = sum(store.size for store in self._stores)
        return max(0, _QUEUE_BYTES - queued) // max(1, self.blocks.num_bytes)

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        self._take_stored()
        (blocks, slots), (snapshots, places) = _columns(pairs), _columns(states)
        if self._loads:
            items = _ends(blocks, snapshots)
            for load in self._loads:
                if not load.items.isdisjoint(items):
                    self._store_stream.wait_event(load.done)
        pieces = self._pieces(0, blocks, slots, snapshots, places)
        succeeded = self._begin(pieces, self._store_stream, self._stores, to_host=True)
        if not succeeded:
            self._lost |= _ends(slots, places)
        elif self._lost:
            self._lost -= _ends(slots, places)
        return succeeded

    def _begin(
        self, pieces: list[_Copy], stream: torch.cuda.Stream, queue: deque[_Copy], *, to_host: bool
    ) -> bool:
        """Enqueue the pieces of a copy until one fails; return whether all were enqueued."""
        for piece in pieces:
            piece.began.record(stream)
            piece.failed = not self._copy(piece, stream, to_host=to_host)
            piece.done.record(stream)
            # kept even after a failure, as some of its copies may be in flight
            queue.append(piece)
            if piece.failed:
                piece.last = True
                return False
        return True

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        stream = self._load_stream
        if self._after_steps:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        (slots, blocks), (places, snapshots) = _columns(pairs), _columns(states)
        if self._stores:
            self._order(stream, _ends(blocks, snapshots), _ends(slots, places))
        if self._lost and not self._lost.isdisjoint(_ends(slots, places)):
            lost = self._piece(ticket, (), (), (), ())
            lost.began.record(stream)
            lost.done.record(stream)
            lost.failed = True
            self._loads.append(lost)
            return False
        pieces = self._pieces(ticket, blocks, slots, snapshots, places)
        return self._begin(pieces, stream, self._loads, to_host=False)

    def _pieces(
        self,
        ticket: int,
        blocks: Sequence[int],
        slots: Sequence[int],
        states: Sequence[int],
        state_slots: Sequence[int],
    ) -> list[_Copy]:
        """Return the pieces of a new copy, whose progress is seen by their events.

        The parameters are those of `_Copy`.
        """
        size = max(1, len(blocks)) if self.blocks.on_device(slots) else _PIECE
        starts = range(0, len(blocks), size)
        parts = [(blocks[at : at + size], slots[at : at + size], (), ()) for at in starts]
        pieces = [self._piece(ticket, *part) for part in parts]
        if states:
            pieces.append(self._piece(ticket, (), (), states, state_slots))
        for piece in pieces[:-1]:
            piece.last = False
        return pieces

    def _piece(
        self,
        ticket: int,
        blocks: Sequence[int],
        slots: Sequence[int],
        states: Sequence[int],
        state_slots: Sequence[int],
    ) -> _Copy:
        size = _size(self, blocks, states)
        events = _timing_event(), _timing_event()
        return _Copy(ticket, blocks, slots, states, state_slots, size, *events)

    def finished(self) -> list[tuple[int, bool]]:
        done = []
        while self._loads and self._loads[0].done.query():
            load = self._loads.popleft()
            seconds = load.began.elapsed_time(load.done) / 1000
            self.load_seconds += seconds
            if load.size >= _WORTH_TIMING and not load.failed and seconds:
                self.load_rate = load.size / seconds
            if load.last:
                done.append((load.ticket, not load.failed))
        return done

    def ending(self) -> dict[int, float]:
        left: dict[int, float] = {}
        size = 0
        for load in self._loads:
            # an event before it may be one that waits for steps or stores
            if not (load.ticket in left or load.began.query()):
                break
            size += 0 if load.done.query() else load.size
            left[load.ticket] = size / self.load_rate if self.load_rate else inf
            if load.failed:
                del left[load.ticket]
        return left

    def before(self, batch: Batch) -> None:
        """Make the next step wait on its stream for stores of the blocks and states that it writes.

        The step also waits for unfinished loads of the blocks and states that it reads. These are
        loads on ranks other than 0, as rank 0 knows only when its own loads end, and loads of
        blocks that come from another replica.
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

    def warm_device(self, slot: int) -> None:
        """Compile the kernels of copies to device slots, with an unused block."""
        self.store([(0, slot)])
        self.load(0, [(slot, 0)])
        self.wait()
        self.finished()
        self._take_stored()

    def wait(self) -> None:
        self._store_stream.synchronize()
        self._load_stream.synchronize()

    def stores_end(self) -> Callable[[], None]:
        return _end_of(self._stores)

    def loads_end(self) -> Callable[[], None]:
        return _end_of(self._loads)

    def _probe(self) -> None:
        """Measure the load rate with the first blocks, before any request uses the caches."""
        count = min(_PROBED, self.blocks.least, self.blocks.count)
        pairs = [(number, number) for number in range(count)]
        self.store(pairs)  # so that the loads below write the same bytes back
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
        """Make a stream wait for stores that involve the given items or slots.

        items, slots: numbers as in `_ends`.
        """
        for store in self._stores:
            if not (store.items.isdisjoint(items) and store.slots.isdisjoint(slots)):
                stream.wait_event(store.done)

    def _copy(self, copy: _Copy, stream: torch.cuda.Stream, *, to_host: bool) -> bool:
        """Enqueue the copies between device items and slots; return False after an error."""
        try:
            _enqueue(self.blocks, copy.blocks, copy.block_slots, stream, to_host)
            if self.states is not None:
                _enqueue(self.states, copy.states, copy.state_slots, stream, to_host)
        except Exception:
            logger.warning("KV blocks were not copied", exc_info=True)
            return False
        return True


def _enqueue(
    slots: HostSlots,
    chosen: Sequence[int],
    numbers: Sequence[int],
    stream: torch.cuda.Stream,
    to_host: bool,
) -> None:
    """Enqueue copies between device items and slots.

    chosen, numbers: the items, and the slot of each.
    """
    if not chosen:
        return
    on_device, at = slots.on_device(numbers), 0
    blocks, places = np.array(chosen, np.int64), slots.addresses(numbers)
    for part in slots.parts:
        items = part()
        (rows, _, width), first, pitch = items.shape, items.data_ptr(), items.stride(0)
        ends = [first + blocks * width, at + places]
        sizes = pitch, width, width, rows
        if to_host:
            ends, sizes = ends[::-1], (width, pitch, width, rows)
        addresses = np.stack(ends, 1)
        if rows and on_device:
            # imported here because it imports Triton
            from kernels.device_copies import copy_device_rows

            copy_device_rows(addresses, *sizes, stream)
        elif rows:
            copy_rows(addresses.tolist(), *sizes, stream.cuda_stream)
        at += rows * width


def _end_of(copies: Sequence[_Copy]) -> Callable[[], None]:
    """Return a function that waits for copies of one stream, the last of which ends last."""
    return copies[-1].done.synchronize if copies else lambda: None


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


Copies = CpuCopies | CudaCopies


def _size(copies: Copies, blocks: Sequence[object], states: Sequence[object]) -> int:
    """Return the bytes of as many blocks and snapshots."""
    of_states = 0 if copies.states is None else len(states) * copies.states.num_bytes
    return len(blocks) * copies.blocks.num_bytes + of_states


def host_copies(
    caches: Sequence[KVCache],
    num_blocks: int,
    num_states: int,
    device: torch.device,
    *,
    after_steps: bool,
    memory: Tensor | None = None,
) -> Copies:
    """Allocate host slots for caches, and return the object that copies to and from them.

    caches: the model's cache, which may have recurrent states, and others with the same block ids.
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
