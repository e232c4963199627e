"""Admission: strategies that decide whether the first waiting request may start now.

Strategies for KV-cache memory (`ADMISSION`). A request starts if

 optimistic   its known tokens fit now; lack of blocks later costs a preemption. The default.
 reserved     all blocks that it may ever need fit now. Never preempts.
 sum          the final sizes of all requests fit, shared prefixes counted for each. Never preempts.
 peak         the largest future use of memory fits (LightLLM's router, exact). Never preempts.
With `allocation: contiguous` each request has one region of its whole length. It starts if a gap
between regions holds that length, and nothing is preempted.
The last three rely on max_tokens: a request without max_tokens counts with the model's length.
Strategies for which adapters share a batch (`BATCHING`). A request joins

 mixed        any batch: a step serves requests of all adapters. The default.
 split        only a batch of requests with the same adapter.

Every strategy sees only the head of the queue, so that no request overtakes and none starves.
docs/strategies.md says when to choose which.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from engine.config.kv_groups import Full, KVKind, blocks_for
from engine.scheduling.pacing.chunking import steps_until_computed

if TYPE_CHECKING:
    from engine.scheduling.memory.snapshots import SnapshotPlan
    from engine.scheduling.queue import WaitingQueue
    from engine.scheduling.request import Request


class Footprint(NamedTuple):
    """The KV-cache memory of one request.

    now: tokens whose KV the request holds, or will hold once its known tokens are computed.
    final: tokens whose KV the request holds at its maximum length.
    held: number of blocks in the request's block table.
    shared: number of held blocks that other requests use too; they need no free block.
    """

    now: int
    final: int
    held: int = 0
    shared: int = 0


@dataclass(slots=True)
class KVMemory:
    """The state of a KV block pool from which an admission strategy decides.

    `running()` includes ended requests whose blocks are not released yet.

    uncomputed: known tokens of running requests whose KV is not computed yet.
    budget: number of uncomputed tokens that the current step can still take.
    cuts: number of extra steps for uncomputed tokens, as chunks end where snapshots are taken.
    lag: steps between a request's last step and the step in which its blocks can be reused.
    regions: whether a request takes one region for its whole length; `free` is the largest gap.
    """

    num_blocks: int
    block_size: int
    free: int
    # footprints of all running requests; slow, so called only if needed
    footprints: Callable[[], list[Footprint]]
    kinds: Sequence[KVKind] = (Full(),)
    promised: int = 0  # blocks not allocated yet that the known tokens of running requests need
    num_running: int = 0
    uncomputed: int = 0
    snapshots: "SnapshotPlan | None" = None
    cuts: int = 0
    budget: int = 1
    lag: int = 0
    regions: bool = False
    _running: list[Footprint] | None = None

    def running(self) -> list[Footprint]:
        if self._running is None:
            self._running = self.footprints()
        return self._running

    def count_running(self, admitted: Footprint) -> None:
        """Count one more running request, with its footprint."""
        self.num_running += 1
        if self._running is not None:
            self._running.append(admitted)

    def blocks(self, tokens: int) -> int:
        """Return the peak number of blocks of a request with the given number of tokens."""
        return blocks_for(self.kinds, tokens, self.block_size)


class Fits(Protocol):
    """An admission strategy: returns whether a request with the footprint `new` may start.

    A strategy is called only after `fits_now` has returned True, and its answer is ignored while no
    request runs.
    """

    def __call__(self, memory: KVMemory, new: Footprint, /) -> bool: ...


class Joins(Protocol):
    """A strategy that decides whether a waiting request may join the batch of running requests.

    running: running requests by id.
    queue: the waiting requests, of which the first is the one to decide about.
    """

    def __call__(
        self, request: "Request", running: "Mapping[int, Request]", queue: "WaitingQueue", /
    ) -> bool: ...


def fits_now(memory: KVMemory, new: Footprint) -> bool:
    """Whether blocks are free for the request's known tokens; checked for every strategy."""
    if memory.regions:
        return memory.blocks(new.final) <= memory.free
    return memory.blocks(new.now) - new.shared <= memory.free - memory.promised


def optimistic(memory: KVMemory, new: Footprint) -> bool:
    if memory.regions:
        return True  # `fits_now` has checked the whole length
    # One block stays free for each running request, which will need one soon. Otherwise a preempted
    # request that starts again at once would take it. Simulated with 1,500 requests of 32-512 +
    # 16-512 tokens in 2,048 blocks: 1.5 % more steps than without, but 17 preemptions instead of
    # 820.
    headroom = min(memory.num_running, memory.num_blocks // 16)
    return memory.blocks(new.now) - new.shared + headroom <= memory.free - memory.promised


def reserved(memory: KVMemory, new: Footprint) -> bool:
    owed = sum(max(0, memory.blocks(r.final) - r.held) for r in memory.running())
    return memory.blocks(new.final) - new.shared <= memory.free - owed


def sum_of_lengths(memory: KVMemory, new: Footprint) -> bool:
    total = sum(max(memory.blocks(r.final), r.held) for r in memory.running())
    return total + memory.blocks(new.final) <= memory.num_blocks


def peak(memory: KVMemory, new: Footprint) -> bool:
    requests = [*memory.running(), new]
    # While prompts are computed in chunks, their requests do not decode, so they end up to `delay`
    # steps later. They may then overlap with requests that would otherwise run after them.
    uncomputed = memory.uncomputed + new.now
    delay = steps_until_computed(uncomputed, memory.budget) + memory.cuts
    if memory.snapshots is not None:
        delay += memory.snapshots.cuts(new.now)
    # A table ends inside a block, so that each request may hold block_size - 1 tokens more than it
    # has. KV groups that keep all tokens grow with each token; groups with a window count with
    # their final size.
    size = memory.block_size
    grow = [kind for kind in memory.kinds if kind.whole and kind.by_position]
    other_kinds = [kind for kind in memory.kinds if kind not in grow]
    now = [
        max(
            len(grow) * (r.now + size - 1) + blocks_for(other_kinds, r.final, size) * size,
            r.held * size,
        )
        for r in requests
    ]
    remaining = [r.final - r.now + delay + memory.lag for r in requests]
    return future_peak(now, remaining, len(grow)) <= memory.num_blocks * size


def future_peak(now: Sequence[int], left: Sequence[int], gain: int = 1) -> int:
    """Return the maximum number of tokens in use at any future time.

    Request i holds now[i] tokens, gains `gain` in each of left[i] steps, and then frees all. The
    peak is at the end of a request. Sort requests by left, descending: at the end of request i,
    requests 0 .. i run, and each has gained left[i] steps' tokens (LightLLM, "efficient router").
    """
    if not now:
        return 0
    order = np.argsort(-np.asarray(left, dtype=np.int64), kind="stable")
    left_sorted = np.asarray(left, dtype=np.int64)[order]
    held = np.cumsum(np.asarray(now, dtype=np.int64)[order])
    return int((gain * left_sorted * np.arange(1, len(now) + 1) + held).max())


def mixed(request: "Request", running: "Mapping[int, Request]", queue: "WaitingQueue") -> bool:
    return True


def split(request: "Request", running: "Mapping[int, Request]", queue: "WaitingQueue") -> bool:
    if queue.waiting_for_adapter:  # an earlier request waits for its adapter
        return False
    other = next(iter(running.values()), None)
    return other is None or other.adapter is request.adapter


ADMISSION: dict[str, Fits] = {
    "optimistic": optimistic,
    "sum": sum_of_lengths,
    "reserved": reserved,
    "peak": peak,
}
BATCHING: dict[str, Joins] = {"mixed": mixed, "split": split}
