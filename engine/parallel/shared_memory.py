"""SharedMemoryGroup: ranks that are processes of one machine, whose sums meet in shared memory.

The memory is a file without a name that rank 0 makes and the others inherit. It has a line of
counters for each rank, and two slots for each rank that take turns:

    counters | rank 0: meetings, failed | rank 1: meetings, failed | ...
    slots    | turn 0: rank 0, rank 1, ... | turn 1: rank 0, rank 1, ...

In a meeting each rank copies its piece into its slot, counts, waits until all have counted as many,
and reads all slots. One wait is enough. A rank writes into the slots of meeting k again in meeting
k + 2, and has then seen all others count k + 1, which they do when they have read those of k.
"""

import logging
import math
import mmap
import os
import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.parallel.group import TensorParallelGroup

logger = logging.getLogger("manta.engine")

SLOT = 1 << 22  # bytes of a piece; what is larger goes in several
_LINE = 64  # bytes of a cache line, so that a rank's counting disturbs no other
_LOOKS = 4000  # before a rank lets others have its core: longer than two ranks that both run differ
_YIELDS = 2000  # of these before it sleeps
_SLEEP, _NAP = 5e-5, 5e-3  # seconds
_LATE = 5.0
_MEETINGS, _FAILED, _ROUND = 0, 1, 2  # words of a line; rank 0's has the round


class RankFailed(Exception):
    """Another rank's step has failed, so that this one cannot come to its end."""


@dataclass(slots=True)
class _State:
    memory: mmap.mmap
    words: memoryview  # int64, of all lines
    slots: list[list[Tensor]]  # [2][size] uint8
    meetings: int = 0
    round: int = 0
    fence: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class SharedMemoryGroup(TensorParallelGroup):
    """state: see `open`."""

    state: _State | None = None

    @classmethod
    def open(cls, rank: int, size: int, descriptor: int) -> "SharedMemoryGroup":
        """descriptor: of a file that all ranks have open; it can be closed afterwards. The file's
        pages are taken when they are first used."""
        length = size * (_LINE + 2 * SLOT)
        os.ftruncate(descriptor, length)
        memory = mmap.mmap(descriptor, length)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        begin = size * _LINE
        slots = list(whole[begin:].view(2 * size, SLOT))
        words = memoryview(memory)[:begin].cast("q")
        return cls(rank, size, _State(memory, words, [slots[:size], slots[size:]]))

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        step = SLOT // x.itemsize
        for at in range(0, len(flat), step):
            piece = flat[at : at + step]
            # In the order of ranks, on every rank.
            first, second, *others = self._meet(piece)
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)
        return x

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        rows = x.shape[0]
        widths = [end - begin for begin, end in (self.share(total, r) for r in range(self.size))]
        flat, step = x.reshape(-1), SLOT // x.itemsize
        parts = [x.new_empty(rows * width) for width in widths] if self.rank == 0 else []
        for at in range(0, rows * widths[0], step):  # rank 0 has the most
            met = self._meet(flat[at : at + step])
            for part, piece in zip(parts, met, strict=False):
                mine = part[at : at + step]
                mine.copy_(piece[: len(mine)])
        if self.rank:
            return x
        return torch.cat([part.view(rows, -1) for part in parts if len(part)], 1)

    def broadcast(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        step = SLOT // x.itemsize
        for at in range(0, len(flat), step):
            piece = flat[at : at + step]
            first, *_ = self._meet(piece)
            if self.rank:
                piece.copy_(first)
        return x

    def least(self, number: int) -> int:
        # Asked at the start, where a rank may read weights for minutes.
        return min(int(each) for each in self._meet(torch.tensor([number]), math.inf))

    def _meet(self, piece: Tensor, late: float = _LATE) -> list[Tensor]:
        """What each rank brought, like `piece` but for its length; to be read before the next
        meeting but one. late: seconds until the log names who is waited for. Raises RankFailed."""
        state = self.state
        assert state is not None
        slots = state.slots[state.meetings & 1]
        size = piece.nbytes
        slots[self.rank][:size].view(piece.dtype).copy_(piece)
        state.meetings += 1
        with state.fence:  # the piece is written before it is counted, on any processor
            state.words[self.rank * _LINE // 8 + _MEETINGS] = state.meetings
        for rank in range(self.size):
            if rank != self.rank:
                self._wait(state, rank, late)
        with state.fence:
            return [slot[:size].view(piece.dtype) for slot in slots]

    def _wait(self, state: _State, rank: int, late: float) -> None:
        words, at, wanted = state.words, rank * _LINE // 8 + _MEETINGS, state.meetings
        for _ in range(_LOOKS):
            if words[at] >= wanted:
                return
        for _ in range(_YIELDS):
            os.sched_yield()
            if words[at] >= wanted:
                return
            self._look_for_failures(state)
        began = time.monotonic()
        while words[at] < wanted:
            self._look_for_failures(state)
            waited = time.monotonic() - began
            # Longer and longer: one that waits for ever shall not look as if it computed.
            time.sleep(min(max(_SLEEP, waited / 20), _NAP))
            if waited > late:
                late *= 4
                logger.warning("rank %d of %d is late by %.0f s", rank, self.size, waited)

    def _look_for_failures(self, state: _State) -> None:
        if state.words[_ROUND] != state.round:
            raise RankFailed("the step was given up")
        for rank in range(self.size):
            if state.words[rank * _LINE // 8 + _FAILED] > state.round:
                raise RankFailed(f"the step has failed on rank {rank} of {self.size}")

    # ---- after a step that failed

    def fail(self) -> None:
        """This rank's step has failed: let those who wait for it know."""
        assert self.state is not None
        self.state.words[self.rank * _LINE // 8 + _FAILED] = self.state.round + 1

    def begin_round(self) -> None:
        """On rank 0: end all waits of the others for this round."""
        assert self.state is not None and self.rank == 0
        self.state.words[_ROUND] += 1

    def join_round(self) -> None:
        """With no other rank in a meeting or about to be: start counting anew."""
        state = self.state
        assert state is not None
        state.round = state.words[_ROUND]
        state.meetings = 0
        state.words[self.rank * _LINE // 8 + _MEETINGS] = 0
