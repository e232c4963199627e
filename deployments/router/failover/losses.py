"""Losses: what becomes of the choices of a replica that is lost, or that gives them back."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from deployments.observe.metrics import RouterMetrics
from deployments.router.failover.displaced import Displaced
from deployments.router.failover.poison import by_itself
from deployments.router.inflight import Choice, Entry
from deployments.router.replica_client import Link
from engine.errors import RequestFailed

logger = logging.getLogger("manta.router")

_SUSPECT_PAUSE = 0.25  # seconds; as long as it may take to hear of replicas that died together
_SUSPECTS_FIRST = 0.05  # seconds, in which all routers send the suspects of a death to their trial


class Losses:
    """allowed: replicas, killed from outside, that a request may lose in a row without a token from
    any. entries: requests in flight. place(choices): of one request, to another replica."""

    def __init__(
        self,
        allowed: int,
        entries: Collection[Entry],
        displaced: Displaced,
        metrics: RouterMetrics,
        place: Callable[[list[Choice]], None],
    ) -> None:
        self._allowed = allowed
        self._entries = entries
        self._displaced = displaced
        self._metrics = metrics
        self._place = place

    def given_back(self, link: Link, choice: Choice) -> None:
        """The replica is to stop, and the choice goes on elsewhere. Nobody is to blame."""
        self._moves(link, choice, "it is to stop")
        self._place([choice])

    def lost(self, link: Link, choices: list[Choice], reason: str) -> None:
        """Its connection broke, and these were there."""
        level = logging.WARNING if choices or not link.retired else logging.INFO
        logger.log(level, "replica %s: %s; %d choices move", link.replica, reason, len(choices))
        moving: dict[Entry, list[Choice]] = {}
        passed: dict[Entry, list[Choice]] = {}
        for choice in choices:
            if choice.done or self._give_up(link, choice):
                continue  # done: its entry failed with another choice of this loop
            self._moves(link, choice, f"lost: {reason}")
            logger.warning(
                "moves from %s after %d tokens: %s",
                link.replica,
                len(choice.emitted),
                reason,
                extra={"request_id": choice.entry.request.request_id},
            )
            choice.begun = len(choice.emitted)
            if choice.blame.losses:
                # It may be the cause: let those that are not go first, to be ahead of its next
                # death; and let all news of replicas that died at once arrive.
                self._place_later([choice], _SUSPECT_PAUSE)
            elif choice.blame.turn == "after":
                passed.setdefault(choice.entry, []).append(choice)
            else:
                moving.setdefault(choice.entry, []).append(choice)
        if link.failed is not None and by_itself(link.failed):
            for choice in (one for entry in self._entries for one in entry.choices):
                choice.blame.acquit(link.failed.deaths)
        for together in moving.values():
            # Together: a poison with n > 1 must not be tried at two replicas.
            left = [choice for choice in together if not choice.done]
            if left:
                self._place(left)
        for together in passed.values():
            self._place_later([choice for choice in together if not choice.done], _SUSPECTS_FIRST)

    def _give_up(self, link: Link, choice: Choice) -> bool:
        """Whether the request has cost too many replicas; then it has failed."""
        why = choice.blame.lost(
            link.replica, choice.id, choice.given, link.failed, self._allowed, link.silent
        )
        if why:
            request_id = choice.entry.request.request_id
            logger.warning(
                "given up at %s: %s", link.replica, why, extra={"request_id": request_id}
            )
            choice.entry.fail(RequestFailed(why))
        return bool(why)

    def _moves(self, link: Link, choice: Choice, why: str) -> None:
        self._metrics.migrations.add()
        choice.entry.migrations += 1
        choice.entry.story.moves(link.replica, why, time.monotonic())

    def _place_later(self, choices: list[Choice], seconds: float) -> None:
        """They wait for so long, if there is a replica to go to then."""

        def place() -> None:
            if left := [choice for choice in choices if self._displaced.take(choice)]:
                self._place(left)

        self._displaced.put(choices)
        asyncio.get_running_loop().call_later(seconds, place)
