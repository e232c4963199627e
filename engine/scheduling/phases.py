"""RequestPhases: the requests of an engine, and the phase of each.

A request without a row waits in the queue, for its adapter, or for blocks from the host. A request
with a row computes known tokens, decodes, or finishes its last step. scheduler.py decides which
requests a step computes. request_memory.py has the rows and blocks, which are released when the
last launched step that uses them is done.
"""

import logging
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from heapq import nlargest

from engine.lora.tiers.store import AdapterStore
from engine.messages import Delta
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.drafts.step_drafts import StepDrafts
from engine.scheduling.memory.block_manager import FreeBlocks, FreeList
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.memory.image_cache import ImageCache
from engine.scheduling.memory.kv_growth import Demand, KVGrowth
from engine.scheduling.memory.request_memory import RequestMemory
from engine.scheduling.moves.block_moves import BlockMoves
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.request import Request, RequestPhase
from engine.scheduling.step import LaunchedStep, SchedulerCounters

logger = logging.getLogger("manta.engine")

_QUEUED = (  # phases without a row
    RequestPhase.WAITING,
    RequestPhase.WAITING_FOR_ADAPTER,
    RequestPhase.WAITING_FOR_BLOCKS,
)


class RequestPhases:
    """The owner of the requests and, in `memory`, of their rows and blocks."""

    def __init__(
        self,
        config: CoreConfig,
        adapters: AdapterStore | None = None,
        free_blocks: Callable[[int], FreeBlocks] = FreeList,
        speculation: Speculation | None = None,
        tier: HostTier | None = None,
        moves: BlockMoves | None = None,
    ) -> None:
        self.config = config
        self._adapters = adapters or AdapterStore.disabled()
        # Every running request must be able to decode in every step, so the token budget bounds
        # rows.
        self._most_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.memory = RequestMemory(config, self._most_rows, free_blocks, tier, moves)
        self.tier = tier
        self.moves = moves
        self.running = self.memory.running
        self.images = None if config.images is None else ImageCache(config.images)
        self.counters = SchedulerCounters()
        self.speculate(speculation)
        self._traced = logger.isEnabledFor(logging.DEBUG)
        self.step = 0  # the last step scheduled
        self.done_step = 0  # the last step whose result has arrived
        self.requests: dict[int, Request] = {}  # id -> request that has not ended
        self.queue = WaitingQueue()
        self.num_constrained = 0  # number of requests with a grammar
        self.num_batch = 0  # number of requests that are batch work
        # the newest step's number when a request that is not batch work last ended
        self.shared_step = -math.inf
        self.computing: list[Request] = []  # requests in phase COMPUTING
        self.decode_groups = [
            DecodeGroup(config.block_size, len(config.kinds), micro_batch)
            for micro_batch in range(config.micro_batches)
        ]
        self.in_flight: deque[LaunchedStep] = deque()
        self._failed: list[Delta] = []  # last deltas of requests whose adapter failed to load
        self._arrivals = 0
        # the model's end tokens, and stop ids of requests since the engine was last idle
        self._end_tokens = set(config.eos_token_ids)

    def speculate(self, speculation: Speculation | None) -> None:
        """Set the source of drafts from now on; None = no drafts. Call this only when no step is in
        flight."""
        self.drafts: StepDrafts | None = None
        if speculation is not None:
            self.drafts = StepDrafts(speculation, self.config, self.memory, self.counters)

    def add_request(self, request: Request) -> None:
        """Queue a new, validated request; its id must be unused."""
        assert request.id not in self.requests
        assert len(request.token_ids) <= request.limit
        if not self.requests:
            self._end_tokens = set(self.config.eos_token_ids)
        self._end_tokens |= request.stop_ids
        self.requests[request.id] = request
        self.num_constrained += request.constraint is not None
        self.num_batch += request.batch_work
        if request.adapter is not None:
            self._adapters.claim(request.adapter)
        if self.images is not None and request.images:
            self.images.add_request(request)
        self.queue.add_request(request)

    def next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def abort(self, ids: Iterable[int]) -> list[Delta]:
        """End requests in any phase by their ids, and return their last deltas.

        Ids of ended requests are ignored.
        """
        deltas = []
        for request_id in ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._end(request)
                delta = Delta(request_id, [], "abort")
                request.deliver_routes(delta)
                deltas.append(delta)
        return deltas

    def fail(self, requests: Iterable[Request], error: str) -> list[Delta]:
        """End requests with an error, unless they have already ended; return their last deltas.

        error: "code: message".
        """
        deltas = []
        for request in requests:
            if request.phase is not RequestPhase.ENDED:
                self._end(request)
                logger.warning("failed: %s", error, extra={"request_id": request.request_id})
                deltas.append(Delta(request.id, [], "error", error=error))
        return deltas

    def take_loaded(self) -> None:
        """Queue the requests whose adapter is now on the device, or has failed to load."""
        for adapter in self._adapters.poll():
            self.queue.adapter_ready(adapter)

    def take_failed(self) -> list[Delta]:
        """Return the last deltas of requests that `schedule` ended with an error, each once."""
        failed, self._failed = self._failed, []
        return failed

    def take_arrived(self) -> None:
        """Queue the requests whose prefixes were loaded from the host, or failed to load.

        Also collects finished writes to disk.
        """
        if self.tier is not None and (self.tier.num_loads or self.tier.has_news()):
            before = self.tier.num_loads
            for request in self.tier.take_arrived():
                self.queue.blocks_ready(request)
            self.queue.retry |= self.tier.num_loads < before  # ended loads have freed blocks

    @property
    def loading(self) -> bool:
        """Whether loads from the host are in flight; `take_arrived` collects finished ones."""
        return self.tier is not None and self.tier.num_loads > 0

    def requeue(self, *, trusted: bool) -> None:
        """Put all running requests back into the queue and drop the steps in flight.

        The caller must drop the results of these steps.

        trusted: whether computed KV is valid, so that its blocks stay in the prefix cache.
        """
        touched = [request for launched in self.in_flight for request in launched.requests]
        self.in_flight.clear()
        if self.drafts is not None:
            self.drafts.drop_steps()
        if self.memory.snapshots is not None:
            self.memory.snapshots.forget_after(self.done_step)
        self.done_step = self.step
        self._give_back()
        running = list(self.running.values())
        if not trusted:
            for request in {*touched, *running}:
                self.memory.discard_cached(request)
            self.drop_images()
        for request in running:
            self._return_to_queue(request)

    def drop_images(self) -> None:
        """Forget all embeddings of images; the next step drops those that the runner has."""
        if self.images is not None:
            self.images.clear()

    def admit_only(self, requests: Container[Request] | None) -> None:
        """Restrict admission to the given requests from now on; None lifts the restriction."""
        self.queue.only = requests
        self.queue.retry = True

    def shrink(self, num_blocks: int) -> None:
        """Replace the KV cache by num_blocks empty blocks.

        Call this only when no request runs and no copy of the host tier is in flight.
        """
        if self.tier is not None:
            for request in self.tier.abandon():
                self.queue.blocks_ready(request)
        if self.moves is not None:
            self.moves.abandon()
        self.memory.empty(num_blocks)
        self.config = replace(self.config, num_blocks=num_blocks)

    def grow(self, growth: KVGrowth) -> None:
        """Grow or shrink the only block pool by demand; if it grew, waiting requests may start."""
        memory, queue = self.memory, self.queue
        # Whether the first request waits for blocks, and not for a row or for the next step.
        blocked = memory.has_row and not queue.retry
        waiting = queue.waiting if blocked else ()
        (pool,) = memory.pools
        if growth.poll(pool, Demand(len(self.running), self.computing, waiting)):
            queue.retry = True

    def change_weights(self, model_key: str, *, recompute: bool) -> None:
        """Empty the caches and give requests the new key, as the weights have changed.

        Call this only when no step is in flight.

        No later request starts from a prefix of the old weights.

        model_key: the new weights' key, see `CoreConfig`.
        recompute: whether running requests compute their keys again.
        """
        assert not self.in_flight
        self.config = replace(self.config, model_key=model_key)
        if recompute:
            self.requeue(trusted=False)
        self.memory.reset_prefix_cache()
        if self.tier is not None:
            self.tier.renew_files()
        self.drop_images()
        for request in self.requests.values():
            request.set_model_key(model_key)
            request.hashes = []
            # until a preemption, some of its blocks have KV of the old weights
            request.cacheable = False

    # ---- internal changes of phase -------------------------------------------------------------

    def _return_to_queue(self, request: Request) -> None:
        """Put the request back into the queue; the prefix cache may still have its blocks."""
        self._leave(request)
        self._release(request)
        request.num_computed = 0
        request.fetched = request.read_from_disk = False
        if self.images is not None:
            self.images.restart(request)
        self.queue.add_request(request)

    def _leave(self, request: Request) -> None:
        """Remove the request from the list of its phase. The caller sets the new phase."""
        if request.phase is RequestPhase.DECODING:
            self.decode_groups[request.micro_batch].leave(request)
        elif request.phase is RequestPhase.COMPUTING:
            self.computing.remove(request)
        elif request.phase is RequestPhase.WAITING:
            self.queue.remove_request(request)
            self.queue.retry = True
        elif request.phase is RequestPhase.WAITING_FOR_ADAPTER:
            self.queue.drop_waiting_for_adapter(request)
        elif request.phase is RequestPhase.WAITING_FOR_BLOCKS:
            assert self.tier is not None
            self.queue.drop_waiting_for_blocks(request)
            self.tier.end_request(request)

    def _end(self, request: Request) -> None:
        """End the request; its row and blocks are released when no step in flight uses them."""
        self._leave(request)
        request.phase = RequestPhase.ENDED
        if self._traced:
            figures = (request.num_computed, request.num_cached, request.queued_us)
            text = "ended: %d tokens computed, %d of them cached, %d us queued"
            logger.debug(text, *figures, extra={"request_id": request.request_id})
        del self.requests[request.id]
        self.num_constrained -= request.constraint is not None
        if request.batch_work:
            self.num_batch -= 1
        else:
            self.shared_step = self.step
        self.counters.finished += 1
        for launched in self.in_flight:
            launched.some_ended = True
        if request.row >= 0:
            self._release(request)
        if request.adapter is not None:
            self._adapters.release(request.adapter, started=request.num_cached >= 0)
        if self.drafts is not None:
            self.drafts.speculation.end(request)
        if self.images is not None and request.images:
            self.images.end_request(request)

    def _release(self, request: Request) -> None:
        """Release the request's row and blocks when no step in flight uses them."""
        self.memory.release(request)
        self._give_back()

    def _give_back(self) -> None:
        for release in self.memory.give_back(self.done_step):
            if release.adapter_slot >= 0:
                self._adapters.unpin(release.adapter_slot)
            self.queue.retry = True

    # ---- counts and checks ---------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """The number of requests without a row."""
        return len(self.requests) - len(self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """The number of known tokens, over all requests, that are not computed yet.

        Tokens of steps in flight count as not computed.
        """
        in_flight = sum(launched.prompt_tokens for launched in self.in_flight)
        computing = sum(r.remaining for r in self.computing if r.remaining > 1)
        return self.queue.num_tokens + computing + in_flight

    def interactive_tokens(self) -> int:
        """Return the number of uncomputed prompt tokens of requests that are not batch work."""
        tokens = sum(r.remaining for r in self.computing if not r.batch_work)
        for request in self.queue.waiting:
            # the queue is sorted, so the requests after it are batch work too
            if request.batch_work:
                break
            tokens += request.queued_tokens
        return tokens

    def batch_victims(self, free: int) -> list[Request]:
        """Return the running batch work to preempt for other waiting requests.

        The last in the order of service comes first.

        free: number of free rows, for which no batch work has to be preempted.
        """
        wanted = bisect_left(self.queue.waiting, True, key=lambda r: r.batch_work) - free
        if wanted <= 0:
            return []
        running = (r for r in self.running.values() if r.batch_work)
        movable = (r for r in running if r.phase is not RequestPhase.FINISHING)
        return nlargest(wanted, movable, key=lambda r: r.order)

    def batch_waiting_tokens(self) -> int:
        """Return the number of known tokens of batch work that are not in any step yet."""
        queued = sum(request.queued_tokens for request in self.queue.waiting if request.batch_work)
        computing = (r.remaining for r in self.computing if r.batch_work and r.remaining > 1)
        return queued + sum(computing)

    def check_integrity(self) -> None:
        """Assert the invariants of requests, rows and blocks. Call this only between steps."""
        self.memory.check_integrity()
        phases = dict.fromkeys(RequestPhase, 0)
        for request in self.requests.values():
            phases[request.phase] += 1
            assert (request.row >= 0) != (request.phase in _QUEUED)
            assert (request.group_index >= 0) == (request.phase is RequestPhase.DECODING)
        assert phases[RequestPhase.ENDED] == 0
        assert phases[RequestPhase.COMPUTING] == len(self.computing)
        assert phases[RequestPhase.DECODING] == sum(map(len, self.decode_groups))
        assert sum(phases[phase] for phase in _QUEUED) == len(self.queue)
        assert len(self.running) + len(self.queue) == len(self.requests)
        self.queue.check_integrity()
        if self.tier is not None:
            self.tier.check_integrity(self.queue.waiting_for_blocks)
        if self.images is not None:
            self.images.check_integrity(self.requests.values())
        pins = Counter(r.adapter_slot for r in self.running.values())
        pins.update(r.adapter_slot for r in self.memory.deferred)
        users = Counter(r.adapter for r in self.requests.values() if r.adapter is not None)
        self._adapters.check_integrity(pins, users)
        constrained = [r for r in self.requests.values() if r.constraint is not None]
        assert self.num_constrained == len(constrained)
        for group in self.decode_groups:
            for index, request in enumerate(group.requests):
                assert (request.micro_batch, request.group_index) == (group.micro_batch, index)
                assert group.rows[index] == request.row
        if not self.requests and not self.in_flight:
            assert not self.memory.deferred, "idle, yet a request holds blocks"
