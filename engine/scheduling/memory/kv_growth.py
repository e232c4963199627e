"""KVGrowth: decides when an engine's pool of KV blocks grows and shrinks, while it serves.

Blocks are added when requests lack some. They are also added before that, when few blocks are left
without evicting a prefix and no engine lacks the memory. When another engine of the device lacks
memory, the last blocks that no request uses are removed, down to `least` blocks.

Pages are mapped and unmapped on a thread. The step loop only publishes the new number of blocks:

 step loop   needs blocks | steps ............... | publish
 thread      ............ | claim | map | zero    |

The thread also unmaps pages, after it has waited for the steps that were launched before.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from engine.batch import OutOfMemory
from engine.errors import EngineDead
from engine.messages import CACHES, PARTS, WEIGHTS
from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.kv_shares import KVShare
from engine.scheduling.orders.sleeping import Sleeper
from engine.scheduling.request import Request

logger = logging.getLogger("manta.engine")

GIB = 1 << 30
_TICK = 0.05  # seconds between two polls of the other engines' shares
_IDLE_TICK = 0.5  # the same in an engine that runs no steps
_LOOK_AHEAD = 2  # number of spare blocks for each running request below which the pool grows
_WAITING = 32  # maximum number of waiting requests whose blocks count as lacking
_AGAIN = 0.05  # seconds until memory is asked for again
_WAKE_SECONDS = 30.0  # longest wait for other engines' memory after a sleep


class Pages(Protocol):
    """The interface of `engine.runner.caches.block_pages.BlockPages` that this module uses."""

    most: int

    @property
    def mapped_bytes(self) -> int: ...

    def rounded(self, num_blocks: int) -> int: ...
    def num_bytes(self, num_blocks: int) -> int: ...
    def grow(self, num_blocks: int) -> None: ...
    def retract(self, num_blocks: int) -> Callable[[], None] | None: ...
    def give_all(self) -> None: ...


class Demand(NamedTuple):
    """The requests that need blocks.

    running: number of running requests.
    computing: requests with tokens to compute.
    waiting: requests that wait for memory, in order.
    """

    running: int
    computing: Sequence[Request] = ()
    waiting: Sequence[Request] = ()


class KVGrowth:
    """The growth and shrinking of an engine's KV blocks within its share of the device's memory.

    pages: the memory of blocks; `least` of them are mapped.
    share: this engine's share of the device's memory.
    least: number of blocks that are never removed.
    growths, shrinks: numbers of times that blocks were added and removed.
    pause_seconds: the seconds that the step loop spent on adding and removing blocks.
    longest_pause: the longest of these times.
    room: number of blocks that could be added, as of the last poll of the shares.
    """

    def __init__(self, pages: Pages, share: KVShare, least: int) -> None:
        self.pages = pages
        self.share = share
        self.least = least
        self.growths = self.shrinks = self.room = 0
        self.pause_seconds = self.longest_pause = 0.0
        self.wake: Callable[[], None] = lambda: None  # ends the step loop's wait
        self._limit = pages.most
        self._step = max(1, pages.rounded(pages.rounded(1) + 1) - pages.rounded(1))
        self._block_bytes = max(1, pages.num_bytes(pages.most) // pages.most)
        self._busy = False  # whether a job runs or its result is not published
        self._done = -1  # number of mapped blocks, the result of the last job; -1 = no new result
        self._again = 0.0  # monotonic seconds from which memory may be requested again
        # bytes that this engine's requests use and lack, and that other engines ask for
        self._used = self._short = self._asked = 0
        self._look = False  # whether `poll` has to handle `_asked`
        self._polled = time.monotonic()
        self._asleep = self._closed = self._failed = False
        self._after_sleep = least  # number of blocks to map after a sleep
        share.settle(pages.mapped_bytes, least=pages.num_bytes(least))
        self._job: Callable[[], int] | None = None
        self._signal = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once no CUDA graph is being captured; until then `poll` maps pages."""
        self._thread = threading.Thread(target=self._run, name="kv-growth", daemon=True)
        self._thread.start()

    # ---- in the step loop ----------------------------------------------------------------------

    def growable(self, pool: BlockManager) -> int:
        """Return how many blocks could be added, as of the last poll of the shares."""
        return 0 if self._asleep else max(0, min(self.room, self._limit - pool.num_blocks))

    def has_news(self) -> bool:
        """Whether `poll` has something to do in an engine without requests."""
        return self._done >= 0 or self._look

    def poll(self, pool: BlockManager, demand: Demand) -> bool:
        """Publish newly mapped blocks, and begin the next growth or shrinking if one is needed.

        Returns whether the pool has more blocks than before.
        """
        began = time.perf_counter()
        self._polled, self._look = time.monotonic(), False
        before = pool.num_blocks
        changed = self._publish(pool)
        grown = pool.num_blocks > before
        if not (self._busy or self._asleep or self._failed):
            changed |= self._decide(pool, demand)
        if changed:
            seconds = time.perf_counter() - began
            self.pause_seconds += seconds
            self.longest_pause = max(self.longest_pause, seconds)
        return grown

    def _publish(self, pool: BlockManager) -> bool:
        if self._done < 0:
            return False
        done, self._done, self._busy = self._done, -1, False
        if done <= pool.num_blocks:
            return False
        pool.grow(done)
        return True

    def _decide(self, pool: BlockManager, demand: Demand) -> bool:
        """Begin to grow or to shrink; return whether blocks were removed."""
        free, now = pool.num_free, pool.num_blocks
        soon = _LOOK_AHEAD * demand.running * pool.num_groups
        for request in demand.computing:
            soon += max(0, pool.blocks_for(request.num_tokens) - len(pool.held(request)))
        soon += sum(pool.blocks_for(len(r.token_ids) + 1) for r in demand.waiting[:_WAITING])
        short = min(soon - free, self._limit - now)
        asked, self._asked = self._asked, 0
        keep = min(now, now - free + soon)
        self._used = keep * self._block_bytes
        if short > 0:
            if time.monotonic() >= self._again:
                self._begin_growth(now, now + max(short, self._step))
            return False
        self._short = 0
        if asked:
            blocks = -(-asked // self._block_bytes)
            return self._begin_shrinking(pool, max(self.least, keep, now - blocks))
        few = pool.num_empty < self._step
        if few and self.room >= self._step and time.monotonic() >= self._again:
            self._begin_growth(now, now + self._step, ask=False)
        return False

    def _begin_growth(self, now: int, wanted: int, *, ask: bool = True) -> None:
        wanted = min(self._limit, self.pages.rounded(wanted))
        if wanted > now:
            self._begin(lambda: self._grow(now, wanted, ask=ask))

    def _begin_shrinking(self, pool: BlockManager, wanted: int) -> bool:
        before = pool.num_blocks
        reached = pool.withdraw(wanted)
        unmap = None
        if self.pages.num_bytes(reached) < self.pages.num_bytes(before):
            unmap = self.pages.retract(reached)
        if unmap is None:  # unmapping would free no page, or copies from these blocks are in flight
            pool.grow(before)
            return False
        self.shrinks += 1
        self._begin(lambda: self._unmap(reached, unmap))
        return True

    def add(self, pool: BlockManager, size: int) -> None:
        """Begin to add blocks of `size` bytes, before requests need them."""
        self.settle(pool)
        self._begin_growth(pool.num_blocks, pool.num_blocks + size // self._block_bytes)

    def settle(self, pool: BlockManager) -> None:
        """Wait for the thread's job, and publish its result."""
        with self._signal:
            self._signal.wait_for(lambda: not self._busy or self._done >= 0 or self._failed)
        self._publish(pool)

    def withdraw_all(self, pool: BlockManager) -> None:
        """Remove all blocks but the `least` first ones.

        Call this only when no request has blocks, and no step is in flight.
        """
        self.settle(pool)
        self.lower(pool, self.least)
        self._after_sleep = pool.num_blocks

    def lower(self, pool: BlockManager, num_blocks: int) -> None:
        """Remove blocks down to num_blocks, or to the last one in use, and unmap them at once.

        Call this only when no step is in flight.
        """
        reached = pool.withdraw(max(self.least, num_blocks))
        unmap = self.pages.retract(reached)
        if unmap is None:
            pool.grow(max(reached, self.pages.rounded(reached)))
            return
        pool.grow(self._unmap(reached, unmap))

    def shrink_for_steps(self, pool: BlockManager) -> bool:
        """Free an eighth of the blocks' memory for steps, permanently; return whether that was
        possible.

        Call this only when no request has blocks.
        """
        self.settle(pool)
        before = pool.num_blocks
        self._limit = max(self.least, before * 7 // 8)
        self.lower(pool, self._limit)
        self._limit = max(self._limit, pool.num_blocks)
        return pool.num_blocks < before

    def sleep(self, parts: Collection[str]) -> None:
        """Release the memory of sleeping parts to other engines. Call this after `withdraw_all`."""
        if CACHES in parts:
            self._asleep = True
            self.pages.give_all()
            self.share.settle(0, least=0)
        self.share.sleeping |= WEIGHTS in parts
        self.share.report(used=self.share.own.mapped, short=0)

    def make_room(self, parts: Collection[str]) -> None:
        """Wait until other engines have freed memory for parts that wake. Raises EngineDead."""
        self.share.sleeping &= WEIGHTS not in parts
        size = self.pages.num_bytes(self._after_sleep) if CACHES in parts else 0
        if not self.share.wait_for(size, _WAKE_SECONDS):
            raise EngineDead(
                f"the model cannot wake: its KV blocks need {size / GIB:.2f} GiB, its weights and "
                f"steps {self.share.own.kept / GIB:.2f} GiB, and the engines of the device leave "
                f"{self.share.room() / GIB:.2f} GiB for blocks beside them. Ways out: lower "
                "kv_cache_bytes of the models that share it, or raise kv_shared_bytes",
                code="device_taken",
            )

    def take_again(self) -> None:
        """Map the blocks that `make_room` has claimed. Raises EngineDead."""
        try:
            self.pages.grow(self._after_sleep)
        except OutOfMemory as error:
            self.share.settle(0)
            raise EngineDead(f"the model cannot wake: {error}", code="device_taken") from None
        self.share.settle(self.pages.mapped_bytes, least=self.pages.num_bytes(self.least))
        self._asleep = False

    def stats(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` about growth."""
        return {
            "kv_mapped_bytes": self.pages.mapped_bytes,
            "kv_growths": self.growths,
            "kv_shrinks": self.shrinks,
            "kv_pause_seconds": self.pause_seconds,
            "kv_longest_pause": self.longest_pause,
        }

    def close(self) -> None:
        """End the thread, and free the share."""
        with self._signal:
            self._closed = True
            self._signal.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.share.close()

    # ---- on the thread -------------------------------------------------------------------------

    def _begin(self, job: Callable[[], int]) -> None:
        self._busy = True
        if self._thread is None:
            self._done = job()
            return
        with self._signal:
            self._job = job
            self._signal.notify_all()

    def _run(self) -> None:
        while not self._closed:
            with self._signal:
                idle = time.monotonic() - self._polled > 1.0
                self._signal.wait_for(
                    lambda: self._job is not None or self._closed,
                    _IDLE_TICK if idle else _TICK,
                )
                job, self._job = self._job, None
            try:
                if job is not None:
                    done = job()
                    with self._signal:
                        self._done = done
                        self._signal.notify_all()
                    self.wake()
                elif not self._closed:
                    self.tick()
            except Exception:
                logger.exception("KV blocks can no longer grow or shrink")
                with self._signal:
                    self._failed = True
                    self._signal.notify_all()
                return

    def _grow(self, now: int, wanted: int, *, ask: bool) -> int:
        """Claim and map memory for up to `wanted` blocks; return the number of mapped blocks.

        now: the number of blocks mapped before.
        ask: whether to ask other engines for memory that is lacking.
        """
        pages, have = self.pages, self.pages.num_bytes(now)
        size = pages.num_bytes(wanted) - have
        granted = self.share.claim(size, last=not ask)
        reach = range(now, wanted + 1)
        reached = now + bisect_right(reach, have + granted, key=pages.num_bytes) - 1
        if reached > now:
            try:
                pages.grow(reached)
            except OutOfMemory:
                logger.warning("the device has no memory for more KV blocks", exc_info=True)
                reached, granted = now, 0
        self.growths += reached > now
        self.share.settle(pages.mapped_bytes)
        self._short = size - granted if ask else 0
        if granted < size:
            self._again = time.monotonic() + _AGAIN
            self.room = 0
        self.share.report(used=self._used, short=self._short)
        return min(self._limit, pages.rounded(reached)) if reached > now else now

    def _unmap(self, reached: int, unmap: Callable[[], None]) -> int:
        unmap()
        self.share.settle(self.pages.mapped_bytes)
        return min(self._limit, self.pages.rounded(reached))

    def tick(self) -> None:
        """Publish the memory that this engine uses and lacks, and read how much the others lack."""
        share = self.share
        if self._asleep:
            return
        idle = time.monotonic() - self._polled > 2 * _IDLE_TICK
        if idle:
            self._short = 0  # an engine that makes no steps has no request that lacks blocks
        share.report(used=self._used, short=self._short)
        self._asked = share.asked()
        lacking = sum(other.short for other in share.others())
        self.room = max(0, share.room() - lacking) // self._block_bytes
        # An engine without steps has to run `poll` first, to learn how much its requests use.
        if self._asked or (idle and lacking):
            self._look = True
            self.wake()


class GrowingMemory:
    """A `Sleeper` for engines with a growing KV pool: it also frees and claims the pool's
    memory."""

    def __init__(self, memory: Sleeper, growth: KVGrowth) -> None:
        self._memory = memory
        self._growth = growth

    def sleep(self, parts: Collection[str] = PARTS, *, drop: bool = False) -> None:
        self._memory.sleep(parts, drop=drop)
        self._growth.sleep(parts)

    def wake(self, parts: Collection[str] = PARTS) -> None:
        self._growth.make_room(parts)
        self._memory.wake(parts)
        if CACHES in parts:
            self._growth.take_again()
