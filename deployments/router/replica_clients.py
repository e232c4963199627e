"""Links: a router's connections to the replicas of its model."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deployments.router.inflight import Choice
from deployments.router.replica_client import Endpoint, Link

logger = logging.getLogger("manta.router")


class Links(dict[str, Link]):
    """Those in service, by the replica's name. closing: retired ones, with choices left.

    connect(name, endpoint) makes one. vocabulary: identity of the router's tokenizer, "" if it is
    not known.
    """

    def __init__(self, connect: Callable[[str, Endpoint], Link], vocabulary: str) -> None:
        super().__init__()
        self.closing: set[Link] = set()
        self._connect = connect
        self._vocabulary = vocabulary

    def everywhere(self) -> Iterator[Link]:
        yield from self.values()
        yield from self.closing

    def holding(self, choice: Choice) -> Link | None:
        """The one that has the choice."""
        link = self.get(choice.place)
        if link is not None and choice.id in link.choices:
            return link
        return next((link for link in self.closing if choice.id in link.choices), None)

    def replace(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """These are the running replicas, id -> what each published. Those of a model with another
        tokenizer are left to the routers that come with them, while an update is under way."""
        if self._vocabulary:
            mine = ("", self._vocabulary)
            replicas = {
                name: told for name, told in replicas.items() if told.get("tokenizer", "") in mine
            }
        for name in self.keys() - replicas.keys():
            link = self.pop(name)
            logger.info("replica %s has left, %d choices there", name, len(link.choices))
            if link.choices:
                self.closing.add(link)
            link.retire()
        for name in replicas.keys() - self.keys():
            self[name] = self._connect(name, Endpoint.parse(replicas[name]))

    def close(self) -> None:
        for link in list(self.everywhere()):
            link.close("the router is shutting down")
