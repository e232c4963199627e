"""Waking: scaling from zero replicas.

A request to a model without replicas makes Serve start one. If the request cannot be held until the
replica is ready, its error has a Retry-After.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from deployments.observe.metrics import RouterMetrics
from engine.errors import Overloaded

logger = logging.getLogger("manta.router")

UNKNOWN = 5.0  # Retry-After in seconds if the time of a replica's start is unknown


class Waking:
    """The router's calls that make Serve start the first replica of a model without replicas.

    A model sleeps if it may scale to zero, has no replica, and no call for one is pending.

    model: name of the model.
    start_seconds: assumed seconds of a replica's start, until a start was measured; None: the model
        never sleeps, and this object does nothing.
    ask: makes Serve start a replica, and returns when the replica has answered.
    """

    def __init__(
        self,
        model: str = "",
        start_seconds: float | None = None,
        ask: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.metrics = RouterMetrics()  # replaced by the dispatcher's metrics
        self._model = model
        self._guess = start_seconds
        self._ask = ask
        self._took: float | None = None  # measured seconds of a start
        self._was_there = False  # whether this router has ever seen a replica of the model
        self._empty = False  # whether Serve has reported that there is no replica
        self._asked = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def sleeping(self) -> bool:
        return self._guess is not None and self._empty and not self._waits

    @property
    def wakes_for_requests(self) -> bool:
        """Whether the model has scaled to zero, so that the next request starts a replica."""
        return self._guess is not None and self._empty and self._was_there

    @property
    def starting(self) -> bool:
        """Whether the model has had no replica yet, and none starts for the next request."""
        return not self._was_there and (self._guess is None or not self._empty)

    @property
    def _waits(self) -> bool:
        return self._task is not None and not self._task.done()

    def replicas(self, count: int) -> None:
        """Record the number of replicas that Serve reports."""
        self._empty = not count
        self._was_there |= count > 0

    def opened(self, start_seconds: float) -> None:
        """Record that a replica accepts requests and how long its start took.

        A call by which `wake` asks Serve for a replica is cancelled if the call is still pending.

        start_seconds: duration of the replica's start as it reports; 0: unknown.
        """
        self._was_there = True
        if self._waits:
            # Another router may have asked for the replica earlier: the start then took longer than
            # this router's wait.
            self._took = max(time.monotonic() - self._asked, start_seconds)
            logger.info("%s is awake after %.1f s", self._model, self._took)
        elif self._took is None and start_seconds:
            self._took = start_seconds
        self.close()

    def wake(self) -> bool:
        """Ask Serve for a replica if the model sleeps, and return whether it did."""
        if not self.sleeping or self._ask is None:
            return False
        logger.info("%s sleeps, and is woken by a request", self._model)
        self.metrics.wakes.inc()
        self._asked = time.monotonic()
        self._task = asyncio.ensure_future(self._ask())
        return True

    def check(self, wait_seconds: float) -> None:
        """Raise Overloaded if a replica is starting but not expected to be ready within
        `wait_seconds`.

        Nothing is raised until the duration of a start was measured.
        """
        if self._took is None or not self._waits:
            return
        seconds_left = self._asked + self._took - time.monotonic()
        if seconds_left > wait_seconds:
            raise Overloaded(
                f"{self._model} sleeps, was woken, and is expected to be ready in "
                f"{seconds_left:.0f} s",
                code="no_replica",
                retry_after=seconds_left,
            )

    def seconds(self) -> float:
        """Return the Retry-After in seconds while the model has no replica."""
        if not self._waits or self._guess is None:
            return UNKNOWN
        expected = self._guess if self._took is None else self._took
        return math.ceil(max(UNKNOWN, self._asked + expected - time.monotonic()))

    def take_over(self, other: "Waking") -> None:
        """Copy the measured start time of an earlier Waking of the same model, and whether it has
        ever seen a replica."""
        self._took, self._was_there = other._took, other._was_there

    def close(self) -> None:
        """Stop waiting for a replica."""
        if self._task is not None:
            self._task.cancel()
