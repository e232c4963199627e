"""AddressRange on a driver that only counts: what it calls, and what is left after an error."""

import ctypes
from typing import Any

import pytest
import torch

from kernels import device_memory
from kernels.device_memory import AddressRange

GRANULE, BASE = 2 << 20, 1 << 40
DEVICE = torch.device("cuda", 0)


class Driver:
    """A driver of CUDA with a map of addresses and no memory.

    fail: name of a call -> (successful calls before, CUresult).
    """

    def __init__(self) -> None:
        self.fail: dict[str, tuple[int, int]] = {}
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            before, code = self.fail.get(name, (1, 0))
            if code and not before:
                return code
            self.fail[name] = before - 1, code
            method = getattr(self, f"_{name}")
            return int(method(*arguments) or 0)

        return call

    def _cuMemGetAllocationGranularity(self, step: Any, properties: Any, which: int) -> None:
        assert which == 1
        step._obj.value = GRANULE

    def _cuMemAddressReserve(self, address: Any, size: Any, *options: Any) -> None:
        address._obj.value = BASE
        self.reserved[BASE] = size.value

    def _cuMemAddressFree(self, address: Any, size: Any) -> None:
        assert not self.mapped, "addresses go before their pages"
        assert self.reserved.pop(address.value) == size.value

    def _cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> None:
        assert size.value % GRANULE == 0
        handle._obj.value = len(self.handles) + 100
        self.handles[handle._obj.value] = size.value

    def _cuMemRelease(self, handle: Any) -> None:
        del self.handles[handle.value]

    def _cuMemMap(self, at: Any, size: Any, offset: Any, handle: Any, flags: Any) -> None:
        assert self.handles[handle.value] == size.value and at.value not in self.mapped
        self.mapped[at.value] = size.value

    def _cuMemSetAccess(self, at: Any, size: Any, access: Any, count: Any) -> None:
        assert sum(self.mapped.values()) >= size.value
        self.accessible[at.value] = size.value

    def _cuMemUnmap(self, at: Any, size: Any) -> None:
        assert self.mapped.pop(at.value) == size.value, "a part of a mapping goes"

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_NOT_PERMITTED"

    def _cuGetErrorString(self, code: int, text: Any) -> None:
        text._obj.value = b"operation not permitted"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    own = Driver()
    monkeypatch.setattr(device_memory, "_driver", lambda: own)
    return own


def test_chunks_come_and_go(driver: Driver) -> None:
    """Bug: a handle is left, so that its memory is never free; a chunk is unmapped in parts."""
    addresses = AddressRange(100 * GRANULE - 5, DEVICE)
    assert addresses.size == 100 * GRANULE and addresses.granule == GRANULE
    assert addresses.__cuda_array_interface__["data"] == (BASE, False)
    addresses.map(4 * GRANULE, 2 * GRANULE, 3)
    assert driver.mapped == {BASE + at * GRANULE: 2 * GRANULE for at in (4, 6, 8)}
    assert driver.accessible == {BASE + 4 * GRANULE: 6 * GRANULE} and not driver.handles
    addresses.unmap(6 * GRANULE, 2 * GRANULE, 2)
    assert driver.mapped == {BASE + 4 * GRANULE: 2 * GRANULE}
    addresses.unmap(4 * GRANULE, 2 * GRANULE)
    addresses.close()
    assert not driver.reserved


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_is_named_and_undone(driver: Driver, name: str) -> None:
    """Bug: chunks of a growth that failed stay mapped; an error of which only a number is told."""
    addresses = AddressRange(100 * GRANULE, DEVICE)
    for code, error in ((800, RuntimeError), (2, torch.OutOfMemoryError)):
        driver.fail[name] = (0 if name == "cuMemSetAccess" else 2, code)
        with pytest.raises(error, match=name) as raised:
            addresses.map(0, GRANULE, 5)
        assert not driver.mapped and not driver.handles
        if code != 2:
            assert "CUDA_ERROR_NOT_PERMITTED" in str(raised.value) and "800" in str(raised.value)
    driver.fail.clear()
    addresses.map(0, GRANULE, 5)
    assert len(driver.mapped) == 5


def test_a_driver_without_a_granularity_is_told(driver: Driver) -> None:
    """Bug: a division by zero in a start."""
    driver._cuMemGetAllocationGranularity = lambda *arguments: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="granularity"):
        AddressRange(GRANULE, DEVICE)
    assert ctypes.sizeof(device_memory._Properties) == 32
