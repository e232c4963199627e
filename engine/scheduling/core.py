"""EngineCore: the step loop; takes requests and returns deltas. Single-threaded, without torch.

One call of `step`, one batch ahead (async_scheduling):

 schedule n + 1 -> launch n + 1 -> wait for n -> update with n -> deltas of n

so that the device has the next step before the host has seen the last result. Otherwise a step is
scheduled, launched, waited for and updated at once. In a pipeline there is also a step of each
micro-batch in flight, and the oldest is waited for. A step with drafts is waited for at once, and
launched when no other is in flight.
A grammar needs a token before it can tell what may follow. So if a constrained request has its last
token in flight, the step's forward pass is launched without its sampling:

 launch forward n + 1 -> wait for n -> update with n -> begin the masks
 deltas of n -> schedule n + 2 -> wait for the masks -> launch sampling n + 1 -> launch n + 2

Masks are then computed on other threads while the device computes layers and logits. If all tokens
are known, masks are computed during the launch.

If a step raises, the poison requests fail and the engine goes on: bisect_failure.py. If the device
has no memory for a step, no request fails: its tokens are computed again in smaller steps.
"""

import contextlib
import logging
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from engine.batch import Batch, OutOfMemory, StepResult
from engine.config.kv_groups import blocks_for
from engine.errors import InvalidRequest, MantaError, Overloaded
from engine.lora.tiers.store import AdapterStore
from engine.messages import (
    WEIGHTS,
    AdapterAnswer,
    AddAdapter,
    Answer,
    Delta,
    EngineRequest,
    EngineStats,
    KVSource,
    RemoveAdapter,
    TransferWeights,
    UpdateWeights,
)
from engine.scheduling.bisect_failure import FailureBisection
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.memory.block_manager import FreeBlocks, FreeList
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.moves.block_moves import KV_MOVES_OFF, BlockMoves
from engine.scheduling.orders.sleeping import KEEP, EngineSleep, Sleeper
from engine.scheduling.orders.transfers import WeightReceiver, WeightTransfers
from engine.scheduling.orders.updates import Pause, WeightLoader, WeightUpdates
from engine.scheduling.pacing.step_timer import StepTimer
from engine.scheduling.request import Request, RequestPhase, validate
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation import Speculation
from engine.scheduling.step import LaunchedStep
from engine.scheduling.step_failure import MemoryShortages, StepBlame
from engine.structured.constraint import Constraint
from engine.structured.preparing import Grammars
from engine.structured.step_grammars import Filled, HostMemory, StepGrammars, host_memory
from engine.structured.token_limits import Masks, TokenLimits

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


class PendingResult(Protocol):
    """The pending result of a launched step."""

    def sample(self, masks: Masks) -> None:
        """Launch the sampling of a batch with `masked` entries; call it once, before `wait`.

        masks: a row for each masked entry, [n, ceil(vocab / 32)] int32, 1 = allowed; unchanged
            until the step is done.
        Raises OutOfMemory.
        """
        ...

    def conclude(self) -> None:
        """Launch the rest of the step, in a pipeline.

        If the device allows, the call does not wait for the step. The next launched step may need
        the tokens. Raises as `wait`.
        """
        ...

    def wait(self) -> StepResult:
        """Block until the step is done and return its result; call it once, in launch order."""
        ...


