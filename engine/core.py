"""EngineCore: the step loop. Requests in, deltas out; single-threaded, and free of torch.

One step, one batch ahead (async_scheduling):

    schedule n + 1 -> launch n + 1 -> wait for n -> update with n -> deltas of n

so the device has the next step before the host has seen the last one. Otherwise: schedule, launch,
wait, update, all of one step.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from engine.batch import Batch, StepResult
from engine.core_config import CoreConfig
from engine.errors import MantaError, Overloaded
from engine.messages import Delta, EngineRequest, EngineStats
from engine.request import Request, validate
from engine.scheduler import Scheduler

__all__ = ["CoreConfig", "EngineCore", "Pending", "Runner"]


class Pending(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the step is done. Called once, in the order of launches."""
        ...


class Runner(Protocol):
    """Runs batches on a device, in order. At most two are launched and not waited for."""

    def launch(self, batch: Batch) -> Pending:
        """Start a step, and take all it needs from `batch` before returning."""
        ...


class EngineCore:
    """Call `step` while `has_work`. An exception from `step` is fatal: the runner has failed.

    The failure of one request never raises; it ends with a delta whose finish is "error".
    """

    def __init__(self, config: CoreConfig, runner: Runner) -> None:
        capacity = config.num_blocks * config.block_size
        self.config = replace(config, max_model_len=min(config.max_model_len, capacity))
        self.scheduler = Scheduler(self.config)
        self.draining = False
        self._runner = runner
        self._pending: deque[Pending] = deque()
        self._outbox: list[Delta] = []  # deltas that came up between steps
        self._step_seconds = 0.0

    def add(self, message: EngineRequest) -> None:
        """Queue a request. One that cannot run ends with its delta in the next step's."""
        try:
            if self.draining:
                raise Overloaded("this engine is draining", code="draining")
            if message.id in self.scheduler.requests:
                raise MantaError(f"request id {message.id} is in use", code="duplicate_id")
            validate(message, self.config)
        except MantaError as error:
            text = f"{error.code}: {error.message}"
            self._outbox.append(Delta(message.id, [], "error", error=text))
            return
        request = Request(message, self.config, self.scheduler.next_arrival())
        done = len(request.token_ids) >= request.limit
        if done and request.params.prompt_logprobs is None:
            # Nothing to sample: resumed after its last token, or max_tokens = 0.
            self._outbox.append(Delta(message.id, [], "length", cached=0))
        else:
            self.scheduler.add(request)

    def abort(self, ids: Sequence[int]) -> None:
        """End these requests; the next step brings their last deltas. Unknown ids are ignored."""
        self._outbox += self.scheduler.abort(ids)

    def has_work(self) -> bool:
        """A call of `step` would do something."""
        return bool(self.scheduler.requests or self._pending or self._outbox)

    def step(self) -> list[Delta]:
        """Run one round of the loop and return what came of it; in the first round of a burst, one
        batch ahead, that is nothing yet."""
        began = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is not None:
            self._pending.append(self._runner.launch(batch))
        deltas, self._outbox = self._outbox, []
        if self._pending and (
            batch is None or not self.config.async_scheduling or len(self._pending) > 1
        ):
            result = self._pending.popleft().wait()
            deltas += self.scheduler.update(result)
        else:
            assert batch is not None or not self.scheduler.requests, (
                "requests are left, yet none can run"
            )
        self._step_seconds = time.perf_counter() - began
        return deltas

    def drain(self) -> None:
        """Refuse new requests from now on and finish the old ones."""
        self.draining = True

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; requests that run keep their blocks."""
        self.scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        return EngineStats(
            step=scheduler.step,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.num_waiting_tokens,
            free_blocks=scheduler.blocks.num_free,
            total_blocks=scheduler.blocks.num_blocks,
            block_size=scheduler.blocks.block_size,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            step_seconds=self._step_seconds,
            finished=counters.finished,
            draining=self.draining,
        )

    def check_integrity(self) -> None:
        """Assert that no row, block or request is lost. Meant for idle moments; legal at any."""
        self.scheduler.check_integrity()
