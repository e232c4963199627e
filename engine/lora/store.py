"""AdapterStore: which adapters are known, and in which tier each is. No torch here.

    disk or object store --read (thread)--> host memory --upload (thread)--> device slot

Host memory and slots are LRU: host memory with a byte budget, slots by number. All methods belong
to the step loop's thread; what the threads have done is taken over by `poll`, so a load never
stalls a step, and only the requests that need that adapter wait.

A slot is pinned by every row that may still run on it, and what is pinned is not replaced. When all
are pinned and an adapter waits, the slot with the fewest rows is promised to it: nobody new gets in
there, and when its last row ends the slot changes hands. So no adapter starves.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from engine.errors import AdapterError
from engine.lora.names import AdapterNames
from engine.lora.peft_config import check_name
from engine.messages import AdapterAnswer, AdapterInfo, AddAdapter, RemoveAdapter

logger = logging.getLogger("manta.engine")

RETRY_SECONDS = 10.0  # how long a failed read is remembered
READ_AHEAD = 4  # reads under way, beyond which none is begun for a request that is not first

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Described:
    """What a look at the files says. stamp: changes when they do; "" if nobody can tell."""

    kind: str
    rank: int
    num_bytes: int
    targets: list[str]
    stamp: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter in host memory. digest: of the bytes that were read."""

    described: Described
    digest: str
    host_bytes: int
    weights: Any


class Loader(Protocol):
    """Reads and moves adapters. Called from the store's threads; raises AdapterError."""

    def describe(self, path: str) -> Described:
        """Configuration only."""
        ...

    def read(self, path: str) -> Loaded: ...

    def upload(self, weights: Any, slot: int) -> None:
        """Into a slot that no step uses. Returns when the copy is done."""
        ...


class NoLoader:
    """Of an engine that takes no adapters: never called."""

    def describe(self, path: str) -> Described:
        raise NotImplementedError

    def read(self, path: str) -> Loaded:
        raise NotImplementedError

    def upload(self, weights: Any, slot: int) -> None:
        raise NotImplementedError


class Adapter:
    """One revision of one adapter."""

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
        self.reading = False
        self.error: AdapterError | None = None
        self.failed_at = 0.0
        self.slot: _Slot | None = None
        self.users = 0  # accepted requests that have not ended
        self.started = 0  # of these, those that have begun: they need these very weights again
        self.retired = False  # replaced or removed

    @property
    def key(self) -> str:
        """In the keys of the prefix cache."""
        return f"{self.info.name}@{self.info.revision}"


@dataclass(slots=True, eq=False)
class _Slot:
    index: int
    adapter: Adapter | None = None
    ready: bool = False
    pins: int = 0
    promised: Adapter | None = None
    used: int = 0  # when, in asks


