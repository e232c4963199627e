"""BlockPages: which bytes have pages as blocks grow and shrink, and what lies there."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from engine.batch import OutOfMemory
from engine.runner.caches.block_pages import BlockPages, HostRange

CPU = torch.device("cpu")
GRANULE = 64


class FakeAddresses:
    """A fake address range that records which granules have pages.

    room: the most bytes of pages.
    """

    all: ClassVar[list["FakeAddresses"]] = []
    room = 1 << 30
    granule = GRANULE

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = -(-size // GRANULE) * GRANULE
        self.bytes: Tensor = torch.zeros(self.size, dtype=torch.uint8)
        self.chunks: dict[int, int] = {}  # offset -> bytes
        self.all.append(self)

    def map(self, offset: int, chunk: int, count: int) -> None:
        new = {offset + index * chunk: chunk for index in range(count)}
        assert not new.keys() & self.chunks.keys(), "pages are mapped over others"
        assert offset % GRANULE == chunk % GRANULE == 0
        if self.mapped + chunk * count > self.room:
            raise torch.OutOfMemoryError
        self.chunks |= new

    def unmap(self, offset: int, chunk: int, count: int) -> None:
        for index in range(count):
            assert self.chunks.pop(offset + index * chunk) == chunk, "a part of a mapping goes"

    def close(self) -> None:
        self.all.remove(self)

    @property
    def mapped(self) -> int:
        return sum(self.chunks.values())


@pytest.fixture(autouse=True)
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeAddresses, "all", [])
    monkeypatch.setattr(FakeAddresses, "room", 1 << 30)


def pages_of(widths: Sequence[int], most: int = 100, step: int = 512) -> BlockPages:
    """Return the pages of a cache with 4 planes for each width. widths: bytes of a block in a
    plane."""
    pages = BlockPages(CPU, most, FakeAddresses, step)
    for width in widths:
        pages.storage((2, 2, most, width), torch.uint8, CPU, 1)
    return pages


@pytest.mark.parametrize("widths", [(64,), (96, 40), (200, 16), (7,)])
def test_blocks_have_pages_and_no_more_than_are_counted(widths: tuple[int, ...]) -> None:
    """Bug: the last block has no page in some plane or cache; bytes that no one counts."""
    pages = pages_of(widths)
    for wanted in (1, 5, 30, 31, 100, 60, 61, 3, 1):
        blocks = pages.rounded(wanted)
        assert wanted <= blocks <= 100 and pages.rounded(blocks) == blocks
        if pages.num_bytes(wanted) >= pages.mapped_bytes:
            pages.grow(wanted)
        else:
            unmap = pages.retract(wanted)
            assert unmap is not None
            unmap()
        assert pages.mapped_bytes == pages.num_bytes(wanted)
        assert pages.mapped_bytes == sum(addresses.mapped for addresses in FakeAddresses.all)
        for addresses, planes in zip(FakeAddresses.all, pages._caches, strict=True):
            for plane in range(4):
                end = plane * planes.stride + blocks * planes.width
                places = range(plane * planes.stride, end, GRANULE)
                covered = {
                    byte
                    for offset, size in addresses.chunks.items()
                    for byte in range(offset, offset + size, GRANULE)
                }
                assert covered.issuperset(place - place % GRANULE for place in places)
    pages.give_all()
    assert pages.mapped_bytes == 0


def test_growth_that_fails_leaves_nothing_behind() -> None:
    """Bug: pages of some planes stay mapped and are mapped again, or are never given back."""
    pages = pages_of((64, 32))
    before = [dict(addresses.chunks) for addresses in FakeAddresses.all]
    FakeAddresses.all[1].room = FakeAddresses.all[1].mapped + 300  # some planes, not all
    with pytest.raises(OutOfMemory):
        pages.grow(50)
    assert [addresses.chunks for addresses in FakeAddresses.all] == before
    assert pages.mapped_bytes == pages.num_bytes(1)
    FakeAddresses.all[1].room = 1 << 30
    pages.grow(50)


def test_no_page_goes_while_copies_read_freed_blocks() -> None:
    """Bug: a store to the host reads memory that is gone."""
    pages = pages_of((64,))
    pages.grow(50)
    pages.copying = lambda: True
    assert pages.retract(2) is None and pages.mapped_bytes == pages.num_bytes(50)


def test_tables_name_no_block_without_pages() -> None:
    """Bug: a tile loads the block that an earlier request of the row had, and the device faults."""
    pages = pages_of((64,))
    pages.grow(100)
    pages.tables = [torch.tensor([[3, 99], [50, 2]], dtype=torch.int32)]
    unmap = pages.retract(40)
    assert unmap is not None and pages.tables[0].tolist() == [[3, 0], [0, 2]]


def test_pages_of_the_cpu_come_back_empty() -> None:
    """Bug: memory that was given back is still taken, or an old request's keys are read."""
    pages = BlockPages(CPU, 1000, step=1)
    storage = pages.storage((1, 2, 1000, 4096), torch.float32, CPU, 1)
    pages.grow(1000)
    storage[:, :, 2:900] = 1.0

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * HostRange.granule

    full = resident()
    unmap = pages.retract(2)
    assert unmap is not None
    unmap()
    assert full - resident() > 20 << 20
    pages.grow(1000)
    assert not storage[:, :, 2:].any()
    assert storage[0, 1].is_contiguous() and storage.shape == (1, 2, 1000, 4096)
