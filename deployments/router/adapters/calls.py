"""AdapterCalls: a router's calls to replicas about adapters."""

import asyncio
import time
from collections.abc import Callable, Mapping
from random import Random

from deployments.adapters.record_store import AdapterRecord
from deployments.router.replicas.replica_calls import ReplicaCalls
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.routing.decision import RoutingRequest
from deployments.routing.fleet import Fleet
from deployments.routing.route import route
from deployments.transport.channel import AdapterVersion
from engine.errors import AdapterError, Overloaded
from engine.messages import AdapterAnswer, AdapterInfo, AddAdapter

LOAD_SECONDS = 120.0  # for a large adapter from a slow store
TOLD_SECONDS = 2.0  # for replicas to answer; one that is silent for longer is dead anyway
_LOOK = 0.05  # seconds between looks for a replica
_LOSSES = 2  # replicas that may be lost over one adapter


class AdapterCalls:
    """clients: of the replicas, by name. wait_seconds: for a replica to be ready. wanted: called
    when none is."""

    def __init__(
        self,
        calls: ReplicaCalls,
        clients: Mapping[str, ReplicaClient],
        fleet: Fleet,
        random: Random,
        wait_seconds: float,
        wanted: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._clients = clients
        self._fleet = fleet
        self._random = random
        self._wait_seconds = wait_seconds
        self._wanted = wanted
        self.waiting = 0  # calls that wait for a replica to be ready

    async def load(self, record: AdapterRecord) -> AdapterInfo:
        """Have an adapter read and checked, and made known, at the replica that its requests would
        go to.

        Raises AdapterError; Overloaded if there is no replica.
        """
        for _ in range(_LOSSES):
            client = await self._find(record.name)
            order = AddAdapter(self._calls.ticket(), record.name, record.path)
            answer = await self._calls.ask(client, order, LOAD_SECONDS)
            if answer is None:
                continue
            assert isinstance(answer, AdapterAnswer)
            if answer.info is None:
                raise AdapterError(answer.message, code=answer.code)
            return answer.info
        raise Overloaded("the replicas that read the adapter did not answer", code="no_replica")

    async def announce(self, record: AdapterRecord, *, gone: bool = False) -> None:
        """Tell every replica which revision the name means now. Returns when they know."""
        revision = "" if gone else record.revision
        await asyncio.gather(
            *(
                self._calls.ask(
                    client,
                    AdapterVersion(self._calls.ticket(), record.name, record.version, revision),
                    TOLD_SECONDS,
                )
                for client in list(self._clients.values())
                if client.connection is not None
            )
        )

    async def _find(self, adapter: str) -> ReplicaClient:
        deadline = time.monotonic() + self._wait_seconds
        self.waiting += 1
        try:
            while True:
                now = time.monotonic()
                decision = route(
                    RoutingRequest(1, 1, adapter=adapter), self._fleet, self._random, now
                )
                client = None if decision is None else self._clients.get(decision.replica)
                if client is not None and client.connection is not None:
                    return client
                self._wanted()
                if now > deadline:
                    raise Overloaded(
                        f"no replica became ready within {self._wait_seconds:g} s",
                        code="no_replica",
                        retry_after=5,
                    )
                await asyncio.sleep(_LOOK)
        finally:
            self.waiting -= 1
