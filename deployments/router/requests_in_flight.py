"""RequestsInFlight: the requests of a dispatcher that have not ended, and the traces of the last
ones that have."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from deployments.router.inflight import InflightRequest
from deployments.router.request_trace import RequestTraces, log_trace
from engine.errors import MantaError, Overloaded


class RequestsInFlight(Collection[InflightRequest]):
    """The requests in flight, in the order of arrival.

    router: name of the router, for traces.
    on_end: functions that are called with each prompt that has ended.
    """

    def __init__(self, router: str) -> None:
        self._router = router
        self._requests: dict[InflightRequest, None] = {}
        self.traces = RequestTraces()
        self.on_end: list[Callable[[InflightRequest], None]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[InflightRequest]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[InflightRequest]:
        return reversed(self._requests)

    def __contains__(self, inflight: object) -> bool:
        return inflight in self._requests

    def add(self, inflight: InflightRequest) -> None:
        """Add a request, which fails at its deadline, if it has one. A deadline needs a running
        event loop."""
        self._requests[inflight] = None
        deadline = inflight.request.deadline
        if deadline is not None:
            error = MantaError("the request's deadline has passed", code="deadline_exceeded")
            left = max(0.0, deadline - time.monotonic())
            timer = asyncio.get_running_loop().call_later(left, inflight.fail, error)
            inflight.timers.append(timer)

    def ended(self, inflight: InflightRequest) -> None:
        self._requests.pop(inflight, None)
        self.traces.add(inflight.trace)
        log_trace(inflight.trace)
        for tell in self.on_end:
            tell(inflight)

    def explain(self, id: str, owner: str | None) -> list[dict[str, Any]]:
        """Return what became of the requests with this id; see request_trace.py."""
        asked = [inflight for inflight in self._requests if inflight.trace.id == id]
        for inflight in asked:  # a trace is not written to for a token
            inflight.trace.output_tokens = inflight.output_tokens
        unfinished = [inflight.trace for inflight in asked]
        now = time.monotonic()
        return [trace.tell(self._router, now) for trace in self.traces.find(id, owner, unfinished)]

    def stop(self, id: str, owner: str | None) -> int:
        """End the requests with this id, and return how many prompts these were.

        owner: digest of the key that asks; None may end any.
        """
        found = [
            inflight
            for inflight in self._requests
            if inflight.trace.id == id and owner in (None, inflight.trace.owner)
        ]
        for inflight in found:
            inflight.fail(MantaError("the request was stopped", code="cancelled"))
        return len(found)

    def fail_all(self, reason: MantaError | None = None) -> None:
        """Fail all requests, whose time to end is over.

        reason: why; by default the service is stopping.
        """
        message = "the service is stopping, and the time it had for this request is over"
        for inflight in list(self._requests):
            inflight.fail(reason or Overloaded(message, code="draining", retry_after=5))
