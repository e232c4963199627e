"""ReplicaLosses: moves the choices of a lost or draining replica to others, or fails them."""

import asyncio
import logging
import time
from collections.abc import Collection

from deployments.observe.metrics import RouterMetrics
from deployments.router.assignment import Assignment
from deployments.router.inflight import InflightChoice, InflightRequest
from deployments.router.poison import by_itself
from deployments.router.replicas.replica_client import ReplicaClient
from engine.errors import RequestFailed

logger = logging.getLogger("manta.router")

_SUSPECT_PAUSE = 0.25  # seconds within which a router learns of all replicas that died together


class ReplicaLosses:
    """The handler of lost replicas: moves their choices to other replicas, and fails requests that
    have lost too many replicas.

    allowed: number of replicas killed from outside that a request may lose in a row without a new
        token.
    requests: all requests in flight.
    """

    def __init__(
        self,
        allowed: int,
        requests: Collection[InflightRequest],
        assignment: Assignment,
        metrics: RouterMetrics,
    ) -> None:
        self._allowed = allowed
        self._requests = requests
        self._assignment = assignment
        self._metrics = metrics

    def given_back(self, client: ReplicaClient, choice: InflightChoice) -> None:
        """Move a choice that a draining replica has returned, without counting a loss against
        it."""
        self._moves(client, choice, "it is to stop")
        self._assignment.assign([choice])

    def lost(self, client: ReplicaClient, choices: list[InflightChoice], reason: str) -> None:
        """Send the choices of a replica whose connection has broken to other replicas.

        Requests that have lost too many replicas (poison.py) fail. A choice that got no token from
        a replica killed from outside is sent _SUSPECT_PAUSE seconds later than the others.

        choices: choices that the replica ran. reason: why the connection ended.
        """
        level = logging.WARNING if choices or not client.retired else logging.INFO
        logger.log(level, "replica %s: %s; %d choices move", client.replica, reason, len(choices))
        moving: dict[InflightRequest, list[InflightChoice]] = {}
        for choice in choices:
            if choice.done or self._give_up(client, choice):
                # `done`: the request has failed with an earlier choice of this loop.
                continue
            self._moves(client, choice, f"lost: {reason}")
            logger.warning(
                "moves from %s after %d tokens: %s",
                client.replica,
                len(choice.emitted),
                reason,
                extra={"request_id": choice.inflight.request.request_id},
            )
            choice.begun = len(choice.emitted)
            if choice.suspicion.losses:
                # This choice may have killed the engine. The others are sent first, so that they
                # run before it can kill again. Meanwhile the router learns of replicas that died
                # with this one.
                self._assign_later([choice], _SUSPECT_PAUSE)
            else:
                moving.setdefault(choice.inflight, []).append(choice)
        if client.failed is not None and by_itself(client.failed):
            for inflight in self._requests:
                for choice in inflight.choices:
                    choice.suspicion.acquit(client.failed.deaths)
        for together in moving.values():
            # A request's choices are sent together: with n > 1 a poison request must not be on
            # probation at two replicas.
            unfinished = [choice for choice in together if not choice.done]
            if unfinished:
                self._assignment.assign(unfinished)

    def _give_up(self, client: ReplicaClient, choice: InflightChoice) -> bool:
        """Fail the choice's request if it has lost too many replicas; return whether it failed."""
        why = choice.suspicion.lost(
            client.replica, choice.id, choice.given, client.failed, self._allowed, client.silent
        )
        if why:
            request_id = choice.inflight.request.request_id
            logger.warning(
                "given up at %s: %s", client.replica, why, extra={"request_id": request_id}
            )
            choice.inflight.fail(RequestFailed(why))
        return bool(why)

    def _moves(self, client: ReplicaClient, choice: InflightChoice, why: str) -> None:
        self._metrics.migrations.inc()
        choice.inflight.migrations += 1
        choice.inflight.trace.moves(client.replica, why, time.monotonic())

    def _assign_later(self, choices: list[InflightChoice], seconds: float) -> None:
        """Send choices after `seconds`; until then they wait among the displaced choices."""
        displaced = self._assignment.displaced

        def assign() -> None:
            if displaced_choices := [choice for choice in choices if displaced.remove(choice)]:
                self._assignment.assign(displaced_choices)

        displaced.add_choices(choices)
        asyncio.get_running_loop().call_later(seconds, assign)
