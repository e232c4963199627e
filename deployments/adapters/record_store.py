"""AdapterRecordStore: the adapters' records, which all routers of an application share and which
outlive each router.

There is one record a name, in the cluster's key-value store. There is no lock and no leader: the
last write counts, and a record's `version` tells which of two is newer.
"""

import secrets
from typing import Protocol

import msgspec

from deployments.cluster_store import prefix, store


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of an adapter's name.

    path: path of its folder, or the URL of an object store.
    revision: hash of its files; "" until a replica has read them.
    version: nanoseconds of the time at which the name last changed its meaning; it only grows.
    source: "config", "folder" (the watched one) or "api".
    stamp: stamp of the files in the watched folder, which tells that they were replaced.
    kind, rank, num_bytes, targets, virtual_tokens: as AdapterInfo, once they were read.
    removed: whether an operator removed it, though configuration or folder still have it.
    """

    name: str
    path: str
    revision: str = ""
    version: int = 0
    source: str = "api"
    stamp: str = ""
    kind: str = ""
    rank: int = 0
    num_bytes: int = 0
    targets: list[str] = []
    virtual_tokens: int = 0
    removed: bool = False

    @property
    def key(self) -> str:
        """The adapter's name and revision in a request, so that it goes on elsewhere with the same
        weights."""
        return f"{self.name}@{self.revision}"


class AdapterRecordStore(Protocol):
    """A store of adapter records. It blocks, and is called from threads. Raises OSError if the
    store cannot be had."""

    def changed(self, since: bytes) -> tuple[bytes, dict[str, AdapterRecord]] | None:
        """Return all records and a mark of this state; None if the state is still that of mark
        `since`. b"" is the mark of no state."""
        ...

    def put(self, record: AdapterRecord, fresh: bool = False) -> bool:
        """Write a record, and return whether it was written.

        fresh: whether to write only if the name has no record.
        """
        ...

    def delete(self, name: str) -> None: ...


class LocalRecordStore:
    """A record store in this process, for a single router."""

    def __init__(self) -> None:
        self._records: dict[str, AdapterRecord] = {}
        self._mark = 1

    def changed(self, since: bytes) -> tuple[bytes, dict[str, AdapterRecord]] | None:
        mark = b"%d" % self._mark
        return None if mark == since else (mark, dict(self._records))

    def put(self, record: AdapterRecord, fresh: bool = False) -> bool:
        if fresh and record.name in self._records:
            return False
        self._records[record.name] = record
        self._mark += 1
        return True

    def delete(self, name: str) -> None:
        self._records.pop(name, None)
        self._mark += 1


def mark_of_all(app: str) -> bytes:
    """A mark that changes with each change of the adapters of any model behind a router's
    application. Blocks; raises OSError."""
    marks: bytes = store("get", _mark(app)) or b""
    return marks


def _mark(app: str) -> str:
    return f"{prefix(app)}adapters/mark"


class RayRecordStore:
    """A record store in Ray's own key-value store, which lives as long as the cluster. Replicas and
    routers come and go, and so may Serve's controller.

    app: application of the model.
    routers: application of the model's routers, "" if it is the same.
    """

    def __init__(self, app: str, routers: str = "") -> None:
        self._folder = f"{prefix(app)}adapters/name/"
        self._mark = _mark(app)
        # The routers' last: who sees it has to find the model's.
        self._marks = dict.fromkeys((self._mark, _mark(routers or app)))

    def changed(self, since: bytes) -> tuple[bytes, dict[str, AdapterRecord]] | None:
        # The mark first: a change while the records are read makes the next look find another one.
        mark: bytes = store("get", self._mark) or b"none"
        if mark == since:
            return None
        records: dict[str, AdapterRecord] = {}
        for key in store("list", self._folder):
            raw = store("get", key)
            if raw is not None:
                record = msgspec.msgpack.decode(raw, type=AdapterRecord)
                records[record.name] = record
        return mark, records

    def put(self, record: AdapterRecord, fresh: bool = False) -> bool:
        value = msgspec.msgpack.encode(record)
        existed = store("put", self._folder + record.name, value, overwrite=not fresh)
        if fresh and existed:
            return False
        self._note_change()
        return True

    def delete(self, name: str) -> None:
        store("del", self._folder + name)
        self._note_change()

    def _note_change(self) -> None:
        for mark in self._marks:
            store("put", mark, secrets.token_bytes(8))


def newer(before: AdapterRecord | None, now: int) -> int:
    """The version of what follows `before`. now: nanoseconds; clocks of two machines may differ."""
    return max(now, 0 if before is None else before.version + 1)
