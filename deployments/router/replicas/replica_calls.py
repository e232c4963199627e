"""ReplicaCalls: request-response calls to replicas over their channels, matched by ticket numbers.

`recall` uses such calls to fetch the tokens of a stream whose router or proxy has died.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from deployments.backend import RecalledChoice
from deployments.transport.channel import Recall, Recalled

if TYPE_CHECKING:
    from deployments.router.replicas.replica_client import ReplicaClient

RECALL_SECONDS = 2.0  # seconds for all answers; a new router has to connect to the replicas first
_POLL = 0.02  # seconds between polls for newly connected replicas


class Ticketed(Protocol):
    ticket: int


class ReplicaCalls:
    """The pending calls of one router. The answer to a call is a message with the same ticket."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._waiting: dict[int, tuple[ReplicaClient, asyncio.Future[Any]]] = {}

    def ticket(self) -> int:
        """Return a unique number for a new call."""
        return next(self._tickets)

    async def ask(self, client: "ReplicaClient", message: Ticketed, seconds: float) -> Any:
        """Send a call and return its answer; None if the replica was lost or did not answer in
        time."""
        if client.connection is None:
            return None
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[message.ticket] = (client, future)
        client.connection.send(message)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(message.ticket, None)

    def answered(self, answer: Ticketed) -> None:
        """Pass an answer to the call that has its ticket, if the call still waits."""
        call = self._waiting.pop(answer.ticket, None)
        if call is not None and not call[1].done():
            call[1].set_result(answer)

    def lost(self, client: "ReplicaClient") -> None:
        """End the calls to a replica whose connection is lost; `ask` then returns None."""
        for ticket, (asked, future) in list(self._waiting.items()):
            if asked is client:
                del self._waiting[ticket]
                if not future.done():
                    future.set_result(None)


async def recall(
    calls: ReplicaCalls,
    clients: Callable[[], Iterable["ReplicaClient"]],
    streams: Sequence[str],
    enough: Callable[[list[RecalledChoice]], bool],
) -> list[RecalledChoice]:
    """Return the choices of the given streams, with output tokens, that replicas still have in
    memory.

    All replicas are asked, also those that connect meanwhile. The call ends when all have answered,
    when the answers suffice, or after RECALL_SECONDS.

    clients: returns the present replicas. streams: ids of the streams.
    enough: whether the choices so far suffice.
    """
    choices: list[RecalledChoice] = []
    asked: dict[ReplicaClient, asyncio.Task[None]] = {}

    async def ask(client: "ReplicaClient") -> None:
        answer = await calls.ask(client, Recall(calls.ticket(), list(streams)), RECALL_SECONDS)
        if isinstance(answer, Recalled):
            choices.extend(
                RecalledChoice(
                    record.stream,
                    record.choice,
                    record.token_ids,
                    record.finish,
                    record.stop_token,
                    client.endpoint.weights,
                )
                for record in answer.records
            )

    end = time.monotonic() + RECALL_SECONDS
    try:
        while time.monotonic() < end:
            known = list(clients())
            for client in known:
                if client not in asked and client.connection is not None:
                    asked[client] = asyncio.create_task(ask(client))
            open_ = [task for task in asked.values() if not task.done()]
            all_answered = known and not open_ and all(client in asked for client in known)
            if enough(choices) or all_answered:
                break
            if open_:
                await asyncio.wait(open_, timeout=_POLL, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(_POLL)
    finally:
        for task in asked.values():
            task.cancel()
    return choices
