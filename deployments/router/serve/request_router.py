"""DiscoveryRouter: Serve's request router for handles of engine deployments.

The class publishes the running replicas to `discovery`, and sends handle calls to the least busy
replica. Tokens are sent over channels instead (transport/channel.py). Serve pickles this module by
value, so the module must have no state.
"""

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from deployments.transport import discovery


class DiscoveryRouter(FIFOMixin, RequestRouter):
    """A request router that publishes the replicas' metadata to `discovery`.

    All replicas are in one priority group, so Serve picks the one with the shortest queue.
    """

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
