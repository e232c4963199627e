"""AdapterStore: all known adapters and the memory tier of each. No torch here.

 disk or object store --read (threads)--> host memory --upload (thread)--> device slot

Adapters from object stores are cached on disk (disk.py). Disk and host memory (host.py) have byte
budgets and drop the least recently used adapter. Host memory also drops adapters without a request
for a day. The device slot (slots.py) with the fewest recent requests is replaced. All methods
belong to the step loop's thread, and `poll` applies the results of other threads. A load never
stalls a step, and only requests that need that adapter wait. Additions and removals of one name are
done in order, without waiting for those of other names, nor for reads that requests began.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from engine.errors import AdapterError
from engine.lora.peft_config import check_name
from engine.lora.tiers.adapter import (
    Adapter,
    AdapterDescription,
    LoadedAdapter,
    Loader,
    NoLoader,
    changed,
    info_of,
)
from engine.lora.tiers.host import HostMemory
from engine.lora.tiers.names import AdapterNames
from engine.lora.tiers.remote import is_remote
from engine.lora.tiers.slots import DeviceSlots, Slot
from engine.messages import AdapterAnswer, AddAdapter, RemoveAdapter

logger = logging.getLogger("manta.engine")

RETRY_SECONDS = 10.0  # seconds for which a failed read is not tried again
# number of threads for disks, and again for object stores, so that a hanging store blocks no disk
READERS = 4
READ_AHEAD = 4  # number of reads in flight above which no read begins in advance

T = TypeVar("T")


class AdapterStore:
    """The adapters that the engine knows, and the memory tier of each.

    max_loras: the number of device slots; with 0 every adapter is refused.
    host_bytes: the budget of host memory; adapters that running requests may need again are kept
        even beyond the budget.
    disk: the executor of reads.
    device: the executor of uploads.
    clock: returns seconds.
    """

    def __init__(
        self,
        loader: Loader,
        max_loras: int,
        host_bytes: int,
        *,
        disk: Executor | None = None,
        device: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._loader = loader
        self._disk = disk or ThreadPoolExecutor(READERS, "adapter-reads")
        self._remote = disk or ThreadPoolExecutor(READERS, "adapter-downloads")
        self._device = device or ThreadPoolExecutor(1, "adapter-uploads")
        self._names: AdapterNames[Adapter] = AdapterNames()
        # name -> queued additions and removals, of which the first is in progress
        self._lines: dict[str, deque[Callable[[], None]]] = {}
        self._slots = DeviceSlots(max_loras)
        self._host = HostMemory(host_bytes, clock)
        # adapters that wait for a slot, in order of their first request
        self._wanted: dict[Adapter, None] = {}
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._news: list[Adapter] = []
        self._answers: list[AdapterAnswer] = []
        self._wake: Callable[[], None] = lambda: None
        self.loads = 0  # number of uploads since the start
        self.reads = 0
        self._reading = 0  # reads in flight

    # ---- names ---------------------------------------------------------------------------------

    def add(self, message: AddAdapter) -> None:
        """Begin to add an adapter; `take_answers` returns the answer later."""

        def work() -> AdapterDescription | LoadedAdapter:
            self._check_enabled()
            check_name(message.name)
            if message.load:
                return self._loader.read(message.path, message.digest)
            return self._loader.describe(message.path, message.digest)

        def then(result: AdapterDescription | LoadedAdapter | AdapterError) -> None:
            self._added(message, result)
            self._next(message.name)

        self._line_up(message.name, lambda: self._run(self._readers(message.path), work, then))

    def _added(
        self, message: AddAdapter, result: AdapterDescription | LoadedAdapter | AdapterError
    ) -> None:
        if isinstance(result, AdapterError):
            answer = AdapterAnswer(message.ticket, None, result.code, result.message)
            self._answers.append(answer)
            return
        loaded = result if isinstance(result, LoadedAdapter) else None
        described = result.described if isinstance(result, LoadedAdapter) else result
        if loaded is not None and message.digest not in ("", loaded.digest):
            error = changed(message.name)
            self._answers.append(AdapterAnswer(message.ticket, None, error.code, error.message))
            return
        digest = loaded.digest if loaded is not None else message.digest or described.stamp
        info = info_of(message.name, message.revision or digest, described)
        before = self._names.get(info.name)
        if before is not None and before.is_same(info, described, digest):
            if loaded is not None or before.path != message.path:
                # a read in flight from the old path is ignored, as it may fail
                before.reading = None
            before.path, before.stamp, before.error = message.path, described.stamp, None
            if loaded is not None and before.weights is None:
                self._keep(before, loaded)
            if before in self._wanted and before.slot is None:
                self._advance(before)
            self._answers.append(AdapterAnswer(message.ticket, before.info))
            return
        adapter = Adapter(info, message.path, described.stamp)
        adapter.digest = message.digest
        self._names.set_current(info.name, info.revision, adapter)
        if before is not None:
            self._retire(before)
        if loaded is not None:
            self._keep(adapter, loaded)
        self._answers.append(AdapterAnswer(message.ticket, info))

    def remove(self, message: RemoveAdapter) -> None:
        """Remove an adapter after all earlier additions and removals of its name."""

        def then() -> None:
            self._removed(message)
            self._next(message.name)

        self._line_up(message.name, lambda: self._later(then))

    def _line_up(self, name: str, begin: Callable[[], None]) -> None:
        """Call begin() once all earlier additions and removals of the name are done.

        The work that begin() starts must end with a call of `_next`.
        """
        line = self._lines.setdefault(name, deque())
        line.append(begin)
        if len(line) == 1:
            begin()

    def _next(self, name: str) -> None:
        line = self._lines[name]
        line.popleft()
        if line:
            line[0]()
        else:
            del self._lines[name]

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
        """Return the adapter of a name or "name@revision". Raises AdapterError."""
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
        """Count an accepted request of the adapter, and begin to read the adapter in advance.

        The read only begins if host memory has room and few other reads are in flight.
        """
        adapter.users += 1
        self._slots.popularity.count(adapter.info.name, self._clock())
        room = self._host.has_room and self._reading < READ_AHEAD
        if adapter.error is None and room:
            self._read(adapter)

    def ask(self, adapter: Adapter) -> bool:
        """Return whether a request may start on the adapter now.

        If not, the adapter is being loaded or waits for a slot. `poll` returns the adapter once the
        request should ask again.
        Raises AdapterError if the adapter cannot be loaded.
        """
        if adapter.error is not None:
            if self._clock() < adapter.failed_at + RETRY_SECONDS:
                raise adapter.error
            adapter.error = None
        slot = adapter.slot
        if slot is None:
            self._wanted[adapter] = None
            self._advance(adapter)
            return False
        if slot.promised is not None:
            # its slot is promised to another adapter, so it waits for a further slot
            self._wanted[adapter] = None
            return False
        if slot.ready:
            self._wanted.pop(adapter, None)
            self._slots.touch(slot)
            self._host.touch(adapter)
        return slot.ready

    def pin(self, adapter: Adapter, *, first: bool) -> int:
        """Start a request on the adapter's slot; return the slot's index.

        first: whether the request starts for the first time, not again after a preemption.
        """
        slot = adapter.slot
        assert slot is not None and slot.ready
        slot.pins += 1
        adapter.started += first
        return slot.index

    def unpin(self, index: int) -> None:
        """Unpin a slot for a row that no step uses any more. index: the slot's index."""
        slot = self._slots[index]
        slot.pins -= 1
        assert slot.pins >= 0
        if not slot.pins:
            assert slot.adapter is not None
            self._drop_unused(slot.adapter)
            self._slot_changed()

    def release(self, adapter: Adapter, *, started: bool) -> None:
        """Count the end of a request of the adapter.

        An adapter without requests no longer waits for a slot, and is dropped if it is retired. If
        none of its requests has started, host memory may evict it.

        started: whether the request has run.
        """
        adapter.users -= 1
        adapter.started -= started
        assert 0 <= adapter.started <= adapter.users
        if not adapter.users:
            self._wanted.pop(adapter, None)
            self._unpromise(adapter)
            self._drop_unused(adapter)
        if not adapter.started:
            self._host.evict(self._wanted)

    # ---- results of threads --------------------------------------------------------------------

    def on_loaded(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, when `poll` has something to do."""
        self._wake = wake

    def has_news(self) -> bool:
        return not self._done.empty() or bool(self._news) or self._host.has_unused

    def poll(self) -> list[Adapter]:
        """Apply the results of threads; return the adapters whose waiting requests should call
        `ask`."""
        while not self._done.empty():
            self._done.get()()
        self._host.drop_unused()
        news, self._news = self._news, []
        return news

    # ---- tiers ---------------------------------------------------------------------------------

    def _run(
        self,
        executor: Executor,
        work: Callable[[], T],
        then: Callable[[T | AdapterError], None],
    ) -> None:
        """Run work() on the executor; a later `poll` calls `then` with its result or error."""

        def job() -> None:
            result: T | AdapterError
            try:
                result = work()
            except AdapterError as error:
                result = error
            except Exception as error:  # a damaged file or a full device may raise any exception
                logger.exception("an adapter could not be loaded")
                result = AdapterError(f"it could not be loaded: {type(error).__name__}: {error}")
            self._later(lambda: then(result))

        executor.submit(job)

    def _later(self, then: Callable[[], None]) -> None:
        """Make the next `poll` call then(). Thread-safe."""
        self._done.put(then)
        self._wake()

    def _readers(self, path: str) -> Executor:
        return self._remote if is_remote(path) else self._disk

    def _read(self, adapter: Adapter) -> None:
        if adapter.weights is None and adapter.reading is None:
            reading = adapter.reading = object()
            self._reading += 1
            self.reads += 1
            path, digest = adapter.path, adapter.digest
            self._run(
                self._readers(path),
                lambda: self._loader.read(path, digest),
                lambda result: self._was_read(adapter, reading, result),
            )

    def _was_read(
        self, adapter: Adapter, reading: object, result: LoadedAdapter | AdapterError
    ) -> None:
        self._reading -= 1
        if adapter.reading is not reading:
            return  # an outdated result, as the adapter was added again meanwhile
        adapter.reading = None
        if isinstance(result, LoadedAdapter):
            # Digests are exact, but may be unknown before the first read; then stamps are compared.
            before, now = (
                (adapter.digest, result.digest)
                if adapter.digest
                else (adapter.stamp, result.described.stamp)
            )
            if before != now:
                result = changed(adapter.info.name)
        if isinstance(result, AdapterError):
            adapter.error, adapter.failed_at = result, self._clock()
            self._wanted.pop(adapter, None)
            self._unpromise(adapter)
            self._news.append(adapter)
            return
        self._keep(adapter, result)
        if adapter in self._wanted and adapter.slot is None:
            self._advance(adapter)
        self._drop_unused(adapter)

    def _keep(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        self._host.keep(adapter, loaded)
        adapter.info = info_of(adapter.info.name, adapter.info.revision, loaded.described)
        self._host.evict(self._wanted)

    def _advance(self, adapter: Adapter) -> None:
        """Continue with an adapter that waits: begin a read or an upload, or promise a slot."""
        if adapter.weights is None:
            self._read(adapter)
            return
        slot = self._slots.free(adapter)
        if slot is not None:
            self._upload(adapter, slot)
        else:
            self._slots.promise(adapter)

    def _unpromise(self, adapter: Adapter) -> None:
        self._news += self._slots.unpromise(adapter)

    def _slot_changed(self) -> None:
        """Give free slots to the adapters that they are promised to.

        Requests for other waiting adapters ask again, in their order, so that none overtakes an
        earlier one.
        """
        for adapter in self._slots.due():
            self._advance(adapter)
        self._news += self._wanted

    def _upload(self, adapter: Adapter, slot: Slot) -> None:
        del self._wanted[adapter]
        self._unpromise(adapter)
        self._slots.give(slot, adapter)
        self._host.touch(adapter)
        self.loads += 1
        weights = adapter.weights
        self._run(
            self._device,
            lambda: self._loader.upload(weights, slot.index),
            lambda error: self._uploaded(adapter, slot, error),
        )

    def _uploaded(self, adapter: Adapter, slot: Slot, error: AdapterError | None) -> None:
        slot.ready = True
        if error is not None:
            self._slots.empty_slot(slot)
            adapter.error, adapter.failed_at = error, self._clock()
        self._news.append(adapter)
        self._drop_unused(adapter)
        self._host.evict(self._wanted)
        self._slot_changed()

    def _retire(self, adapter: Adapter) -> None:
        adapter.retired = True
        self._drop_unused(adapter)

    def _drop_unused(self, adapter: Adapter) -> None:
        """Drop a retired adapter from all tiers once its last request has ended."""
        if not adapter.retired or adapter.users:
            return
        self._names.forget(adapter.info.name, adapter.info.revision, adapter)
        slot = adapter.slot
        if slot is not None:
            if slot.pins or not slot.ready:
                return  # called again when the slot is unused
            self._slots.empty_slot(slot)
        self._host.forget(adapter)
        if slot is not None:
            self._slot_changed()

    # ---- inspection ----------------------------------------------------------------------------

    @property
    def resident(self) -> list[str]:
        """The names of the adapters on the device; the one to be evicted next is last."""
        return self._slots.resident

    @property
    def host_bytes(self) -> int:
        """The bytes of the adapters in host memory."""
        return self._host.num_bytes

    def check_integrity(self, pins: dict[int, int], users: dict[Adapter, int]) -> None:
        """Assert that the counts of all tiers are consistent.

        pins: slot index -> number of rows that use it.
        users: adapter -> number of requests that have not ended.
        """
        self._slots.check_integrity(pins)
        self._host.check_integrity()
        for adapter, count in users.items():
            assert adapter.users == count, f"adapter {adapter.key}: users are lost"
