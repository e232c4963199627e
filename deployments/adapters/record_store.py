"""AdapterRecordStore: the store of adapter records that all routers of an application share.

The records are in the cluster's key-value store, one per adapter name, and outlive each router.
There is no lock and no leader: the last write wins, and `version` orders two records of a name.
"""

import secrets
from typing import Protocol

import msgspec

from deployments.cluster_store import prefix, store


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The files that an adapter's name currently refers to: their path and revision.

    path: path of the adapter's folder, or its URL in an object store.
    revision: hash of the adapter's files; "" until a replica has read them.
    version: time in nanoseconds of the name's last change; never decreases.
    source: "config", "folder" (the watched folder) or "api".
    stamp: text that changes when the files in the watched folder are replaced.
    kind, rank, num_bytes, targets, virtual_tokens: fields of AdapterInfo, empty until the files
        were read.
    removed: whether an operator has removed an adapter that the configuration or the watched folder
        still contains.
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
        """The adapter as "name@revision", which identifies the same weights at any replica."""
        return f"{self.name}@{self.revision}"


class AdapterRecordStore(Protocol):
    """A store of adapter records. Its methods block, so they are called from threads.

    Raises OSError if the store is unavailable.
    """

    def changed(self, since: bytes) -> tuple[bytes, dict[str, AdapterRecord]] | None:
        """Return a change mark and all records; None if nothing has changed since the mark `since`.

        The mark is a byte string that differs after each change of the records.
        since: the mark of an earlier call; b"" if the records were never read.
        """
        ...

    def put(self, record: AdapterRecord, fresh: bool = False) -> bool:
        """Write a record, and return whether it was written.

        fresh: whether to write only if the name has no record yet.
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
    """Return a mark that changes with any change of the adapters of any model of an application.

    app: name of the routers' Serve application.

    Blocks; raises OSError if the store is unavailable.
    """
    marks: bytes = store("get", _mark(app)) or b""
    return marks


def _mark(app: str) -> str:
    return f"{prefix(app)}adapters/mark"


class RayRecordStore:
    """A record store in Ray's own key-value store, which lives as long as the cluster.

    It survives replicas, routers and Serve's controller.

    app: name of the model's Serve application.
    routers: name of the Serve application of the model's routers; "" if it is `app`.
    """

    def __init__(self, app: str, routers: str = "") -> None:
        self._folder = f"{prefix(app)}adapters/name/"
        self._mark = _mark(app)
        # The routers' mark is written last: when a reader sees it changed, the model's mark must
        # have changed.
        self._marks = dict.fromkeys((self._mark, _mark(routers or app)))

    def changed(self, since: bytes) -> tuple[bytes, dict[str, AdapterRecord]] | None:
        # The mark is read before the records, so that the next call notices a change made in
        # between.
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
    """Return the version of a record that replaces `before`.

    now: this machine's time in nanoseconds; machines' clocks may differ.
    """
    return max(now, 0 if before is None else before.version + 1)
