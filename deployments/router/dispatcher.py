"""Dispatcher: the router's `Backend` of one model. The dispatcher accepts requests; its parts are:

  RequestQueue      admits requests and keeps them until a replica has room
  Assignment        sends choices to replicas and aborts them there
  RequestsInFlight  unfinished requests, and traces of those that ended last
  Replicas          connections to the replicas, and their state for routing
  ReplicaEvents     handles frames from replicas, and lost replicas
  ModelCards        the names that are served: the model and its adapters
  AdapterRegistry   the adapters, which AdapterCalls makes known to replicas
  FleetWeights      the weights at all replicas, as a trainer changes them
  Waking            wakes a model without replicas

This module has no Ray and no HTTP: replicas come through `set_replicas`, requests through
`generate`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any
from weakref import WeakSet

from deployments.adapters.record_store import AdapterRecordStore
from deployments.adapters.registry import AdapterRegistry, AdapterSettings
from deployments.backend import (
    BackendState,
    GenerationRequest,
    ModelCard,
    RecalledChoice,
    draining,
)
from deployments.checkpoints.resolve import ModelIdentity
from deployments.observe.metrics import RouterMetrics
from deployments.router.adapters import AdapterCalls
from deployments.router.admission.request_queue import RequestQueue
from deployments.router.admission.scale_from_zero import Waking
from deployments.router.assignment import Assignment
from deployments.router.inflight import InflightRequest
from deployments.router.live_view import view_of_model
from deployments.router.models.model_cards import ModelCards
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.replica_events import ReplicaEvents
from deployments.router.replica_losses import ReplicaLosses
from deployments.router.replicas.replica_calls import recall
from deployments.router.replicas.replicas import Replicas
from deployments.router.requests_in_flight import RequestsInFlight
from deployments.router.weights import FleetWeights
from deployments.router.weights_record import WeightsStore
from engine.errors import MantaError, Overloaded
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("manta.router")

PAUSED_SECONDS = 20.0  # seconds of waiting in a trainer's pause after which a log line is written


class Dispatcher:
    """The backend of one model with any number of replicas.

    All methods must be called on the event loop that created it.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        limits: DispatchLimits,
        name: str,
        identity: ModelIdentity | None = None,
        adapters: AdapterSettings | None = None,
        record_store: AdapterRecordStore | None = None,
        waking: Waking | None = None,
        weights_store: WeightsStore | None = None,
    ) -> None:
        self.name = name
        self.metrics = metrics = RouterMetrics()
        self.random = random = Random()  # for routing and admission
        self._tokenizer = tokenizer
        self._draining = False
        self._wait_seconds = limits.wait_seconds
        self.cards = ModelCards(card)
        self.waking = waking or Waking()
        self.waking.metrics = metrics
        vocabulary = "" if identity is None else identity.tokenizer
        self.replicas = Replicas(limits.channel, name, vocabulary)
        base = "" if identity is None else identity.weights
        self.weights = FleetWeights(self.replicas, base, weights_store)
        self.weights.on_deep_sleep = self._await_all_weights
        self.weights.on_pause = self._watch_pause
        self._pause_watch: asyncio.TimerHandle | None = None
        self.requests = RequestsInFlight(name, metrics)
        # requests with a timer that fails them if no update restores the weights dropped by a sleep
        self._weightless: WeakSet[InflightRequest] = WeakSet()
        self._adapter_calls = calls = AdapterCalls(
            self.replicas, random, limits.wait_seconds, self.waking
        )
        settings = adapters or AdapterSettings(card.id)
        self.adapters = AdapterRegistry(settings, calls, self._set_models, record_store)
        self._set_models()
        self.assignment = Assignment(
            self.replicas, self.cards, self.waking, metrics, random, limits.wait_seconds
        )
        self.queue = RequestQueue(
            limits,
            self.replicas.fleet,
            self.requests,
            self.cards,
            self.assignment,
            self.waking,
            random,
        )
        self._events = ReplicaEvents(
            self.replicas,
            self.cards,
            self.adapters,
            self.assignment,
            ReplicaLosses(limits.losses, self.requests, self.assignment, metrics),
            self.queue,
            self.waking,
            metrics,
            self.weights,
        )

    # -- Backend

    def models(self) -> Mapping[str, ModelCard]:
        return self.cards.by_name

    def _set_models(self) -> None:
        self.cards.set_adapters(self.adapters.records)

    def tokenizer(self, model: str) -> Tokenizer:
        return self._tokenizer

    def admit(self, key: str, priority: int, model: str = "") -> None:
        try:
            if self._draining:
                raise draining()
            self.queue.admit(key, priority)
        except MantaError as refusal:
            self.metrics.failed.inc(1, refusal.code)
            raise

    def generate(self, request: GenerationRequest) -> InflightRequest:
        try:
            if self._draining:
                raise draining()
            roomy = self.queue.check(request)
        except MantaError as refusal:
            self.metrics.failed.inc(1, refusal.code)
            raise
        inflight = InflightRequest(request, self.metrics, self.assignment, self.requests)
        self.requests.add(inflight)
        self.queue.enter(inflight, roomy)
        if self.weights.slept_deeply and self.weights.dropped:
            self._await_weights(inflight)
        return inflight

    def _await_all_weights(self) -> None:
        """Call `_await_weights` for every request in flight, as a sleep has dropped the weights."""
        for inflight in self.requests:
            self._await_weights(inflight)

    def _await_weights(self, inflight: InflightRequest) -> None:
        """Start a timer that fails a request if the engines still lack weights after
        `wait_seconds`.

        While a trainer has paused the model, the timer is restarted.
        """
        if inflight in self._weightless:
            return
        self._weightless.add(inflight)

        def refuse() -> None:
            self._weightless.discard(inflight)
            if not self.weights.dropped:
                return
            if self.weights.paused:
                # The trainer has not finished its step, and may still send weights.
                self._await_weights(inflight)
                return
            message = (
                "a sleep of level 2 has dropped the weights, and no update has brought others; "
                "a trainer has to call update_weights, or POST /update_weights_from_disk"
            )
            inflight.fail(Overloaded(message, code="weights_dropped", retry_after=5))

        loop = asyncio.get_running_loop()
        inflight.timers.append(loop.call_later(self._wait_seconds, refuse))

    def _watch_pause(self) -> None:
        """Log once if a request waits for longer than PAUSED_SECONDS in the pause that now
        begins."""
        loop, began = asyncio.get_running_loop(), time.monotonic()

        def look() -> None:
            self._pause_watch = None
            if not self.weights.paused:
                return
            # In a "wait" pause, requests that arrived before the pause run to completion.
            since = began if self.weights.pause_mode == "wait" else 0.0
            late = time.monotonic() - PAUSED_SECONDS
            waiting = sum(since <= inflight.arrived <= late for inflight in self.requests)
            if not waiting:
                self._pause_watch = loop.call_later(PAUSED_SECONDS, look)
                return
            logger.warning(
                "%s: %d requests have waited for %.0f s or longer, as a trainer has paused the "
                "replicas; %s ends the pause",
                self.cards.base.id,
                waiting,
                PAUSED_SECONDS,
                self.weights.ended_by,
            )

        self._end_pause_watch()
        self._pause_watch = loop.call_later(PAUSED_SECONDS, look)

    def _end_pause_watch(self) -> None:
        if self._pause_watch is not None:
            self._pause_watch.cancel()

    async def recall(
        self,
        model: str,
        streams: Sequence[str],
        enough: Callable[[list[RecalledChoice]], bool],
    ) -> list[RecalledChoice]:
        return await recall(self.replicas.calls, self.replicas.everywhere, streams, enough)

    def state(self) -> BackendState:
        return BackendState(
            replicas={
                client.replica: client.state.stats
                for client in self.replicas.values()
                if client.connection
            },
            in_flight=len(self.requests),
            queued=self.queue.choices,
            queued_tokens=self.queue.tokens,
            draining=self._draining,
        )

    def held(self) -> dict[str, int]:
        """Return, by kind of object, the number of objects that unfinished requests hold in this
        router.

        A count above 0 while no request is in flight indicates a leak.
        """
        return {
            "requests": len(self.requests),
            "waiting": len(self.assignment.displaced) + self.queue.choices,
            "choices": sum(len(client.choices) for client in self.replicas.everywhere()),
        }

    def live(self) -> dict[str, Any]:
        """Return the model's live view; see live_view.py."""
        return view_of_model(self.replicas, self.queue, self.requests, self._events.log)

    def load(self) -> dict[str, int | float]:
        """Return {metric: value} of the arriving and waiting load, which scaling/policy.py
        reads."""
        return {
            **self.requests.arrival_rates(),
            "in_flight": len(self.requests),
            "queued": self.queue.choices
            + len(self.assignment.displaced)
            + self._adapter_calls.waiting,
            "queued_tokens": self.queue.tokens,
        }

    def ready(self) -> bool:
        """Whether the model accepts requests: it has a replica, or the next request starts one."""
        return not self._draining and (self.queue.ready() or self.waking.wakes_for_requests)

    def starting(self) -> bool:
        """Whether the model has had no replica yet, and none starts for the next request."""
        return self.waking.starting

    def status(self) -> str:
        """Return the model's status: "ready", "sleeping" (the next request wakes it) or
        "starting"."""
        if available := self.replicas.fleet.available():
            asleep = all(replica.stats.asleep for replica in available)
            return "sleeping" if asleep else "ready"
        return "sleeping" if self.waking.sleeping else "starting"

    # -- for the router

    def set_replicas(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the running replicas.

        replicas: by replica name, the metadata that the replica has published.
        """
        self.replicas.replace(replicas, self._events)
        self.waking.replicas(len(self.replicas))
        self.queue.replicas_changed()

    def refuse_new(self) -> None:
        """Refuse new requests; those in flight go on."""
        self._draining = True

    def leave(self, reason: MantaError) -> None:
        """Stop serving the model; requests continue at the remaining replicas.

        reason: the error of requests that still wait once no replica is left.
        """
        self.queue.leave(reason)

    def close(self, reason: MantaError | None = None) -> None:
        """Fail the requests in flight, and disconnect from the replicas.

        reason: the error of the requests; None: the service is stopping.
        """
        self.refuse_new()
        self.waking.close()
        self.adapters.close()
        self.weights.close()
        self._end_pause_watch()
        self._events.close()
        self.requests.fail_all(reason)
        self.replicas.close()
