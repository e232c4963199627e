"""RouterLoad: what arrives at a dispatcher and waits there, for scaling/policy.py."""

import time
from collections.abc import Collection, Sized

from deployments.observe.metrics import RouterMetrics
from deployments.router.adapters.calls import AdapterCalls
from deployments.router.admission.request_queue import RequestQueue
from deployments.router.inflight import InflightRequest
from deployments.routing.fleet import OUTPUT_GUESS
from deployments.scaling.policy import CounterRates


class RouterLoad:
    """requests: in flight. displaced: choices that lost their replica and have no other yet."""

    def __init__(
        self,
        metrics: RouterMetrics,
        requests: Collection[InflightRequest],
        queue: RequestQueue,
        displaced: Sized,
        adapter_calls: AdapterCalls,
    ) -> None:
        self._metrics = metrics
        self._requests = requests
        self._queue = queue
        self._displaced = displaced
        self._adapter_calls = adapter_calls
        self._rates = CounterRates(time.monotonic())

    def stats(self) -> dict[str, int | float]:
        """Rates are tokens/s since the last call: of prompts without cached tokens, of outputs by
        the mean length so far."""
        metrics = self._metrics
        ended = sum(metrics.output_size.counts)
        output = metrics.output_size.sum / ended if ended else OUTPUT_GUESS
        rates = self._rates.update(
            time.monotonic(),
            prompt=sum(metrics.prompt_tokens.values.values())
            - sum(metrics.cached_tokens.values.values()),
            requests=sum(metrics.prompt_size.counts),
        )
        return {
            "prompt_rate": rates["prompt"],
            "output_rate": rates["requests"] * output,
            "in_flight": len(self._requests),
            "queued": self._queue.choices + len(self._displaced) + self._adapter_calls.waiting,
            "queued_tokens": self._queue.tokens,
        }
