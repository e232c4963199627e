"""EngineCore: the step loop; it takes requests and returns deltas. Single-threaded, without torch.

One call of `step`, one batch ahead (async_scheduling):

 schedule n + 1 -> launch n + 1 -> wait for n -> update with n -> deltas of n

so that the device has the next step before the host has seen the last result. Otherwise a step is
scheduled, launched, waited for and updated in one call. In a pipeline each micro-batch has a step
in flight, and the call waits for the oldest. A step with drafts is waited for at once, and launched
when no other is in flight, unless the device can add accepted drafts to the next step's positions:
see `StepDrafts.ahead`.
A grammar needs a token before it can tell what may follow. So if a constrained request has its last
token in flight, the step's forward pass is launched without its sampling:

 launch forward n + 1 -> wait for n -> update with n -> begin the masks
 deltas of n -> schedule n + 2 -> wait for the masks -> launch sampling n + 1 -> launch n + 2

Masks are then computed on other threads while the device computes layers and logits. If all tokens
that masks depend on are known, masks are computed while the forward pass is launched.

If a step raises, the poison requests fail and the engine continues: failures/. If the device
has no memory for a step, no request fails: the step's tokens are computed again in smaller steps.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.batch import Batch, StepResult
from engine.errors import InvalidRequest
from engine.lora.tiers.store import AdapterStore
from engine.messages import (
    CACHES,
    WEIGHTS,
    AdapterAnswer,
    AddAdapter,
    Answer,
    Delta,
    EngineRequest,
    EngineStats,
    RemoveAdapter,
    TransferWeights,
    UpdateWeights,
)
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.failures.step_failure import StepBlame
from engine.scheduling.failures.step_recovery import StepRecovery
from engine.scheduling.memory.block_manager import FreeBlocks, FreeList
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.memory.kv_growth import KVGrowth
from engine.scheduling.moves.block_moves import KV_MOVES_OFF, BlockMoves
from engine.scheduling.orders.sleeping import KEEP, EngineSleep, Sleeper
from engine.scheduling.orders.transfers import WeightReceiver, WeightTransfers
from engine.scheduling.orders.updates import Pause, WeightLoader, WeightUpdates
from engine.scheduling.pacing.step_timer import StepTimer
from engine.scheduling.preparation import RequestPreparation
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import LaunchedStep
from engine.scheduling.step_runner import PendingResult, Runner
from engine.structured.constraint import Constraint
from engine.structured.preparing import Grammars
from engine.structured.step_grammars import Filled, HostMemory, StepGrammars, host_memory

__all__ = ["CoreConfig", "EngineCore", "PendingResult", "Runner"]

logger = logging.getLogger("manta.engine")

_POISON = "engine_error: the engine fails on this request, and only on it"

# Seconds between polls for finished loads from the host if there is nothing else to do.
_LOAD_SECONDS = 0.0002
_MOST_MASK_THREADS = 8  # 16 threads made steps of 64 rows no shorter
_NO_GRAMMARS = InvalidRequest(
    "this engine has no vocabulary to constrain outputs with",
    param="structured",
    code="structured_not_supported",
)


class EngineCore:
    """The step loop of an engine: call `step` while `has_work`.

    An exception from `step` is fatal: the device is lost, or every step on it fails.

    The failure of one request never raises: the request ends with a delta whose finish is "error".
    """

    def __init__(
        self,
        config: CoreConfig,
        runner: Runner,
        adapters: AdapterStore | None = None,
        free_blocks: Callable[[int], FreeBlocks] = FreeList,
        grammars: Grammars | None = None,
        memory: Sleeper | None = None,
        mask_memory: HostMemory = host_memory,
        weights: WeightLoader | None = None,
        speculation: Speculation | None = None,
        receiver: WeightReceiver | None = None,
        tier: HostTier | None = None,
        moves: BlockMoves | None = None,
        growth: KVGrowth | None = None,
    ) -> None:
        """Set up the core.

        receiver: takes weights that a trainer sends; None = none can be sent.
        weights: replaces the model's weights; None = they cannot be replaced.
        memory: the memory of an engine that may sleep; None = it cannot.
        mask_memory: allocates the host memory from which the device copies masks.
        speculation: the drafts of steps; None = each decode gets one token a step.
        tier: keeps KV blocks in host memory, for a device with one pool; None = no host tier.
        moves: exchanges KV blocks with other replicas; None = no blocks are exchanged.
        growth: grows and shrinks the only pool of blocks; None = its size is fixed.
        """
        config = config.bounded()
        self._adapters = adapters or AdapterStore.disabled()
        threads = min(_MOST_MASK_THREADS, len(os.sched_getaffinity(0)))
        self._step_grammars = StepGrammars(threads, config.depth, mask_memory)
        self.scheduler = Scheduler(config, self._adapters, free_blocks, speculation, tier, moves)
        self._moves = moves
        self._growth = growth
        # answers that refuse `serve_kv` calls, in an engine that exchanges no KV blocks
        self._unserved: list[Answer] = []
        self.draining = False
        self._sleep = EngineSleep(memory)
        self._pause = Pause()
        self._updates = WeightUpdates(weights)
        self._transfers = WeightTransfers(receiver)
        # the prefix cache's key for the weights of the engine's start
        self._model_key = config.model_key
        self.on_device = False  # whether a step waits for the device; read by another thread
        self._runner = runner
        self._depth = config.depth
        self._pending: deque[PendingResult] = deque()
        self._outbox: list[Delta] = []  # deltas of requests that ended between two steps
        self._grammars = grammars or Grammars(_NO_GRAMMARS)
        self._preparation = RequestPreparation(
            self.scheduler, self._adapters, self._grammars, moves, self._outbox
        )
        self._preparing = self._preparation.preparing
        # The newest step and the function that finishes its masks, if the step waits for masks.
        self._masks_begun: tuple[LaunchedStep, Callable[[], Filled]] | None = None
        self._timer = StepTimer(config.micro_batches)
        self._blame = StepBlame()
        self._recovery = StepRecovery(self.scheduler, self._pending, growth)

    @property
    def config(self) -> CoreConfig:
        """The current settings, as changed by shortages of memory and by new weights."""
        return self.scheduler.config

    def add_request(self, message: EngineRequest) -> None:
        """Queue a request; a request that cannot run ends with an error delta in the next step."""
        if self.draining:
            error = "draining: this engine is draining"
            self._outbox.append(Delta(message.id, [], "error", error=error))
        elif self._pause.on:
            self._pause.later[message.id] = message
        else:
            self._preparation.add(message, pulls=not self._sleep.parts)

    def abort(self, ids: Sequence[int]) -> None:
        """End requests; the next step returns their last deltas. Unknown ids are ignored."""
        for id in ids:
            later = self._pause.later.pop(id, None)
            if later is not None or self._preparing.pop(id, None) is not None:
                self._outbox.append(Delta(id, [], "abort"))
            if self._moves is not None:
                self._moves.cancel(id)
        self._outbox += self.scheduler.abort(ids)

    def has_work(self) -> bool:
        """Whether a call of `step` has something to do.

        False if all requests, or all in the current bisection group, wait for adapters.
        """
        return bool(
            self._pending
            or self._outbox
            or self._updates.ready
            or (self.scheduler.can_run() and not (self._pause.frozen or self._sleep.dropped))
            or self._adapters.has_news()
            or self._grammars.has_news()
            or self.scheduler.loading
            or (self.scheduler.tier is not None and self.scheduler.tier.has_news())
            or (self._moves is not None and self._moves.has_news())
            or (self._growth is not None and self._growth.has_news())
            or self._may_fall_asleep()
        )

    def launch_delay(self) -> float:
        """Return for how many seconds the loop may take input before it calls `step`.

        The result is 0 unless batch work runs.
        """
        scheduler = self.scheduler
        if not scheduler.num_batch or len(self._pending) != 1 or scheduler.config.depth != 2:
            return 0.0
        newest = scheduler.in_flight[-1]
        if newest.awaits_masks or scheduler.drafts is not None or self._outbox:
            return 0.0
        work = newest.decodes, newest.context, newest.prompt_tokens
        seconds = scheduler.batch_pace.launch_after(*work)
        return max(newest.began, self._timer.since) + seconds - time.perf_counter()

    def step(self) -> list[Delta]:
        """Run one round of the step loop; return the new tokens and ends of requests as deltas.

        With async_scheduling the first round after an idle time only launches a step, and returns
        no deltas.
        """
        scheduler, pending, blame = self.scheduler, self._pending, self._blame
        recovery = self._recovery
        if self._updates.ready and not pending:
            self._replace_weights()
        # No request may run in a pause, or while the weights are lost.
        held = self._updates.ready or self._pause.frozen or self._sleep.dropped
        if self._sleep.wanted and self._may_fall_asleep():
            self._fall_asleep()
        elif self._sleep.parts and scheduler.can_run() and not held:
            self.wake()
        began = time.perf_counter()
        self._take_arrivals()
        batch = None if held else scheduler.schedule()
        deltas = self._outbox + scheduler.take_failed()
        self._outbox.clear()
        waits = scheduler.drafts is not None and scheduler.drafts.waits
        depth = 1 if recovery.bisection is not None or waits else self._depth
        # whether the device has waited for this launch since the last step
        idle_device = bool(batch and scheduler.num_batch and pending and pending[-1].ready())
        result: StepResult | None = None
        with blame(-1):
            self._launch(batch, deltas)
        if pending and (batch is None or len(pending) >= depth or blame.failure):
            with blame(0):
                self.on_device = True
                result = pending.popleft().wait()
            self.on_device = False
        if result is not None and self._moves is not None and not self._moves.confirm():
            recovery.recompute()
            result = None
        idle = not (result or blame.failure or batch or held)
        pulling = self._moves is not None and self._moves.holds and scheduler.can_run()
        if idle and (scheduler.loading or pulling):
            time.sleep(_LOAD_SECONDS)
        else:
            assert not (idle and scheduler.can_run()), "requests are left, yet none can run"
        if result is not None:
            recovery.succeeded()
            done = scheduler.in_flight[0]  # the step of `result`
            deltas += scheduler.update(result)
        if batch is not None and blame.failure is None and scheduler.in_flight:
            newest = scheduler.in_flight[-1]
            if newest.awaits_masks:
                with blame(-1):
                    self._begin_masks(newest)
        if blame.failure is not None:
            recovery.retry(self._runner, *blame.take_failure())
        if recovery.bisection is not None:
            deltas += recovery.go_on(recovery.bisection, succeeded=result is not None)
        self._timer.stepped(began, result=result is not None, more=self.has_work())
        if result is not None:
            self._observe(done, result, late=idle_device)
            if scheduler.drafts is not None and not held:
                self._launch_drafts(deltas)
        return deltas

    def _take_arrivals(self) -> None:
        """Take in what became ready since the last round: loaded and moved blocks, memory for
        blocks, prepared requests."""
        scheduler = self.scheduler
        scheduler.take_loaded()
        if scheduler.tier is not None:
            scheduler.take_arrived()
        if self._moves is not None:
            self._preparation.take_moves(self._moves)
        if self._growth is not None:
            scheduler.grow(self._growth)
        if self._preparing:
            self._preparation.take_prepared()

    def _observe(self, done: LaunchedStep, result: StepResult, *, late: bool) -> None:
        """Report the time of a step that is done to what chooses the sizes of later steps.

        late: whether the device waited for the step that was launched meanwhile.
        """
        scheduler = self.scheduler
        seconds = self._timer.between
        if scheduler.config.micro_batches > 1:
            seconds = self._timer.since_last(done.micro_batch, done.began)
        # the time of encoding does not depend on the chunk's size
        seconds = max(0.0, seconds - result.encode_wait)
        work = done.decodes, done.context, done.prompt_tokens
        scheduler.pace.observe(*work, seconds)
        if scheduler.num_batch:
            scheduler.batch_pace.observe(*work, seconds, late=late)
        if scheduler.tier is not None:
            scheduler.tier.worth.observe_step(done.prompt_tokens, seconds)
        if scheduler.drafts is not None:
            entries = 0 if done.prompt_tokens else done.decodes - done.num_drafts
            scheduler.drafts.speculation.observe_step(entries, done.num_drafts, seconds)

    def _launch_drafts(self, deltas: list[Delta]) -> None:
        """Launch the next step before the deltas of the last step, which had drafts, are published.

        Otherwise the device would be idle meanwhile. Does nothing if that step is launched already.

        deltas: gets the last deltas of requests whose grammar allows no token.
        """
        if self._pending or self._depth == 1 or self._recovery.bisection is not None:
            return
        batch = self.scheduler.schedule()
        with self._blame(-1):
            self._launch(batch, deltas)
        if self._blame.failure is not None:
            self._recovery.retry(self._runner, *self._blame.take_failure())

    def _launch(self, batch: Batch | None, deltas: list[Delta]) -> None:
        """Launch the sampling of the last step if its masks were pending, then launch the batch.

        deltas: gets the last deltas of requests whose grammar allows no token.
        """
        scheduler, pending, blame = self.scheduler, self._pending, self._blame
        if self._masks_begun is not None:
            blame.suspect = -1 if batch is None else -2
            deltas += self._sample_deferred(*self._masks_begun)
        if batch is None:
            return
        if len(pending) >= scheduler.config.micro_batches > 1:
            blame.suspect = 0
            pending[0].conclude()
        blame.suspect = -1
        if batch.masked and not scheduler.in_flight[-1].awaits_masks:
            deltas += self._launch_with_masks(batch)
        else:
            pending.append(self._runner.launch(batch))

    def _launch_with_masks(self, batch: Batch) -> list[Delta]:
        """Launch a step whose masks are computed during the forward pass's launch.

        Returns the last deltas of requests whose grammar allows no token.

        All tokens that the masks depend on are known.
        """
        launched = self.scheduler.in_flight[-1]
        finish = self._step_grammars.begin(_constraints(launched))
        try:
            pending = self._runner.launch(batch)
        finally:
            masks, errors = finish()
        pending.sample(masks)
        self._pending.append(pending)
        return self._fail_masks(launched, errors)

    def _begin_masks(self, launched: LaunchedStep) -> None:
        """Begin the masks of the newest step, for which the next call of `step` waits."""
        pending = self._pending.pop()  # after an error nothing may wait for this step
        self._masks_begun = launched, self._step_grammars.begin(_constraints(launched))
        self._pending.append(pending)

    def _sample_deferred(self, launched: LaunchedStep, finish: Callable[[], Filled]) -> list[Delta]:
        """Launch the sampling of the newest step, whose masks the last call of `step` began.

        Returns the last deltas of requests whose grammar allows no token.

        finish: waits for the masks, and returns (masks, error messages by row of the masks).
        """
        self._masks_begun = None
        pending = self._pending.pop()  # after an error nothing may wait for this step
        masks, errors = finish()
        pending.sample(masks)
        self._pending.append(pending)
        return self._fail_masks(launched, errors)

    def _fail_masks(self, launched: LaunchedStep, errors: dict[int, str]) -> list[Delta]:
        """End the requests whose grammar allows no token; return their last deltas.

        If a grammar allows no token after a draft, `Verifications.most` is lowered: that draft and
        the request's later drafts are not accepted.

        errors: row of the masks -> message.
        """
        deltas = []
        for row, why in errors.items():
            if (place := row - len(launched.constrained)) >= 0:
                launched.forbid_after(place)
                continue
            deltas += self.scheduler.fail([launched.requests[launched.constrained[row]]], why)
        return deltas

    def drain(self) -> None:
        """Refuse new requests from now on and finish the accepted ones."""
        self.draining = True

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, files included; running requests keep their blocks."""
        self.scheduler.memory.reset_prefix_cache()
        if self.scheduler.tier is not None:
            self.scheduler.tier.delete_files()

    def sleep(self, level: int = KEEP, parts: Sequence[str] = (), ticket: int = 0) -> None:
        """Ask the engine to free memory once no request runs; a new request wakes the engine.

        Requests that a pause keeps are computed again after the wake. See `EngineSleep.ask` and
        `answers`.
        """
        self._sleep.ask(level, parts, ticket)

    def _may_fall_asleep(self) -> bool:
        requests = self.scheduler.requests or self._preparing
        held = self._pause.frozen or self._sleep.dropped
        idle = not self._pending and (held or not requests)
        return bool(self._sleep.wanted) and idle

    def _fall_asleep(self) -> None:
        if self.scheduler.running:
            self.scheduler.requeue(trusted=True)
        self.scheduler.memory.reset_prefix_cache()
        self.scheduler.drop_images()
        if self.scheduler.tier is not None:
            self.scheduler.tier.copies.wait()
            self.scheduler.take_arrived()
        if self._moves is not None:
            self._moves.settle()
        if self._growth is not None and CACHES in self._sleep.wanted:
            self._growth.withdraw_all(self.scheduler.memory.pools[0])
        self._sleep.begin()

    def wake(self, parts: Sequence[str] = (), ticket: int = 0) -> None:
        """Allocate the given parts of the memory again (none = all), or cancel a pending sleep.

        Raises MantaError if the device has no room.
        """
        self._sleep.end(parts, ticket)

    def pause(self, mode: str, ticket: int) -> None:
        """Hold new requests back until `resume`; see `Pause.begin` and `answers`."""
        if self._pause.frozen:
            self._timer.skip()  # as "wait" lets requests continue
        if self._pause.begin(mode, ticket):
            self.abort([*self.scheduler.requests, *self._preparing, *self._pause.later])

    def resume(self) -> None:
        """End the pause; held requests are queued in their order."""
        if self._pause.frozen:
            self._timer.skip()
        for message in self._pause.end():
            self.add_request(message)

    def update_weights(self, message: UpdateWeights) -> None:
        """Begin to replace the weights; see `answers`."""
        self._updates.ask(message)

    def transfer_weights(self, message: TransferWeights) -> None:
        """Begin to take weights from a trainer; see `answers`."""
        self._transfers.ask(message)

    def close(self) -> None:
        """Delete the files of weight transfers, and write what the disk tier has queued; no method
        is called afterwards."""
        self._transfers.close()
        if self.scheduler.tier is not None:
            self.scheduler.tier.close()
        if self._moves is not None:
            self._moves.close()
        if self._growth is not None:
            self._growth.close()

    def serve_kv(self, host: str, ticket: int) -> None:
        """Begin to serve KV blocks to other replicas; see `answers`.

        host: the address to listen on.
        """
        if self._moves is not None:
            self._moves.serve(host, ticket)
            return
        text = "serve_kv: this engine moves no KV blocks; set kv_moves"
        self._unserved.append(Answer(ticket, KV_MOVES_OFF, text, "kv_moves"))

    def _replace_weights(self) -> None:
        """Replace the weights by the checked ones, with no step in flight.

        Raises EngineDead if only a part of the weights was replaced.
        """
        self._sleep.end([WEIGHTS])
        recompute = self._updates.recomputes
        replaced = self._updates.replace()
        self._timer.skip()
        if not replaced:
            return
        self._sleep.replaced()
        self._transfers.in_place(self._updates.folder)
        key = f"{self._model_key}@{self._updates.count}"
        self.scheduler.change_weights(key, recompute=recompute)
        for request in self._preparing.values():
            request.set_model_key(key)
            request.hashes = []
        if self._moves is not None:
            self._moves.weights_changed(self._updates.version, self._updates.count)

    def add_adapter(self, message: AddAdapter) -> None:
        """Begin to register an adapter; see `answers`."""
        self._adapters.add(message)

    def remove_adapter(self, message: RemoveAdapter) -> None:
        self._adapters.remove(message)

    def answers(self) -> list[AdapterAnswer | Answer]:
        """Return the answers to adapter messages, pauses, sleeps and updates since the last
        call."""
        self.scheduler.take_loaded()
        requests = bool(self.scheduler.requests or self._preparing)
        unserved, self._unserved = self._unserved, []
        return [
            *unserved,
            *(() if self._moves is None else self._moves.take_answers()),
            *self._adapters.take_answers(),
            *self._updates.take_answers(),
            *self._sleep.take_answers(),
            *self._transfers.take_answers(),
            *self._pause.take_answers(in_flight=bool(self._pending), requests=requests),
        ]

    def on_loaded(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, when `has_work` or `answers` may change."""
        self._adapters.on_loaded(wake)
        self._grammars.on_ready(wake)
        self._updates.on_checked(wake)
        self._transfers.on_done(wake)
        if self.scheduler.tier is not None:
            self.scheduler.tier.on_written(wake)
        if self._moves is not None:
            self._moves.wake = wake
        if self._growth is not None:
            self._growth.wake = wake

    def take_evicted(self) -> tuple[bytes, bytes]:
        """Return and clear the hashes of evicted prefixes: StepFrame's fields (gone, lowered)."""
        return self.scheduler.memory.take_evicted()

    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        pools, first = scheduler.memory.pools, scheduler.memory.pools[0]
        growable = 0 if self._growth is None else self._growth.growable(first)
        return EngineStats(
            step=scheduler.done_step,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + len(self._preparing) + len(self._pause.later),
            waiting_tokens=scheduler.num_waiting_tokens
            + sum(len(request.token_ids) for request in self._preparing.values()),
            free_blocks=first.positions(growable + sum(pool.num_free for pool in pools)),
            total_blocks=first.positions(growable + sum(pool.num_blocks for pool in pools)),
            reserved_blocks=first.positions(scheduler.memory.reserved_blocks),
            block_size=first.block_size,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            step_seconds=self._timer.step,
            busy_seconds=self._timer.total,
            finished=counters.finished,
            out_of_memory=counters.out_of_memory,
            draining=self.draining,
            rows=scheduler.rows,
            adapters=self._adapters.resident,
            adapter_loads=self._adapters.loads,
            asleep=self._sleep.asleep,
            weights_dropped=self._sleep.dropped,
            wakes=self._sleep.wakes,
            wake_seconds=self._sleep.wake_seconds,
            paused=self._pause.on,
            weights_version=self._updates.version,
            weight_updates=self._updates.count,
            update_seconds=self._updates.seconds,
            drafts=counters.drafts,
            draft_tokens=counters.draft_tokens,
            batch_requests=scheduler.num_batch,
            batch_waiting_tokens=scheduler.batch_waiting_tokens() if scheduler.num_batch else 0,
            accepted_by_position=counters.accepted_by_position.copy(),
            **_of_states(scheduler),
            **({} if scheduler.images is None else scheduler.images.stats()),
            **({} if scheduler.tier is None else scheduler.tier.stats()),
            **({} if self._moves is None else self._moves.stats()),
            **({} if self._growth is None else self._growth.stats()),
        )

    def check_integrity(self) -> None:
        """Assert that no row, block or request is lost.

        Meant for idle moments, but may be called at any time.
        """
        self.scheduler.check_integrity()


def _constraints(launched: LaunchedStep) -> list[Constraint]:
    """Return the constraints of the entries `launched.constrained`, then those of its drafts."""
    constraints = [launched.requests[entry].constraint for entry in launched.constrained]
    known = [constraint for constraint in constraints if constraint is not None]
    return known + [later for *_, later in launched.later]


def _of_states(scheduler: Scheduler) -> dict[str, int]:
    """Return the stats about recurrent states and their snapshots; {} if no layer is recurrent."""
    snapshots = scheduler.memory.snapshots
    if snapshots is None:
        return {}
    return {
        "state_slots": scheduler.config.max_num_seqs,
        "snapshots": len(snapshots),
        "snapshot_slots": snapshots.capacity,
        "snapshots_taken": scheduler.counters.snapshots_taken,
        "snapshots_evicted": snapshots.evicted,
    }
