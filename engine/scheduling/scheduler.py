"""Scheduler: decides which tokens of which requests the next step computes, and assigns blocks.

phases.py has the requests and their phases. request_memory.py assigns rows and blocks. step.py has
code about a single step, such as reading its result, and drafts/ has its drafts. queue.py has the
order of waiting requests, and request_start.py chooses the pool where a request starts.
The timeline, one batch ahead (`EngineCore.step`); otherwise `schedule` comes after `update`:

 schedule n+1 | launch n+1 | wait n | update n | schedule n+2 | launch n+2 | wait n+1 | ...

So `schedule` does not know the tokens of the step in flight, only that each sampling entry will
have one. Three rules follow. Results of requests that have ended are dropped. Rows and blocks are
released when the last launched step that uses them is done. A preempted request waits until its
last result has arrived.
A request with drafts may get more than one token. If the host knows the drafts, the next step waits
for the result, and `schedule` returns None meanwhile. If a model computes them, `schedule` counts
none as accepted, `StepDrafts` reserves blocks as if all were, and the device adds those that were.
In a pipeline with n micro-batches, `schedule` takes one that is in none of the newest n - 1 steps.
The last tokens of its requests have then returned to the first stage, or will have when the step is
computed. The rules are the same.
The token budget of a step is spent in this order:
1. requests that decode;
2. running requests that lack a block or still compute their prompt, in the order of service;
3. waiting requests, in the order of service, while admission accepts the first of them;
4. drafts of requests that decode.
The order of service is (priority, arrival).
A chunk with image tokens ends before an image that the step cannot encode: image_cache.py.
A request whose prefix is in host memory waits outside the queue while it is loaded: host_tier.py.
"""

import time
from collections.abc import Callable
from heapq import nlargest
from itertools import islice

from engine.batch import Batch, PrefixCopy, StepResult
from engine.errors import AdapterError
from engine.lora.tiers.adapter import Adapter
from engine.lora.tiers.store import AdapterStore
from engine.messages import Delta
from engine.scheduling.admission import ADMISSION, BATCHING, KVMemory
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.decode_group import next_group
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.drafts.step_drafts import StepDrafts
from engine.scheduling.memory.block_manager import FreeBlocks, FreeList
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.memory.image_cache import ImageCache
from engine.scheduling.moves.block_moves import BlockMoves
from engine.scheduling.pacing.batch_pace import CALM_STEPS, BatchPace
from engine.scheduling.pacing.chunking import (
    PromptPace,
    prefill_tokens,
    scored_prefill_tokens,
    startable_tokens,
)
from engine.scheduling.pacing.step_target import StepTarget
from engine.scheduling.phases import RequestPhases
from engine.scheduling.request import Request, RequestPhase
from engine.scheduling.request_start import find_start
from engine.scheduling.step import LaunchedStep, StepBuilder

# seconds that a launch takes, for which a step of a loaded request may wait if no other runs
_LAUNCH_SECONDS = 0.001


