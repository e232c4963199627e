"""CudaCopies without a GPU: the order of copies, and when loads should end, with fake events."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.runner.caches import cuda_copies
from engine.runner.caches.cuda_copies import CudaCopies
from engine.runner.caches.host_slots import HostSlots

BLOCKS, BYTES = 128, 4 << 20


class FakeStream:
    """A CUDA stream that records what it has to wait for. `done` events of all streams have ended.

    waits: the events for which its later work waits.
    """

    cuda_stream = 0

    def __init__(self, *_: Any) -> None:
        self.waits: list[FakeEvent] = []

    def wait_event(self, event: "FakeEvent") -> None:
        self.waits.append(event)

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeEvent:
    """A CUDA event, which has ended if its number is at most that of `ended`."""

    count = 0
    ended = 1 << 60

    def __init__(self, **_: Any) -> None:
        self.number = 0

    def record(self, stream: Any) -> None:
        FakeEvent.count += 1
        self.number = FakeEvent.count

    def query(self) -> bool:
        return self.number <= FakeEvent.ended

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1.0


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaCopies]:
    """Return copies of 128 blocks, each of 4 MiB that are not there."""
    current = FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_copies, "copy_rows", lambda *_: None)
    monkeypatch.setattr(FakeEvent, "ended", 1 << 60)
    storage = torch.zeros(1, BLOCKS, 4, dtype=torch.uint8)
    slots = HostSlots([lambda: storage], BLOCKS, torch.device("cpu"))
    slots.num_bytes = BYTES
    yield CudaCopies(slots, None, 0, torch.device("cpu"), after_steps=False)


def test_the_end_of_a_load_is_seen_by_its_pieces(copies: CudaCopies) -> None:
    """Bugs: a load is expected to end before it has begun, or too early by the part that is not
    copied; a load that failed is waited for; a load is done with its first piece."""
    rate = copies.load_rate
    assert rate == 32 * BYTES / 0.001, "a piece of 32 blocks in a millisecond"
    FakeEvent.ended = FakeEvent.count
    assert copies.load(7, [(slot, slot) for slot in range(96)])
    assert copies.ending() == {}
    FakeEvent.ended += 1  # the first piece has begun
    assert copies.ending() == {7: pytest.approx(0.003)}
    assert copies.load(8, [(slot, slot) for slot in range(96, 100)])
    assert copies.ending().keys() == {7}, "what the second one waits for is not known"
    FakeEvent.ended += 3  # of the first load two pieces are done
    assert copies.ending() == {7: pytest.approx(0.001)}
    assert copies.finished() == []
    FakeEvent.ended = FakeEvent.count
    assert copies.finished() == [(7, True), (8, True)] and copies.ending() == {}
    copies._lost = frozenset([5])
    assert not copies.load(9, [(5, 5)])
    assert copies.ending() == {} and copies.finished() == []
    FakeEvent.ended = FakeEvent.count
    assert copies.finished() == [(9, False)]


def test_a_store_waits_for_the_load_of_its_blocks(copies: CudaCopies) -> None:
    """Bug: a request that started before its load has ended leaves at once, and blocks are stored
    that are not loaded yet."""
    loads: Any = copies._load_stream
    loads.waits.clear()  # those of the first measurement
    copies.load(1, [(slot, slot) for slot in range(64)])
    first, second = copies._loads
    stream: Any = copies._store_stream
    assert copies.store([(3, 100)]) and stream.waits == [first.done]
    assert copies.store([(70, 101)]) and stream.waits == [first.done]
    # and a load waits for the store of its slot
    copies.load(2, [(101, 90)])
    assert loads.waits == [copies._stores[-1].done] and second.last
