"""DeltaDelivery: hands the deltas of a replica's frame to their requests."""

import time

from deployments.router.adapters.stale import StaleAdapters
from deployments.router.failover.losses import ReplicaLosses
from deployments.router.inflight import InflightChoice
from deployments.router.placement import Placement
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.routing.fleet import Fleet
from engine.messages import Delta, StepFrame


class DeltaDelivery:
    """Ends that are not for the client are kept back: of a replica that is to stop, of an adapter
    that was replaced, of a probation that was passed."""

    def __init__(
        self, fleet: Fleet, placement: Placement, losses: ReplicaLosses, stale: StaleAdapters
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._losses = losses
        self._stale = stale

    def take(self, client: ReplicaClient, frame: StepFrame, now: float) -> None:
        """now: monotonic seconds."""
        choices = client.choices
        for delta in frame.deltas:
            choice = choices.get(delta.id)
            if choice is None:
                continue  # aborted while the delta was on its way
            if delta.cached >= 0:  # the choice's first delta
                self._fleet.begun(client.state, delta.id)
                if delta.adapter_us > 0:
                    self._fleet.adapter_loaded(delta.adapter_us / 1e6)
                elif not choice.begun:
                    client.state.measure_first(now - choice.inflight.placed)
            if delta.finish:
                client.forget(choice)
                if delta.finish == "error" and delta.error.startswith("draining"):
                    self._losses.given_back(client, choice)
                    continue
                if choice.passes(delta, client.endpoint.max_model_len):
                    self._passes(client, choice, delta, now)
                    continue
            if delta.finish == "error" and self._stale.takes(choice, delta):
                continue
            choice.inflight.take(choice, delta, now)

    def _passes(
        self, client: ReplicaClient, choice: InflightChoice, delta: Delta, now: float
    ) -> None:
        """The choice has passed its probation. It goes on when the other suspects there have had
        their turn. It stays at this replica, which has its KV cache and, with n > 1, the other
        choices."""
        delta.finish = ""
        choice.inflight.take(choice, delta, now)
        choice.begun = len(choice.emitted)
        choice.place = ""
        choice.suspicion.passes()
        choice.inflight.trace.moves(client.replica, "its engine lives", time.monotonic())
        if not choice.inflight.paused:
            self._placement.place([choice], [client.replica] if client.state.available else None)
