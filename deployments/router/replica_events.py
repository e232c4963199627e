"""ReplicaEvents: a router's reactions when a replica is ready, sends a frame, or is lost."""

import logging
import time

from deployments.adapters.registry import AdapterRegistry
from deployments.observe.metrics import RouterMetrics
from deployments.router.adapters import StaleAdapters
from deployments.router.admission.request_queue import RequestQueue
from deployments.router.admission.scale_from_zero import Waking
from deployments.router.assignment import Assignment
from deployments.router.inflight import InflightChoice
from deployments.router.live_view import EventLog
from deployments.router.models.model_cards import ModelCards
from deployments.router.replica_losses import ReplicaLosses
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.router.replicas.replicas import Replicas
from deployments.router.weights import FleetWeights
from engine.messages import BATCH_PRIORITY, StepFrame

logger = logging.getLogger("manta.router")


class ReplicaEvents:
    """The listener to all replicas of one model (`replica_client.ReplicaListener`).

    The end of a choice at a replica is not passed to the client in four cases: the replica drains,
    the adapter was replaced, the choice has passed its probation, or a prefill replica has computed
    the prompt for a decode replica. In the last two cases the tokens of the delta are passed.
    """

    def __init__(
        self,
        replicas: Replicas,
        cards: ModelCards,
        adapters: AdapterRegistry,
        assignment: Assignment,
        losses: ReplicaLosses,
        queue: RequestQueue,
        waking: Waking,
        metrics: RouterMetrics,
        weights: FleetWeights,
    ) -> None:
        self.log = EventLog()
        self._replicas = replicas
        self._cards = cards
        self._adapters = adapters
        self._assignment = assignment
        self._losses = losses
        self._queue = queue
        self._waking = waking
        self._metrics = metrics
        self._weights = weights
        self._stale = StaleAdapters(adapters, assignment)

    def close(self) -> None:
        """Cancel the tasks that fetch new revisions of adapters."""
        self._stale.close()

    def opened(self, client: ReplicaClient) -> None:
        """Handle a newly connected replica: send waiting choices and requests to replicas."""
        logger.info("replica %s is connected", client.replica)
        self._metrics.channels.inc()
        self.log.add_entry("joined", client.replica)
        self._weights.opened(client)
        self._waking.opened(client.endpoint.start_seconds)
        self._adapters.replica_came()
        self._cards.learn(client.endpoint)
        self._assignment.assign_displaced()
        self._queue.fill()

    def lost(self, client: ReplicaClient, choices: list[InflightChoice], reason: str) -> None:
        """Send the choices of a lost replica to other replicas, or fail their requests."""
        self.log.add_entry("lost", client.replica, f"{reason}; {len(choices)} choices move")
        self._replicas.closing.discard(client)
        self._losses.lost(client, choices, reason)
        self._queue.replicas_changed()

    def frame(self, client: ReplicaClient, frame: StepFrame, now: float) -> None:
        """Pass the deltas of a frame to their requests. now: monotonic seconds."""
        choices, state, stats = client.choices, client.state, frame.stats
        version = stats.weights_version
        if state.kept_out or self._weights.lacks(stats):
            self._weights.differs(client, stats)
        for delta in frame.deltas:
            choice = choices.get(delta.id)
            if choice is None:
                continue  # aborted while the delta was in transit
            if delta.cached >= 0:  # the choice's first delta
                state.begun(delta.id)
                if delta.adapter_us > 0:
                    self._replicas.fleet.adapter_loaded(delta.adapter_us / 1e6)
                elif not choice.begun and choice.inflight.request.priority < BATCH_PRIORITY:
                    state.measure_first(choice.inflight.placed, now)
            if delta.finish:
                client.forget(choice)
                if delta.finish == "error" and delta.error.startswith("draining"):
                    self._losses.given_back(client, choice)
                    continue
                if choice.passes(delta, client.endpoint.max_model_len):
                    if choice.version != version:
                        choice.change_version(version)
                    delta.finish = ""
                    choice.inflight.take_delta(choice, delta, now)
                    if choice.prefill:
                        self._end_prefill(client, choice)
                    else:
                        self._end_probation(client, choice)
                    continue
            if delta.finish == "error" and self._stale.hold_back(choice, delta):
                continue
            if choice.version != version and delta.token_ids:
                choice.change_version(version)
            choice.inflight.take_delta(choice, delta, now)
        self._queue.hear_frame(state)

    def _end_prefill(self, client: ReplicaClient, choice: InflightChoice) -> None:
        """Move a choice from a prefill replica, which has computed its prompt, to a decode replica.

        The decode replica pulls the prompt's KV blocks.
        """
        choice.begun = len(choice.emitted)
        choice.inflight.trace.moves(client.replica, "its prompt is computed", time.monotonic())
        if not choice.inflight.paused:
            self._assignment.assign([choice])

    def _end_probation(self, client: ReplicaClient, choice: InflightChoice) -> None:
        """Queue a choice that has passed its probation behind the other suspects of the replica.

        The choice stays at this replica, which has its KV blocks and, with n > 1, the request's
        other choices.
        """
        choice.begun = len(choice.emitted)
        choice.place = ""
        choice.suspicion.passes()
        choice.inflight.trace.moves(client.replica, "its engine lives", time.monotonic())
        if not choice.inflight.paused:
            among = [client.replica] if client.state.available else None
            self._assignment.assign([choice], among)
