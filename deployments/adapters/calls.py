"""AdapterCalls: what a router asks of replicas about adapters, and their answers."""

import asyncio
import itertools
import time
from collections.abc import Mapping
from random import Random

from deployments.adapters.book import AdapterRecord
from deployments.channel import AdapterVersion
from deployments.decision import Work
from deployments.fleet import Fleet
from deployments.link import Link
from deployments.routing import route
from engine.errors import AdapterError, Overloaded
from engine.messages import AdapterAnswer, AdapterInfo, AddAdapter

LOAD_SECONDS = 120.0  # for a large one from a slow store
TOLD_SECONDS = 2.0  # for replicas to hear of a change; one that is gone for so long is dead anyway
_LOOK = 0.05  # seconds between looks for a replica
_LOSSES = 2  # replicas that may be lost over one adapter


class AdapterCalls:
    """links: the replicas by name. wait_seconds: for one to be ready."""

    def __init__(
        self, links: Mapping[str, Link], fleet: Fleet, random: Random, wait_seconds: float
    ) -> None:
        self._links = links
        self._fleet = fleet
        self._random = random
        self._wait_seconds = wait_seconds
        self._tickets = itertools.count(1)
        self._asked: dict[int, tuple[Link, asyncio.Future[AdapterAnswer | None]]] = {}
        self.waiting = 0  # for a replica to be ready

    async def load(self, record: AdapterRecord) -> AdapterInfo:
        """Have it read and checked where requests for it would go, and made known there.

        Raises AdapterError; Overloaded if there is no replica.
        """
        for _ in range(_LOSSES):
            link = await self._find(record.name)
            answer = await self._ask(
                link, AddAdapter(next(self._tickets), record.name, record.path), LOAD_SECONDS
            )
            if answer is None:
                continue
            if answer.info is None:
                raise AdapterError(answer.message, code=answer.code)
            return answer.info
        raise Overloaded("the replicas that read the adapter did not answer", code="no_replica")

    async def announce(self, record: AdapterRecord, *, gone: bool = False) -> None:
        """Tell every replica what the name means now. Returns when they know."""
        revision = "" if gone else record.revision
        await asyncio.gather(
            *(
                self._ask(
                    link,
                    AdapterVersion(next(self._tickets), record.name, record.version, revision),
                    TOLD_SECONDS,
                )
                for link in list(self._links.values())
                if link.connection is not None
            )
        )

    def answered(self, answer: AdapterAnswer) -> None:
        asked = self._asked.pop(answer.ticket, None)
        if asked is not None and not asked[1].done():
            asked[1].set_result(answer)

    def lost(self, link: Link) -> None:
        """Its connection is gone."""
        for ticket, (where, future) in list(self._asked.items()):
            if where is link:
                del self._asked[ticket]
                if not future.done():
                    future.set_result(None)

    async def _find(self, adapter: str) -> Link:
        deadline = time.monotonic() + self._wait_seconds
        self.waiting += 1
        try:
            while True:
                now = time.monotonic()
                decision = route(Work(1, 1, adapter=adapter), self._fleet, self._random, now)
                link = None if decision is None else self._links.get(decision.replica)
                if link is not None and link.connection is not None:
                    return link
                if now > deadline:
                    raise Overloaded(
                        f"no replica became ready within {self._wait_seconds:g} s",
                        code="no_replica",
                        retry_after=5,
                    )
                await asyncio.sleep(_LOOK)
        finally:
            self.waiting -= 1

    async def _ask(
        self, link: Link, message: AddAdapter | AdapterVersion, seconds: float
    ) -> AdapterAnswer | None:
        """None if it was lost, or has not answered in time."""
        if link.connection is None:
            return None
        future: asyncio.Future[AdapterAnswer | None] = asyncio.get_running_loop().create_future()
        self._asked[message.ticket] = (link, future)
        link.connection.send(message)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return None
        finally:
            self._asked.pop(message.ticket, None)
