"""recall: asks the replicas for the tokens of a stream whose router or edge has died."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from deployments.backend import RecalledChoice
from deployments.router.replicas.replica_calls import ReplicaCalls
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.transport.channel import Recall, Recalled

SECONDS = 2.0  # for all replicas: a new router has to connect first; longer is not worth it
_LOOK = 0.02  # seconds between looks for replicas that were not there yet


async def recall(
    calls: ReplicaCalls,
    clients: Callable[[], Iterable[ReplicaClient]],
    streams: Sequence[str],
    enough: Callable[[list[RecalledChoice]], bool],
) -> list[RecalledChoice]:
    """Ask all replicas, those too that connect meanwhile. Ends when `enough` says so, when all have
    answered, or after SECONDS."""
    found: list[RecalledChoice] = []
    asked: dict[ReplicaClient, asyncio.Task[None]] = {}

    async def ask(client: ReplicaClient) -> None:
        answer = await calls.ask(client, Recall(calls.ticket(), list(streams)), SECONDS)
        if isinstance(answer, Recalled):
            found.extend(
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

    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            known = list(clients())
            for client in known:
                if client not in asked and client.connection is not None:
                    asked[client] = asyncio.create_task(ask(client))
            open_ = [task for task in asked.values() if not task.done()]
            if enough(found) or (known and not open_ and all(client in asked for client in known)):
                break
            if open_:
                await asyncio.wait(open_, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(_LOOK)
    finally:
        for task in asked.values():
            task.cancel()
    return found
