"""RequestsInFlight: a dispatcher's unfinished requests, traces of ended ones, and arrival rates."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from deployments.observe.metrics import RouterMetrics
from deployments.router.inflight import InflightRequest
from deployments.router.request_trace import RequestTraces, log_trace
from deployments.routing.fleet import OUTPUT_GUESS
from deployments.scaling.policy import CounterRates
from engine.errors import MantaError, Overloaded


class RequestsInFlight(Collection[InflightRequest]):
    """The requests in flight, in the order of arrival.

    router: name of the router, for traces.
    on_end: functions that are called with each prompt that has ended.
    """

    def __init__(self, router: str, metrics: RouterMetrics) -> None:
        self._router = router
        self._metrics = metrics
        self._rates = CounterRates(time.monotonic())
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
        """Add a request; a timer on the event loop fails it at its deadline, if it has one."""
        self._requests[inflight] = None
        deadline = inflight.request.deadline
        if deadline is not None:
            error = MantaError("the request's deadline has passed", code="deadline_exceeded")
            seconds_left = max(0.0, deadline - time.monotonic())
            timer = asyncio.get_running_loop().call_later(seconds_left, inflight.fail, error)
            inflight.timers.append(timer)

    def ended(self, inflight: InflightRequest) -> None:
        self._requests.pop(inflight, None)
        self.traces.add(inflight.trace)
        log_trace(inflight.trace)
        for listener in self.on_end:
            listener(inflight)

    def explain(self, id: str, owner: str | None) -> list[dict[str, Any]]:
        """Return the traces of the requests with an id, as JSON; see request_trace.py.

        owner: digest of the API key that asks, which sees its own requests only; None: all.
        """
        asked = [inflight for inflight in self._requests if inflight.trace.id == id]
        for inflight in asked:
            # Traces are not updated per token, so the numbers of output tokens are set here.
            inflight.trace.output_tokens = inflight.output_tokens
        unfinished = [inflight.trace for inflight in asked]
        now = time.monotonic()
        traces = self.traces.find(id, owner, unfinished)
        return [trace.to_json(self._router, now) for trace in traces]

    def stop(self, id: str, owner: str | None, partial: bool = False) -> int:
        """End the unfinished requests with an id, and return the number of prompts ended.

        owner: digest of the API key that asks, which ends its own requests only; None: all.
        partial: whether a request's answer is the output so far; if false, it is an error.
        """
        requests = [
            inflight
            for inflight in self._requests
            if inflight.trace.id == id and owner in (None, inflight.trace.owner)
        ]
        for inflight in requests:
            if partial:
                inflight.cut()
            else:
                inflight.fail(MantaError("the request was stopped", code="cancelled"))
        return len(requests)

    def arrival_rates(self) -> dict[str, float]:
        """Return {"prompt_rate", "output_rate"}: the tokens/s that arrived since the last call.

        Cached prompt tokens are left out. Outputs are assumed to have the mean length of earlier
        outputs.
        """
        metrics = self._metrics
        ended = sum(metrics.output_size.counts)
        output = metrics.output_size.sum / ended if ended else OUTPUT_GUESS
        rates = self._rates.update(
            time.monotonic(),
            prompt=sum(metrics.prompt_tokens.values.values())
            - sum(metrics.cached_tokens.values.values()),
            requests=sum(metrics.prompt_size.counts),
        )
        return {"prompt_rate": rates["prompt"], "output_rate": rates["requests"] * output}

    def fail_all(self, reason: MantaError | None = None) -> None:
        """Fail all requests that are still in flight.

        reason: the error of the requests; None: the service is stopping.
        """
        message = "the service is stopping, and the time it had for this request is over"
        for inflight in list(self._requests):
            inflight.fail(reason or Overloaded(message, code="draining", retry_after=5))
