"""Adapter, Loader: one revision of an adapter, and the interface that reads adapters.

No torch here.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import AdapterError
from engine.lora.peft_config import PREFIX
from engine.messages import AdapterInfo

if TYPE_CHECKING:
    from engine.lora.tiers.slots import Slot


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """The description of an adapter, from its configuration alone or from all its files.

    stamp: a string that changes when the files change; "" if a store does not report it.
    """

    kind: str
    rank: int
    num_bytes: int
    targets: list[str]
    stamp: str
    virtual_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in host memory.

    digest: hash of the files' bytes.
    """

    described: AdapterDescription
    digest: str
    host_bytes: int
    weights: Any


class Loader(Protocol):
    """The interface that reads adapters and copies them to the device.

    Threads of AdapterStore call the methods.

    path: the adapter's folder or URL.
    digest: hash of the expected bytes, by which a cached copy may be found; "" = any bytes.
    Raises AdapterError.
    """

    def describe(self, path: str, digest: str = "") -> AdapterDescription:
        """Return the description from the adapter's configuration, without reading weights."""
        ...

    def read(self, path: str, digest: str = "") -> LoadedAdapter: ...

    def upload(self, weights: Any, slot: int) -> None:
        """Copy weights into an unused slot; return when the copy is done."""
        ...


class NoLoader:
    """The loader of an engine without adapters, which is never called."""

    def describe(self, path: str, digest: str = "") -> AdapterDescription:
        raise NotImplementedError

    def read(self, path: str, digest: str = "") -> LoadedAdapter:
        raise NotImplementedError

    def upload(self, weights: Any, slot: int) -> None:
        raise NotImplementedError


class Adapter:
    """The state of one revision of an adapter, changed only by the store."""

    __slots__ = (
        "digest",
        "error",
        "failed_at",
        "first_stamp",
        "host_bytes",
        "info",
        "path",
        "reading",
        "retired",
        "slot",
        "stamp",
        "started",
        "users",
        "weights",
    )

    def __init__(self, info: AdapterInfo, path: str, stamp: str) -> None:
        self.info = info
        self.first_stamp = stamp
        self.path = path
        self.stamp = stamp
        self.digest = ""
        self.weights: Any = None  # in host memory; None = not loaded
        self.host_bytes = 0
        self.reading: object | None = None  # token of the read that the adapter waits for
        self.error: AdapterError | None = None
        self.failed_at = 0.0
        self.slot: Slot | None = None
        self.users = 0  # number of accepted requests that have not ended
        # number of these requests that have started; after a preemption they need the same weights
        self.started = 0
        self.retired = False  # whether this revision was replaced or removed

    @property
    def key(self) -> str:
        """The adapter's name with its revision."""
        return f"{self.info.name}@{self.info.revision}"

    @property
    def blocks_key(self) -> str:
        """The adapter's part of the prefix hashes of KV blocks.

        Files of KV blocks outlive the engine, and the next engine may find other adapter files
        under a revision that a user named. So the key includes `first_stamp`, which changes with
        the files.
        """
        return f"{self.key} {self.first_stamp}"

    @property
    def is_prefix(self) -> bool:
        """Whether the adapter is prefix tuning, whose virtual tokens have precomputed KV."""
        return self.info.kind == PREFIX

    def is_same(self, info: AdapterInfo, described: AdapterDescription, digest: str) -> bool:
        """Whether an added adapter has the revision and, as far as known, the bytes of this one.

        info, described, digest: the data of the added adapter.
        """
        if self.info.revision != info.revision:
            return False
        return self.digest == digest if self.digest else self.stamp == described.stamp


def info_of(name: str, revision: str, described: AdapterDescription) -> AdapterInfo:
    return AdapterInfo(
        name,
        revision,
        described.kind,
        described.rank,
        described.num_bytes,
        described.targets,
        described.virtual_tokens,
    )


def changed(name: str) -> AdapterError:
    return AdapterError(
        f"the files of adapter {name} have changed since it was added; add it again",
        code="adapter_changed",
    )