class Runner(Protocol):
    """An interface that runs batches on a device, in order.

    At most `CoreConfig.depth` batches are launched and not waited for.
    """

    def launch(self, batch: Batch) -> PendingResult:
        """Start a step, which needs nothing from `batch` after the return. Raises OutOfMemory.

        Of `batch.dropped_images` the runner may have lost some, as in a failure or a sleep.
        """
        ...

    def recover(self) -> bool:
        """Drop the embeddings of images and prepare for the next step, after one has raised and
        with none in flight; False: device lost."""
        ...

    def shrink(self, num_blocks: int) -> None:
        """Keep the memory of num_blocks KV blocks and free the rest. All keys are lost."""
        ...


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
    ) -> None:
        """Set up the core.

        receiver: takes weights that a trainer sends; None = none can be sent.
        weights: replaces the model's weights; None = they cannot be replaced.
        memory: the memory of an engine that may sleep; None = it cannot.
        mask_memory: allocates the host memory from which the device copies masks.
        speculation: the drafts of steps; None = each decode gets one token a step.
        tier: the KV blocks in host memory, of a device with one pool; None = there are none.
        moves: the KV blocks that go to other replicas and come from them; likewise.
        """
        self.config = replace(config, max_model_len=_longest(config))
        self._adapters = adapters or AdapterStore.disabled()
        threads = min(_MOST_MASK_THREADS, len(os.sched_getaffinity(0)))
        self._step_grammars = StepGrammars(threads, config.depth, mask_memory)
        self.scheduler = Scheduler(
            self.config, self._adapters, free_blocks, speculation, tier, moves
        )
        self._moves = moves
        self._unserved: list[Answer] = []  # to orders that an engine without moves refuses
        self.draining = False
        self._sleep = EngineSleep(memory)
        self._pause = Pause()
        self._updates = WeightUpdates(weights)
        self._transfers = WeightTransfers(receiver)
        self._model_key = config.model_key  # the key of the weights at the start
        self.on_device = False  # whether a step waits for the device; read by another thread
        self._runner = runner
        self._depth = config.depth
        self._pending: deque[PendingResult] = deque()
        self._outbox: list[Delta] = []  # deltas that arose between steps
        self._grammars = grammars or Grammars(_NO_GRAMMARS)
        # requests whose grammars are being compiled, or whose blocks come from another replica
        self._preparing: dict[int, Request] = {}
        # The newest step and the function that finishes its masks, if the step waits for masks.
        self._masks_begun: tuple[LaunchedStep, Callable[[], Filled]] | None = None
        self._timer = StepTimer(config.micro_batches)
        self._blame = StepBlame()
        self._shortages = MemoryShortages()
        self._bisection: FailureBisection | None = None
        # Whether a poison request was found, and no step has succeeded since.
        self._poison_unconfirmed = False

    def add_request(self, message: EngineRequest) -> None:
        """Queue a request; a request that cannot run ends with an error delta in the next step."""
        if self._pause.on and not self.draining:
            self._pause.later[message.id] = message
            return
        try:
            if self.draining:
                raise Overloaded("this engine is draining", code="draining")
            if message.id in self.scheduler.requests or message.id in self._preparing:
                raise MantaError(f"request id {message.id} is in use", code="duplicate_id")
            adapter = self._adapters.find(message.adapter) if message.adapter else None
            virtual = 0 if adapter is None else adapter.info.virtual_tokens
            validate(message, self.config, virtual)
        except MantaError as error:
            text = f"{error.code}: {error.message}"
            self._outbox.append(Delta(message.id, [], "error", error=text))
            return
        request = Request(message, self.config, self.scheduler.next_arrival(), adapter)
        done = len(request.token_ids) >= request.limit
        if done and not (request.pooled or request.prompt_logprobs or request.routes):
            # No token is left to sample: the request was resumed after its last token, or
            # max_tokens is 0.
            self._outbox.append(Delta(message.id, [], "length", cached=0))
            return
        if message.source is not None and self._pull(request, message.source):
            self._preparing[request.id] = request
            return
        self._constrain(request)

    def _pull(self, request: Request, source: KVSource) -> bool:
        """Begin to pull a request's prefix from another replica, if that can be used; return
        whether the request waits for it."""
        moves, scheduler = self._moves, self.scheduler
        if moves is None or self._sleep.parts or not scheduler.shares(request):
            return False
        (pool,) = scheduler.memory.pools
        count = (len(request.token_ids) - 1) // self.config.block_size
        return moves.pull(request, source, pool, pool.hash_prefix(request, count))

    def _take_moves(self, moves: BlockMoves) -> None:
        """Let the moves go on, and the requests whose blocks have come."""
        scheduler = self.scheduler
        (pool,) = scheduler.memory.pools
        for id in moves.poll(pool, scheduler.step, scheduler.done_step):
            request = self._preparing.pop(id, None)
            if request is not None:  # it was not aborted meanwhile
                self._constrain(request)

    def _constrain(self, request: Request) -> None:
        """Queue a request, once its grammar is compiled if it has one."""
        params, output = request.params, request.token_ids[request.num_prompt :]
        limits: TokenLimits | None = None
        if params.allowed_token_ids or params.bad_words_ids:
            vocab_size = self.config.vocab_size
            limits = TokenLimits(params.allowed_token_ids, params.bad_words_ids, vocab_size)
        if params.structured is not None:
            self._preparing[request.id] = request
            self._grammars.ask(
                request.id,
                params.structured,
                output,
                stop_ids=params.stop_token_ids,
                min_tokens=request.min_tokens,
                ignore_eos=params.ignore_eos,
                thinking=params.thinking,
                limits=limits,
            )
            return
        if limits is not None:
            request.constraint = Constraint.without_grammar(
                self.config.vocab_size, request.stop_ids, request.min_tokens, limits, output
            )
        self.scheduler.add_request(request)

    def _take_prepared(self) -> None:
        """Queue requests whose grammars are compiled, and end requests whose grammars failed."""
        for id, prepared in self._grammars.poll():
            request = self._preparing.pop(id, None)
            if request is None:
                continue  # aborted meanwhile
            if not isinstance(prepared, Constraint):
                text = f"{prepared.code}: {prepared.message}"
                self._outbox.append(Delta(id, [], "error", error=text))
            elif prepared.complete:  # the request was resumed after its last token
                self._outbox.append(Delta(id, [], "stop", cached=0))
            else:
                request.constraint = prepared
                self.scheduler.add_request(request)

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

        It has nothing if all requests, or all in the current bisection group, wait for adapters.
        """
        return bool(
            self._pending
            or self._outbox
            or self._updates.ready
            or (self.scheduler.can_run() and not (self._pause.frozen or self._sleep.dropped))
            or self._adapters.has_news()
            or self._grammars.has_news()
            or self.scheduler.loading
            or (self._moves is not None and self._moves.has_news())
            or self._may_fall_asleep()
        )

    def step(self) -> list[Delta]:
        """Run one round of the loop and return its deltas.

        With async_scheduling the first round after an idle time only launches a step and returns
        none.
        """
        scheduler, pending, blame = self.scheduler, self._pending, self._blame
        if self._updates.ready and not pending:
            self._replace_weights()
        # No request may run in a pause, or while the weights are lost.
        held = self._updates.ready or self._pause.frozen or self._sleep.dropped
        if self._sleep.wanted and self._may_fall_asleep():
            self._fall_asleep()
        elif self._sleep.parts and scheduler.can_run() and not held:
            self.wake()
        began = time.perf_counter()
        scheduler.take_loaded()
        if scheduler.tier is not None:
            scheduler.take_arrived()
        if self._moves is not None:
            self._take_moves(self._moves)
        if self._preparing:
            self._take_prepared()
        batch = None if held else scheduler.schedule()
        deltas, self._outbox = self._outbox + scheduler.take_failed(), []
        depth = 1 if self._bisection is not None or scheduler.verifying else self._depth
        result: StepResult | None = None
        done: LaunchedStep | None = None  # the step that `result` belongs to
        with blame(-1):
            self._launch(batch, deltas)
        if pending and (batch is None or len(pending) >= depth or blame.failure):
            with blame(0):
                self.on_device = True
                result = pending.popleft().wait()
            self.on_device = False
        idle = not (result or blame.failure or batch or held)
        moving = self._moves is not None and (self._moves.copying or self._moves.holds)
        if idle and (scheduler.loading or moving):
            time.sleep(_LOAD_SECONDS)
        else:
            assert not (idle and scheduler.can_run()), "requests are left, yet none can run"
        if result is not None:
            self._poison_unconfirmed = False
            if self._shortages.count_success():
                limit = 2 * scheduler.token_limit
                scheduler.token_limit = min(limit, self.config.max_num_batched_tokens)
            done = scheduler.in_flight[0]
            deltas += scheduler.update(result)
        if batch is not None and blame.failure is None and scheduler.in_flight:
            newest = scheduler.in_flight[-1]
            if newest.awaits_masks:
                with blame(-1):
                    self._begin_masks(newest)
        if blame.failure is not None:
            self._retry(*blame.take_failure())
        if self._bisection is not None:
            deltas += self._continue_bisection(self._bisection, succeeded=result is not None)
        self._timer.stepped(began, result=result is not None, more=self.has_work())
        if done is not None:
            seconds = self._timer.between
            if self.config.micro_batches > 1:
                seconds = self._timer.since_last(done.micro_batch, done.began)
            if result is not None:  # encodes take as long, whatever the size of a prompt's chunk
                seconds = max(0.0, seconds - result.encode_wait)
            scheduler.pace.observe(done.decodes, done.context, done.prompt_tokens, seconds)
            if scheduler.tier is not None:
                scheduler.tier.observe_step(done.prompt_tokens, seconds)
            if scheduler.speculation is not None:
                entries = 0 if done.prompt_tokens else done.decodes - done.num_drafts
                scheduler.speculation.observe_step(entries, done.num_drafts, seconds)
                if not held:
                    self._launch_drafts(deltas)
        return deltas

    def _launch_drafts(self, deltas: list[Delta]) -> None:
        """Launch the step after one with drafts before deltas are published.

        The device is idle then, or computes drafts of a model and nothing else.

        deltas: gets the last deltas of requests whose grammar allows no token.
        """
        if self._pending or self._depth == 1 or self._bisection is not None:
            return
        batch = self.scheduler.schedule()
        with self._blame(-1):
            self._launch(batch, deltas)
        if self._blame.failure is not None:
            self._retry(*self._blame.take_failure())

    def _launch(self, batch: Batch | None, deltas: list[Delta]) -> None:
        """Launch the sampling that has waited for masks, then the batch.

        deltas: gets the last deltas of requests whose grammar allows no token.
        """
        scheduler, pending, blame = self.scheduler, self._pending, self._blame
        if self._masks_begun is not None:
            blame.suspect = -1 if batch is None else -2
            deltas += self._sample_deferred(*self._masks_begun)
        if batch is None:
            return
        if len(pending) >= self.config.micro_batches > 1:
            blame.suspect = 0
            pending[0].conclude()
        blame.suspect = -1
        if batch.masked and not scheduler.in_flight[-1].awaits_masks:
            deltas += self._launch_with_masks(batch)
        else:
            pending.append(self._runner.launch(batch))

    def _launch_with_masks(self, batch: Batch) -> list[Delta]:
        """Launch a step whose masks are computed during the forward pass's launch.

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
        pending = self._pending.pop()  # without masks the step must not be waited for
        self._masks_begun = launched, self._step_grammars.begin(_constraints(launched))
        self._pending.append(pending)

    def _sample_deferred(self, launched: LaunchedStep, finish: Callable[[], Filled]) -> list[Delta]:
        """Launch the sampling of the newest step, whose masks the last call of `step` began."""
        self._masks_begun = None
        pending = self._pending.pop()  # without masks the step must not be waited for
        masks, errors = finish()
        pending.sample(masks)
        self._pending.append(pending)
        return self._fail_masks(launched, errors)

    def _fail_masks(self, launched: LaunchedStep, errors: dict[int, str]) -> list[Delta]:
        """End the requests whose grammar allows no token, and drop drafts after which none does.

        errors: row of the masks -> message.
        """
        deltas = []
        for row, why in errors.items():
            if (place := row - len(launched.constrained)) >= 0:
                launched.forbid_after(place)
                continue
            deltas += self.scheduler.fail([launched.requests[launched.constrained[row]]], why)
        return deltas

    def _retry(self, failure: Exception, suspect: int) -> None:
        """Run the requests of a failed step again, in smaller steps or in groups.

        suspect: the index in `Scheduler.in_flight` of the step to blame.
        """
        if isinstance(failure, OutOfMemory) and self._bisection is None:
            self._retry_smaller(failure, self.scheduler.in_flight[-1])
        else:
            self._begin_bisection(failure, suspect)

    def _retry_smaller(self, failure: OutOfMemory, newest: LaunchedStep) -> None:
        """Requeue all requests, and run smaller steps from now on.

        If a step of one token does not fit and the KV cache cannot shrink, begin a bisection. So
        does a step that encodes an image, for which a smaller KV cache is no remedy.
        """
        self._shortages.count_shortage()
        scheduler = self.scheduler
        scheduler.counters.out_of_memory += 1
        fewer = self.config.num_blocks * 7 // 8
        can_shrink = fewer >= scheduler.memory.pools[0].blocks_for(self.config.max_model_len)
        num_tokens = newest.decodes + newest.prompt_tokens + newest.ahead_tokens
        # an image that must not be cut, or a whole text, may exceed the limit
        smaller = min(num_tokens, scheduler.token_limit) // 2
        if not smaller and (newest.num_images or not can_shrink):
            self._begin_bisection(failure, -1)
            return
        self._drop_pending()
        if not self._runner.recover():
            raise failure
        scheduler.requeue(trusted=False)
        scheduler.token_limit = max(1, smaller)
        logger.warning(
            "out of memory in a step of %d tokens: steps of at most %d from now on",
            num_tokens,
            scheduler.token_limit,
        )
        if self._shortages.persists and can_shrink:
            in_a_row = self._shortages.in_a_row
            logger.warning("out of memory %d times: %d KV blocks", in_a_row, fewer)
            self._runner.shrink(fewer)
            scheduler.shrink(fewer)
            self.config = scheduler.config

    def _begin_bisection(self, failure: Exception, suspect: int) -> None:
        """Drop the steps in flight, one of which has raised, and run the requests in groups.

        Raises `failure` if the device is lost.
        """
        logger.warning("a step has failed; trying its requests in groups", exc_info=failure)
        failure.with_traceback(None)  # the frames of its traceback hold tensors
        self._drop_pending()
        if not self._runner.recover():
            raise failure
        launched = self.scheduler.in_flight[suspect]
        suspects = [*dict.fromkeys([*launched.requests, *launched.ahead])]
        suspects = [r for r in suspects if r.phase is not RequestPhase.ENDED]
        self.scheduler.requeue(trusted=False)
        if self._bisection is None:
            self._bisection = FailureBisection(suspects, failure)
        else:
            self._bisection.failed(suspects, failure)
        self.scheduler.admit_only(self._bisection.group)

    def _drop_pending(self) -> None:
        """Wait for the launched steps and discard their results."""
        for pending in self._pending:
            with contextlib.suppress(Exception):  # a launched step's inputs may be wrong already
                pending.wait()
        self._pending.clear()

    def _continue_bisection(self, bisection: FailureBisection, *, succeeded: bool) -> list[Delta]:
        """Continue the bisection after one of its steps.

        If the group has passed, the next group starts. After the last group the poison requests
        fail.
        Raises the last failure if no group's step has succeeded: the engine itself is then the
        cause.
        """
        bisection.healthy |= succeeded
        if bisection.group and not bisection.group_passed():
            return []
        bisection.next_group()
        self.scheduler.requeue(trusted=True)
        if bisection.group:
            self.scheduler.admit_only(bisection.group)
            return []
        self._bisection = None
        self.scheduler.admit_only(None)
        if bisection.poison and not bisection.healthy:
            if self._poison_unconfirmed or len(bisection.poison) > 1:
                raise bisection.error
            self._poison_unconfirmed = True
        logger.warning("%d poison requests made steps fail", len(bisection.poison))
        return self.scheduler.fail(bisection.poison, _POISON)

    def drain(self) -> None:
        """Refuse new requests from now on and finish the accepted ones."""
        self.draining = True

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, files included; running requests keep their blocks."""
        self.scheduler.memory.reset_prefix_cache()
        if self.scheduler.tier is not None and self.scheduler.tier.disk is not None:
            self.scheduler.tier.disk.files.clear()

    def sleep(self, level: int = KEEP, parts: Sequence[str] = (), ticket: int = 0) -> None:
        """Ask the engine to free memory once no request runs; a request wakes it.

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
        self._sleep.begin()

    def wake(self, parts: Sequence[str] = (), ticket: int = 0) -> None:
        """Allocate the given parts of the memory again (none = all), or cancel a pending sleep.

        Raises MantaError if the device has no room.
        """
        self._sleep.end(parts, ticket)

    def pause(self, mode: str, ticket: int) -> None:
        """Hold new requests back until `resume`; see `Pause.begin` and `answers`."""
        if self._pause.begin(mode, ticket):
            self.abort([*self.scheduler.requests, *self._preparing, *self._pause.later])

    def resume(self) -> None:
        """End the pause; held requests are queued in their order."""
        for message in self._pause.end():
            self.add_request(message)

    def update_weights(self, message: UpdateWeights) -> None:
        """Begin to replace the weights; see `answers`."""
        self._updates.ask(message)

    def transfer_weights(self, message: TransferWeights) -> None:
        """Begin to take weights from a trainer; see `answers`."""
        self._transfers.ask(message)

    def close(self) -> None:
        """Delete what transfers have left, and write what the disk tier has queued; no method is
        called afterwards."""
        self._transfers.close()
        if self.scheduler.tier is not None and self.scheduler.tier.disk is not None:
            self.scheduler.tier.copies.wait()
            self.scheduler.tier.disk.poll()
            self.scheduler.tier.disk.files.close()
        if self._moves is not None:
            self._moves.close()

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

        Raises EngineDead if the weights are mixed.
        """
        self._sleep.end([WEIGHTS])
        recompute = self._updates.recomputes
        if not self._updates.replace():
            return
        self._sleep.replaced()
        self._transfers.in_place(self._updates.folder)
        key = f"{self._model_key}@{self._updates.count}"
        self.scheduler.change_weights(key, recompute=recompute)
        self.config = replace(self.config, model_key=key)
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
        if self._moves is not None:
            self._moves.wake = wake

    def take_gone(self) -> bytes:
        """Return the field `gone` of the next frame."""
        return self.scheduler.memory.take_gone()

    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        pools, first = scheduler.memory.pools, scheduler.memory.pools[0]
        return EngineStats(
            step=scheduler.done_step,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + len(self._preparing) + len(self._pause.later),
            waiting_tokens=scheduler.num_waiting_tokens
            + sum(len(request.token_ids) for request in self._preparing.values()),
            free_blocks=first.positions(sum(pool.num_free for pool in pools)),
            total_blocks=first.positions(sum(pool.num_blocks for pool in pools)),
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
            accepted_by_position=counters.accepted_by_position.copy(),
            **_of_states(scheduler),
            **({} if scheduler.images is None else scheduler.images.stats()),
            **({} if scheduler.tier is None else scheduler.tier.stats()),
            **({} if self._moves is None else self._moves.stats()),
        )

    def check_integrity(self) -> None:
        """Assert that no row, block or request is lost.

        Meant for idle moments, but always legal.
        """
        self.scheduler.check_integrity()


def _constraints(launched: LaunchedStep) -> list[Constraint]:
    """Return the constraints of the step's constrained entries, then of their drafts, in order."""
    constraints = [launched.requests[entry].constraint for entry in launched.constrained]
    known = [constraint for constraint in constraints if constraint is not None]
    return known + [later for _, later in launched.later]


def _of_states(scheduler: Scheduler) -> dict[str, int]:
    """Return the stats of a recurrent model's states; {} for other models."""
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


def _longest(config: CoreConfig) -> int:
    """Return the length of the longest request that the blocks can hold, up to max_model_len."""
    num_blocks, images = config.num_blocks, config.images
    if images is not None and images.bidirectional:
        # A step computes the tokens of an image together, beside those in the window before it.
        windows = sum(not kind.whole for kind in config.kinds)
        num_blocks = max(0, num_blocks - windows * -(-images.largest // config.block_size))
    return (
        bisect_right(
            range(config.max_model_len + 1),
            num_blocks,
            key=lambda tokens: blocks_for(config.kinds, tokens, config.block_size),
        )
        - 1
    )