class Scheduler(RequestPhases):
    """The scheduler, which builds each step's batch and applies its result; see the module."""

    def __init__(
        self,
        config: CoreConfig,
        adapters: AdapterStore | None = None,
        free_blocks: Callable[[int], FreeBlocks] = FreeList,
        speculation: Speculation | None = None,
        tier: HostTier | None = None,
        moves: BlockMoves | None = None,
    ) -> None:
        super().__init__(config, adapters, free_blocks, speculation, tier, moves)
        self.decoding = self.decode_groups[0]  # the group of the step that is being scheduled
        self.lacks_blocks = False  # whether a request that is not batch work waits for blocks
        # the maximum number of tokens in a step, which the core may lower
        self.token_limit = config.max_num_batched_tokens
        # the pace limits prompt tokens, from step times that the core reports
        target = config.target_tpot
        self.pace = StepTarget(target) if target else PromptPace()
        self.batch_pace = BatchPace()
        self._fits = ADMISSION[config.admission]
        self._joins = BATCHING[config.batching]
        self._result_at = 0.0  # time.perf_counter() at the last result
        self._lag = int(config.async_scheduling or config.micro_batches > 1)

    @property
    def rows(self) -> int:
        """The maximum number of requests that may run now."""
        return self.pace.rows(self._most_rows)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if not request.batch_work:
            self.batch_pace.observe_prompt(request.remaining)

    def can_run(self) -> bool:
        """Whether a request runs or may start; False if all requests wait for adapters or
        blocks."""
        if self.running:
            return True
        request = self.queue.first()
        return request is not None and self._joins(request, self.running, self.queue)

    # ---- schedule ------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Decide the next step and count it as launched; return None if nothing can run now."""
        drafts = self.drafts
        if drafts is not None and self.in_flight and self._waits(drafts):
            return None
        if self.tier is not None:
            self._take_ending(self.tier)
        builder = StepBuilder(Batch(self.step + 1))
        if len(self.decode_groups) > 1:
            newest = islice(reversed(self.in_flight), len(self.decode_groups) - 1)
            self.decoding = next_group(
                self.decode_groups, {launched.micro_batch for launched in newest}
            )
        self._grow_decodes(builder)
        if self.num_batch:
            self._limit_batch_work(builder)
        if self.computing or self.queue.waiting:
            builder.prompt_limit = self._prompt_limit(builder)
            self._schedule_prompts(builder)
            if builder.batch_tokens == 0 and builder.empty(self.decoding):
                builder.batch_tokens = 1  # batch work runs, as nothing else can
                self._schedule_prompts(builder)
        may_draft = drafts is not None and (drafts.ahead or not self.in_flight)
        if drafts is not None and may_draft and self.queue.only is None:
            num_chunks = len(builder.sampling) + len(builder.prefill_only)
            tokens = self.token_limit - len(self.decoding) - builder.chunk_tokens
            room = min(self.rows - len(self.decoding) - num_chunks, tokens)
            drafts.add(builder, self.decoding, room, self.num_constrained > 0)
        if not (self.decoding.requests or builder.sampling or builder.prefill_only):
            if self.images is not None:
                self.images.cancel()
            return None
        return self._build(builder)

    def _waits(self, drafts: StepDrafts) -> bool:
        """Whether no step may be launched before the result of the one in flight is known.

        Steps with images need exact positions.
        """
        images = self.images is not None and bool(self.computing or self.queue.waiting)
        return drafts.waits or (images and drafts.unsettled is not None)

    def _grow_decodes(self, builder: StepBuilder) -> None:
        """Allocate a block for each decoding request whose next token needs a new one.

        If free blocks do not suffice, all requests that need one leave the decode group for
        `computing`, where the order of service decides which of them get a block.
        """
        index = self.decoding.step_index + 1
        due = self.decoding.block_due(index)
        if not due:
            return
        stalled = any(r.remaining == 1 and not r.batch_work for r in self.computing)
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

    def _limit_batch_work(self, builder: StepBuilder) -> None:
        """Limit the batch work of the step, if other requests run, wait, or ended shortly before.

        Batch work is preempted for requests that lack rows or blocks. Decodes beyond the limit
        leave the decode group, the last in the order of service first.
        """
        calm = len(self.requests) == self.num_batch and self.step - self.shared_step >= CALM_STEPS
        if calm or len(self.decode_groups) > 1 or self.queue.only is not None:
            return
        free = 0 if self.lacks_blocks else self.rows - len(self.running)
        self.lacks_blocks = False
        for victim in self.batch_victims(free):
            self._preempt(victim, builder)
        # without steps in flight, victims' rows are free at once and their last tokens are known
        if not self.in_flight:
            builder.preempted = False
        decodes = [request for request in self.decoding.requests if request.batch_work]
        paused = sum(r.batch_work and r.remaining == 1 for r in self.computing)
        counts = len(self.decoding) - len(decodes), len(decodes) + paused
        work = self.interactive_tokens(), counts, self.decoding.context / max(1, len(self.decoding))
        limits = self.batch_pace.limits(self.rows, self.token_limit, *work)
        builder.batch_decodes, builder.batch_tokens, builder.own_tokens = limits
        more = len(decodes) - builder.batch_decodes
        for request in nlargest(more, decodes, key=lambda r: r.order):
            self.decoding.leave(request)
            request.phase = RequestPhase.COMPUTING
            self.computing.append(request)
        builder.batch_decodes = max(0, -more)

    def _schedule_prompts(self, builder: StepBuilder) -> None:
        """Schedule requests that do not decode: running ones, those with one token left first,
        and then waiting ones."""
        for request in sorted(self.computing, key=lambda r: (r.remaining > 1, r.order)):
            if request.phase is not RequestPhase.COMPUTING:
                continue  # the request was preempted for an earlier one
            self._schedule_chunk(request, builder)
        if self.queue.waiting and not builder.preempted:
            self._admit(builder)

    def _schedule_chunk(self, request: Request, builder: StepBuilder) -> None:
        """Add the request's next tokens to the step, as many as budget and blocks allow."""
        budget = self._budget(builder)
        if request.batch_work:
            decodes = request.remaining == 1
            budget = min(budget, builder.batch_decodes if decodes else builder.batch_tokens)
        if self.config.whole_texts:
            if request.remaining > budget and builder.chunk_tokens:
                return
            # a text that cannot be split runs alone, even beyond a lowered token limit
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

    def _prompt_limit(self, builder: StepBuilder) -> int:
        """Return the maximum number of prompt tokens that this step may compute.

        If no request decodes, prompt tokens may fill the whole budget.
        """
        # In a pipeline, prompts are split even without decodes, so that stages compute chunks at
        # the same time.
        if not self.decoding and len(self.decode_groups) == 1:
            return self.pace.limit(self.token_limit, 0, 0)
        free = self.rows - len(self.running)
        startable = max(0, min(free, len(self.queue.waiting)))
        queued = startable_tokens(self.queue.num_tokens, len(self.queue), startable)
        waiting = queued + sum(r.remaining for r in self.computing)
        wanted = prefill_tokens(waiting, self.token_limit)
        if self.num_batch and builder.batch_tokens < self.token_limit:
            wanted = builder.batch_tokens + builder.own_tokens
        return self.pace.limit(wanted, len(self.decoding), self.decoding.context)

    def _budget(self, builder: StepBuilder) -> int:
        """Return the number of tokens that this step can still take."""
        room = self.token_limit - len(self.decoding)
        return min(room, builder.prompt_limit) - builder.chunk_tokens

    def _give_blocks_to_images(
        self, images: ImageCache, request: Request, budget: int, builder: StepBuilder
    ) -> int:
        """Allocate blocks for a chunk with images, and let the step encode them.

        Returns the number of tokens of the chunk. It exceeds `budget` if the chunk begins inside an
        image that must not be split and whose remaining tokens exceed the budget.
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

        least: the minimum useful number of tokens; if fewer have blocks, the result is 0.
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
        """Preempt other requests of the pool until `needed` blocks are, or soon become, free.

        The last request in the order of service is preempted first. Blocks that become free when
        steps in flight are done count too. No request is preempted for a later one: the last
        request waits for its block. A chunk that is already in this step is never a victim, as
        chunks are scheduled in order.
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
        """Release the victim's row and blocks, remove it from this step, and queue it again."""
        self.counters.preemptions += 1
        builder.preempted = True
        builder.batch.new_blocks = [new for new in builder.batch.new_blocks if new[0] != victim.row]
        self._return_to_queue(victim)

    def _admit(self, builder: StepBuilder) -> None:
        """Start waiting requests, in order, while tokens, rows and memory suffice for the first."""
        memories: list[KVMemory] = []  # the memory of each pool
        queue, rows = self.queue, self.rows
        while self.memory.has_row and self._budget(builder) > 0 and (request := queue.first()):
            if len(self.running) + len(queue.waiting_for_blocks) >= rows:
                return
            if request.last_step > self.done_step:  # its last token is still in flight
                assert len(self.decode_groups) > 1
                return
            if not queue.retry and self.running:
                return
            if request.batch_work and min(builder.batch_tokens, builder.batch_decodes) <= 0:
                return
            if not self._joins(request, self.running, queue):
                queue.retry = False  # not tried again until a request has ended
                return
            if request.adapter is not None and not self._has_adapter(request.adapter, request):
                continue
            if not memories:
                memories = self._memories()
            if self.tier is not None and self._fetch(self.tier, request, memories):
                self._take_ending(self.tier)
                memories = []
                continue
            if not self._start(request, memories, builder):
                if not self.running and self.moves is not None and self.moves.yield_blocks():
                    memories = []
                    continue
                queue.retry = False
                self.lacks_blocks = not request.batch_work
                return
            self._schedule_chunk(request, builder)
            if memories[0].regions:
                memories = []  # computed again, as the gaps between regions have changed

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

    def _fetch(self, tier: HostTier, request: Request, memories: list[KVMemory]) -> bool:
        """Begin to load a request's prefix from host memory or disk; return whether the request
        waits.

        Nothing is loaded if computing the prefix is faster.

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

    def _take_ending(self, tier: HostTier) -> None:
        """Queue the requests whose loads from the host should end before the next step can begin.

        Not with moves, which may send a block before a step has waited for its load.
        """
        if tier.num_loads and self.moves is None and self.queue.only is None:
            for request in tier.take_ending(max(0.0, self._seconds_left())):
                self.queue.blocks_ready(request)

    def _seconds_left(self) -> float:
        """Return the least expected seconds until the device can begin the next step."""
        if not self.in_flight:
            return 0.0 if self.running else _LAUNCH_SECONDS
        if len(self.in_flight) > 1 or len(self.decode_groups) > 1:
            return 0.0
        (launched,) = self.in_flight
        began = max(launched.began, self._result_at)
        seconds = self.pace.least_seconds(launched.decodes, launched.prompt_tokens)
        return began + seconds - time.perf_counter()

    def shares(self, request: Request) -> bool:
        """Whether the request may start with blocks that other requests have computed."""
        return (
            self.config.prefix_caching
            and request.pooled is None
            and request.prompt_logprobs is None
            and request.routes is None
        )

    def _start(self, request: Request, memories: list[KVMemory], builder: StepBuilder) -> bool:
        """Give the request a row and its cached blocks; return False if memory does not allow it.

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
            self.tier.worth.start(request, hashes, request.num_registered)
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
        """Copy the adapter's precomputed prefix KV into new blocks, as far as it is not cached."""
        start, stop, pool = request.num_computed, request.num_prefix, self.memory.pool(request)
        assert pool.num_groups == 1 and pool.whole, "such adapters are refused"
        blocks = self.memory.extend_to(request, stop)
        copy = PrefixCopy(request.adapter_slot, start, stop, blocks, request.kv_rank)
        builder.batch.prefixes.append(copy)
        request.num_computed = stop
        # A request that starts in this same step may share these blocks.
        pool.hash_blocks(request, stop)

    def _memories(self) -> list[KVMemory]:
        """Return the state of each pool for admission strategies, at this point of the step."""
        budget = max(1, self.token_limit - len(self.running))
        return [
            self.memory.seen(rank, self.computing, self._step_index, budget, self._lag)
            for rank in range(len(self.memory.pools))
        ]

    def _step_index(self, request: Request) -> int:
        """Return how many steps the request's decode group (its micro-batch) has had so far."""
        return self.decode_groups[request.micro_batch].step_index

    def _add_chunk(self, request: Request, length: int, builder: StepBuilder) -> None:
        """Add `length` tokens of the request to the step. Their blocks must be allocated."""
        if request.batch_work:
            if length == 1 == request.remaining:
                builder.batch_decodes -= 1
            else:
                builder.batch_tokens -= length
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
        """Complete and return the batch, and set the phase of each of its requests."""
        group = self.decoding
        launched = builder.build(group)
        if self.memory.snapshots is not None:
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
                    if self.drafts is not None:
                        self.drafts.speculation.expect(request)
        if self.drafts is not None:
            self.drafts.launched(launched, builder.batch)
        if self.num_constrained:
            self._constrain(launched, builder.batch)
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
            verifications = launched.verifications
            assert verifications is not None
            for index, length in enumerate(verifications.lengths):
                constraints = verifications.constraints.get(index, ())[:length]
                batch.masked += range(first, first + len(constraints))
                launched.later += [(index, at, later) for at, later in enumerate(constraints)]
                first += length

    # ---- update --------------------------------------------------------------------------------

    def update(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest step in flight to its requests; return their deltas."""
        launched = self.in_flight.popleft()
        self._result_at = time.perf_counter()
        outcome = launched.accept(result, self._end_tokens)
        self.done_step = launched.step
        self.counters.prompt_tokens += launched.prompt_tokens
        self.counters.output_tokens += outcome.num_tokens
        if self.images is not None:
            self.images.encode_seconds += result.encode_seconds
        finishing: list[Request] = []
        if self.drafts is not None:
            finishing = self.drafts.update(launched, result, self.decode_groups)
        for request in outcome.failed:
            self.memory.discard_cached(request)
            if self.images is not None:
                self.images.discard(request)
            self._end(request)
        for request in outcome.ended:
            self._end(request)
        for request in finishing:
            if request.phase is RequestPhase.DECODING:
                newest = self.in_flight[-1]
                newest.finishing.append(newest.requests.index(request))
                self.decoding.leave(request)
                request.phase = RequestPhase.FINISHING
        for entry in launched.firsts:
            self.memory.store_computed(launched.requests[entry], self.done_step)
        if self.memory.deferred:
            self._give_back()
        if self.drafts is not None and self.in_flight and not self.drafts.ahead:
            constrained = self.num_constrained > 0
            self.drafts.speculation.peek(self.decoding.requests, constrained=constrained)
        return outcome.deltas
