"""SharedMemoryGroup: ranks that are processes on one machine, with all-reduce in shared memory.

The memory is an unnamed file that rank 0 creates and the others inherit. The file has a cache line
of counters for each rank, and two slots for each rank, used alternately:

 counters | rank 0: meetings, failed | rank 1: meetings, failed | ...
 slots    | turn 0: rank 0, rank 1, ... | turn 1: rank 0, rank 1, ...

A meeting is one all-gather. Each rank copies its piece into its slot, increments its counter, waits
until all counters are as high, and reads all slots. One wait is enough: a rank reuses the slots of
meeting k in meeting k + 2. By then it has seen all counters at k + 1, and ranks count k + 1 only
after reading the slots of k.
"""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.parallel.group import TensorParallelGroup
from kernels.cpu.meeting import (
    FAILED,
    FAILED_ON,
    LINE_WORDS,
    ROUND,
    CompilerUnavailable,
    Meeting,
)

__all__ = ["LINE_WORDS", "RankFailed", "SharedMemoryGroup", "wait_for"]

SLOT = 1 << 22  # bytes of a piece; larger tensors are sent in several pieces
# number of polls before a rank yields its core, enough for the usual delay between running ranks
_LOOKS = 4000
_YIELDS = 2000  # number of yields before a rank sleeps
_SLEEP, _NAP = 5e-5, 5e-3  # seconds: shortest and longest sleep


class RankFailed(Exception):
    """The error of a step that cannot finish because another rank's step has failed."""


def wait_for(words: memoryview, at: int, wanted: int, check: Callable[[], None]) -> None:
    """Wait until words[at] >= wanted.

    check: called from time to time; its exception ends the wait.
    """
    for _ in range(_LOOKS):
        if words[at] >= wanted:
            return
    for _ in range(_YIELDS):
        os.sched_yield()
        if words[at] >= wanted:
            return
        check()
    began = time.monotonic()
    while words[at] < wanted:
        check()
        # Sleeps get longer, so that a rank with a long wait uses little CPU time.
        time.sleep(min(max(_SLEEP, (time.monotonic() - began) / 20), _NAP))


