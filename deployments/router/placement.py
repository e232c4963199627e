"""Placement: to which replica choices go, and how they are taken off it."""

import time
from collections.abc import Callable, Collection
from random import Random

from deployments.observe.metrics import RouterMetrics
from deployments.router.failover.displaced import Displaced
from deployments.router.inflight import Choice, Entry
from deployments.router.replica_client import Link
from deployments.router.replica_clients import Links
from deployments.routing.decision import Decision, Work
from deployments.routing.fleet import Fleet
from deployments.routing.prefix_index import chain, pack
from deployments.routing.replica_state import ReplicaState
from deployments.routing.route import route
from deployments.transport.channel import Submit
from engine.messages import Abort


class Placement:
    """max_len: tokens of the longest request. Choices are known by numbers, and none is used twice
    on a connection."""

    def __init__(
        self,
        links: Links,
        fleet: Fleet,
        displaced: Displaced,
        metrics: RouterMetrics,
        random: Random,
        max_len: Callable[[], int],
    ) -> None:
        self._next = 1
        self._links = links
        self._fleet = fleet
        self._displaced = displaced
        self._metrics = metrics
        self._random = random
        self._max_len = max_len

    def numbers(self, count: int) -> int:
        """The first of so many new ones in a row."""
        first, self._next = self._next, self._next + count
        return first

    def begin(self, entry: Entry, replicas: list[ReplicaState]) -> None:
        """A new request, to one of these: they have room."""
        self._metrics.queue.observe(time.monotonic() - entry.arrived)
        names = {replica.name for replica in replicas}
        self.place([choice for choice in entry.choices if not choice.done], names)

    def place(self, choices: list[Choice], among: Collection[str] | None = None) -> None:
        """Send choices of one request to a replica, one of `among` if given, or let them wait."""
        first = choices[0]
        work = self._work(choices)
        now = time.monotonic()
        names = self._allowed(choices, among)
        decision = route(work, self._fleet, self._random, now, among=names, avoid=first.place)
        if decision is None:
            self._displaced.put(choices)
            return
        link = self._links[decision.replica]
        self._metrics.routed.add(1, decision.reason)
        self._fleet.send(link.state, [choice.id for choice in choices], decision, work, now)
        self._note(first.entry, decision, len(first.emitted), now)
        for choice in choices:
            choice.place = decision.replica
            choice.weights = link.endpoint.weights
            choice.blame.passed &= not choice.given
            choice.begun = len(choice.emitted)
            self._submit(choice, link, work)

    def place_displaced(self) -> None:
        """There may be a replica for them now."""
        for choices in self._displaced.take_all():
            self.place(choices)

    def take_off(self, choices: list[Choice]) -> None:
        """They are wanted at no replica any more."""
        by_link: dict[Link, list[int]] = {}
        for choice in choices:
            self._displaced.take(choice)
            link = self._links.holding(choice)
            if link is not None:
                by_link.setdefault(link, []).append(choice.id)
                link.forget(choice)
        for link, ids in by_link.items():
            if link.connection is not None:
                link.connection.send(Abort(ids))

    def bring_back(self, choices: list[Choice]) -> None:
        """They were taken off and go on. New numbers, because the old ones may not have ended
        yet."""
        for choice in choices:
            choice.id = self.numbers(1)
        self.place(choices)

    def place_again(self, choices: list[Choice]) -> None:
        """What they ask for means something else now."""
        self.take_off(choices)
        self.bring_back(choices)

    def _work(self, choices: list[Choice]) -> Work:
        request, emitted = choices[0].entry.request, choices[0].emitted
        limit = request.params.max_tokens
        return Work(
            len(request.token_ids) + len(emitted),
            self._max_len() if limit is None else limit,
            len(choices),
            chain(request.token_ids + emitted, request.adapter, request.cache_salt),
            request.adapter.partition("@")[0],  # as replicas call it
        )

    def _allowed(self, choices: list[Choice], among: Collection[str] | None) -> list[str] | None:
        """Where they may go; None is anywhere. What was emitted goes on with the same weights
        only."""
        weights = next((choice.weights for choice in choices if choice.emitted), "")
        names = self._links.keys() if among is None else among
        if weights:
            names = [name for name in names if self._links[name].endpoint.weights == weights]
        return None if len(names) == len(self._links) else list(names)

    @staticmethod
    def _note(entry: Entry, decision: Decision, emitted: int, now: float) -> None:
        entry.placed = now
        entry.replicas.append(decision.replica)
        entry.story.sent(decision, now, emitted)

    @staticmethod
    def _submit(choice: Choice, link: Link, work: Work) -> None:
        entry = choice.entry
        request = entry.request
        link.choices[choice.id] = choice
        assert link.connection is not None
        link.connection.send(
            Submit(
                choice.as_request(),
                links=pack(work.links),
                adapter_path=request.adapter_path,
                adapter_version=0 if entry.begun else request.adapter_version,
                turn=choice.blame.turn,
                deaths=choice.blame.deaths,
                stream=request.stream,
            )
        )
