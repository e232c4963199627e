"""The request router of the handles to engine deployments: discovery, and plain calls to the least
busy replica.

Tokens do not pass here (transport/channel.py). This module travels by value: no state in it.
"""

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from deployments.router.serve import discovery


class DiscoveryRouter(FIFOMixin, RequestRouter):
    """Publishes the replicas' metadata to `discovery`; ranks all replicas equal, so the shortest
    queue wins."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        discovery.publish(
            self._deployment_id.app_name,
            self._deployment_id.name,
            {replica.replica_id.unique_id: replica.replica_metadata for replica in replicas},
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]
