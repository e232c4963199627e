"""Assignment: sends choices to replicas, and aborts choices at replicas.

Choices that lost their replica wait here for another replica. New requests wait in the request
queue instead (admission/request_queue.py).
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from deployments.observe.metrics import RouterMetrics
from deployments.router.admission.scale_from_zero import Waking
from deployments.router.inflight import InflightChoice, InflightRequest
from deployments.router.models.model_cards import ModelCards
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.router.replicas.replicas import Replicas
from deployments.routing.decision import RoutingDecision, RoutingRequest
from deployments.routing.fleet import MOVE_TOKENS
from deployments.routing.prefix_index import hash_prefix, pack_hashes
from deployments.routing.route import route
from deployments.transport.channel import AdapterRef, Submit
from engine.errors import MantaError, Overloaded
from engine.messages import BATCH_PRIORITY, Abort, KVSource


class DisplacedChoices:
    """The choices that have lost their replica and wait for another one.

    seconds: maximum seconds that a choice waits before its request fails.
    waking: wakes the model when a choice begins to wait.
    """

    def __init__(self, seconds: float, waking: Waking) -> None:
        self._seconds = seconds
        self._waking = waking
        # The waiting choices by their ids, each with the timer that ends its wait.
        self._choices: dict[int, tuple[InflightChoice, asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def add_choices(self, choices: list[InflightChoice]) -> None:
        """Add choices to wait for a replica."""
        loop = asyncio.get_running_loop()
        error = Overloaded(
            f"no replica became ready within {self._seconds:g} s", code="no_replica", retry_after=5
        )
        for choice in choices:
            timer = loop.call_later(self._seconds, choice.inflight.fail, error)
            self._choices[choice.id] = (choice, timer)
        self._waking.wake()

    def remove(self, choice: InflightChoice) -> bool:
        """Remove a choice, and return whether it was waiting."""
        _, timer = self._choices.pop(choice.id, (None, None))
        if timer is not None:
            timer.cancel()
        return timer is not None

    def fail_all(self, error: MantaError) -> None:
        """Fail the requests of all waiting choices, because no replica will become available."""
        for choices in self.pop_all():
            choices[0].inflight.fail(error)

    def pop_all(self) -> list[list[InflightChoice]]:
        """Remove all choices and return them, grouped by request."""
        waiting = [choice for choice, _ in self._choices.values()]
        for choice in waiting:
            self.remove(choice)
        groups = itertools.groupby(waiting, lambda choice: choice.inflight)
        return [list(group) for _, group in groups]


class Assignment:
    """The sender of choices to replicas: picks a replica by `route`, books the choice and submits
    it.

    Messages to replicas identify a choice by a number (`InflightChoice.id`) that is never reused.

    numbers: iterator over the unused numbers.

    wait_seconds: maximum seconds that a displaced choice waits for a replica.
    """

    def __init__(
        self,
        replicas: Replicas,
        cards: ModelCards,
        waking: Waking,
        metrics: RouterMetrics,
        random: Random,
        wait_seconds: float,
    ) -> None:
        self.displaced = DisplacedChoices(wait_seconds, waking)
        self.numbers: Iterator[int] = itertools.count(1)
        self._replicas = replicas
        self._cards = cards
        self._metrics = metrics
        self._random = random

    def begin(self, inflight: InflightRequest) -> None:
        """Send a new request to one of the replicas that have room."""
        self._metrics.queue.observe(time.monotonic() - inflight.arrived)
        choices = [choice for choice in inflight.choices if not choice.done]
        self.assign(choices, with_room=True)

    def assign(
        self,
        choices: list[InflightChoice],
        among: Sequence[str] | None = None,
        *,
        with_room: bool = False,
    ) -> None:
        """Send choices of one request to one replica; if none is available, keep them as displaced.

        among: names of the replicas that may be chosen; None: any.
        with_room: whether only replicas with room for more choices may be chosen.
        """
        first = choices[0]
        inflight = first.inflight
        request, emitted = inflight.request, first.emitted
        limit, adapter = request.params.max_tokens, request.adapter
        tokens = request.token_ids + emitted
        # An embedding request leaves nothing in the prefix cache.
        caches = not request.params.pooled
        wanted = RoutingRequest(
            len(tokens),
            self._cards.base.max_model_len if limit is None else limit,
            len(choices),
            hash_prefix(tokens, request.adapter_key, request.cache_salt, request.images)
            if caches
            else [],
            "" if adapter is None else adapter.name,  # the adapter's name at replicas
            request.session,
            request.priority >= BATCH_PRIORITY,
        )
        now = time.monotonic()
        sent_before = inflight.replicas or request.emitted
        names = self._allowed(choices, among) if sent_before else among
        fleet = self._replicas.fleet
        decision = None
        prefilled, first_only = first.prefill, False
        fleet.refresh()
        if fleet.apart:
            decision, first_only = self._apart(choices, wanted, names, now, with_room=with_room)
        if decision is None:
            decision = route(
                wanted,
                fleet,
                self._random,
                now,
                among=names,
                avoid=first.place,
                with_room=with_room,
            )
        for choice in choices:
            choice.prefill = first_only and decision is not None
        if decision is None:
            self.displaced.add_choices(choices)
            return
        if prefilled and decision.source == first.place:
            decision = replace(decision, reason="handover")
        client = self._replicas[decision.replica]
        self._metrics.routed.inc(1, decision.reason)
        fleet.send(client.state, [choice.id for choice in choices], decision, wanted, now)
        inflight.placed = now
        inflight.replicas.append(decision.replica)
        inflight.trace.sent(decision, now, len(first.emitted))
        source = None
        if decision.source or first.place:
            source = self._source(first, client, decision, prefilled=prefilled)
        self._submit(choices, client, decision, wanted, source)

    def _apart(
        self,
        choices: list[InflightChoice],
        wanted: RoutingRequest,
        among: Sequence[str] | None,
        now: float,
        *,
        with_room: bool,
    ) -> tuple[RoutingDecision | None, bool]:
        """Return the routing decision for choices of a model with prefill and decode replicas, and
        whether the chosen replica computes the prompt only.

        If the cache of a replica that decodes lacks fewer than MOVE_TOKENS tokens of the prompt,
        the request starts there. Choices with output tokens, suspects and embedding requests never
        go to a prefill replica. Returns (None, False) if no replica of the right role may be
        chosen.
        """
        fleet, first = self._replicas.fleet, choices[0]

        def choose(allowed: Sequence[str]) -> RoutingDecision | None:
            return route(
                wanted,
                fleet,
                self._random,
                now,
                among=allowed,
                avoid=first.place,
                with_room=with_room,
            )

        names = list(fleet.replicas) if among is None else among
        states = {name: fleet.replicas[name] for name in names if name in fleet.replicas}
        going_on = [name for name, state in states.items() if state.role != "prefill"]
        pooled = first.inflight.request.params.pooled
        if first.emitted or first.suspicion.tokens or pooled:
            return choose(going_on), False
        answering = [name for name, state in fleet.replicas.items() if state.role != "prefill"]
        warm = route(wanted, fleet, self._random, now, among=answering, with_room=True)
        if warm is not None and wanted.prompt_tokens - warm.cached < MOVE_TOKENS:
            return warm, False
        computing = [name for name, state in states.items() if state.role != "decode"]
        decision = choose(computing)
        if decision is None:
            return None, False
        return decision, fleet.replicas[decision.replica].role == "prefill"

    def _source(
        self,
        choice: InflightChoice,
        client: ReplicaClient,
        decision: RoutingDecision,
        *,
        prefilled: bool,
    ) -> KVSource | None:
        """Return the source from which a choice's new replica should pull the prefix's KV blocks;
        None if the new replica has the blocks, or computes them sooner.

        The old replica of a choice that moves is preferred, because it has the blocks of the
        newest tokens.

        client, decision: the new replica, and the routing decision.
        prefilled: whether the choice leaves a prefill replica that has computed its prompt.
        """
        tokens = len(choice.inflight.request.token_ids) + len(choice.emitted)
        former = choice.place if choice.place != client.replica else ""
        lacking = tokens if decision.source else tokens - decision.cached
        saves = self._replicas.fleet.move_saves(client.state, lacking)
        if former and (saves or (prefilled and lacking >= MOVE_TOKENS)):
            source = self._replicas.source(former)
            if source is not None:
                return source
        return self._replicas.source(decision.source) if decision.source else None

    def assign_displaced(self) -> None:
        """Try again to send all displaced choices to replicas."""
        for choices in self.displaced.pop_all():
            self.assign(choices)

    def take_off(self, choices: list[InflightChoice]) -> None:
        """Abort choices at their replicas, or remove them from the displaced choices."""
        by_client: dict[ReplicaClient, list[int]] = {}
        for choice in choices:
            self.displaced.remove(choice)
            client = self._replicas.holding(choice)
            if client is not None:
                by_client.setdefault(client, []).append(choice.id)
                client.forget(choice)
        for client, ids in by_client.items():
            if client.connection is not None:
                client.connection.send(Abort(ids))

    def bring_back(self, choices: list[InflightChoice]) -> None:
        """Send choices again that `take_off` has aborted.

        The choices get new numbers, because replicas may not have ended the old ones yet.
        """
        for choice in choices:
            choice.id = next(self.numbers)
        self.assign(choices)

    def assign_again(self, choices: list[InflightChoice]) -> None:
        """Abort choices and send them again, because their adapter has changed."""
        self.take_off(choices)
        self.bring_back(choices)

    def _allowed(
        self, choices: list[InflightChoice], among: Sequence[str] | None
    ) -> Sequence[str] | None:
        """Return the names of the replicas of `among` that may run the choices; None: any replica
        may.

        Choices with output tokens may only continue with the same weights.
        """
        for choice in choices:
            if choice.emitted and choice.weights:
                names = list(self._replicas) if among is None else among
                endpoints = {name: self._replicas[name].endpoint for name in names}
                return [name for name in names if endpoints[name].weights == choice.weights]
            if choice.emitted:
                break
        return among

    def _submit(
        self,
        choices: list[InflightChoice],
        client: ReplicaClient,
        decision: RoutingDecision,
        wanted: RoutingRequest,
        source: KVSource | None,
    ) -> None:
        inflight = choices[0].inflight
        request = inflight.request
        prefix_hashes = pack_hashes(wanted.prefix_hashes) if wanted.prefix_hashes else b""
        adapter: AdapterRef | None = None
        if (record := request.adapter) is not None:
            version = 0 if inflight.begun else record.version
            adapter = AdapterRef(record.name, record.revision, record.path, version)
        for choice in choices:
            suspicion = choice.suspicion
            if len(choice.emitted) > choice.begun:
                # The previous replica has generated tokens, so an earlier passed probation is no
                # longer valid.
                suspicion.passed = False
            choice.place = decision.replica
            choice.weights = client.endpoint.weights
            choice.begun = len(choice.emitted)
            client.choices[choice.id] = choice
            assert client.connection is not None
            message = choice.as_request()
            message.source = source
            message.prefix_hashes = b"".join(wanted.prefix_hashes)
            client.connection.send(
                Submit(
                    message,
                    prefix_hashes=prefix_hashes,
                    adapter=adapter,
                    start=suspicion.start,
                    deaths=suspicion.deaths,
                    stream=request.stream,
                )
            )
