"""Scheduler: decides what each request computes in the next step, and which row and blocks it has.

request_memory.py assigns rows and blocks. step.py has code about a single step, such as reading its
result. queue.py has the order of waiting requests, and request_start.py chooses the pool where one
starts.
The timeline, one batch ahead (`EngineCore.step`); otherwise `schedule` comes after `update`:

 schedule n+1 | launch n+1 | wait n | update n | schedule n+2 | launch n+2 | wait n+1 | ...

So `schedule` does not know the tokens of the step in flight, only that each sampling entry will
have one. Three rules follow. A result for a request that has ended is dropped. Rows and blocks are
released when the last launched step that uses them is done. A preempted request waits until its
last result has arrived.
A request with drafts may get more than one token, so its next step waits for the result, and
`schedule` returns None meanwhile.
In a pipeline, `schedule` takes a micro-batch that is in none of the newest steps, of which there
are one fewer than micro-batches. The last tokens of its requests have then returned to the first
stage, or will have when the step is computed. The rules are the same.
The token budget of a step is spent in this order:
1. requests that decode;
2. running requests that lack a block or still compute their prompt, in the order of service;
3. waiting requests, in the order of service, while admission accepts the first of them;
4. drafts of requests that decode.
The order of service is (priority, arrival).
A chunk with image tokens ends before an image that the step cannot encode: image_cache.py.
A request whose prefix is in host memory waits outside the queue while it is loaded: host_tier.py.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from engine.batch import Batch, PrefixCopy, StepResult
from engine.errors import AdapterError
from engine.lora.tiers.adapter import Adapter
from engine.lora.tiers.store import AdapterStore
from engine.messages import Delta
from engine.scheduling.admission import ADMISSION, BATCHING, KVMemory
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.decode_group import DecodeGroup, next_group
from engine.scheduling.memory.block_manager import FreeBlocks, FreeList
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.memory.image_cache import ImageCache
from engine.scheduling.memory.request_memory import RequestMemory
from engine.scheduling.memory.snapshots import Snapshots
from engine.scheduling.moves.block_moves import BlockMoves
from engine.scheduling.pacing.chunking import (
    PromptPace,
    prefill_tokens,
    scored_prefill_tokens,
    startable_tokens,
)
from engine.scheduling.pacing.step_target import StepTarget
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.request import Request, RequestPhase
from engine.scheduling.request_start import find_start
from engine.scheduling.speculation import Speculation
from engine.scheduling.step import LaunchedStep, SchedulerCounters, StepBuilder

logger = logging.getLogger("manta.engine")

_QUEUED = (  # phases without a row
    RequestPhase.WAITING,
    RequestPhase.WAITING_FOR_ADAPTER,
    RequestPhase.WAITING_FOR_BLOCKS,
)


class Scheduler:
    """The owner of the requests and, in `memory`, of their rows and blocks.

    The module's docstring has the order of calls.
    """

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
        self.speculation = speculation
        # whether a step that verifies or computes drafts is in flight
        self.verifying = False
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
        self._traced = logger.isEnabledFor(logging.DEBUG)
        self.step = 0  # the last step scheduled
        self.done_step = 0  # the last step whose result has arrived
        self.requests: dict[int, Request] = {}  # id -> request that has not ended
        self.queue = WaitingQueue()
        self.num_constrained = 0  # number of requests with a grammar
        self.computing: list[Request] = []  # requests in phase COMPUTING
        self.decode_groups = [
            DecodeGroup(config.block_size, len(config.kinds), micro_batch)
            for micro_batch in range(config.micro_batches)
        ]
        self.decoding = self.decode_groups[0]  # the group of the step that is being scheduled
        self.in_flight: deque[LaunchedStep] = deque()
        # the most tokens of a step; the core may lower it
        self.token_limit = config.max_num_batched_tokens
        # the pace limits prompt tokens, from step times that the core reports
        target = config.target_tpot
        self.pace = StepTarget(target) if target else PromptPace()
        # of models with recurrent states: the value of `settled` for the next batch
        self._settled: list[tuple[int, int]] = []
        self._failed: list[Delta] = []  # last deltas of requests whose adapter failed to load
        self._fits = ADMISSION[config.admission]
        self._joins = BATCHING[config.batching]
        self._lag = int(config.async_scheduling or config.micro_batches > 1)
        self._arrivals = 0
        # and stop ids of requests since the engine was last idle
        self._end_tokens = set(config.eos_token_ids)

    # ---- add and end requests ------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a new request that is able to run and has a new id."""
        assert request.id not in self.requests
        assert len(request.token_ids) <= request.limit
        if not self.requests:
            self._end_tokens = set(self.config.eos_token_ids)
        self._end_tokens |= request.stop_ids
        self.requests[request.id] = request
        self.num_constrained += request.constraint is not None
        if request.adapter is not None:
            self._adapters.claim(request.adapter)
        if self.images is not None and request.images:
            self.images.add_request(request)
        self.queue.add_request(request)

    @property
    def rows(self) -> int:
        """The most requests that may run now."""
        return self.pace.rows(self._most_rows)

    def next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def abort(self, ids: Iterable[int]) -> list[Delta]:
        """End requests in any phase by their ids; ids of ended requests are ignored."""
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
        """End the requests, unless they have ended already; return their error deltas.

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

    def can_run(self) -> bool:
        """Whether a request runs or may start; False if all requests wait for adapters or
        blocks."""
        if self.running:
            return True
        request = self.queue.first()
        return request is not None and self._joins(request, self.running, self.queue)

    @property
    def loading(self) -> bool:
        """Whether blocks are being loaded from the host, which `take_arrived` asks for."""
        return self.tier is not None and self.tier.num_loads > 0

    def requeue(self, *, trusted: bool) -> None:
        """Put all running requests back into the queue and drop the steps in flight.

        The caller must drop the results of these steps.

        trusted: whether computed blocks stay in the prefix cache.
        """
        touched = [request for launched in self.in_flight for request in launched.requests]
        self.in_flight.clear()
        self._settled.clear()
        self.verifying = False
        if self.speculation is not None:
            self.speculation.awaited = None
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

        Legal when no request runs and no copy of the host tier is in flight.
        """
        if self.tier is not None:
            for request in self.tier.abandon():
                self.queue.blocks_ready(request)
        if self.moves is not None:
            self.moves.abandon()
        self.memory.empty(num_blocks)
        self.config = replace(self.config, num_blocks=num_blocks)

    def change_weights(self, model_key: str, *, recompute: bool) -> None:
        """Note that the weights have changed. Legal when no step is in flight.

        No later request starts from a prefix of the old weights.

        model_key: the new one, see `CoreConfig`.
        recompute: whether running requests compute their keys again.
        """
        assert not self.in_flight
        self.config = replace(self.config, model_key=model_key)
        if recompute:
            self.requeue(trusted=False)
        self.memory.reset_prefix_cache()
        if self.tier is not None and self.tier.disk is not None:
            self.tier.disk.files.renew()
        self.drop_images()
        for request in self.requests.values():
            request.set_model_key(model_key)
            request.hashes = []
            request.cacheable = False  # some of its blocks are of old weights, until a preemption

    # ---- schedule ------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Decide the next step and count it as launched; return None if nothing can run now."""
        speculation = self.speculation
        if speculation and self.in_flight and (self.verifying or speculation.awaited):
            return None
        builder = StepBuilder(Batch(self.step + 1))
        if len(self.decode_groups) > 1:
            newest = islice(reversed(self.in_flight), len(self.decode_groups) - 1)
            self.decoding = next_group(
                self.decode_groups, {launched.micro_batch for launched in newest}
            )
        self._grow_decodes(builder)
        if self.computing or self.queue.waiting:
            builder.prompt_limit = self._prompt_limit()
        if self.computing:
            self._schedule_running(builder)
        if self.queue.waiting and not builder.preempted:
            self._admit(builder)
        if speculation and not self.in_flight and self.queue.only is None:
            self._add_drafts(speculation, builder)
            self._add_proposals(speculation, builder)
        if not (self.decoding.requests or builder.sampling or builder.prefill_only):
            if self.images is not None:
                self.images.cancel()
            return None
        return self._build(builder)

    def _grow_decodes(self, builder: StepBuilder) -> None:
        """Allocate a block for each decoding request whose next token needs a new one.

        If free blocks do not suffice, all requests that need one leave the decode group for
        `computing`, where the order of service decides which of them get a block.
        """
        index = self.decoding.step_index + 1
        due = self.decoding.block_due(index)
        if not due:
            return
        stalled = any(r.remaining == 1 for r in self.computing)
        for request in due:
            pool = self.memory.pool(request)
            pool.hash_blocks(request, request.base + index)
            if not pool.whole:
                pool.drop_behind(request, request.base + index)
        by_pool = self.memory.by_pool(due)
        if stalled or any(
            len(some) * pool.next_cost(some[0]) > pool.num_free for pool, some in by_pool
        ):
            for request in due:
                self.decoding.leave(request)
                request.phase = RequestPhase.COMPUTING
                self.computing.append(request)
            return
        for pool, some in by_pool:
            builder.batch.new_blocks += pool.extend(some)
        for request in due:
            self.decoding.extended(request)
            if self.memory.snapshots is not None:
                self.memory.snapshots.decoded(request, request.base + index, builder.batch.step)

    def _add_drafts(self, speculation: Speculation, builder: StepBuilder) -> None:
        """Add drafts of decoding requests, as far as rows, tokens and free blocks allow.

        No request is preempted for drafts, and each running request keeps a free block.
        """
        group = self.decoding
        if self.memory.snapshots is not None:
            self._take_snapshots(self.memory.snapshots, builder.batch.step)
        num_chunks = len(builder.sampling) + len(builder.prefill_only)
        tokens = self.token_limit - len(group) - builder.chunk_tokens
        room = min(self.rows - len(group) - num_chunks, tokens)
        for verification in speculation.choose(
            group.requests, room, constrained=self.num_constrained > 0
        ):
            request, drafts = verification.request, verification.drafts
            start = request.base + group.step_index + 1
            if self.memory.snapshots is not None:
                del drafts[self.memory.snapshots.room(request, start) :]
            wanted = start + 1 + len(drafts)
            places = self._places(request, wanted, builder)
            if places < wanted:
                del drafts[max(0, places - start - 1) :]
            if drafts:
                builder.verifications.append(verification)

    def _take_snapshots(self, snapshots: Snapshots, step: int) -> None:
        """Take the snapshots that are due of decoding requests.

        Blocks that were reserved for drafts are not yet hashed when their tokens are accepted.
        """
        index, size = self.decoding.step_index + 1, self.config.block_size
        for request in self.decoding.requests:
            position = request.base + index
            if not position % size:
                self.memory.pool(request).hash_blocks(request, position)
                snapshots.decoded(request, position, step)

    def _add_proposals(self, speculation: Speculation, builder: StepBuilder) -> None:
        """Let the step compute drafts of requests that sample, as far as free blocks allow.

        A drafter's cache may keep the next token and all drafts but the last.
        """
        index = self.decoding.step_index + 1
        lasts = {request: request.base + index for request in self.decoding.requests}
        for request, length in builder.sampling:
            lasts[request] = request.num_computed + length - 1
        for verification in builder.verifications:
            lasts[verification.request] += len(verification.drafts)
        for request, count in speculation.compute(lasts):
            first = lasts[request] + 1
            count = min(count, self._places(request, first + count, builder) - first)
            if count > 0:
                builder.proposals.append((request, count))

    def _places(self, request: Request, tokens: int, builder: StepBuilder) -> int:
        """Give a request free blocks, up to this many tokens; return how many its blocks hold then.

        Each running request keeps a free block.
        """
        pool, size = self.memory.pool(request), self.config.block_size
        places = len(request.blocks) // pool.num_groups * size
        if places >= tokens or pool.regions is not None:
            return places
        # a table with more blocks than a window needs would break the other strategies
        if not pool.whole and self.config.admission != "optimistic":
            return places
        free = pool.num_free - len(self.running) * pool.next_cost(request)
        count = max(0, min(-(-(tokens - places) // size), free // pool.next_cost(request)))
        if count:
            builder.batch.new_blocks += pool.extend((request,), count)
            if request.group_index >= 0:
                self.decoding.extended(request)
        return places + count * size

    def _schedule_running(self, builder: StepBuilder) -> None:
        """Schedule running requests that do not decode, those with one token left first."""
        for request in sorted(self.computing, key=lambda r: (r.remaining > 1, r.order)):
            if request.phase is not RequestPhase.COMPUTING:
                continue  # preempted for an earlier request
            self._schedule_chunk(request, builder)

    def _schedule_chunk(self, request: Request, builder: StepBuilder) -> None:
        """Schedule as many of the request's tokens as budget and blocks allow, perhaps none."""
        budget = self._budget(builder)
        if self.config.whole_texts:
            if request.remaining > budget and builder.chunk_tokens:
                return
            # a text cannot be split, so it runs alone even if steps were made smaller
            budget = request.remaining
        scored = request.prompt_logprobs is not None and not request.delivered
        if scored and self.decoding:
            budget = min(budget, scored_prefill_tokens(self.token_limit) - builder.scored_tokens)
        if self.memory.snapshots is not None:
            budget = min(budget, self.memory.snapshots.advance(request, builder.batch.step))
        if budget <= 0:
            return
        if self.images is not None and request.next_image < len(request.images):
            length = self._give_blocks_to_images(self.images, request, budget, builder)
        else:
            length = self._give_blocks(request, budget, builder)
        if length > 0:
            builder.scored_tokens += length if scored else 0
            self._add_chunk(request, length, builder)

    def _prompt_limit(self) -> int:
        """Return the most prompt tokens that this step may compute.

        If no request decodes they may fill the whole budget.
        """
        # With several steps in flight, splitting a prompt lets several stages compute its parts at
        # once.
        if not self.decoding and len(self.decode_groups) == 1:
            return self.pace.limit(self.token_limit, 0, 0)
        free = self.rows - len(self.running)
        startable = max(0, min(free, len(self.queue.waiting)))
        queued = startable_tokens(self.queue.num_tokens, len(self.queue), startable)
        waiting = queued + sum(r.remaining for r in self.computing)
        wanted = prefill_tokens(waiting, self.token_limit)
        return self.pace.limit(wanted, len(self.decoding), self.decoding.context)

    def _budget(self, builder: StepBuilder) -> int:
        """Return the number of tokens that this step can still take."""
        room = self.token_limit - len(self.decoding)
        return min(room, builder.prompt_limit) - builder.chunk_tokens

    def _give_blocks_to_images(
        self, images: ImageCache, request: Request, budget: int, builder: StepBuilder
    ) -> int:
        """Allocate blocks for a chunk with images, and let the step encode them.

        Returns the tokens of the chunk. They exceed `budget` if it begins in an image that must not
        be cut and whose rest exceeds it.
        """
        length = images.whole(request, min(request.remaining, budget))
        if self.config.encodes_ahead and self.decoding and self.queue.only is None:
            most = images.whole(request, min(request.remaining, 2 * budget))
            length = images.hand_out(request, length, most, self.token_limit)
        length = images.reach(request, length, self.token_limit)
        room = self.config.max_num_batched_tokens - len(self.decoding) - builder.chunk_tokens
        if not 0 < length <= max(budget, room):
            return 0
        least = images.whole(request, 1)
        length = self._give_blocks(request, length, builder, least)
        if length:
            length = images.whole(request, length)
            images.use(request, length)
        return length

    def _give_blocks(
        self, request: Request, budget: int, builder: StepBuilder, least: int = 1
    ) -> int:
        """Allocate blocks for up to `budget` tokens; return how many tokens have blocks now.

        least: fewer tokens are of no use; the result is 0 then.
        """
        size, manager = self.config.block_size, self.memory.pool(request)
        length = min(request.remaining, budget)
        room = len(request.blocks) // manager.num_groups * size - request.num_computed
        if length > room:
            if room < least:
                needed = manager.next_cost(request, -(-(least - room) // size))
                if manager.num_free < needed:
                    self._make_room(request, needed, builder)
            count = min(-(-(length - room) // size), manager.num_extensions(request))
            if room + count * size < least:
                return 0
            length = min(length, room + count * size)
            builder.batch.new_blocks += manager.extend((request,), count)
        return length

    def _make_room(self, request: Request, needed: int, builder: StepBuilder) -> None:
        """Preempt requests of the same pool until `needed` blocks are free for the request.

        The last request in the order of service is preempted first. Blocks may be free already, or
        become free when steps are done. No request is preempted for a later one: the last request
        waits for its block. A chunk that is already in this step is never a victim, as chunks are
        scheduled in order.
        """
        pool, rank = self.memory.pool(request), request.kv_rank
        while pool.num_free < needed:
            if self.moves is not None and self.moves.yield_blocks():
                continue
            coming = self.memory.coming(rank, builder.sampling + builder.prefill_only)
            if pool.num_free + coming >= builder.owed[rank] + needed:
                builder.owed[rank] += needed
                return
            victim = self.memory.last_in_order(rank)
            if victim is request:
                return
            self._preempt(victim, builder)

    def _preempt(self, victim: Request, builder: StepBuilder) -> None:
        """Take the victim's row and blocks, and remove its blocks from this step."""
        self.counters.preemptions += 1
        builder.preempted = True
        builder.batch.new_blocks = [new for new in builder.batch.new_blocks if new[0] != victim.row]
        self._return_to_queue(victim)

    def _admit(self, builder: StepBuilder) -> None:
        """Start waiting requests, in order, while tokens, rows and memory suffice for the first."""
        memories: list[KVMemory] = []  # of each pool
        queue, rows = self.queue, self.rows
        while self.memory.has_row and self._budget(builder) > 0 and (request := queue.first()):
            if len(self.running) + len(queue.waiting_for_blocks) >= rows:
                return
            if request.last_step > self.done_step:  # its token in flight is not known yet
                assert len(self.decode_groups) > 1
                return
            if not queue.retry and self.running:
                return
            if not self._joins(request, self.running, queue):
                queue.retry = False  # until a request has ended
                return
            if request.adapter is not None and not self._has_adapter(request.adapter, request):
                continue
            if not memories:
                memories = self._memories()
            if self.tier is not None and self._fetch(self.tier, request, memories):
                memories = []
                continue
            if not self._start(request, memories, builder):
                if not self.running and self.moves is not None and self.moves.yield_blocks():
                    memories = []
                    continue
                queue.retry = False
                return
            self._schedule_chunk(request, builder)
            if memories[0].regions:
                memories = []  # the gaps have changed

    def _has_adapter(self, adapter: Adapter, request: Request) -> bool:
        """Return whether the adapter is on the device.

        If not, the request is moved to `WaitingQueue.waiting_for_adapter`. If the adapter cannot be
        loaded, the request ends with an error.
        """
        try:
            if self._adapters.ask(adapter):
                return True
        except AdapterError as error:
            self._failed += self.fail([request], f"{error.code}: {error.message}")
            return False
        self.queue.wait_for_adapter(adapter, request)
        return False

    def take_arrived(self) -> None:
        """Queue the requests whose prefixes were loaded from the host, or failed to load."""
        if self.tier is not None and self.tier.num_loads:
            before = self.tier.num_loads
            for request in self.tier.take_arrived():
                self.queue.blocks_ready(request)
            self.queue.retry |= self.tier.num_loads < before  # its blocks are free now

    def _fetch(self, tier: HostTier, request: Request, memories: list[KVMemory]) -> bool:
        """Return whether the request now waits for blocks from the host or its disk, as loading
        them is faster than computing their tokens.

        memories: the memory of each pool.
        """
        if request.fetched or self.queue.only is not None or not self.shares(request):
            return False
        (pool,) = self.memory.pools
        hashes = pool.hash_prefix(request, (len(request.token_ids) - 1) // self.config.block_size)
        snapshots = self.memory.snapshots
        if tier.disk is not None and not request.read_from_disk:
            request.read_from_disk = tier.disk.fetch(request, pool, hashes, snapshots)
            if request.read_from_disk:
                self.queue.wait_for_blocks(request)
                return True
        prefix = tier.find(pool, hashes, snapshots)
        if prefix is None:
            return False
        if find_start(request, hashes, (pool,), memories, snapshots, self._fits) is None:
            return False
        if not tier.begin(request, pool, prefix, snapshots):
            return False
        request.fetched = True
        self.queue.wait_for_blocks(request)
        return True

    def shares(self, request: Request) -> bool:
        """Whether the request may start with blocks of others."""
        return (
            self.config.prefix_caching
            and request.pooled is None
            and request.prompt_logprobs is None
            and request.routes is None
        )

    def _start(self, request: Request, memories: list[KVMemory], builder: StepBuilder) -> bool:
        """Give the request a row and the cached blocks of its prefix, if memory allows.

        memories: the memory of each pool.
        """
        held, size, num_tokens = self.memory, self.config.block_size, len(request.token_ids)
        caching = self.config.prefix_caching and request.pooled is None
        lookup = self.shares(request)
        hashes: list[bytes] = []
        if lookup:
            # The last token is computed again even if it is cached, because sampling needs its
            # logits.
            hashes = held.pools[0].hash_prefix(request, (num_tokens - 1) // size)
        start = find_start(request, hashes, held.pools, memories, held.snapshots, self._fits)
        if start is None:
            return False
        pool, memory = held.pools[start.kv_rank], memories[start.kv_rank]
        self.queue.remove_request(request)
        held.start(request, start, cacheable=caching)
        if self.tier is not None:
            self.tier.start(request, hashes, request.num_registered)
        if request.adapter is not None:
            first = request.num_cached < 0
            request.adapter_slot = self._adapters.pin(request.adapter, first=first)
        request.phase = RequestPhase.COMPUTING
        self.computing.append(request)
        if request.num_cached < 0:
            num_cached = min(request.num_computed, request.num_prompt) - request.num_virtual
            request.num_cached = max(0, num_cached)
            request.queued_us = (time.monotonic_ns() - request.arrived) // 1000
            if lookup:
                self.counters.prefix_queries += request.num_prompt - request.num_virtual
                self.counters.prefix_hits += request.num_cached
        free = pool.num_free
        if request.num_computed < request.num_prefix:
            self._copy_prefix(request, builder)
        memory.free -= start.footprint.held - start.footprint.shared + free - pool.num_free
        memory.promised += max(0, memory.blocks(num_tokens) - len(pool.held(request)))
        if held.snapshots is not None:
            snapshot = held.snapshots.begin(request, start.num_resident)
            if snapshot >= 0:
                builder.batch.resumed_states.append((request.row, snapshot))
            memory.cuts += held.snapshots.plan.cuts(num_tokens)
        for pool_memory in memories:  # all pools share a step's token budget
            pool_memory.uncomputed += num_tokens - request.num_computed
        if self.images is not None and request.images:
            self.images.computed(request)
        memory.count_running(held.footprint(request, self._step_index(request)))
        builder.batch.new_rows.append(request.new_row())
        builder.batch.new_blocks.extend(
            (request.row, index, block) for index, block in enumerate(request.blocks) if block >= 0
        )
        return True

    def _copy_prefix(self, request: Request, builder: StepBuilder) -> None:
        """Allocate blocks for keys of the adapter's prefix that are not cached, and copy the
        keys."""
        start, stop, pool = request.num_computed, request.num_prefix, self.memory.pool(request)
        assert pool.num_groups == 1 and pool.whole, "such adapters are refused"
        blocks = self.memory.extend_to(request, stop)
        copy = PrefixCopy(request.adapter_slot, start, stop, blocks, request.kv_rank)
        builder.batch.prefixes.append(copy)
        request.num_computed = stop
        # A request that starts in this same step may share these blocks.
        pool.hash_blocks(request, stop)

    def _memories(self) -> list[KVMemory]:
        """Return each pool as admission strategies see it at this point of the step."""
        budget = max(1, self.token_limit - len(self.running))
        return [
            self.memory.seen(rank, self.computing, self._step_index, budget, self._lag)
            for rank in range(len(self.memory.pools))
        ]

    def _step_index(self, request: Request) -> int:
        """Return the current step index of the request's decode group."""
        return self.decode_groups[request.micro_batch].step_index

    def _add_chunk(self, request: Request, length: int, builder: StepBuilder) -> None:
        """Add `length` tokens of the request to the step. Their blocks must be allocated."""
        reaches_end = length == request.remaining
        samples = reaches_end and request.num_tokens < request.limit
        if length == 1 and samples:
            self.computing.remove(request)
            self.decoding.join(request)
            builder.joined.append(request)
            return
        (builder.sampling if samples else builder.prefill_only).append((request, length))
        builder.chunk_tokens += length
        # Registered now, so that a request admitted in this same step can share these blocks.
        self.memory.pool(request).hash_blocks(request, request.num_computed + length)

    def _build(self, builder: StepBuilder) -> Batch:
        """Complete the batch, and set every request's phase for the next step."""
        group = self.decoding
        launched = builder.build(group)
        if self.memory.snapshots is not None:
            builder.batch.settled, self._settled = self._settled, []
            builder.batch.saved_states = self.memory.snapshots.take_saves()
            self.counters.snapshots_taken += len(builder.batch.saved_states)
        images = self.images
        if images is not None and (images.used or images.dropped):
            launched.ahead = images.build(builder.batch)
            ahead = builder.batch.ahead_images
            launched.num_images = len(builder.batch.images) + len(ahead)
            launched.ahead_tokens = sum(image.size for image in ahead)
        step = self.step = launched.step
        for entry in launched.finishing:
            group.leave(launched.requests[entry])
            launched.requests[entry].phase = RequestPhase.FINISHING
        chunks = builder.sampling + builder.prefill_only
        num_decodes = launched.decodes - launched.num_drafts
        for entry, (request, length) in enumerate(chunks, start=num_decodes):
            samples = entry < len(launched.ids)
            reaches_end = samples or length == request.remaining
            request.num_computed += length
            if self.images is not None and request.images:
                self.images.computed(request)
            if not (pool := self.memory.pool(request)).whole:
                pool.drop_behind(request, request.num_computed)
            request.last_step = step
            if samples and not request.delivered:
                launched.firsts.append(entry)
            if reaches_end:
                self.computing.remove(request)
                if not samples or request.num_tokens == request.limit:
                    request.phase = RequestPhase.FINISHING
                    launched.finishing.append(entry)
                else:
                    group.join(request)
                    if self.speculation is not None:
                        self.speculation.expect(request)
        if self.speculation is not None:
            builder.batch.dormant = self.speculation.dormant
        if self.num_constrained:
            self._constrain(launched, builder.batch)
        self.verifying = launched.num_drafts > 0 or bool(launched.proposals)
        self.in_flight.append(launched)
        return builder.batch

    def _constrain(self, launched: LaunchedStep, batch: Batch) -> None:
        """Set which samples need masks, and whether the tokens that decide the masks are known."""
        entries = []
        for entry, request in enumerate(launched.requests[: len(launched.ids)]):
            constraint = request.constraint
            if constraint is not None:
                launched.awaits_masks |= constraint.sampled_in > self.done_step
                constraint.sampled_in = launched.step
                entries.append(entry)
        launched.constrained = batch.masked = entries
        if launched.num_drafts:  # drafts' entries lie between the other decodes and the chunks
            first, count = launched.decodes - launched.num_drafts, launched.num_drafts
            batch.masked = [entry if entry < first else entry + count for entry in entries]
            for verification in launched.verifications:
                constraints = verification.constraints[: len(verification.drafts)]
                batch.masked += range(first, first + len(constraints))
                launched.later += [(verification, later) for later in constraints]
                first += len(verification.drafts)

    # ---- update --------------------------------------------------------------------------------

    def update(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest step in flight: add tokens, and end requests."""
        launched = self.in_flight.popleft()
        outcome = launched.accept(result, self._end_tokens)
        self.done_step = launched.step
        self.verifying = False  # a step with drafts is the only one in flight
        self.counters.prompt_tokens += launched.prompt_tokens
        self.counters.output_tokens += outcome.num_tokens
        if self.images is not None:
            self.images.encode_seconds += result.encode_seconds
        if self.speculation is not None and (launched.verifications or launched.proposals):
            self._observe_drafts(self.speculation, launched)
            for place, (request, count) in enumerate(launched.proposals):
                self.speculation.receive(request, count, partial(_item, result.drafts, place))
        for request in outcome.failed:
            self.memory.discard_cached(request)
            if self.images is not None:
                self.images.discard(request)
            self._end(request)
        for request in outcome.ended:
            self._end(request)
        if self.memory.deferred:
            self._give_back()
        if self.speculation is not None and self.in_flight:
            constrained = self.num_constrained > 0
            self.speculation.peek(self.decoding.requests, constrained=constrained)
        return outcome.deltas

    def _observe_drafts(self, speculation: Speculation, launched: LaunchedStep) -> None:
        """Advance requests by their accepted draft tokens, and count drafted and accepted ones."""
        for verification in launched.verifications:
            request = verification.request
            if request.phase is RequestPhase.DECODING:
                if verification.gained:
                    self.decode_groups[request.micro_batch].advance(request, verification.gained)
                if self.memory.snapshots is not None:
                    self._settled.append((request.row, 1 + verification.gained))
            self.counters.count_drafts(len(verification.drafts), verification.accepted)
        speculation.observe(launched.verifications)

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
        self.counters.finished += 1
        for launched in self.in_flight:
            launched.some_ended = True
        if request.row >= 0:
            self._release(request)
        if request.adapter is not None:
            self._adapters.release(request.adapter, started=request.num_cached >= 0)
        if self.speculation is not None:
            self.speculation.end(request)
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

    def check_integrity(self) -> None:
        """Assert the invariants of requests, rows and blocks. Legal between steps."""
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


def _item(read: Callable[[], Sequence[Sequence[int]]], place: int) -> Sequence[int]:
    return read()[place]
