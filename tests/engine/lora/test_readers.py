"""Adapters that are slow to read: who waits for them, and for how long."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import AdapterError
from engine.lora.peft_config import CONFIG_FILE, WEIGHTS_FILE
from engine.lora.tiers import remote
from engine.lora.tiers.adapter import LoadedAdapter
from engine.lora.tiers.disk import DiskCache
from engine.lora.tiers.store import AdapterStore
from engine.messages import AdapterAnswer, AddAdapter, RemoveAdapter
from tests.fakes import Inline, MemoryLoader, make_store

SECONDS = 30  # that a test waits for what should come at once


class Hanging(MemoryLoader):
    """A loader whose reads of the path `hung` return once `release` is set."""

    def __init__(self, hung: str) -> None:
        self._hung = hung
        self.begun, self.release = threading.Event(), threading.Event()

    def read(self, path: str, digest: str = "") -> LoadedAdapter:
        if path == self._hung:
            self.begun.set()
            assert self.release.wait(SECONDS)
            raise AdapterError("it is gone")
        return super().read(path, digest)


class Loop:
    """A stand-in for the step loop, which polls a store whenever it has news."""

    def __init__(self, store: AdapterStore) -> None:
        self.store = store
        self._news = threading.Event()
        self.answers: list[AdapterAnswer] = []
        store.on_loaded(self._news.set)

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self._news.wait(SECONDS), "it waits for the read that hangs"
            self._news.clear()
            self.store.poll()
            self.answers += self.store.take_answers()

    def answer(self, message: AddAdapter | RemoveAdapter) -> AdapterAnswer:
        ask = self.store.add if isinstance(message, AddAdapter) else self.store.remove
        ask(message)  # type: ignore[arg-type]
        self.until(lambda: any(a.ticket == message.ticket for a in self.answers))
        return next(a for a in self.answers if a.ticket == message.ticket)


def test_a_read_that_hangs_holds_up_nobody_else() -> None:
    """Bug: with one thread for all reads, a slow object store keeps other adapters from their
    requests, and adapters from being added and removed."""
    loader = Hanging("1")
    store = AdapterStore(loader, 4, 1 << 30)
    loop = Loop(store)
    try:
        for ticket, (name, path) in enumerate([("a", "1"), ("b", "2")]):
            assert loop.answer(AddAdapter(ticket, name, path, load=False)).info is not None
        assert not store.ask(store.find("a"))
        assert loader.begun.wait(SECONDS)
        loop.until(lambda: store.ask(store.find("b")))
        assert loop.answer(AddAdapter(2, "c", "3")).info is not None
        loop.until(lambda: store.ask(store.find("c")))
        assert loop.answer(RemoveAdapter(3, "c")).info is not None
        hung = store.find("a")
        assert loop.answer(AddAdapter(4, "a", "4")).info is not None
        loop.until(lambda: store.ask(store.find("a")))
        assert hung.reading is not None and store.host_bytes == 2 + 4
    finally:
        loader.release.set()
    loop.until(lambda: hung.reading is None)
    assert store.ask(store.find("a")) and store.host_bytes == 2 + 4


def test_what_is_asked_for_one_name_is_done_in_order() -> None:
    """Bug: of two additions of a name the first to be read is replaced by the older one, or a
    removal overtakes the addition before it, and the adapter stays."""
    disk = Inline(hold=True)
    store = make_store(disk=disk)
    for ticket, path in enumerate(("1", "2")):
        store.add(AddAdapter(ticket, "a", path))
    store.remove(RemoveAdapter(2, "a", "2"))
    store.add(AddAdapter(3, "a", "it is broken"))
    store.add(AddAdapter(4, "b", "1"))
    assert len(disk.held) == 2, "one of each name"
    disk.held.reverse()
    answers = []
    for _ in range(4):
        disk.release()
        store.poll()
        answers += store.take_answers()
    assert [answer.ticket for answer in answers] == [4, 0, 1, 2, 3]
    assert [answer.info is not None for answer in answers] == [True] * 4 + [False]
    assert store.host_bytes == 1 and not store._lines
    store.remove(RemoveAdapter(5, "b"))
    assert store.has_news(), "the loop takes it over, though no thread has done anything"


@pytest.mark.parametrize("load", [True, False])
def test_added_again_from_another_place_while_the_read_hangs(load: bool) -> None:
    """Bug: what was begun at the old place fails the requests after all, or they wait for it."""
    disk = Inline(hold=True)
    store = make_store("a", disk=disk)
    adapter = store.find("a")
    adapter.path = "it is gone"
    store.claim(adapter)
    assert not store.ask(adapter)
    (hung,) = disk.held
    disk.held.clear()
    store.add(AddAdapter(1, "a", "1", load=load))
    while disk.held or store.has_news():
        disk.release()
        store.poll()
    assert store.find("a") is adapter and store.ask(adapter)
    hung()
    store.poll()
    assert adapter.error is None and store.ask(adapter) and store.host_bytes == 1


@pytest.mark.parametrize("method", ["info", "get_file"])
def test_an_object_store_that_hangs(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: requests for its adapter wait without end and take a thread each; or what it delivers
    too late stays on the disk."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        store.pipe(f"/adapters/slow/{name}", b"{}")
    release = threading.Event()
    right = getattr(type(store), method)

    def hangs(*args: Any, **options: Any) -> Any:
        assert release.wait(SECONDS)
        return right(*args, **options)

    monkeypatch.setattr(type(store), method, hangs)
    monkeypatch.setattr(remote, "MAX_SECONDS", 0.1)
    disk = DiskCache(str(tmp_path))
    before = set(threading.enumerate())
    try:
        with (
            pytest.raises(AdapterError, match=r"memory://adapters/slow: .* 0\.1 s.* local folder"),
            remote.fetched("memory://adapters/slow", disk.open(), weights=True),
        ):
            pass
    finally:
        release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(SECONDS)
    assert not list(disk.folder.iterdir())