class AdapterStore:
    """max_loras: slots; with 0 every adapter is refused.

    host_bytes: budget of host memory; adapters that running requests may need
    again are kept beyond it. disk, device: where reads and uploads run.
    """

    def __init__(
        self,
        loader: Loader,
        max_loras: int,
        host_bytes: int,
        *,
        disk: Executor | None = None,
        device: Executor | None = None,
    ) -> None:
        self._loader = loader
        self._host_budget = host_bytes
        self._disk = disk or ThreadPoolExecutor(1, "adapter-reads")  # one: answers keep their order
        self._device = device or ThreadPoolExecutor(1, "adapter-uploads")
        self._names: AdapterNames[Adapter] = AdapterNames()
        self._slots = [_Slot(index) for index in range(max_loras)]
        self._host: OrderedDict[Adapter, None] = OrderedDict()  # in host memory, oldest use first
        self._wanted: dict[Adapter, None] = {}  # wait for a slot, in the order of asking
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._news: list[Adapter] = []
        self._answers: list[AdapterAnswer] = []
        self._wake: Callable[[], None] = lambda: None
        self._clock = 0
        self.loads = 0  # uploads
        self.reads = 0
        self._reading = 0  # under way
        self.host_bytes = 0

    # ---- names ---------------------------------------------------------------------------------

    def add(self, message: AddAdapter) -> None:
        """Begin; the answer comes by `take_answers`."""

        def work() -> Described | Loaded:
            self._check_enabled()
            check_name(message.name)
            if message.load:
                return self._loader.read(message.path)
            return self._loader.describe(message.path)

        self._run(self._disk, work, lambda result: self._added(message, result))

    def _added(self, message: AddAdapter, result: Described | Loaded | AdapterError) -> None:
        if isinstance(result, AdapterError):
            answer = AdapterAnswer(message.ticket, None, result.code, result.message)
            self._answers.append(answer)
            return
        loaded = result if isinstance(result, Loaded) else None
        described = result.described if isinstance(result, Loaded) else result
        digest = loaded.digest if loaded is not None else described.stamp
        info = AdapterInfo(
            message.name,
            message.revision or digest,
            described.kind,
            described.rank,
            described.num_bytes,
            described.targets,
        )
        before = self._names.get(info.name)
        if before is not None and _same(before, info, described, digest):
            if loaded is not None and before.weights is None:
                before.error = None
                self._keep(before, loaded)
            self._answers.append(AdapterAnswer(message.ticket, before.info))
            return
        adapter = Adapter(info, message.path, described.stamp)
        self._names.put(info.name, info.revision, adapter)
        if before is not None:
            self._retire(before)
        if loaded is not None:
            self._keep(adapter, loaded)
        self._answers.append(AdapterAnswer(message.ticket, info))

    def remove(self, message: RemoveAdapter) -> None:
        """Behind the additions before it."""
        self._run(self._disk, lambda: None, lambda _: self._removed(message))

    def _removed(self, message: RemoveAdapter) -> None:
        try:
            adapter = self._names.remove(message.name, message.revision)
        except AdapterError as error:
            self._answers.append(AdapterAnswer(message.ticket, None, error.code, error.message))
            return
        self._retire(adapter)
        self._answers.append(AdapterAnswer(message.ticket, adapter.info))

    @classmethod
    def disabled(cls) -> "AdapterStore":
        return cls(NoLoader(), 0, 0)

    def find(self, name: str) -> Adapter:
        """What a request names: a name or "name@revision". Raises AdapterError."""
        self._check_enabled()
        return self._names.find(name)

    def _check_enabled(self) -> None:
        if not self._slots:
            raise AdapterError(
                "this engine takes no adapters; start it with max_loras > 0",
                code="adapters_disabled",
            )

    def take_answers(self) -> list[AdapterAnswer]:
        answers, self._answers = self._answers, []
        return answers

    # ---- requests ------------------------------------------------------------------------------

    def claim(self, adapter: Adapter) -> None:
        """A request was accepted: bring its adapter into host memory while the request waits, if
        that drives out no other and is not far ahead of its turn."""
        adapter.users += 1
        room = self.host_bytes < self._host_budget and self._reading < READ_AHEAD
        if adapter.error is None and room:
            self._read(adapter)

    def ask(self, adapter: Adapter) -> bool:
        """Whether a request may start on it now. If not, it is on its way, and `poll` will name it.

        Raises AdapterError if it cannot be had.
        """
        if adapter.error is not None:
            if time.monotonic() < adapter.failed_at + RETRY_SECONDS:
                raise adapter.error
            adapter.error = None
        slot = adapter.slot
        if slot is None:
            self._wanted[adapter] = None
            self._advance(adapter)
            return False
        if slot.promised is not None:
            self._wanted[adapter] = None  # in line for another one, when this one is taken away
            return False
        if slot.ready:
            self._wanted.pop(adapter, None)
            self._touch(slot)
            if adapter.weights is not None:
                self._host.move_to_end(adapter)
        return slot.ready

    def pin(self, adapter: Adapter, *, first: bool) -> int:
        """A request starts (`first`: not after a preemption). Its slot's index."""
        slot = adapter.slot
        assert slot is not None and slot.ready
        slot.pins += 1
        adapter.started += first
        return slot.index

    def unpin(self, index: int) -> None:
        """No step uses the row any more."""
        slot = self._slots[index]
        slot.pins -= 1
        assert slot.pins >= 0
        if not slot.pins:
            assert slot.adapter is not None
            self._drop_unused(slot.adapter)
            self._slot_changed()

    def release(self, adapter: Adapter, *, started: bool) -> None:
        """A request has ended."""
        adapter.users -= 1
        adapter.started -= started
        assert 0 <= adapter.started <= adapter.users
        if not adapter.users:
            self._wanted.pop(adapter, None)
            self._unpromise(adapter)
            self._drop_unused(adapter)
        if not adapter.started:
            self._evict()

    # ---- what has come -------------------------------------------------------------------------

    def on_loaded(self, wake: Callable[[], None]) -> None:
        """Call wake(), from any thread, when `poll` has something to do."""
        self._wake = wake

    def has_news(self) -> bool:
        return not self._done.empty() or bool(self._news)

    def poll(self) -> list[Adapter]:
        """Take over what the threads have done. Returns the adapters whose requests should ask
        again."""
        while not self._done.empty():
            self._done.get()()
        news, self._news = self._news, []
        return news

    # ---- tiers ---------------------------------------------------------------------------------

    def _run(
        self,
        executor: Executor,
        work: Callable[[], T],
        then: Callable[[T | AdapterError], None],
    ) -> None:
        """work() on the executor, then `then` with what came of it, here."""

        def job() -> None:
            result: T | AdapterError
            try:
                result = work()
            except AdapterError as error:
                result = error
            except Exception as error:  # whatever a damaged file or a full device brings up
                logger.exception("an adapter could not be loaded")
                result = AdapterError(f"it could not be loaded: {type(error).__name__}: {error}")
            self._done.put(lambda: then(result))
            self._wake()

        executor.submit(job)

    def _read(self, adapter: Adapter) -> None:
        if adapter.weights is None and not adapter.reading:
            adapter.reading = True
            self._reading += 1
            self.reads += 1
            path, stamp = adapter.path, adapter.stamp

            def work() -> Loaded:
                loaded = self._loader.read(path)
                if loaded.described.stamp != stamp:
                    raise AdapterError(
                        f"the files of adapter {adapter.info.name} have changed since it was "
                        "added; add it again",
                        code="adapter_changed",
                    )
                return loaded

            self._run(self._disk, work, lambda result: self._was_read(adapter, result))

    def _was_read(self, adapter: Adapter, result: Loaded | AdapterError) -> None:
        adapter.reading = False
        self._reading -= 1
        if isinstance(result, Loaded) and adapter.digest not in ("", result.digest):
            result = AdapterError(
                f"the files of adapter {adapter.info.name} hold something else than when it was "
                "added; add it again",
                code="adapter_changed",
            )
        if isinstance(result, AdapterError):
            adapter.error, adapter.failed_at = result, time.monotonic()
            self._wanted.pop(adapter, None)
            self._unpromise(adapter)
            self._news.append(adapter)
            return
        self._keep(adapter, result)
        if adapter in self._wanted:
            self._advance(adapter)

    def _keep(self, adapter: Adapter, loaded: Loaded) -> None:
        adapter.weights, adapter.digest = loaded.weights, loaded.digest
        adapter.host_bytes = loaded.host_bytes
        described, info = loaded.described, adapter.info
        adapter.info = AdapterInfo(
            info.name,
            info.revision,
            described.kind,
            described.rank,
            described.num_bytes,
            described.targets,
        )
        self.host_bytes += loaded.host_bytes
        self._host[adapter] = None
        self._evict()

    def _evict(self) -> None:
        """Host memory back to its budget. The newest stays, or nothing could ever be uploaded."""
        newest = next(reversed(self._host), None)
        for adapter in list(self._host):
            if self.host_bytes <= self._host_budget:
                return
            uploading = adapter.slot is not None and not adapter.slot.ready
            if adapter is newest or adapter.started or uploading or adapter in self._wanted:
                continue
            if not (adapter.retired and adapter.users):  # such could not be read again
                self._forget_weights(adapter)

    def _forget_weights(self, adapter: Adapter) -> None:
        if adapter.weights is not None:
            self.host_bytes -= adapter.host_bytes
            adapter.weights = None
            del self._host[adapter]

    def _advance(self, adapter: Adapter) -> None:
        """The next thing to do for one that waits for a slot."""
        if adapter.weights is None:
            self._read(adapter)
            return
        slot = self._free_slot(adapter)
        if slot is not None:
            self._upload(adapter, slot)
        elif not any(slot.promised is adapter for slot in self._slots):
            self._promise(adapter)

    def _free_slot(self, adapter: Adapter) -> _Slot | None:
        """One that nobody runs on: empty, promised to this one, or the least recently used."""
        free = [
            slot
            for slot in self._slots
            if not slot.pins
            and (slot.ready or slot.adapter is None)
            and slot.promised in (None, adapter)
        ]
        return min(free, key=lambda s: (s.adapter is not None, s.used), default=None)

    def _promise(self, adapter: Adapter) -> None:
        """Half of the slots at most are promised, so that the others keep their requests going."""
        open_slots = [slot for slot in self._slots if slot.promised is None and slot.ready]
        if len(self._slots) - len(open_slots) < max(1, len(self._slots) // 2):
            victim = min(open_slots, key=lambda s: (s.pins, s.used), default=None)
            if victim is not None:
                victim.promised = adapter

    def _unpromise(self, adapter: Adapter) -> None:
        for slot in self._slots:
            if slot.promised is adapter:
                slot.promised = None
                if slot.adapter is not None:
                    self._news.append(slot.adapter)

    def _slot_changed(self) -> None:
        """Slots that are free go to those they are promised to. All others who wait shall ask
        again, in the order of service, so that nobody takes a slot from one who comes before."""
        for slot in self._slots:
            if slot.promised is not None and not slot.pins:
                self._advance(slot.promised)
        self._news += self._wanted

    def _upload(self, adapter: Adapter, slot: _Slot) -> None:
        assert adapter.slot is None and not slot.pins
        del self._wanted[adapter]
        self._unpromise(adapter)
        if slot.adapter is not None:
            slot.adapter.slot = None
        slot.adapter, slot.ready, adapter.slot = adapter, False, slot
        self._touch(slot)
        self._host.move_to_end(adapter)
        self.loads += 1
        weights = adapter.weights
        self._run(
            self._device,
            lambda: self._loader.upload(weights, slot.index),
            lambda error: self._uploaded(adapter, slot, error),
        )

    def _uploaded(self, adapter: Adapter, slot: _Slot, error: AdapterError | None) -> None:
        slot.ready = True
        if error is not None:
            slot.adapter = adapter.slot = None
            slot.ready = False
            adapter.error, adapter.failed_at = error, time.monotonic()
        self._news.append(adapter)
        self._drop_unused(adapter)
        self._evict()
        self._slot_changed()

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.used = self._clock

    def _retire(self, adapter: Adapter) -> None:
        adapter.retired = True
        self._drop_unused(adapter)

    def _drop_unused(self, adapter: Adapter) -> None:
        """Of a retired adapter nothing is kept once its last request has ended."""
        if not adapter.retired or adapter.users:
            return
        self._names.forget(adapter.info.name, adapter.info.revision, adapter)
        slot = adapter.slot
        if slot is not None:
            if slot.pins or not slot.ready:
                return  # called again when it is
            slot.adapter, slot.ready, adapter.slot = None, False, None
        self._forget_weights(adapter)
        if slot is not None:
            self._slot_changed()

    # ---- looking at it -------------------------------------------------------------------------

    @property
    def resident(self) -> list[str]:
        """Names of the adapters on the device, the last used first."""
        slots = [s for s in self._slots if s.adapter is not None and s.ready]
        slots.sort(key=lambda s: -s.used)
        return [s.adapter.info.name for s in slots if s.adapter is not None]

    def check_integrity(self, pins: dict[int, int], users: dict[Adapter, int]) -> None:
        """pins: slot index -> rows that use it; users: adapter -> requests that have not ended."""
        for slot in self._slots:
            assert slot.pins == pins.get(slot.index, 0), f"slot {slot.index}: pins are lost"
            assert slot.adapter is None or slot.adapter.slot is slot
            assert slot.adapter is not None or not (slot.ready or slot.pins)
        for adapter, count in users.items():
            assert adapter.users == count, f"adapter {adapter.key}: users are lost"
        assert self.host_bytes == sum(adapter.host_bytes for adapter in self._host)


def _same(adapter: Adapter, info: AdapterInfo, described: Described, digest: str) -> bool:
    """Whether what is added is known already: of one revision, and of equal bytes as far as they
    were read."""
    if adapter.info.revision != info.revision:
        return False
    return adapter.digest == digest if adapter.digest else adapter.stamp == described.stamp
