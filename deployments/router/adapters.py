"""AdapterCalls, StaleAdapters: a router's calls to replicas about the adapters of its model.

StaleAdapters restarts requests whose adapter was replaced after routing and before the request
reached the engine.
"""

import asyncio
import time
from random import Random

from deployments.adapters.paths import without_paths
from deployments.adapters.record_store import AdapterRecord
from deployments.adapters.registry import AdapterRegistry
from deployments.router.admission.scale_from_zero import Waking
from deployments.router.assignment import Assignment
from deployments.router.inflight import InflightChoice, InflightRequest
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.router.replicas.replicas import Replicas
from deployments.routing.decision import RoutingRequest
from deployments.routing.route import route
from deployments.transport.channel import AdapterVersion
from engine.errors import AdapterError, MantaError, Overloaded
from engine.messages import AdapterAnswer, AdapterInfo, AddAdapter, Delta

LOAD_SECONDS = 120.0  # seconds for a large adapter from a slow store
# Seconds for replicas to answer; a replica that is silent for longer is lost anyway.
ANNOUNCE_SECONDS = 2.0
_POLL = 0.05  # seconds between polls for a replica
_LOSSES = 2  # replicas that may be lost while reading one adapter
_STALE = ("adapter_changed", "adapter_not_found")
# Seconds before the record store is read again: a replica may hear of a change before the store.
_PAUSE = 0.3


class AdapterCalls:
    """A router's calls to replicas about adapters.

    wait_seconds: maximum seconds to wait for a replica to be ready.
    waking: wakes the model if it sleeps.
    waiting: number of calls that wait for a replica to be ready.
    """

    def __init__(
        self, replicas: Replicas, random: Random, wait_seconds: float, waking: Waking
    ) -> None:
        self.waiting = 0
        self._replicas = replicas
        self._random = random
        self._wait_seconds = wait_seconds
        self._waking = waking

    async def load(self, record: AdapterRecord) -> AdapterInfo:
        """Make one replica read and check an adapter's files and register the adapter with its
        engine.

        The replica is the one to which requests with this adapter would be routed. Returns the
        adapter's facts. Raises AdapterError; Overloaded if there is no replica.
        """
        for _ in range(_LOSSES):
            client = await self._find(record.name)
            order = AddAdapter(self._replicas.calls.ticket(), record.name, record.path)
            answer = await self._replicas.calls.ask(client, order, LOAD_SECONDS)
            if answer is None:
                continue
            assert isinstance(answer, AdapterAnswer)
            if answer.info is None:
                raise AdapterError(answer.message, code=answer.code)
            return answer.info
        raise Overloaded("the replicas that read the adapter did not answer", code="no_replica")

    async def announce(self, record: AdapterRecord, *, gone: bool = False) -> None:
        """Send every connected replica the current revision of an adapter's name, and wait for the
        answers, for at most ANNOUNCE_SECONDS.

        gone: whether the adapter was removed.
        """
        revision = "" if gone else record.revision
        calls = self._replicas.calls

        async def announce(client: ReplicaClient) -> None:
            message = AdapterVersion(calls.ticket(), record.name, record.version, revision)
            await calls.ask(client, message, ANNOUNCE_SECONDS)

        clients = [client for client in self._replicas.values() if client.connection is not None]
        await asyncio.gather(*map(announce, clients))

    async def _find(self, adapter: str) -> ReplicaClient:
        """Wait for a connected replica, and return the one to which `route` sends requests with
        this adapter. Raises Overloaded."""
        deadline = time.monotonic() + self._wait_seconds
        request = RoutingRequest(1, 1, adapter=adapter)
        self.waiting += 1
        try:
            while True:
                now = time.monotonic()
                decision = route(request, self._replicas.fleet, self._random, now)
                client = None if decision is None else self._replicas.get(decision.replica)
                if client is not None and client.connection is not None:
                    return client
                self._waking.wake()
                if now > deadline:
                    raise Overloaded(
                        f"no replica became ready within {self._wait_seconds:g} s",
                        code="no_replica",
                        retry_after=5,
                    )
                await asyncio.sleep(_POLL)
        finally:
            self.waiting -= 1


class StaleAdapters:
    """The handler of requests that were sent with an outdated adapter revision, because this router
    had missed a change.

    These requests have no output tokens yet, so each is sent again with the new revision.
    """

    def __init__(self, adapters: AdapterRegistry, assignment: Assignment) -> None:
        self._adapters = adapters
        self._assignment = assignment
        self._ended: dict[InflightRequest, list[tuple[InflightChoice, Delta]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def hold_back(self, choice: InflightChoice, delta: Delta) -> bool:
        """Withhold a delta that ends a choice with an error, if an outdated adapter revision may be
        the cause.

        Returns whether the delta is withheld. If false, the error may be sent to the client.
        """
        inflight, request = choice.inflight, choice.inflight.request
        if request.adapter is None:
            return False
        ended = self._ended.get(inflight)
        if ended is not None:
            ended.append((choice, delta))
            return True
        code = delta.error.partition(":")[0]
        if code not in _STALE or inflight.begun or not request.adapter.version:
            delta.error = without_paths(delta.error, request.adapter.path, request.model)
            return False
        self._ended[inflight] = [(choice, delta)]
        task = asyncio.get_running_loop().create_task(self._begin_again(inflight))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _begin_again(self, inflight: InflightRequest) -> None:
        request = inflight.request
        pinned = request.adapter
        assert pinned is not None
        try:
            for pause in (0.0, _PAUSE):
                await asyncio.sleep(pause)
                await self._adapters.refresh()
                record = await self._adapters.pin(pinned.name)
                if record.key != pinned.key or record.version > pinned.version:
                    break
        except MantaError as error:
            del self._ended[inflight]
            inflight.fail(error)
            return
        ended = self._ended.pop(inflight)
        if record.key == pinned.key and record.version <= pinned.version:
            for choice, delta in ended:
                if not choice.done:
                    delta.error = without_paths(delta.error, pinned.path, request.model)
                    inflight.take_delta(choice, delta, time.monotonic())
            return
        request.adapter = record
        choices = [choice for choice in inflight.choices if not choice.done]
        if choices:
            self._assignment.assign_again(choices)
