"""recall: what replicas know of a stream whose router or edge has died."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from deployments.backend import Past
from deployments.router.replica_calls import Asking
from deployments.router.replica_client import Link
from deployments.transport.channel import Recall, Recalled

SECONDS = 2.0  # for all: a router that is new has to connect first, and nobody is worth more time
_LOOK = 0.02  # seconds between looks for replicas that were not there yet


async def recall(
    asking: Asking,
    links: Callable[[], Collection[Link]],
    streams: Sequence[str],
    enough: Callable[[list[Past]], bool],
) -> list[Past]:
    """All replicas are asked, those too that connect meanwhile. Ends when it is enough, when all
    have answered, or after SECONDS."""
    found: list[Past] = []
    asked: dict[Link, asyncio.Task[None]] = {}

    async def ask(link: Link) -> None:
        answer = await asking.ask(link, Recall(asking.ticket(), list(streams)), SECONDS)
        if isinstance(answer, Recalled):
            found.extend(
                Past(
                    record.stream,
                    record.choice,
                    record.token_ids,
                    record.finish,
                    record.stop_token,
                    link.endpoint.weights,
                )
                for record in answer.records
            )

    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            known = list(links())
            for link in known:
                if link not in asked and link.connection is not None:
                    asked[link] = asyncio.create_task(ask(link))
            open_ = [task for task in asked.values() if not task.done()]
            if enough(found) or (known and not open_ and all(link in asked for link in known)):
                break
            if open_:
                await asyncio.wait(open_, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(_LOOK)
    finally:
        for task in asked.values():
            task.cancel()
    return found
