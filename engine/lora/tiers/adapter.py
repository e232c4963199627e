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
    """The description of an adapter's files, from its configuration alone or after reading them.

    stamp: a text that changes when the files do; "" if a store does not report it.
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

    digest: hash of the bytes that were read.
    """

    described: AdapterDescription
    digest: str
    host_bytes: int
    weights: Any


class Loader(Protocol):
    """The interface of a reader of adapters, which also copies them to the device.

    The threads of AdapterStore call it.

    path: the adapter's folder or URL.
    digest: hash of the expected bytes, by which a cached copy may be found; "" = any bytes.
    Raises AdapterError.
    """

    def describe(self, path: str, digest: str = "") -> AdapterDescription:
        """Return the description that the configuration gives, without reading weights."""
        ...

    def read(self, path: str, digest: str = "") -> LoadedAdapter: ...

    def upload(self, weights: Any, slot: int) -> None:
        """Copy weights into a slot that no step uses; return when the copy is done."""
        ...


class NoLoader:
    """The loader of an engine that takes no adapters; it is never called."""

    def describe(self, path: str, digest: str = "") -> AdapterDescription:
        raise NotImplementedError

    def read(self, path: str, digest: str = "") -> LoadedAdapter:
        raise NotImplementedError

    def upload(self, weights: Any, slot: int) -> None:
        raise NotImplementedError


class Adapter:
    """The state of one revision of one adapter, changed only by the store."""

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
        self.weights: Any = None  # in host memory
        self.host_bytes = 0
        self.reading: object | None = None  # token of the read that the adapter waits for
        self.error: AdapterError | None = None
        self.failed_at = 0.0
        self.slot: Slot | None = None
        self.users = 0  # accepted requests that have not ended
        self.started = 0  # users that have begun, and need the same version of the weights again
        self.retired = False  # whether this revision was replaced or removed

    @property
    def key(self) -> str:
        """The adapter's name with its revision."""
        return f"{self.info.name}@{self.info.revision}"

    @property
    def blocks_key(self) -> str:
        """The text that stands for the adapter in the keys of KV blocks.

        Files of KV blocks outlive the engine, and the next engine may read other bytes under a
        revision that a user named. `first_stamp` changes with the adapter's files, so these keys
        differ then.
        """
        return f"{self.key} {self.first_stamp}"

    @property
    def is_prefix(self) -> bool:
        """Whether the adapter is prefix tuning, whose virtual tokens are keys and values."""
        return self.info.kind == PREFIX

    def is_same(self, info: AdapterInfo, described: AdapterDescription, digest: str) -> bool:
        """Whether an adapter that is added has this one's revision and, as far as known, bytes.

        info, described, digest: those of the adapter that is added.
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
