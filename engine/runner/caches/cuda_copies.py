"""CudaCopies: asynchronous copies of KV blocks between a GPU and slots of host memory.

The timeline of a store, and of a step and a load that write the same block afterwards:

 host     step n waited for | store(block) | launch n+1, which writes the block
 stores   ................... copy --------> event
 device   ........................................ waits for the event | step n+1
 loads    ........................................ waits for the event | copy ----> event, polled

The scheduler stores a block when no step in flight uses it, so that the copy can begin at once.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch

from engine.batch import Batch
from engine.runner.caches.copied_items import WORTH_TIMING, CopiedItems, Pairs, item_numbers
from engine.runner.caches.host_slots import HostSlots
from kernels.block_copies import copy_rows

logger = logging.getLogger("manta.engine")

_QUEUE_BYTES = 8 << 30  # maximum bytes of queued stores
_PIECE = 32  # number of blocks of a copy to the host after which a CUDA event is recorded
_PROBED = 64  # number of blocks whose loads are timed at the start


@dataclass
class _Copy:
    """A copy in flight, or a piece of one.

    ticket: ticket of the load; 0 = a store.
    size: bytes.
    """

    ticket: int
    copied: CopiedItems
    size: int
    began: torch.cuda.Event
    done: torch.cuda.Event
    failed: bool = False
    last: bool = True  # whether it is the last piece of its load


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
        copied = CopiedItems.stored(pairs, states)
        for load in self._loads:
            if not load.copied.items.isdisjoint(copied.items):
                self._store_stream.wait_event(load.done)
        pieces = self._pieces(0, copied)
        succeeded = self._begin(pieces, self._store_stream, self._stores, to_host=True)
        if not succeeded:
            self._lost |= copied.slots
        elif self._lost:
            self._lost -= copied.slots
        return succeeded

    def _begin(
        self, pieces: list[_Copy], stream: torch.cuda.Stream, queue: deque[_Copy], *, to_host: bool
    ) -> bool:
        """Enqueue the pieces of a copy until one fails; return whether all were enqueued."""
        for piece in pieces:
            piece.began.record(stream)
            piece.failed = not self._copy(piece.copied, stream, to_host=to_host)
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
        copied = CopiedItems.loaded(pairs, states)
        if self._stores:
            self._order(stream, copied.items, copied.slots)
        if self._lost and not self._lost.isdisjoint(copied.slots):
            lost = self._piece(ticket, CopiedItems())
            lost.began.record(stream)
            lost.done.record(stream)
            lost.failed = True
            self._loads.append(lost)
            return False
        pieces = self._pieces(ticket, copied)
        return self._begin(pieces, stream, self._loads, to_host=False)

    def _pieces(self, ticket: int, copied: CopiedItems) -> list[_Copy]:
        """Return the pieces of a new copy, whose progress is seen by their events."""
        on_device = self.blocks.on_device(copied.block_slots)
        size = len(copied.blocks) if on_device else _PIECE
        pieces = [self._piece(ticket, piece) for piece in copied.pieces(size)]
        for piece in pieces[:-1]:
            piece.last = False
        return pieces

    def _piece(self, ticket: int, copied: CopiedItems) -> _Copy:
        size = copied.num_bytes(self.blocks, self.states)
        return _Copy(ticket, copied, size, _timing_event(), _timing_event())

    def finished(self) -> list[tuple[int, bool]]:
        done = []
        while self._loads and self._loads[0].done.query():
            load = self._loads.popleft()
            seconds = load.began.elapsed_time(load.done) / 1000
            self.load_seconds += seconds
            if load.size >= WORTH_TIMING and not load.failed and seconds:
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
        used, stream = item_numbers(blocks, states), torch.cuda.current_stream(self._device)
        self._order(stream, used, ())
        for load in self._loads:
            if not load.copied.items.isdisjoint(used):
                stream.wait_event(load.done)

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        self._take_stored()
        wanted = item_numbers(slots, states)
        return all(store.copied.slots.isdisjoint(wanted) for store in self._stores)

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

        items, slots: numbers as of `item_numbers`.
        """
        for store in self._stores:
            copied = store.copied
            if not (copied.items.isdisjoint(items) and copied.slots.isdisjoint(slots)):
                stream.wait_event(store.done)

    def _copy(self, copied: CopiedItems, stream: torch.cuda.Stream, *, to_host: bool) -> bool:
        """Enqueue the copies between device items and slots; return False after an error."""
        try:
            _enqueue(self.blocks, copied.blocks, copied.block_slots, stream, to_host)
            if self.states is not None:
                _enqueue(self.states, copied.states, copied.state_slots, stream, to_host)
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
