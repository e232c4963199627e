"""AdapterRegistry: a router's adapters by name, with the record of each.

The names come from the configuration, the watched folder and the record store that all routers
share. This module does not need Ray.

  configuration, watched folder --declare--> name, path        (revision unknown)
  record store                  --records--> name, path, revision, version

An adapter's revision is the hash of its files. A replica computes the revision when the adapter is
added over the API or first requested; from then on the record store has it. The revision is valid
until the adapter is added again, or its files in the watched folder change. Replicas check the
revision whenever they read the files.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from deployments.adapters.paths import (
    AdapterFolder,
    allowed_path,
    scan,
    still_allowed,
    without_paths,
)
from deployments.adapters.record_store import (
    AdapterRecord,
    AdapterRecordStore,
    LocalRecordStore,
    newer,
)
from engine.errors import AdapterError, MantaError, Overloaded
from engine.lora.peft_config import check_name
from engine.lora.tiers.names import not_found
from engine.messages import AdapterInfo

logger = logging.getLogger("manta.router")

POLL_SECONDS = 1.0  # seconds between polls of the watched folder
FAILED_SECONDS = 5.0  # seconds for which a failure to read an adapter is remembered


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The settings of a model's adapters.

    model: name of the base model.
    paths: paths of the configuration's adapters, by adapter name.
    roots: folders and URLs from which other adapters may be added.
    watch: folder whose subfolders are adapters.
    """

    model: str
    paths: Mapping[str, str] = field(default_factory=dict)
    roots: tuple[str, ...] = ()
    watch: str | None = None


class AdapterReplicas(Protocol):
    """The interface for a registry's calls to replicas; see `AdapterCalls`."""

    async def load(self, record: AdapterRecord) -> AdapterInfo: ...

    async def announce(self, record: AdapterRecord, *, gone: bool = False) -> None: ...


