"""ReplicaAdapters: registers adapters with an engine before it gets requests that use them.

A request contains its adapter's name, revision and path, so the first request for a revision can
register the adapter. The engine must know an adapter before it gets a request that uses it. So the
jobs of one adapter name run in order, one at a time. Jobs of other names, and requests for known
adapters, do not wait. This module does not need Ray.

`_newest` has the latest version (AdapterRecord.version) of each name that any router has sent. A
new request with an older version comes from a router that has missed a change. The request is
refused with adapter_changed, and the router reads the adapter records again. So once a replica
knows that an adapter was replaced or removed, no new request can use the old one, whatever its
router knows.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.transport.channel import AdapterVersion, ReplicaEnd, Submit
from engine.errors import AdapterError, EngineDead, MantaError
from engine.messages import AdapterAnswer, AdapterInfo, AddAdapter, EngineRequest

logger = logging.getLogger("manta.replica")

FAILED_SECONDS = 5.0  # seconds for which an adapter that could not be read is not tried again


class AdapterEngine(Protocol):
    """The interface of `engine.process.client.EngineClient` that this module uses."""

    async def add_adapter(
        self, name: str, folder: str, *, revision: str = "", load: bool = True, digest: str = ""
    ) -> AdapterInfo: ...

    async def remove_adapter(self, name: str, revision: str = "") -> AdapterInfo: ...


@dataclass(slots=True, eq=False)
class SubmittedRequest:
    """A router's request, and the connection over which it arrived.

    encoded: whether encoders were already asked for the embeddings of the request's images.
    """

    connection: ReplicaEnd
    message: Submit
    encoded: bool = False

    @property
    def request(self) -> EngineRequest:
        return self.message.request

    @property
    def wanted(self) -> bool:
        """Whether the request's router is still connected and has not aborted the request."""
        return self.request.id in self.connection.live


Job = SubmittedRequest | tuple[ReplicaEnd, AddAdapter | AdapterVersion]


class ReplicaAdapters:
    """The adapters of a replica, which registers them with its engine before requests that use
    them.

    submit: passes a request to the engine.
    refuse: ends a request with an error; its arguments are connection, id and error.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        submit: Callable[[EngineRequest], None],
        refuse: Callable[[ReplicaEnd, int, MantaError], None],
    ) -> None:
        self._engine = engine
        self._submit = submit
        self._refuse = refuse
        self._known: dict[str, str] = {}  # adapter name -> the revision that the engine knows
        self._newest: dict[str, int] = {}
        self._failed: dict[tuple[str, str], tuple[float, AdapterError]] = {}
        # Unfinished jobs by adapter name; each name here has a running task.
        self._jobs: dict[str, deque[Job]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, submitted: SubmittedRequest) -> None:
        """Pass a request with an adapter to the engine, after the engine knows the adapter."""
        adapter = submitted.message.adapter
        assert adapter is not None
        name = adapter.name
        known = name not in self._jobs and self._known.get(name) == adapter.revision
        if known and adapter.version >= self._newest.get(name, 0):
            self._submit(submitted.request)
        else:
            self._do(name, submitted)

    def take_back(self, connection: ReplicaEnd, ids: list[int]) -> list[int]:
        """Drop aborted requests that wait for adapters, and return the ids of the other aborted
        requests, which the engine has.

        ids: ids of the aborted requests of a connection.
        """
        waiting = {
            job.request.id
            for jobs in self._jobs.values()
            for job in jobs
            if isinstance(job, SubmittedRequest)
        }
        connection.live -= waiting.intersection(ids)
        return [id for id in ids if id in connection.live]

    def order(self, connection: ReplicaEnd, message: AddAdapter | AdapterVersion) -> None:
        """Queue an adapter job for a router: to read an adapter, or to record a new version.

        The router gets an AdapterAnswer when the job is done.
        """
        self._do(message.name, (connection, message))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    # -- the jobs of one name, one after the other

    def _do(self, name: str, job: Job) -> None:
        jobs = self._jobs.get(name)
        if jobs is not None:
            jobs.append(job)
            return
        self._jobs[name] = deque([job])
        task = asyncio.get_running_loop().create_task(self._work(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, name: str) -> None:
        jobs = self._jobs[name]
        try:
            while jobs:
                job = jobs[0]
                if isinstance(job, SubmittedRequest):
                    await self._start(name, job)
                elif isinstance(job[1], AddAdapter):
                    await self._answer(*job, self._load(job[1]))
                else:
                    await self._answer(*job, self._announced(job[1]))
                jobs.popleft()
        except EngineDead as error:
            # ReplicaServer tells the routers of the engine's death.
            logger.info("adapter %s: %s", name, error.message)
        finally:
            del self._jobs[name]

    async def _start(self, name: str, submitted: SubmittedRequest) -> None:
        adapter = submitted.message.adapter
        assert adapter is not None
        try:
            if adapter.version:
                # Version 0 is not checked: such a request has tokens already, and keeps its
                # revision.
                if adapter.version < self._newest.get(name, 0):
                    raise AdapterError(
                        f"adapter {name} has been replaced or removed", code="adapter_changed"
                    )
                self._newest[name] = adapter.version
            if self._known.get(name) != adapter.revision:
                await self._make_known(name, adapter.revision, adapter.path)
        except AdapterError as error:
            if submitted.wanted:
                self._refuse(submitted.connection, submitted.request.id, error)
            return
        if submitted.wanted:
            self._submit(submitted.request)

    async def _make_known(self, name: str, revision: str, path: str) -> None:
        """Register an adapter with the engine, which loads the weights later.

        path: the adapter's files.
        Raises AdapterError; if the same revision has failed within FAILED_SECONDS, its files are
        not read again.
        """
        now = time.monotonic()
        self._failed = {key: failure for key, failure in self._failed.items() if failure[0] > now}
        failed = self._failed.get((path, revision))
        if failed is not None:
            raise failed[1]
        try:
            await self._engine.add_adapter(
                name, path, revision=revision, load=False, digest=revision
            )
        except AdapterError as error:
            self._failed[path, revision] = (now + FAILED_SECONDS, error)
            raise
        self._known[name] = revision

    async def _load(self, message: AddAdapter) -> AdapterInfo:
        """Have the engine read and check a whole adapter; return its AdapterInfo, whose revision is
        the hash of the files."""
        info = await self._engine.add_adapter(message.name, message.path)
        self._known[message.name] = info.revision
        self._failed.clear()
        return info

    async def _announced(self, message: AdapterVersion) -> None:
        """Record a router's message with an adapter's current revision.

        The engine drops the adapter's earlier revision once running requests with it have ended. A
        message with an older version than a previous one is ignored.
        """
        name = message.name
        if message.version < self._newest.get(name, 0):
            return
        self._newest[name] = message.version
        known = self._known.get(name)
        if known is not None and known != message.revision:
            del self._known[name]
            await self._engine.remove_adapter(name, known)

    async def _answer(
        self,
        connection: ReplicaEnd,
        message: AddAdapter | AdapterVersion,
        work: Coroutine[Any, Any, AdapterInfo | None],
    ) -> None:
        try:
            answer = AdapterAnswer(message.ticket, await work)
        except AdapterError as error:
            answer = AdapterAnswer(message.ticket, None, error.code, error.message)
        connection.send(answer)
