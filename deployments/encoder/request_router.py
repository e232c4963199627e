"""EncoderRouter: Serve's request router for the handles of encoder pools.

Serve pickles this module by value, so the module must have no state.
"""

from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from deployments.transport import discovery


class EncoderRouter(FIFOMixin, LocalityMixin, RequestRouter):
    """A request router that publishes the running actors to `discovery`.

    Serve keeps a call while there is no actor. Callers that know so need not wait for it.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        discovery.publish(
            self._deployment_id.app_name,
            self._deployment_id.name,
            {replica_id.unique_id: {} for replica_id in self.curr_replicas},
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the actors of this node; if they are busy, Serve asks again, for all actors."""
        near = self.apply_locality_routing(pending_request=pending_request)
        return [[replica for replica in candidate_replicas if replica.replica_id in near]]