class AdapterRegistry:
    """A router's adapters by name. All methods must be called on the event loop.

    on_change: called without arguments whenever `records` have changed.
    """

    def __init__(
        self,
        settings: AdapterSettings,
        replicas: AdapterReplicas,
        on_change: Callable[[], None],
        record_store: AdapterRecordStore | None = None,
    ) -> None:
        self._settings = settings
        self._replicas = replicas
        self._on_change = on_change
        self._record_store = record_store or LocalRecordStore()
        self._mark = b""
        self._written: dict[str, AdapterRecord] = {}  # records as last read from the record store
        self._folder: dict[str, AdapterFolder] = {}
        self._scanned: dict[str, AdapterFolder] = {}  # by the last scan; files may be incomplete
        self._lock = asyncio.Lock()  # held during reads and writes of the record store
        self._looked = 0.0
        self._admin = asyncio.Lock()  # held during a change by an operator
        self._pins: dict[str, asyncio.Task[AdapterRecord]] = {}
        self._failed: dict[str, tuple[float, AdapterRecord, MantaError]] = {}
        self._task: asyncio.Task[None] | None = None
        self._soon: asyncio.Task[None] | None = None
        self.records = self._view()

    async def start(self) -> None:
        """Read all adapters, then start polling the watched folder.

        Changes by other routers are read by `refresh`.
        """
        await self.refresh()
        if self._settings.watch is not None:
            await self._poll(self._settings.watch, first=True)
            self._task = asyncio.get_running_loop().create_task(self._watch(self._settings.watch))

    def close(self) -> None:
        for task in (self._task, self._soon, *self._pins.values()):
            if task is not None:
                task.cancel()

    # -- for requests

    async def pin(self, name: str) -> AdapterRecord:
        """Return the present record of an adapter, reading its files first if the revision is
        unknown. Raises MantaError."""
        if name not in self.records:
            # Another router may just have added the adapter.
            await self.refresh()
        record = self.records.get(name)
        if record is None:
            raise not_found(name)
        if record.revision:
            return record
        task = self._pins.get(name)
        if task is None:
            task = self._pins[name] = asyncio.get_running_loop().create_task(self._pin(name))
            task.add_done_callback(lambda done: self._pinned(name, done))
        return await asyncio.shield(task)

    def _pinned(self, name: str, task: "asyncio.Task[AdapterRecord]") -> None:
        del self._pins[name]
        if not task.cancelled():
            task.exception()  # retrieve the error, as asyncio warns if no caller waits any more

    async def _pin(self, name: str) -> AdapterRecord:
        while (record := self.records.get(name)) is not None:
            if record.revision:
                return record
            await self._pin_as(record)
        raise not_found(name)

    async def _pin_as(self, record: AdapterRecord) -> None:
        """Have a replica read an adapter's files, and store the revision in the record.

        Nothing is stored if the name's record has changed meanwhile. If the revision differs from
        the stored one, it is announced to all replicas.

        Raises AdapterError. For FAILED_SECONDS after a failure the same error is raised without
        reading.
        """
        name, now = record.name, time.monotonic()
        failed = self._failed.get(name)
        if failed is not None and failed[0] > now and failed[1] == record:
            raise failed[2]
        try:
            # The adapter's folder may have been replaced by a link since the last scan.
            if record.source == "folder":
                await asyncio.to_thread(still_allowed, record.path, self._roots())
            info = await self._replicas.load(record)
        except AdapterError as error:
            failure = AdapterError(without_paths(error.message, record.path, name), code=error.code)
            self._failed[name] = (now + FAILED_SECONDS, record, failure)
            raise failure from error
        self._failed.pop(name, None)
        before = self._written.get(name)
        pinned = _with(record, info, newer(before, time.time_ns()))
        async with self._lock:
            if self.records.get(name) == record:
                await self._write(pinned, fresh=before is None)
        # Another router was faster, or an operator has changed the adapter.
        if self.records.get(name) != pinned:
            await self.refresh()
        elif before is not None and before.revision != pinned.revision:
            await self._replicas.announce(pinned)

    def replica_came(self) -> None:
        """Start reading other routers' records in a task, because a new replica has joined."""
        if self.records:
            self._soon = asyncio.get_running_loop().create_task(self.refresh())

    async def refresh(self) -> None:
        """Read the records that other routers have written; cheap if there are no changes."""
        asked = time.monotonic()
        async with self._lock:
            if self._looked <= asked:
                self._looked = time.monotonic()
                with contextlib.suppress(OSError):
                    await self._read()

    # -- changes by an operator

    async def add(self, name: str, path: str = "", model: str = "") -> AdapterRecord:
        """Add an adapter for all routers, or read its files again; return its record.

        New requests then use the present content of the files.

        path: path or URL inside the allowed roots; "": the adapter's present path.
        model: ignored, as this registry has one base model.

        Raises MantaError, after which nothing has changed.
        """
        check_name(name)
        if name == self._settings.model:
            raise AdapterError("that is the model's own name", code="invalid_model_name")
        async with self._admin:
            await self.refresh()
            before = self._written.get(name)
            known, declared = self.records.get(name), self._declared().get(name)
            if path:
                where = await asyncio.to_thread(allowed_path, path, self._roots())
            elif known is None:
                raise not_found(name)
            elif known.source == "config":
                where = known.path
            else:
                # The folder may have been replaced by a link since it was last checked.
                where = await asyncio.to_thread(still_allowed, known.path, self._roots())
            if declared is not None and declared.path == where:
                record = declared
            else:
                record = AdapterRecord(name=name, path=where)
            info = await self._replicas.load(record)
            self._failed.pop(name, None)
            if known is not None and (known.revision, known.path) == (info.revision, where):
                return known
            record = _with(record, info, newer(before, time.time_ns()))
            async with self._lock:
                await self._write(record)
            logger.info("adapter %s: revision %s", name, record.revision)
            await self._replicas.announce(record)
            return record

    def by_model(self) -> list[tuple[str, AdapterRecord]]:
        """Return (base model's name, record) for all adapters."""
        return [(self._settings.model, record) for record in self.records.values()]

    async def remove(self, name: str, model: str = "") -> AdapterRecord:
        """Remove an adapter, and return its record. Running requests with the adapter may finish.

        model: ignored, as this registry has one base model.

        Raises MantaError if there is no such adapter.
        """
        async with self._admin:
            await self.refresh()
            known = self.records.get(name)
            if known is None:
                raise not_found(name)
            declared = self._declared().get(name)
            version = newer(self._written.get(name), time.time_ns())
            async with self._lock:
                if declared is None:
                    await self._delete(name)
                else:
                    gone = msgspec.structs.replace(declared, version=version, removed=True)
                    await self._write(gone)
            logger.info("adapter %s: removed", name)
            removed: AdapterRecord = msgspec.structs.replace(known, version=version)
            await self._replicas.announce(removed, gone=True)
            return removed

    # -- the record store and the folder

    async def _watch(self, folder: str) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._poll(folder)

    async def _poll(self, watched: str, *, first: bool = False) -> None:
        try:
            await self._scan(watched, first)
        except (OSError, MantaError) as error:  # by the watched folder or record store
            reason = getattr(error, "strerror", None) or error
            logger.warning("adapters: %s: %s", watched, reason)

    async def _scan(self, watched: str, first: bool) -> None:
        scanned = await asyncio.to_thread(scan, watched)
        # A subfolder that is unchanged in two scans is not being written to.
        steady = {
            name: adapter
            for name, adapter in scanned.items()
            if first or self._scanned.get(name) == adapter
        }
        remaining = {name: adapter for name, adapter in self._folder.items() if name in scanned}
        self._scanned = scanned
        if self._folder != (folder := {**remaining, **steady}):
            self._folder = folder
            self._rebuild()
            await self._forget_gone()

    async def _forget_gone(self) -> None:
        """Remove the adapters whose subfolders of the watched folder have disappeared."""
        for name, record in list(self._written.items()):
            if record.source == "folder" and name not in self._folder:
                async with self._lock:
                    await self._delete(name)
                version = newer(record, time.time_ns())
                written: AdapterRecord = msgspec.structs.replace(record, version=version)
                await self._replicas.announce(written, gone=True)

    async def _read(self) -> None:
        changed = await asyncio.to_thread(self._record_store.changed, self._mark)
        if changed is not None:
            self._mark, self._written = changed
            self._rebuild()

    async def _write(self, record: AdapterRecord, *, fresh: bool = False) -> None:
        """Write a record to the record store, and use it in this router.

        fresh: whether to write only if the record store has no record of the name.
        """
        with _report_failure():
            if await asyncio.to_thread(self._record_store.put, record, fresh):
                self._written[record.name] = record
                self._rebuild()

    async def _delete(self, name: str) -> None:
        with _report_failure():
            await asyncio.to_thread(self._record_store.delete, name)
            self._written.pop(name, None)
            self._rebuild()

    def _roots(self) -> tuple[str, ...]:
        watch = self._settings.watch
        return self._settings.roots if watch is None else (*self._settings.roots, watch)

    def _declared(self) -> dict[str, AdapterRecord]:
        """Return the adapters of the configuration and, for other names, of the watched folder."""
        declared = {
            name: AdapterRecord(name=name, path=adapter.path, source="folder", stamp=adapter.stamp)
            for name, adapter in self._folder.items()
            if name != self._settings.model
        }
        for name, path in self._settings.paths.items():
            declared[name] = AdapterRecord(name=name, path=path, source="config")
        return declared

    def _rebuild(self) -> None:
        records = self._view()
        if records != self.records:
            self.records = records
            self._on_change()

    def _view(self) -> dict[str, AdapterRecord]:
        """Return {name: record} of the adapters that may be used, in alphabetical order."""
        records = self._declared()
        for name, record in self._written.items():
            declared = records.get(name)
            if record.source != "api" and (declared is None or not _same(declared, record)):
                # The record is for another path, or for files that were replaced later.
                continue
            if record.removed:
                records.pop(name, None)
            else:
                records[name] = record
        return dict(sorted(records.items()))


def _same(declared: AdapterRecord, record: AdapterRecord) -> bool:
    return (declared.source, declared.path, declared.stamp) == (
        record.source,
        record.path,
        record.stamp,
    )


def _with(record: AdapterRecord, info: AdapterInfo, version: int) -> AdapterRecord:
    pinned: AdapterRecord = msgspec.structs.replace(
        record,
        revision=info.revision,
        version=version,
        kind=info.kind,
        rank=info.rank,
        num_bytes=info.num_bytes,
        targets=info.targets,
        virtual_tokens=info.virtual_tokens,
    )
    return pinned


@contextlib.contextmanager
def _report_failure() -> Iterator[None]:
    """A context manager that converts the OSError of an unavailable record store into Overloaded,
    as it is the server's fault."""
    try:
        yield
    except OSError as error:
        raise Overloaded(str(error), code="adapters_unavailable") from error
