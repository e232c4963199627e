"""EngineCore: the step loop. Requests in, deltas out; single-threaded, and free of torch.

One step, one batch ahead (async_scheduling):

    schedule n + 1 -> launch n + 1 -> wait for n -> update with n -> deltas of n

so the device has the next step before the host has seen the last one. Otherwise: schedule, launch,
wait, update, all of one step. In a pipeline there is a step of each micro-batch in flight besides,
and the oldest is waited for.

A grammar has to see a token before it can tell what may follow. So if a request with one has its
last token in flight, the step's forward pass is launched without its sampling:

    launch forward n + 1 -> wait for n -> update with n -> begin the masks
    deltas of n -> schedule n + 2 -> wait for the masks -> launch sampling n + 1 -> launch n + 2

and the masks are made, beside the loop, while the device computes the layers and the logits. Where
nothing of that kind is in flight they are made beside the launch.

If a step raises, the poison requests fail and the engine goes on: bisect_failure.py. If the device
has no memory for a step, no request fails: the tokens are computed again in smaller steps.
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
    AdapterAnswer,
    AddAdapter,
    Delta,
    EngineRequest,
    EngineStats,
    RemoveAdapter,
)
from engine.scheduling.bisect_failure import FailureBisection
from engine.scheduling.block_manager import FreeBlocks, FreeList
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.pacing.step_timer import StepTimer
from engine.scheduling.request import Request, RequestPhase, validate
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sleeping import EngineSleep, Sleeper
from engine.scheduling.step import LaunchedStep
from engine.scheduling.step_failure import MemoryShortages, StepBlame
from engine.structured.constraint import Constraint
from engine.structured.preparing import Grammars
from engine.structured.step_grammars import Filled, HostMemory, StepGrammars, host_memory
from engine.structured.token_limits import Masks, TokenLimits

__all__ = ["CoreConfig", "EngineCore", "PendingResult", "Runner"]

logger = logging.getLogger("manta.engine")

_POISON = "engine_error: the engine fails on this request, and only on it"

_MOST_MASK_THREADS = 8  # 16 made the steps of 64 rows no shorter
_NO_GRAMMARS = InvalidRequest(
    "this engine has no vocabulary to constrain outputs with",
    param="structured",
    code="structured_not_supported",
)


class PendingResult(Protocol):
    """A launched step."""

    def sample(self, masks: Masks) -> None:
        """Launch the sampling of a batch with `masked` entries; once, before `wait`.

        masks: a row for each masked entry, [n, ceil(vocab / 32)] int32, 1 = allowed. They are
            unchanged until the step is done.
        Raises OutOfMemory.
        """
        ...

    def conclude(self) -> None:
        """Launch the rest of the step, in a pipeline.

        The call does not wait for the step where the device allows that. The next step launched may
        need the tokens. Raises as `wait`.
        """
        ...

    def wait(self) -> StepResult:
        """Block until the step is done. Called once, in the order of launches."""
        ...


class Runner(Protocol):
    """The runner of batches on a device, in order.

    At most `CoreConfig.depth` batches are launched and not waited for.
    """

    def launch(self, batch: Batch) -> PendingResult:
        """Start a step, and take all it needs from `batch` before returning. Raises OutOfMemory."""
        ...

    def recover(self) -> bool:
        """Get ready for the next step after one has raised, with nothing in flight. False: the
        device is lost."""
        ...

    def shrink(self, num_blocks: int) -> None:
        """Keep the memory of num_blocks KV blocks and release the rest. All keys are lost."""
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
    ) -> None:
        """Set up the core.

        memory: the memory of an engine that may sleep.
        mask_memory: allocates the host memory that the device copies masks from.
        """
        self.config = replace(config, max_model_len=_longest(config))
        self._adapters = adapters or AdapterStore.disabled()
        threads = min(_MOST_MASK_THREADS, len(os.sched_getaffinity(0)))
        self._step_grammars = StepGrammars(threads, config.depth, mask_memory)
        self.scheduler = Scheduler(self.config, self._adapters, free_blocks)
        self.draining = False
        self._sleep = EngineSleep(memory)
        self.on_device = False  # in a step that waits for the device; read by another thread
        self._runner = runner
        self._depth = config.depth
        self._pending: deque[PendingResult] = deque()
        self._outbox: list[Delta] = []  # deltas that came up between steps
        self._grammars = grammars or Grammars(_NO_GRAMMARS)
        self._preparing: dict[int, Request] = {}  # their grammars are being compiled
        # The newest step and what finishes its masks, if it waits for masks.
        self._masks_begun: tuple[LaunchedStep, Callable[[], Filled]] | None = None
        self._timer = StepTimer(config.micro_batches)
        self._blame = StepBlame()
        self._shortages = MemoryShortages()
        self._bisection: FailureBisection | None = None
        # A poison request was found, and no step has succeeded since.
        self._poison_unconfirmed = False

    def add_request(self, message: EngineRequest) -> None:
        """Queue a request. One that cannot run ends with an error delta of the next step."""
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
        if done and not (request.pooled or request.prompt_logprobs):
            # Nothing to sample: resumed after its last token, or max_tokens = 0.
            self._outbox.append(Delta(message.id, [], "length", cached=0))
            return
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
        """Queue the requests whose grammars are compiled; end the requests whose grammars
        failed."""
        for id, prepared in self._grammars.poll():
            request = self._preparing.pop(id, None)
            if request is None:
                continue  # aborted
            if not isinstance(prepared, Constraint):
                text = f"{prepared.code}: {prepared.message}"
                self._outbox.append(Delta(id, [], "error", error=text))
            elif prepared.complete:  # resumed after its last token
                self._outbox.append(Delta(id, [], "stop", cached=0))
            else:
                request.constraint = prepared
                self.scheduler.add_request(request)

    def abort(self, ids: Sequence[int]) -> None:
        """End these requests; the next step returns their last deltas. Unknown ids are ignored."""
        for id in ids:
            if self._preparing.pop(id, None) is not None:
                self._outbox.append(Delta(id, [], "abort"))
        self._outbox += self.scheduler.abort(ids)

    def has_work(self) -> bool:
        """Whether a call of `step` would do something. It would not if all requests, or all of the
        current group of a bisection, wait for adapters."""
        return bool(
            self._pending
            or self._outbox
            or self.scheduler.can_run()
            or self._adapters.has_news()
            or self._grammars.has_news()
            or self._may_fall_asleep()
        )

    def step(self) -> list[Delta]:
        """Run one round of the loop and return its deltas.

        With async_scheduling the first round after an idle time only launches, and returns none.
        """
        scheduler, pending, blame = self.scheduler, self._pending, self._blame
        if self._sleep.wanted and self._may_fall_asleep():
            scheduler.memory.reset_prefix_cache()
            self._sleep.begin()
        elif self._sleep.asleep and scheduler.can_run():
            self.wake()
        began = time.perf_counter()
        scheduler.take_loaded()
        if self._preparing:
            self._take_prepared()
        batch = scheduler.schedule()
        deltas, self._outbox = self._outbox + scheduler.take_failed(), []
        depth = 1 if self._bisection is not None else self._depth
        result: StepResult | None = None
        done: LaunchedStep | None = None  # the step of `result`
        with blame(-1):
            self._launch(batch, deltas)
        if pending and (batch is None or len(pending) >= depth or blame.failure):
            with blame(0):
                self.on_device = True
                result = pending.popleft().wait()
            self.on_device = False
        assert result or blame.failure or batch or not scheduler.can_run(), (
            "requests are left, yet none can run"
        )
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
            self._retry(*blame.take())
        if self._bisection is not None:
            deltas += self._continue_bisection(self._bisection, succeeded=result is not None)
        self._timer.stepped(began, result=result is not None, more=self.has_work())
        if done is not None:
            seconds = self._timer.between
            if self.config.micro_batches > 1:
                seconds = self._timer.since_last(done.micro_batch, done.began)
            scheduler.pace.observe(done.decodes, done.context, done.prompt_tokens, seconds)
        return deltas

    def _launch(self, batch: Batch | None, deltas: list[Delta]) -> None:
        """Launch the sampling that has waited for masks, then the batch.

        deltas: gets the last deltas of requests whose grammar can go no further.
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
        """Launch a step whose masks are made while the host launches or computes the forward pass.

        All that the masks depend on is known.
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
        """Begin the masks of the newest step, which the next `step` waits for."""
        pending = self._pending.pop()  # a step without masks is not waited for
        self._masks_begun = launched, self._step_grammars.begin(_constraints(launched))
        self._pending.append(pending)

    def _sample_deferred(self, launched: LaunchedStep, finish: Callable[[], Filled]) -> list[Delta]:
        """Launch the sampling of the newest launched step, whose masks the last `step` began."""
        self._masks_begun = None
        pending = self._pending.pop()  # a step without masks is not waited for
        masks, errors = finish()
        pending.sample(masks)
        self._pending.append(pending)
        return self._fail_masks(launched, errors)

    def _fail_masks(self, launched: LaunchedStep, errors: dict[int, str]) -> list[Delta]:
        """End the requests whose grammar can go no further. errors: messages by row of the
        masks."""
        deltas = []
        for row, why in errors.items():
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
        """Requeue all requests, and make smaller steps from now on.

        If a step of one token does not fit and the KV cache cannot shrink, bisect.
        """
        self._shortages.count_shortage()
        scheduler = self.scheduler
        scheduler.counters.out_of_memory += 1
        fewer = self.config.num_blocks * 7 // 8
        can_shrink = fewer >= scheduler.memory.pools[0].blocks_for(self.config.max_model_len)
        num_tokens = newest.decodes + newest.prompt_tokens
        smaller = num_tokens // 2
        if not smaller and not can_shrink:
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
        """Drop the steps in flight, of which one has raised, and run the requests in groups.

        Raises `failure` if the device is lost.
        """
        logger.warning("a step has failed; trying its requests in groups", exc_info=failure)
        failure.with_traceback(None)  # its frames hold tensors
        self._drop_pending()
        if not self._runner.recover():
            raise failure
        launched = self.scheduler.in_flight[suspect]
        suspects = [r for r in launched.requests if r.phase is not RequestPhase.ENDED]
        self.scheduler.requeue(trusted=False)
        if self._bisection is None:
            self._bisection = FailureBisection(suspects, failure)
        else:
            self._bisection.failed(suspects, failure)
        self.scheduler.admit_only(self._bisection.group)

    def _drop_pending(self) -> None:
        """Wait for the launched steps and discard their results."""
        for pending in self._pending:
            with contextlib.suppress(Exception):  # its inputs may be wrong already
                pending.wait()
        self._pending.clear()

    def _continue_bisection(self, bisection: FailureBisection, *, succeeded: bool) -> list[Delta]:
        """Go on with the bisection after one of its steps.

        If the group has passed, the next group starts. If that was the last group, the poison
        requests fail.

        Raises the last failure if no group's step has succeeded: then the engine itself is broken.
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
        """Refuse new requests from now on and finish the old ones."""
        self.draining = True

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; requests that run keep their blocks."""
        self.scheduler.memory.reset_prefix_cache()

    def sleep(self) -> None:
        """Give the memory of weights and caches back in the first step that finds no request. A
        request wakes the engine."""
        self._sleep.ask()

    def _may_fall_asleep(self) -> bool:
        idle = not (self.scheduler.requests or self._preparing or self._pending)
        return self._sleep.wanted and idle

    def wake(self) -> None:
        """Take the memory again, or do not sleep after all. Raises MantaError where the device has
        no room for it."""
        self._sleep.end()

    def add_adapter(self, message: AddAdapter) -> None:
        """Begin to make an adapter known; see `answers`."""
        self._adapters.add(message)

    def remove_adapter(self, message: RemoveAdapter) -> None:
        self._adapters.remove(message)

    def answers(self) -> list[AdapterAnswer]:
        """Return the answers to adapter messages that came since the last call."""
        self.scheduler.take_loaded()
        return self._adapters.take_answers()

    def on_loaded(self, wake: Callable[[], None]) -> None:
        """Set the function that is called, from any thread, when `has_work` or `answers` has
        news."""
        self._adapters.on_loaded(wake)
        self._grammars.on_ready(wake)

    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        pools, first = scheduler.memory.pools, scheduler.memory.pools[0]
        return EngineStats(
            step=scheduler.done_step,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + len(self._preparing),
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
            wakes=self._sleep.wakes,
            wake_seconds=self._sleep.wake_seconds,
            **_of_states(scheduler),
        )

    def check_integrity(self) -> None:
        """Assert that no row, block or request is lost. Meant for idle moments; legal at any."""
        self.scheduler.check_integrity()


def _constraints(launched: LaunchedStep) -> list[Constraint]:
    """Return the constraints of the step's constrained entries, in order."""
    constraints = [launched.requests[entry].constraint for entry in launched.constrained]
    return [constraint for constraint in constraints if constraint is not None]


def _of_states(scheduler: Scheduler) -> dict[str, int]:
    """Return the stats of the recurrent state of a model, if its layers have any."""
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
    """Return the tokens of the longest request that the blocks can hold, up to max_model_len."""
    return (
        bisect_right(
            range(config.max_model_len + 1),
            config.num_blocks,
            key=lambda tokens: blocks_for(config.kinds, tokens, config.block_size),
        )
        - 1
    )
