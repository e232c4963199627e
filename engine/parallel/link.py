"""Link: sends a pipeline's activations from each stage to the next, and from the last to the first.

`SharedMemoryLink` is for processes on one machine. The shared memory of a link has a cache line of
counters and some slots for each stage:

 counters | stage 0: sent, failed | stage 1: sent, failed | ...
 slots    | stage 0: step 0, 1, ... | stage 1: step 0, 1, ... | ...

A stage has as many slots as there are steps in flight. The first stage launches a further step only
after it has the oldest step's result, which has then passed all stages. So a slot is free when it
is written again. If a stage has several ranks, all have the same activations. Each rank sends them
over a separate link to the rank with the same number in the next stage.
"""

import mmap
import os
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.shared_memory import LINE_WORDS, RankFailed, SharedMemoryGroup, wait_for
from engine.parallel.stages import Stage

_SENT, _FAILED, _FAILED_STEP = 0, 1, 2  # indices of a stage's counters


class Link(Protocol):
    """The connection over which a rank exchanges activations with the adjacent pipeline stages.

    Steps are sent and received in the order of launches.
    """

    def begin(self) -> None:
        """Begin the next step, which this rank is about to launch."""
        ...

    def send(self, x: Tensor) -> None:
        """Send x [n, hidden_size] of the last begun step to the next stage, without waiting."""
        ...

    def receive(self, rows: int) -> Tensor:
        """Return the previous stage's output [rows, hidden_size]; the caller may overwrite it.

        Outputs are returned in the order of steps, the oldest first. Raises RankFailed.
        """
        ...


class SharedMemoryLink:
    """The link between stages that are processes on one machine.

    world: the group of all ranks.
    descriptor: the descriptor of the shared file; it can be closed afterwards.
    at: the offset of the first link's memory in the file.
    number: the number of this link, which is the rank's number in its stage.
    steps: the number of steps in flight at once.
    shape: (the maximum number of tokens in a step, hidden_size).
    """

    def __init__(
        self,
        world: SharedMemoryGroup,
        stage: Stage,
        descriptor: int,
        at: int,
        number: int,
        steps: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        self._world, self._rank, self._size = world, stage.number, stage.count
        self._dtype, self._hidden, self._steps = dtype, shape[1], steps
        slot = -(-prod(shape) * dtype.itemsize // 64) * 64
        lines = self._size * 8 * LINE_WORDS
        length = lines + self._size * steps * slot
        begin = at + number * length
        # Memory pages are only allocated when they are first used.
        if os.fstat(descriptor).st_size < begin + length:
            os.ftruncate(descriptor, begin + length)
        self._memory = mmap.mmap(descriptor, begin + length)
        view = memoryview(self._memory)[begin : begin + length]
        self._words = view[:lines].cast("q")
        self._slots = torch.frombuffer(view[lines:], dtype=torch.uint8).view(
            self._size, steps, slot
        )
        self._begun = self._received = 0
        self._waiting = 0  # the step whose output rank 0 waits for; 0 = none

    def begin(self) -> None:
        self._begun += 1

    def send(self, x: Tensor) -> None:
        x = x.to(self._dtype)
        self._place(self._rank, self._begun)[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        # a memory fence, which makes the data visible before the counter on any processor
        with self._world.fence:
            self._words[self._rank * LINE_WORDS + _SENT] = self._begun

    def receive(self, rows: int) -> Tensor:
        # Rank 0 launches further steps before it receives the oldest one's result.
        step = self._begun if self._rank else self._received + 1
        before = (self._rank - 1) % self._size
        self._check(step)  # raises after a failure, as later steps have no valid input
        self._waiting = step
        wait_for(self._words, before * LINE_WORDS + _SENT, step, lambda: self._check(step))
        self._waiting = 0
        self._received = step
        with self._world.fence:
            place = self._place(before, step)
        size = rows * self._hidden * self._dtype.itemsize
        return place[:size].view(self._dtype).view(rows, self._hidden)

    def _place(self, rank: int, step: int) -> Tensor:
        return self._slots[rank, step % self._steps]

    def _check(self, step: int) -> None:
        self._world.check_round()
        for rank in range(self._size):
            line = rank * LINE_WORDS
            failed = self._words[line + _FAILED] > self._world.round
            if failed and self._words[line + _FAILED_STEP] <= step:
                raise RankFailed(f"the step has failed on stage {rank} of {self._size}")

    def stragglers(self) -> list[tuple[int, int]]:
        """Return [(first stage that delays rank 0, number of steps it has finished)], or [] if
        rank 0 does not wait."""
        sent = [self._words[rank * LINE_WORDS + _SENT] for rank in range(self._size)]
        behind = [(rank, done) for rank, done in enumerate(sent) if rank and done < self._waiting]
        return behind[:1]

    def fail(self) -> None:
        """Mark the last begun step as failed, for the stages that wait for this rank."""
        line = self._rank * LINE_WORDS
        if self._words[line + _FAILED] <= self._world.round:  # only the first failure is recorded
            self._words[line + _FAILED_STEP] = self._begun
            with self._world.fence:
                self._words[line + _FAILED] = self._world.round + 1

    def join_round(self) -> None:
        """Reset the step counters after a failure; no other rank may be in a step."""
        self._begun = self._received = 0
        self._words[self._rank * LINE_WORDS + _SENT] = 0


class DistributedLink:
    """The link between stages that communicate over torch.distributed.

    Each link of the ring has a separate process group, so that no link waits for another. Sends are
    asynchronous, after the kernels that compute the tensors.

    ranks: the ranks of the ring, in the order of stages.
    groups: this rank's process groups with the next rank and with the previous rank.
    steps: the number of steps in flight at once, whose sent tensors must be kept.
    """

    def __init__(
        self,
        stage: Stage,
        ranks: Sequence[int],
        groups: tuple[Any, Any],
        steps: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._outward, self._inward = groups
        self._next, self._before = ranks[(stage.number + 1) % stage.count], ranks[stage.number - 1]
        self._steps, self._hidden, self._dtype, self._device = steps, hidden, dtype, device
        self._sent: list[tuple[Any, Tensor]] = []

    def begin(self) -> None:
        pass

    def send(self, x: Tensor) -> None:
        if not x.numel():
            return
        # A copy for gloo, which reads the tensor while the next step may reuse the memory.
        x = x.to(self._dtype, copy=self._device.type == "cpu").contiguous()
        self._sent.append((dist.isend(x, self._next, group=self._outward), x))
        # the oldest send has completed, as more steps have begun since than can be in flight
        if len(self._sent) > self._steps:
            work, _ = self._sent.pop(0)
            work.wait()

    def receive(self, rows: int) -> Tensor:
        x = torch.empty(rows, self._hidden, dtype=self._dtype, device=self._device)
        if rows:
            work = dist.irecv(x, self._before, group=self._inward)
            assert work is not None
            work.wait()
        return x


def ring(ranks: Sequence[int]) -> list[Any]:
    """Create a process group of each rank and the next; all ranks call this in the same order."""
    return [dist.new_group([rank, ranks[(at + 1) % len(ranks)]]) for at, rank in enumerate(ranks)]


__all__ = ["DistributedLink", "Link", "RankFailed", "SharedMemoryLink", "ring"]
