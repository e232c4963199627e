"""Adapter: one revision of one adapter, and what is known of it. Loader: where its weights come
from. No torch here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import AdapterError
from engine.lora.peft_config import PREFIX
from engine.messages import AdapterInfo

if TYPE_CHECKING:
    from engine.lora.tiers.slots import Slot


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """The description of an adapter that its files give without its weights.

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
    """An adapter in host memory. digest: of the bytes that were read."""

    described: AdapterDescription
    digest: str
    host_bytes: int
    weights: Any


class Loader(Protocol):
    """Reads and moves adapters. Called from the store's threads; raises AdapterError.

    digest: of the bytes that are expected, to find a copy of them; "" = whatever is there now.
    """

    def describe(self, path: str, digest: str = "") -> AdapterDescription:
        """Read the configuration only."""
        ...

    def read(self, path: str, digest: str = "") -> LoadedAdapter: ...

    def upload(self, weights: Any, slot: int) -> None:
        """Copy weights into a slot that no step uses. Returns when the copy is done."""
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
    """The state of one revision of one adapter, changed by the store alone."""

    __slots__ = (
        "digest",
        "error",
        "failed_at",
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
        self.path = path
        self.stamp = stamp
        self.digest = ""
        self.weights: Any = None  # in host memory
        self.host_bytes = 0
        self.reading: object | None = None  # the read whose result it waits for
        self.error: AdapterError | None = None
        self.failed_at = 0.0
        self.slot: Slot | None = None
        self.users = 0  # accepted requests that have not ended
        self.started = 0  # of these, those that have begun: they need these very weights again
        self.retired = False  # replaced or removed

    @property
    def key(self) -> str:
        """The adapter's part of the keys of the prefix cache."""
        return f"{self.info.name}@{self.info.revision}"

    @property
    def is_prefix(self) -> bool:
        """Whether the adapter is prefix tuning, whose virtual tokens have keys and values, not
        embeddings."""
        return self.info.kind == PREFIX

    def is_same(self, info: AdapterInfo, described: AdapterDescription, digest: str) -> bool:
        """Whether the added adapter is this one: of one revision, and of equal bytes as far as
        these were read."""
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
