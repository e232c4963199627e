"""CpuCopies and CudaCopies: slots of host memory for KV blocks, and how blocks get there and back.

A slot has the block's rows of every cache (the model's, and a drafter's) one after the other, so a
copy is one call for each block and cache. The bytes of a block do not depend on what its layers
keep: latents, quantised keys and windows are all copied alike.

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

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.runner.caches.cache_memory import pinned_bytes
from engine.runner.caches.kv_cache import KVCache
from kernels.block_copies import copy_rows

logger = logging.getLogger("manta.engine")

_QUEUE_BYTES = 8 << 30  # bytes of stores that may wait to be copied
_PIECE = 32  # blocks between two events
_PROBED = 64  # blocks whose loads are timed at the start
_WORTH_TIMING = 8  # blocks; the time of fewer is that of the launch


class HostSlots:
    """The slots of a host tier, as tensors over one piece of host memory.

    caches: the caches whose blocks are copied; all have the same block ids.
    Raises RuntimeError if the memory cannot be pinned.
    """

    def __init__(self, caches: Sequence[KVCache], count: int, device: torch.device) -> None:
        self.caches = caches
        self.count = count
        self.shapes = [_rows(cache) for cache in caches]
        self.block_bytes = sum(rows * width for rows, width in self.shapes)
        self.memory = pinned_bytes(count * self.block_bytes, device)
        self.slots = self.memory.view(count, self.block_bytes)


def _rows(cache: KVCache) -> tuple[int, int]:
    """Return the number of rows of a cache's block, and their bytes."""
    slots, tensors, _, width = cache.storage.shape
    return slots * tensors, width * cache.storage.element_size()


class CpuCopies:
    """The copies of an engine on the CPU (`engine.scheduling.host_tier.HostCopies`)."""

    def __init__(self, slots: HostSlots) -> None:
        self.slots = slots
        self._done: list[tuple[int, bool]] = []
        self._lost: set[int] = set()  # slots whose last store failed
        self.load_rate = self.store_seconds = self.load_seconds = 0.0

    def room(self) -> int:
        return self.slots.count

    def store(self, pairs: Sequence[tuple[int, int]]) -> bool:
        began = time.perf_counter()
        slots = {slot for _, slot in pairs}
        self._lost -= slots
        try:
            self._copy(pairs, to_host=True)
        except Exception:
            logger.warning("KV blocks were not copied to the host", exc_info=True)
            self._lost |= slots
            return False
        self.store_seconds += time.perf_counter() - began
        return True

    def load(self, ticket: int, pairs: Sequence[tuple[int, int]]) -> bool:
        began = time.perf_counter()
        try:
            if not self._lost.isdisjoint(slot for slot, _ in pairs):
                raise RuntimeError("they had not got there")
            self._copy([(block, slot) for slot, block in pairs], to_host=False)
        except Exception:
            logger.warning("KV blocks were not loaded from the host", exc_info=True)
            self._done.append((ticket, False))
            return False
        seconds = time.perf_counter() - began
        self.load_seconds += seconds
        if len(pairs) >= _WORTH_TIMING:
            self.load_rate = len(pairs) * self.slots.block_bytes / seconds
        self._done.append((ticket, True))
        return True

    @torch.inference_mode()
    def _copy(self, pairs: Sequence[tuple[int, int]], *, to_host: bool) -> None:
        at = 0
        for cache, (rows, width) in zip(self.slots.caches, self.slots.shapes, strict=True):
            blocks = cache.storage.view(torch.uint8).view(rows, cache.num_blocks, width)
            slots = self.slots.slots[:, at : at + rows * width]
            for block, slot in pairs:
                place = slots[slot].view(rows, width)
                if to_host:
                    place.copy_(blocks[:, block])
                else:
                    blocks[:, block].copy_(place)
            at += rows * width

    def finished(self) -> list[tuple[int, bool]]:
        done, self._done = self._done, []
        return done

    def before(self, batch: Batch) -> None:
        """Do nothing, as all copies are done."""

    def wait(self) -> None:
        """Do nothing, as all copies are done."""


@dataclass(slots=True)
class _Store:
    """A piece of a store in flight."""

    blocks: frozenset[int]
    slots: frozenset[int]
    began: torch.cuda.Event
    done: torch.cuda.Event


@dataclass(slots=True)
class _Load:
    ticket: int
    blocks: frozenset[int]
    began: torch.cuda.Event
    done: torch.cuda.Event
    failed: bool = False


