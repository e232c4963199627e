"""Replicas: a router's connections to the replicas of a model, with their state for routing."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from deployments.router.inflight import InflightChoice
from deployments.router.replicas.replica_calls import ReplicaCalls
from deployments.router.replicas.replica_client import (
    ReplicaClient,
    ReplicaEndpoint,
    ReplicaListener,
)
from deployments.routing.fleet import Fleet
from deployments.transport.channel import ChannelLimits
from engine.messages import KVSource

logger = logging.getLogger("manta.router")


class Replicas(dict[str, ReplicaClient]):
    """The clients of the replicas in service, by the replica's name.

    router: name of the router, for the replicas' logs.
    vocabulary: identity of the router's tokenizer; "": unknown.
    closing: retired clients with unfinished choices.
    """

    def __init__(self, limits: ChannelLimits, router: str, vocabulary: str = "") -> None:
        super().__init__()
        self.fleet = Fleet()
        self.calls = ReplicaCalls()
        self.closing: set[ReplicaClient] = set()
        self.vocabulary = vocabulary
        self._limits = limits
        self._router = router

    def everywhere(self) -> Iterator[ReplicaClient]:
        """Yield all clients, including retired ones."""
        yield from self.values()
        yield from self.closing

    def source(self, name: str) -> KVSource | None:
        """Return the source from which a replica's KV blocks are pulled; None if the replica is
        not connected or has none.

        name: the replica, which may be retired.
        """
        for client in self.everywhere():
            if client.replica == name and client.connection is not None:
                return client.endpoint.kv_source
        return None

    def holding(self, choice: InflightChoice) -> ReplicaClient | None:
        """Return the client of the replica that runs a choice; None if no replica runs it."""
        client = self.get(choice.place)
        if client is not None and choice.id in client.choices:
            return client
        return next((client for client in self.closing if choice.id in client.choices), None)

    def replace(
        self, published: Mapping[str, Mapping[str, Any]], listener: ReplicaListener
    ) -> None:
        """Set the running replicas: connect to new ones, and retire those that are gone.

        During an update, replicas with another tokenizer are left to the routers of that version.

        published: metadata that each replica has published, by name.
        listener: the handler of the new replicas' events.
        """
        if self.vocabulary:
            mine = ("", self.vocabulary)
            published = {
                name: endpoint
                for name, endpoint in published.items()
                if endpoint.get("tokenizer", "") in mine
            }
        for name in self.keys() - published.keys():
            client = self.pop(name)
            logger.info("replica %s has left, %d choices there", name, len(client.choices))
            if client.choices:
                self.closing.add(client)
            client.retire()
        for name in published.keys() - self.keys():
            self[name] = self._connect(name, ReplicaEndpoint.parse(published[name]), listener)

    def _connect(
        self, name: str, endpoint: ReplicaEndpoint, listener: ReplicaListener
    ) -> ReplicaClient:
        return ReplicaClient(
            name,
            endpoint,
            listener,
            fleet=self.fleet,
            calls=self.calls,
            limits=self._limits,
            router=self._router,
        )

    def close(self) -> None:
        """Close all connections."""
        for client in list(self.everywhere()):
            client.close("the router is shutting down")
