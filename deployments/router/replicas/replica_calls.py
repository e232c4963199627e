"""ReplicaCalls: requests to replicas over their channels, answered by ticket."""

import asyncio
import itertools
from typing import Any, Protocol

from deployments.router.replicas.replica_client import ReplicaClient


class Ticketed(Protocol):
    ticket: int


class ReplicaCalls:
    """The calls of one router. An answer is a message with the ticket of its call."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._asked: dict[int, tuple[ReplicaClient, asyncio.Future[Any]]] = {}

    def ticket(self) -> int:
        """A new ticket."""
        return next(self._tickets)

    async def ask(self, client: ReplicaClient, message: Ticketed, seconds: float) -> Any:
        """The answer; None if the replica was lost or has not answered in time."""
        if client.connection is None:
            return None
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[message.ticket] = (client, future)
        client.connection.send(message)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return None
        finally:
            self._asked.pop(message.ticket, None)

    def answered(self, answer: Ticketed) -> None:
        asked = self._asked.pop(answer.ticket, None)
        if asked is not None and not asked[1].done():
            asked[1].set_result(answer)

    def lost(self, client: ReplicaClient) -> None:
        """The connection to this replica is gone."""
        for ticket, (where, future) in list(self._asked.items()):
            if where is client:
                del self._asked[ticket]
                if not future.done():
                    future.set_result(None)
