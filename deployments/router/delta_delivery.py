"""Deltas: from a replica's frame to the requests that they are of."""

import time

from deployments.router.adapters.stale import StaleAdapters
from deployments.router.failover.losses import Losses
from deployments.router.inflight import Choice
from deployments.router.placement import Placement
from deployments.router.replica_client import Link
from deployments.routing.fleet import Fleet
from engine.messages import Delta, StepFrame


class Deltas:
    """Ends that are not for the client are kept back: a replica that is to stop, an adapter that
    means something else now, a trial that is passed."""

    def __init__(
        self, fleet: Fleet, placement: Placement, losses: Losses, stale: StaleAdapters
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._losses = losses
        self._stale = stale

    def take(self, link: Link, frame: StepFrame, now: float) -> None:
        """now: monotonic seconds."""
        choices = link.choices
        for delta in frame.deltas:
            choice = choices.get(delta.id)
            if choice is None:
                continue  # aborted while the delta was on its way
            if delta.cached >= 0:  # its first
                self._fleet.begun(link.state, delta.id)
                if delta.adapter_us > 0:
                    self._fleet.adapter_loaded(delta.adapter_us / 1e6)
            if delta.finish:
                link.forget(choice)
                if delta.finish == "error" and delta.error.startswith("draining"):
                    self._losses.given_back(link, choice)
                    continue
                if choice.passes(delta, link.endpoint.max_model_len):
                    self._passes(link, choice, delta, now)
                    continue
            if delta.finish == "error" and self._stale.takes(choice, delta):
                continue
            choice.entry.take(choice, delta, now)

    def _passes(self, link: Link, choice: Choice, delta: Delta, now: float) -> None:
        """It has been tried, and goes on when the others have been, too. It stays where it is: what
        was computed is there, and with n > 1 the other choices."""
        delta.finish = ""
        choice.entry.take(choice, delta, now)
        choice.begun = len(choice.emitted)
        choice.place = ""
        choice.blame.passes()
        choice.entry.story.moves(link.replica, "its engine lives", time.monotonic())
        if not choice.entry.paused:
            self._placement.place([choice], [link.replica] if link.available else None)
