"""StepRecovery: runs the requests of a failed step again, in smaller steps or in groups.

step_failure.py says which step is to blame, and bisection.py which requests run together.
"""

import contextlib
import logging
from collections import deque

from engine.batch import OutOfMemory
from engine.messages import Delta
from engine.scheduling.failures.bisection import FailureBisection
from engine.scheduling.failures.step_failure import MemoryShortages
from engine.scheduling.memory.kv_growth import KVGrowth
from engine.scheduling.request import RequestPhase
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import LaunchedStep
from engine.scheduling.step_runner import PendingResult, Runner

logger = logging.getLogger("manta.engine")

_POISON = "engine_error: the engine fails on this request, and only on it"


class StepRecovery:
    """The recovery of a step loop from steps that raise.

    bisection: the search for the requests that make steps fail; None = there is none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pending: deque[PendingResult],
        growth: KVGrowth | None = None,
    ) -> None:
        """Set up recovery.

        pending: the launched steps of the loop, in order.
        growth: grows and shrinks the pool of KV blocks; None = its size is fixed.
        """
        self.bisection: FailureBisection | None = None
        self._scheduler, self._pending, self._growth = scheduler, pending, growth
        self._shortages = MemoryShortages()
        # Whether a poison request was found, and no step has succeeded since.
        self._poison_unconfirmed = False

    def succeeded(self) -> None:
        """Clear the suspicion of a poison request, after a step that has not raised.

        After several such steps, the token limit that a lack of memory has lowered is doubled.
        """
        scheduler = self._scheduler
        self._poison_unconfirmed = False
        if scheduler.counters.out_of_memory and self._shortages.count_success():
            limit = 2 * scheduler.token_limit
            scheduler.token_limit = min(limit, scheduler.config.max_num_batched_tokens)

    def retry(self, runner: Runner, failure: Exception, suspect: int) -> None:
        """Run the requests of a failed step again, in smaller steps or in groups.

        suspect: the index in `Scheduler.in_flight` of the step to blame.
        """
        if isinstance(failure, OutOfMemory) and self.bisection is None:
            self._retry_smaller(runner, failure, self._scheduler.in_flight[-1])
        else:
            self._begin_bisection(runner, failure, suspect)

    def recompute(self) -> None:
        """Drop the results of the steps in flight, which have read wrong keys, and compute the
        running requests again."""
        self._drop_pending()
        self._scheduler.requeue(trusted=False)

    def _retry_smaller(self, runner: Runner, failure: OutOfMemory, newest: LaunchedStep) -> None:
        """Requeue all requests, and run smaller steps from now on.

        If a step of one token does not fit and the KV cache cannot shrink, begin a bisection. So
        does a step that encodes an image, for which a smaller KV cache is no remedy.
        """
        self._shortages.count_shortage()
        scheduler = self._scheduler
        scheduler.counters.out_of_memory += 1
        growth, pool = self._growth, scheduler.memory.pools[0]
        fewer = scheduler.config.num_blocks * 7 // 8
        can_shrink = fewer >= pool.blocks_for(scheduler.config.max_model_len)
        if growth is not None:
            can_shrink = pool.num_blocks > growth.least
        num_tokens = newest.decodes + newest.prompt_tokens + newest.ahead_tokens
        # an image that must not be cut, or a whole text, may exceed the limit
        smaller = min(num_tokens, scheduler.token_limit) // 2
        if not smaller and (newest.num_images or not can_shrink):
            self._begin_bisection(runner, failure, -1)
            return
        self._drop_pending()
        if not runner.recover():
            raise failure
        scheduler.requeue(trusted=False)
        scheduler.token_limit = max(1, smaller)
        logger.warning(
            "out of memory in a step of %d tokens: steps of at most %d from now on",
            num_tokens,
            scheduler.token_limit,
        )
        if self._shortages.persists and can_shrink and growth is not None:
            growth.shrink_for_steps(pool)
            logger.warning("out of memory: at most %d KV blocks", pool.num_blocks)
        elif self._shortages.persists and can_shrink:
            in_a_row = self._shortages.in_a_row
            logger.warning("out of memory %d times: %d KV blocks", in_a_row, fewer)
            runner.shrink(fewer)
            scheduler.shrink(fewer)

    def _begin_bisection(self, runner: Runner, failure: Exception, suspect: int) -> None:
        """Drop the steps in flight, one of which has raised, and run the requests in groups.

        Raises `failure` if the device is lost.
        """
        logger.warning("a step has failed; trying its requests in groups", exc_info=failure)
        failure.with_traceback(None)  # the traceback's frames would keep tensors alive
        self._drop_pending()
        if not runner.recover():
            raise failure
        launched = self._scheduler.in_flight[suspect]
        suspects = [*dict.fromkeys([*launched.requests, *launched.ahead])]
        suspects = [r for r in suspects if r.phase is not RequestPhase.ENDED]
        self._scheduler.requeue(trusted=False)
        if self.bisection is None:
            self.bisection = FailureBisection(suspects, failure)
        else:
            self.bisection.failed(suspects, failure)
        self._scheduler.admit_only(self.bisection.group)

    def _drop_pending(self) -> None:
        """Wait for the launched steps and discard their results."""
        for pending in self._pending:
            # a later step's inputs depend on the failed one, so that it may raise too
            with contextlib.suppress(Exception):
                pending.wait()
        self._pending.clear()

    def go_on(self, bisection: FailureBisection, *, succeeded: bool) -> list[Delta]:
        """Continue the bisection after one of its steps; return the deltas of requests that fail.

        If the group has passed, the next group starts. After the last group the poison requests
        fail.
        Raises the last failure if no group's step has succeeded: the engine itself is then the
        cause.
        """
        bisection.healthy |= succeeded
        if bisection.group and not bisection.group_passed():
            return []
        bisection.next_group()
        self._scheduler.requeue(trusted=True)
        if bisection.group:
            self._scheduler.admit_only(bisection.group)
            return []
        self.bisection = None
        self._scheduler.admit_only(None)
        if bisection.poison and not bisection.healthy:
            if self._poison_unconfirmed or len(bisection.poison) > 1:
                raise bisection.error
            self._poison_unconfirmed = True
        logger.warning("%d poison requests made steps fail", len(bisection.poison))
        return self._scheduler.fail(bisection.poison, _POISON)
