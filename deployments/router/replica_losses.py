"""ReplicaLosses: what becomes of the choices of a replica that is lost or gives them back."""

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

_SUSPECT_PAUSE = 0.25  # seconds: as long as news of replicas that died together may take


class ReplicaLosses:
    """The decision what becomes of choices whose replica is lost.

    allowed: replicas, killed from outside, that a request may lose in a row without a token from
        any.
    requests: those in flight.
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
        """The replica is to stop, and the choice goes on elsewhere. No request is blamed."""
        self._moves(client, choice, "it is to stop")
        self._assignment.assign([choice])

    def lost(self, client: ReplicaClient, choices: list[InflightChoice], reason: str) -> None:
        """The connection to the replica broke. choices: those that were there."""
        level = logging.WARNING if choices or not client.retired else logging.INFO
        logger.log(level, "replica %s: %s; %d choices move", client.replica, reason, len(choices))
        moving: dict[InflightRequest, list[InflightChoice]] = {}
        for choice in choices:
            if choice.done or self._give_up(client, choice):
                continue  # done: its request failed with another choice of this loop
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
                # This choice may be the cause. Choices that are not go first, to be ahead of the
                # next death; and all news of replicas that died at once can arrive meanwhile.
                self._assign_later([choice], _SUSPECT_PAUSE)
            else:
                moving.setdefault(choice.inflight, []).append(choice)
        if client.failed is not None and by_itself(client.failed):
            for inflight in self._requests:
                for choice in inflight.choices:
                    choice.suspicion.acquit(client.failed.deaths)
        for together in moving.values():
            # Together: a poison request with n > 1 must not be on probation at two replicas.
            left = [choice for choice in together if not choice.done]
            if left:
                self._assignment.assign(left)

    def _give_up(self, client: ReplicaClient, choice: InflightChoice) -> bool:
        """Whether the request has cost too many replicas; then it has failed."""
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
        self._metrics.migrations.add()
        choice.inflight.migrations += 1
        choice.inflight.trace.moves(client.replica, why, time.monotonic())

    def _assign_later(self, choices: list[InflightChoice], seconds: float) -> None:
        """Let these choices wait for so long before they are sent."""
        displaced = self._assignment.displaced

        def assign() -> None:
            if left := [choice for choice in choices if displaced.remove(choice)]:
                self._assignment.assign(left)

        displaced.put(choices)
        asyncio.get_running_loop().call_later(seconds, assign)
