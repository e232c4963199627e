"""AdapterCalls: what a router asks of replicas about adapters, and their answers."""

import asyncio
import time
from collections.abc import Mapping
from random import Random

from deployments.adapters.record_store import AdapterRecord
from deployments.router.replica_calls import Asking
from deployments.router.replica_client import Link
from deployments.routing.decision import Work
from deployments.routing.fleet import Fleet
from deployments.routing.route import route
from deployments.transport.channel import AdapterVersion
from engine.errors import AdapterError, Overloaded
from engine.messages import AdapterAnswer, AdapterInfo, AddAdapter

LOAD_SECONDS = 120.0  # for a large one from a slow store
TOLD_SECONDS = 2.0  # for replicas to hear of a change; one that is gone for so long is dead anyway
_LOOK = 0.05  # seconds between looks for a replica
_LOSSES = 2  # replicas that may be lost over one adapter


class AdapterCalls:
    """links: the replicas by name. wait_seconds: for one to be ready."""

    def __init__(
        self,
        asking: Asking,
        links: Mapping[str, Link],
        fleet: Fleet,
        random: Random,
        wait_seconds: float,
    ) -> None:
        self._asking = asking
        self._links = links
        self._fleet = fleet
        self._random = random
        self._wait_seconds = wait_seconds
        self.waiting = 0  # for a replica to be ready

    async def load(self, record: AdapterRecord) -> AdapterInfo:
        """Have it read and checked where requests for it would go, and made known there.

        Raises AdapterError; Overloaded if there is no replica.
        """
        for _ in range(_LOSSES):
            link = await self._find(record.name)
            order = AddAdapter(self._asking.ticket(), record.name, record.path)
            answer = await self._asking.ask(link, order, LOAD_SECONDS)
            if answer is None:
                continue
            assert isinstance(answer, AdapterAnswer)
            if answer.info is None:
                raise AdapterError(answer.message, code=answer.code)
            return answer.info
        raise Overloaded("the replicas that read the adapter did not answer", code="no_replica")

    async def announce(self, record: AdapterRecord, *, gone: bool = False) -> None:
        """Tell every replica what the name means now. Returns when they know."""
        revision = "" if gone else record.revision
        await asyncio.gather(
            *(
                self._asking.ask(
                    link,
                    AdapterVersion(self._asking.ticket(), record.name, record.version, revision),
                    TOLD_SECONDS,
                )
                for link in list(self._links.values())
                if link.connection is not None
            )
        )

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
