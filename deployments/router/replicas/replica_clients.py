"""ReplicaClients: a router's connections to the replicas of its model."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deployments.router.inflight import InflightChoice
from deployments.router.replicas.replica_client import ReplicaClient, ReplicaEndpoint

logger = logging.getLogger("manta.router")


class ReplicaClients(dict[str, ReplicaClient]):
    """The clients of replicas in service, by the replica's name. closing: retired clients with
    choices left.

    connect(name, endpoint) makes a client. vocabulary: identity of the router's tokenizer, "" if it
    is not known.
    """

    def __init__(
        self, connect: Callable[[str, ReplicaEndpoint], ReplicaClient], vocabulary: str
    ) -> None:
        super().__init__()
        self.closing: set[ReplicaClient] = set()
        self._connect = connect
        self._vocabulary = vocabulary

    def everywhere(self) -> Iterator[ReplicaClient]:
        yield from self.values()
        yield from self.closing

    def holding(self, choice: InflightChoice) -> ReplicaClient | None:
        """Return the client that has the choice; None if no client has it."""
        client = self.get(choice.place)
        if client is not None and choice.id in client.choices:
            return client
        return next((client for client in self.closing if choice.id in client.choices), None)

    def replace(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the running replicas, id -> what each replica published. During an update, replicas
        with another tokenizer are left to the routers that have that tokenizer too."""
        if self._vocabulary:
            mine = ("", self._vocabulary)
            replicas = {
                name: told for name, told in replicas.items() if told.get("tokenizer", "") in mine
            }
        for name in self.keys() - replicas.keys():
            client = self.pop(name)
            logger.info("replica %s has left, %d choices there", name, len(client.choices))
            if client.choices:
                self.closing.add(client)
            client.retire()
        for name in replicas.keys() - self.keys():
            self[name] = self._connect(name, ReplicaEndpoint.parse(replicas[name]))

    def close(self) -> None:
        for client in list(self.everywhere()):
            client.close("the router is shutting down")
