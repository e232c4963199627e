"""Dispatcher: the router's `Backend` of one model. It takes requests in, and its parts serve them:

    RequestQueue      admits requests and keeps them until a replica has room
    Placement         sends choices to replicas and takes them off again
    RequestsInFlight  those that have not ended, and what became of the last that have
    RouterLoad        what arrives and waits, for autoscaling
    ReplicaClients    the connections to the replicas; Fleet is what routing knows of them
    ReplicaLosses     decides what becomes of choices whose replica is lost
    DisplacedChoices  keeps choices that lost their replica while no other can take them
    DeltaDelivery     hands what a replica's frame brings to the requests

No Ray and no HTTP here: replicas come through `set_replicas`, requests through `generate`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from deployments.adapters.record_store import AdapterRecordStore
from deployments.adapters.registry import AdapterRegistry, AdapterSettings
from deployments.backend import DRAINING, BackendState, GenerationRequest, ModelCard, RecalledChoice
from deployments.checkpoints.resolve import ModelIdentity
from deployments.observe.metrics import RouterMetrics
from deployments.router.adapters.calls import AdapterCalls
from deployments.router.adapters.stale import StaleAdapters
from deployments.router.admission.limits import DispatchLimits
from deployments.router.admission.request_queue import RequestQueue
from deployments.router.admission.waking import Waking
from deployments.router.delta_delivery import DeltaDelivery
from deployments.router.failover.displaced import DisplacedChoices
from deployments.router.failover.losses import ReplicaLosses
from deployments.router.failover.recall import recall
from deployments.router.inflight import InflightChoice, InflightRequest
from deployments.router.live.model_view import ReplicaEvents, view_of_model
from deployments.router.load import RouterLoad
from deployments.router.model_cards import ModelCards
from deployments.router.placement import Placement
from deployments.router.replicas.replica_calls import ReplicaCalls
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.router.replicas.replica_clients import ReplicaClients
from deployments.router.requests_in_flight import RequestsInFlight
from deployments.routing.fleet import Fleet
from engine.errors import MantaError, Overloaded
from engine.messages import StepFrame
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("manta.router")


class Dispatcher:
    """One model, any number of replicas of it. All methods are called on the event loop that made
    it."""

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
    ) -> None:
        self.metrics = RouterMetrics()
        self._cards = ModelCards(card)
        self._tokenizer = tokenizer
        self._limits = limits
        self.name = name
        self._fleet = Fleet()
        self._replica_calls = ReplicaCalls()
        connect = partial(
            ReplicaClient,
            limits=limits.channel,
            router=name,
            fleet=self._fleet,
            on_open=self._on_open,
            on_frame=self._on_frame,
            on_answer=self._replica_calls.answered,
            on_lost=self._on_lost,
        )
        self._clients = ReplicaClients(connect, "" if identity is None else identity.tokenizer)
        self.requests = RequestsInFlight(name)
        self._events = ReplicaEvents()
        self.random = Random()  # of routing and admission
        self.on_models: Callable[[], None] = lambda: None  # `models` has changed
        self._draining = False
        self._leaving: MantaError | None = None  # why, where no replica will come any more
        self.waking = waking or Waking()
        calls = self._adapter_calls = AdapterCalls(
            self._replica_calls,
            self._clients,
            self._fleet,
            self.random,
            limits.wait_seconds,
            self.wake,
        )
        self.adapters = AdapterRegistry(
            adapters or AdapterSettings(card.id), calls, self._set_models, record_store
        )
        self._set_models()
        self._displaced = DisplacedChoices(limits.wait_seconds, self.wake)
        self._placement = Placement(
            self._clients,
            self._fleet,
            self._displaced,
            self.metrics,
            self.random,
            lambda: self._cards.base.max_model_len,
        )
        self._losses = ReplicaLosses(
            limits.losses, self.requests, self._displaced, self.metrics, self._placement.place
        )
        self._stale = StaleAdapters(self.adapters, self._placement.place_again)
        self._delivery = DeltaDelivery(self._fleet, self._placement, self._losses, self._stale)
        self._queue = RequestQueue(
            limits,
            self._fleet,
            self.requests,
            self.random.random,
            lambda: self._cards.base.max_model_len,
            self._placement.begin,
            self.waking.seconds,
        )
        self.load = RouterLoad(self.metrics, self.requests, self._queue, self._displaced, calls)

    # -- Backend

    def models(self) -> Mapping[str, ModelCard]:
        return self._cards.by_name

    def _set_models(self) -> None:
        self._cards.set_adapters(self.adapters.records)
        self.on_models()

    def tokenizer(self, model: str) -> Tokenizer:
        return self._tokenizer

    def admit(self, key: str, model: str = "") -> None:
        try:
            self._check_open()
            self._queue.admit(key)
        except MantaError as refusal:
            self.metrics.failed.add(1, refusal.code)
            raise

    def generate(self, request: GenerationRequest) -> InflightRequest:
        try:
            self._check_open()
            if not self._queue.ready():
                self.wake()
                self.waking.check(self._limits.wait_seconds)
            if len(self.requests) >= self._limits.in_flight:
                message = f"this router has {len(self.requests)} requests in flight already"
                raise Overloaded(message, retry_after=self._queue.seconds())
            now = self._queue.check(request)
        except MantaError as refusal:
            self.metrics.failed.add(1, refusal.code)
            raise
        inflight = InflightRequest(
            request,
            self._placement.numbers(request.params.n),
            self.metrics,
            self._ended,
            self._placement.take_off,
            self._placement.bring_back,
        )
        self.requests.add(inflight)
        self._queue.enter(inflight, now=now)
        return inflight

    async def recall(
        self,
        model: str,
        streams: Sequence[str],
        enough: Callable[[list[RecalledChoice]], bool],
    ) -> list[RecalledChoice]:
        return await recall(self._replica_calls, self._clients.everywhere, streams, enough)

    def state(self) -> BackendState:
        return BackendState(
            replicas={
                client.replica: client.state.stats
                for client in self._clients.values()
                if client.connection
            },
            in_flight=len(self.requests),
            queued=self._queue.choices,
            queued_tokens=self._queue.tokens,
            draining=self._draining,
        )

    def held(self) -> dict[str, int]:
        """Count what requests hold here; nothing of it may outlive its request."""
        return {
            "requests": len(self.requests),
            "waiting": len(self._displaced) + self._queue.choices,
            "choices": sum(len(client.choices) for client in self._clients.everywhere()),
        }

    def live(self) -> dict[str, Any]:
        """Return what is known of the model at this moment; see live/model_view.py."""
        return view_of_model(self._clients, self._fleet, self._queue, self.requests, self._events)

    def ready(self) -> bool:
        """Whether requests are taken: a model that sleeps takes them, too."""
        return not self._draining and (self._queue.ready() or self.waking.wakes_for_requests)

    def status(self) -> str:
        """Return the model's status: ready, sleeping (the next request wakes it) or starting."""
        if available := self._fleet.available():
            return "sleeping" if all(each.stats.asleep for each in available) else "ready"
        return "sleeping" if self.waking.sleeping else "starting"

    def wake(self) -> None:
        """Have a replica started, if the model sleeps."""
        if self.waking.wake():
            self.metrics.wakes.add()

    def _check_open(self) -> None:
        if self._draining:
            raise Overloaded(DRAINING, code="draining", retry_after=5)

    # -- for the router

    def set_replicas(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the running replicas, id -> what each replica published."""
        self._clients.replace(replicas)
        self.waking.replicas(len(self._clients))
        self._give_up_waiting()

    def refuse_new(self) -> None:
        """Refuse new requests; those in flight go on."""
        self._draining = True

    def leave(self, reason: MantaError) -> None:
        """Stop serving the model. Requests go on at the replicas that are left. Without a replica
        the waiting requests fail with this error."""
        self._leaving = reason
        self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        if self._leaving is not None and not self._queue.ready():
            self._displaced.fail_all(self._leaving)
            self._queue.fail_all(self._leaving)

    def close(self, reason: MantaError | None = None) -> None:
        """Fail the requests in flight, for this reason or because the service is stopping, and
        disconnect from the replicas."""
        self.refuse_new()
        self.waking.close()
        self.adapters.close()
        self._stale.close()
        self.requests.fail_all(reason)
        self._clients.close()

    def _ended(self, inflight: InflightRequest) -> None:
        self.requests.ended(inflight)
        self._queue.ended(inflight)

    # -- from the replicas

    def _on_open(self, client: ReplicaClient) -> None:
        logger.info("replica %s is connected", client.replica)
        self.metrics.channels.add()
        self._events.add("joined", client.replica)
        self.waking.opened(client.endpoint.start_seconds)
        self.adapters.replica_came()
        self._cards.learn(client.endpoint)
        self.on_models()
        self._placement.place_displaced()
        self._queue.fill()

    def _on_frame(self, client: ReplicaClient, frame: StepFrame, now: float) -> None:
        self._delivery.take(client, frame, now)
        self._queue.news(client.state)
        self._give_up_waiting()

    def _on_lost(self, client: ReplicaClient, lost: list[InflightChoice], reason: str) -> None:
        self._events.add("lost", client.replica, f"{reason}; {len(lost)} choices move")
        self._replica_calls.lost(client)
        self._clients.closing.discard(client)
        self._losses.lost(client, lost, reason)
        self._give_up_waiting()