@dataclass(slots=True)
class _State:
    memory: mmap.mmap
    words: memoryview  # int64, the counters of all ranks
    slots: list[list[Tensor]]  # [2][size] uint8
    kernel: Meeting | None  # a compiled meeting; None = this machine has no compiler
    dry: bool = False  # whether all-reduces are skipped, see `all_can`
    # Whether `least` is running, in which ranks may wait for minutes while others load weights, so
    # that no rank counts as a straggler.
    agrees: bool = False
    round: int = 0
    fence: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class SharedMemoryGroup(TensorParallelGroup):
    """The group of ranks that are processes on one machine.

    state: the group's shared memory and this rank's counters, created by `open`.
    """

    state: _State | None = None

    @classmethod
    def open(cls, rank: int, size: int, descriptor: int, at: int = 0) -> "SharedMemoryGroup":
        """Open the group in a file that all ranks have open.

        descriptor: the file's descriptor, which can be closed afterwards. Memory pages are only
            allocated when they are first used.
        at: the offset of the group's memory in the file, a multiple of 64.
        """
        lines = size * 8 * LINE_WORDS
        length = at + cls.num_bytes(size)
        if os.fstat(descriptor).st_size < length:
            os.ftruncate(descriptor, length)
        memory = mmap.mmap(descriptor, length)
        whole = torch.frombuffer(memory, dtype=torch.uint8)[at:]
        slots = list(whole[lines:].view(2 * size, SLOT))
        words = memoryview(memory)[at : at + lines].cast("q")
        kernel = None
        with contextlib.suppress(CompilerUnavailable, AttributeError):
            kernel = Meeting(rank, size, whole.data_ptr(), slots[0].data_ptr(), SLOT)
        return cls(rank, size, _State(memory, words, [slots[:size], slots[size:]], kernel))

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the bytes of the memory of a group with `size` ranks."""
        return size * (8 * LINE_WORDS + 2 * SLOT)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._sum(x, None)

    def add_reduced(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._sum(x, residual)

    @property
    def recordable(self) -> bool:
        return self.state is not None and self.state.kernel is not None

    def all_can(self, attempt: Callable[[], bool]) -> bool:
        state = self.state
        assert state is not None
        state.dry = True
        try:
            able = attempt()
        finally:
            state.dry = False
        return bool(self.least(able))

    def check(self) -> None:
        state = self.state
        assert state is not None
        if state.kernel is not None and state.kernel.broken:
            self._look_for_failures(state)
            raise RankFailed("the step was given up")

    def _sum(self, x: Tensor, onto: Tensor | None) -> Tensor:
        state = self.state
        assert state is not None
        if state.dry:
            return x if onto is None else onto
        kernel, plain = state.kernel, x.dtype == torch.float32 and x.is_contiguous()
        if onto is not None:
            plain = plain and onto.dtype == torch.float32 and onto.is_contiguous()
        if kernel is not None and plain and x.nbytes <= SLOT:
            out = kernel.all_reduce(x, onto)
            self.check()
            return out
        flat = x.view(-1)
        step = SLOT // x.itemsize
        for at in range(0, len(flat), step):
            piece = flat[at : at + step]
            if kernel is not None and plain:
                kernel.all_reduce(piece)
                self.check()
                continue
            # Every rank adds in the order of ranks, so that all results have the same bits.
            first, second, *others = self._meet(piece)
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)
        return x if onto is None else onto.add_(x)

    def gather(self, x: Tensor) -> Tensor:
        flat, step = x.reshape(-1), SLOT // x.itemsize
        pieces = [torch.stack(self._meet(flat[at : at + step])) for at in range(0, len(flat), step)]
        return torch.cat(pieces, 1).view(self.size, *x.shape)

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        rows = x.shape[0]
        widths = [end - begin for begin, end in (self.share(total, r) for r in range(self.size))]
        flat, step = x.reshape(-1), SLOT // x.itemsize
        parts = [x.new_empty(rows * width) for width in widths] if self.rank == 0 else []
        for at in range(0, rows * widths[0], step):  # rank 0 has the most columns
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
        state = self.state
        assert state is not None
        state.agrees = True
        minimum = min(int(piece) for piece in self._meet(torch.tensor([number])))
        state.agrees = False
        return minimum

    def _meet(self, piece: Tensor) -> list[Tensor]:
        """All-gather tensors of equal length; return each rank's tensor. Raises RankFailed.

        The results are views of shared memory, which the meeting after the next overwrites.
        """
        state = self.state
        assert state is not None
        words, mine = state.words, self.rank * LINE_WORDS
        wanted, size = words[mine] + 1, piece.nbytes
        slots = state.slots[words[mine] & 1]
        slots[self.rank][:size].view(piece.dtype).copy_(piece)
        # a memory fence, which makes the piece visible before the counter on any processor
        with state.fence:
            words[mine] = wanted
        for rank in range(self.size):
            self._wait(state, rank * LINE_WORDS, wanted)
        with state.fence:
            return [slot[:size].view(piece.dtype) for slot in slots]

    def _wait(self, state: _State, at: int, wanted: int) -> None:
        wait_for(state.words, at, wanted, lambda: self._look_for_failures(state))

    @property
    def fence(self) -> threading.Lock:
        """A lock that serves as a memory fence: who sees a write made under the lock also sees all
        earlier writes."""
        assert self.state is not None
        return self.state.fence

    @property
    def round(self) -> int:
        """The number of this rank's round: of failed steps that the rank has recovered from."""
        assert self.state is not None
        return self.state.round

    def check_round(self) -> None:
        """Raise RankFailed if rank 0 has abandoned the steps of this round."""
        assert self.state is not None
        if self.state.words[ROUND] != self.state.round:
            raise RankFailed("the step was given up")

    def _look_for_failures(self, state: _State) -> None:
        self.check_round()
        if state.words[FAILED] > state.round:
            rank = state.words[FAILED_ON]
            raise RankFailed(f"the step has failed on rank {rank} of {self.size}")

    def behind(self) -> list[tuple[int, int]]:
        """Return (rank, number of its meetings) of the ranks with fewer meetings than others.

        The list is empty if no rank waits in a meeting.
        """
        assert self.state is not None
        met = [self.state.words[rank * LINE_WORDS] for rank in range(self.size)]
        return [(rank, count) for rank, count in enumerate(met) if count < max(met)]

    def stragglers(self) -> list[tuple[int, int]]:
        """Return (rank, number of its meetings) of each rank that delays this rank in a step."""
        state = self.state
        assert state is not None
        if state.agrees:
            return []
        met = [state.words[rank * LINE_WORDS] for rank in range(self.size)]
        return [(rank, count) for rank, count in enumerate(met) if count < met[self.rank]]

    # ---- after a step that failed

    def fail(self) -> None:
        """Mark this rank's step as failed, for the ranks that wait for this rank."""
        assert self.state is not None
        if self.state.words[FAILED] <= self.state.round:  # only the first failure is recorded
            self.state.words[FAILED_ON] = self.rank
            self.state.words[FAILED] = self.state.round + 1

    def begin_round(self) -> None:
        """Begin the next round, which releases ranks that wait in this one; rank 0 calls this."""
        assert self.state is not None and self.rank == 0
        self.state.words[ROUND] += 1

    def join_round(self) -> None:
        """Join the round that rank 0 has begun, and reset this rank's counter of meetings.

        No other rank may be in a meeting or about to enter one.
        """
        state = self.state
        assert state is not None
        state.round = state.words[ROUND]
        state.words[self.rank * LINE_WORDS] = 0
        if state.kernel is not None:
            state.kernel.join(state.round)
