"""ReplicaAdapters: makes adapters known to an engine before requests for them. No Ray here.

A request names an adapter, its revision and the place of its files, so a replica needs to know
nothing beforehand: the first request for a revision makes it known. The engine must know an adapter
before a request for it comes. So what concerns one name is done in order, one job after the other.
Jobs for other names, and requests for adapters that are known, do not wait.

`newest` holds the latest version of each name that a router has named. A new request of an older
version comes from a router that has not heard of the change: the request is refused with
adapter_changed, and the router looks again. So once the replicas have been told, a replaced or
removed adapter is so for every request, whatever the routers know.
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

FAILED_SECONDS = 5.0  # how long the failure of an adapter is remembered


class AdapterEngine(Protocol):
    """The part of `engine.process.client.EngineClient` that is used here."""

    async def add_adapter(
        self, name: str, folder: str, *, revision: str = "", load: bool = True, digest: str = ""
    ) -> AdapterInfo: ...

    async def remove_adapter(self, name: str, revision: str = "") -> AdapterInfo: ...


@dataclass(slots=True, eq=False)
class SubmittedRequest:
    """A router's message, and the connection that it came over."""

    connection: ReplicaEnd
    message: Submit

    @property
    def request(self) -> EngineRequest:
        return self.message.request

    @property
    def wanted(self) -> bool:
        """Whether the request's router is connected and has not taken the request back."""
        return self.request.id in self.connection.live


Job = SubmittedRequest | tuple[ReplicaEnd, AddAdapter | AdapterVersion]


class ReplicaAdapters:
    """The adapters of a replica, made known to its engine before requests for them.

    submit(request): gives a request to the engine.
    refuse(connection, id, error): ends a request.
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
        self._known: dict[str, str] = {}  # name -> the revision that the engine knows
        self._newest: dict[str, int] = {}
        self._failed: dict[tuple[str, str], tuple[float, AdapterError]] = {}
        self._jobs: dict[str, deque[Job]] = {}  # of names that a task is working on
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, submitted: SubmittedRequest) -> None:
        """Give a request with an adapter to the engine, once the engine knows the adapter."""
        adapter = submitted.message.adapter
        assert adapter is not None
        name = adapter.name
        known = name not in self._jobs and self._known.get(name) == adapter.revision
        if known and adapter.version >= self._newest.get(name, 0):
            self._submit(submitted.request)
        else:
            self._do(name, submitted)

    def take_back(self, connection: ReplicaEnd, ids: list[int]) -> list[int]:
        """Drop requests that are no longer wanted, and return the ids of those requests that the
        engine has."""
        waiting = {
            job.request.id
            for jobs in self._jobs.values()
            for job in jobs
            if isinstance(job, SubmittedRequest)
        }
        connection.live -= waiting.intersection(ids)
        return [id for id in ids if id in connection.live]

    def order(self, connection: ReplicaEnd, message: AddAdapter | AdapterVersion) -> None:
        """Do what a router asks: read an adapter, or note a new version. The router gets an
        AdapterAnswer in any case."""
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
            logger.info("adapter %s: %s", name, error.message)  # the routers hear of the death
        finally:
            del self._jobs[name]

    async def _start(self, name: str, submitted: SubmittedRequest) -> None:
        adapter = submitted.message.adapter
        assert adapter is not None
        try:
            if adapter.version:  # 0: the request has begun and keeps its revision
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
        """Add an adapter to the engine. Raises AdapterError; at once if the same adapter failed a
        moment ago."""
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
        """Read and check the whole adapter; its revision is the hash of its files."""
        info = await self._engine.add_adapter(message.name, message.path)
        self._known[message.name] = info.revision
        self._failed.clear()
        return info

    async def _announced(self, message: AdapterVersion) -> None:
        """Note that the name means this revision from now on. Requests that run on another revision
        go on."""
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
