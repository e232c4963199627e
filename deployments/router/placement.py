"""Placement: sends choices to replicas, and takes them off again."""

import time
from collections.abc import Callable, Collection
from random import Random

from deployments.observe.metrics import RouterMetrics
from deployments.router.failover.displaced import DisplacedChoices
from deployments.router.inflight import InflightChoice, InflightRequest
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.router.replicas.replica_clients import ReplicaClients
from deployments.routing.decision import RoutingDecision, RoutingRequest
from deployments.routing.fleet import Fleet
from deployments.routing.prefix_index import hash_prefix, pack_hashes
from deployments.routing.replica_state import ReplicaState
from deployments.routing.route import route
from deployments.transport.channel import AdapterRef, Submit
from engine.messages import Abort


class Placement:
    """max_len: tokens of the longest request. Choices are known by numbers; no number is used twice
    on a connection."""

    def __init__(
        self,
        clients: ReplicaClients,
        fleet: Fleet,
        displaced: DisplacedChoices,
        metrics: RouterMetrics,
        random: Random,
        max_len: Callable[[], int],
    ) -> None:
        self._next = 1
        self._clients = clients
        self._fleet = fleet
        self._displaced = displaced
        self._metrics = metrics
        self._random = random
        self._max_len = max_len

    def numbers(self, count: int) -> int:
        """The first of so many new ones in a row."""
        first, self._next = self._next, self._next + count
        return first

    def begin(self, inflight: InflightRequest, replicas: list[ReplicaState]) -> None:
        """Send a new request to one of these replicas, which have room."""
        self._metrics.queue.observe(time.monotonic() - inflight.arrived)
        names = {replica.name for replica in replicas}
        self.place([choice for choice in inflight.choices if not choice.done], names)

    def place(self, choices: list[InflightChoice], among: Collection[str] | None = None) -> None:
        """Send choices of one request to one replica, of `among` if given; without one they
        wait."""
        first = choices[0]
        wanted = self._routing_request(choices)
        now = time.monotonic()
        names = self._allowed(choices, among)
        decision = route(wanted, self._fleet, self._random, now, among=names, avoid=first.place)
        if decision is None:
            self._displaced.put(choices)
            return
        client = self._clients[decision.replica]
        self._metrics.routed.add(1, decision.reason)
        self._fleet.send(client.state, [choice.id for choice in choices], decision, wanted, now)
        self._note(first.inflight, decision, len(first.emitted), now)
        for choice in choices:
            choice.place = decision.replica
            choice.weights = client.endpoint.weights
            choice.suspicion.passed &= not choice.given
            choice.begun = len(choice.emitted)
            self._submit(choice, client, wanted)

    def place_displaced(self) -> None:
        """Place the displaced choices: there may be a replica for them now."""
        for choices in self._displaced.take_all():
            self.place(choices)

    def take_off(self, choices: list[InflightChoice]) -> None:
        """Take choices off their replicas: they are not wanted there any more."""
        by_client: dict[ReplicaClient, list[int]] = {}
        for choice in choices:
            self._displaced.take(choice)
            client = self._clients.holding(choice)
            if client is not None:
                by_client.setdefault(client, []).append(choice.id)
                client.forget(choice)
        for client, ids in by_client.items():
            if client.connection is not None:
                client.connection.send(Abort(ids))

    def bring_back(self, choices: list[InflightChoice]) -> None:
        """Place choices that were taken off. They get new numbers, because the replica may not have
        ended the old ones yet."""
        for choice in choices:
            choice.id = self.numbers(1)
        self.place(choices)

    def place_again(self, choices: list[InflightChoice]) -> None:
        """Place choices anew, because the adapter that they ask for has changed."""
        self.take_off(choices)
        self.bring_back(choices)

    def _routing_request(self, choices: list[InflightChoice]) -> RoutingRequest:
        request, emitted = choices[0].inflight.request, choices[0].emitted
        limit = request.params.max_tokens
        adapter = request.adapter
        return RoutingRequest(
            len(request.token_ids) + len(emitted),
            self._max_len() if limit is None else limit,
            len(choices),
            # Of a text that becomes a vector nothing is kept.
            []
            if request.params.pooled
            else hash_prefix(request.token_ids + emitted, request.adapter_key, request.cache_salt),
            "" if adapter is None else adapter.name,  # as replicas call it
        )

    def _allowed(
        self, choices: list[InflightChoice], among: Collection[str] | None
    ) -> list[str] | None:
        """Replicas that the choices may go to; None: any. Emitted tokens go on with the same
        weights only."""
        weights = next((choice.weights for choice in choices if choice.emitted), "")
        names = self._clients.keys() if among is None else among
        if weights:
            names = [name for name in names if self._clients[name].endpoint.weights == weights]
        return None if len(names) == len(self._clients) else list(names)

    @staticmethod
    def _note(
        inflight: InflightRequest, decision: RoutingDecision, emitted: int, now: float
    ) -> None:
        inflight.placed = now
        inflight.replicas.append(decision.replica)
        inflight.trace.sent(decision, now, emitted)

    @staticmethod
    def _submit(choice: InflightChoice, client: ReplicaClient, wanted: RoutingRequest) -> None:
        inflight = choice.inflight
        request = inflight.request
        adapter: AdapterRef | None = None
        if (record := request.adapter) is not None:
            version = 0 if inflight.begun else record.version
            adapter = AdapterRef(record.name, record.revision, record.path, version)
        client.choices[choice.id] = choice
        assert client.connection is not None
        client.connection.send(
            Submit(
                choice.as_request(),
                prefix_hashes=pack_hashes(wanted.prefix_hashes),
                adapter=adapter,
                start=choice.suspicion.start,
                deaths=choice.suspicion.deaths,
                stream=request.stream,
            )
        )