class CudaCopies:
    """The copies of an engine on CUDA (`engine.scheduling.host_tier.HostCopies`).

    after_steps: whether loads wait for the steps in flight, which may still read blocks that were
        given back behind a window.
    """

    def __init__(self, slots: HostSlots, device: torch.device, *, after_steps: bool) -> None:
        self.slots = slots
        self._device = device
        self._after_steps = after_steps
        self.load_rate = self.store_seconds = self.load_seconds = 0.0
        # Each direction has its own copy engine.
        self._store_stream = torch.cuda.Stream(device)
        self._load_stream = torch.cuda.Stream(device)
        self._stores: deque[_Store] = deque()
        self._loads: deque[_Load] = deque()
        self._lost: set[int] = set()  # slots whose last store failed
        torch.cuda.synchronize(device)  # the caches are filled before the first copy
        self._probe()

    def room(self) -> int:
        self._take_stored()
        queued = sum(len(store.blocks) for store in self._stores)
        return max(0, _QUEUE_BYTES // self.slots.block_bytes - queued)

    def store(self, pairs: Sequence[tuple[int, int]]) -> bool:
        stream = self._store_stream
        for first in range(0, len(pairs), _PIECE):
            piece = pairs[first : first + _PIECE]
            began, done = _event(), _event()
            began.record(stream)
            succeeded = self._copy(piece, stream, to_host=True)
            done.record(stream)
            # noted even after a failure, as some of its copies may be in flight
            blocks, slots = zip(*piece, strict=True)
            self._stores.append(_Store(frozenset(blocks), frozenset(slots), began, done))
            if not succeeded:
                self._lost.update(slot for _, slot in pairs)
                return False
        self._lost.difference_update(slot for _, slot in pairs)
        return True

    def load(self, ticket: int, pairs: Sequence[tuple[int, int]]) -> bool:
        stream = self._load_stream
        if self._after_steps:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        slots, blocks = zip(*pairs, strict=True)
        self._order(stream, frozenset(blocks), frozenset(slots))
        load = _Load(ticket, frozenset(blocks), _event(), _event())
        load.began.record(stream)
        moved = [(block, slot) for slot, block in pairs]
        lost = not self._lost.isdisjoint(slots)
        load.failed = lost or not self._copy(moved, stream, to_host=False)
        load.done.record(stream)
        self._loads.append(load)
        return not load.failed

    def finished(self) -> list[tuple[int, bool]]:
        done = []
        while self._loads and self._loads[0].done.query():
            load = self._loads.popleft()
            seconds = load.began.elapsed_time(load.done) / 1000
            self.load_seconds += seconds
            if len(load.blocks) >= _WORTH_TIMING and not load.failed and seconds:
                self.load_rate = len(load.blocks) * self.slots.block_bytes / seconds
            done.append((load.ticket, not load.failed))
        return done

    def before(self, batch: Batch) -> None:
        """Let a step that is about to be launched wait for stores of blocks that it writes.

        On other ranks than 0 it also waits for loads of blocks that it uses, which rank 0 has seen
        only its own end of.
        """
        if not (self._stores or self._loads):
            return
        self._take_stored()
        used = {block for _, _, block in batch.new_blocks}
        used.update(block for prefix in batch.prefixes for block in prefix.blocks)
        stream = torch.cuda.current_stream(self._device)
        self._order(stream, used, ())
        for load in self._loads:
            if not load.blocks.isdisjoint(used):
                stream.wait_event(load.done)

    def wait(self) -> None:
        self._store_stream.synchronize()
        self._load_stream.synchronize()

    def _probe(self) -> None:
        """Measure the rate of loads, with the first blocks of caches that nothing uses yet."""
        count = min(_PROBED, self.slots.caches[0].num_blocks, self.slots.count)
        pairs = [(number, number) for number in range(count)]
        self.store(pairs)  # so that what comes back is what was there
        for ticket in range(2):
            self.load(ticket, pairs)
        self.wait()
        self.finished()
        self._take_stored()
        self.store_seconds = self.load_seconds = 0.0

    def _take_stored(self) -> None:
        while self._stores and self._stores[0].done.query():
            store = self._stores.popleft()
            self.store_seconds += store.began.elapsed_time(store.done) / 1000

    def _order(
        self, stream: torch.cuda.Stream, blocks: Collection[int], slots: Collection[int]
    ) -> None:
        """Let a stream wait for the stores from these blocks or to these slots."""
        for store in self._stores:
            if not (store.blocks.isdisjoint(blocks) and store.slots.isdisjoint(slots)):
                stream.wait_event(store.done)

    def _copy(
        self, pairs: Sequence[tuple[int, int]], stream: torch.cuda.Stream, *, to_host: bool
    ) -> bool:
        """Enqueue the copies of blocks and slots; return False after an error."""
        handle, memory = stream.cuda_stream, self.slots.memory.data_ptr()
        try:
            at = 0
            for cache, (rows, width) in zip(self.slots.caches, self.slots.shapes, strict=True):
                pool, pitch = cache.storage.data_ptr(), cache.num_blocks * width
                for block, slot in pairs:
                    place = pool + block * width
                    other = memory + slot * self.slots.block_bytes + at
                    if to_host:
                        copy_rows(other, width, place, pitch, width, rows, handle)
                    else:
                        copy_rows(place, pitch, other, width, width, rows, handle)
                at += rows * width
        except Exception:
            logger.warning("KV blocks were not copied", exc_info=True)
            return False
        return True


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


Copies = CpuCopies | CudaCopies


def host_copies(
    caches: Sequence[KVCache], count: int, device: torch.device, *, after_steps: bool
) -> Copies:
    """Return the copies of caches to `count` slots, whose memory is taken now.

    caches, after_steps: see `HostSlots` and `CudaCopies`.
    Raises RuntimeError if the memory cannot be pinned.
    """
    slots = HostSlots(caches, count, device)
    if device.type == "cuda":
        return CudaCopies(slots, device, after_steps=after_steps)
    return CpuCopies(slots)
