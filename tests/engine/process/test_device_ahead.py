"""A start opens the GPU on a thread beside its imports, and does without that where it fails."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.engine_config import EngineConfig
from engine.process import device_ahead
from engine.process.device_ahead import open_context, prepare_device


class _Driver:
    """A stand-in for libcuda, which records the device whose context is retained.

    status: what `cuInit` returns.
    """

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.retained: list[int] = []

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.retained.append(device.value)
        return 0


def test_the_context_is_that_of_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a rank opens a context of half a gigabyte on another rank's GPU."""
    driver = _Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert open_context(3)
    assert driver.retained == [3]


def test_a_machine_without_a_gpu_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an engine on a CPU ends because there is no driver."""

    def missing(name: str) -> None:
        raise OSError(name)

    for library in (missing, lambda name: _Driver(status=100)):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert not open_context(0)


def test_which_device_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an engine with `device: cpu` takes memory of a GPU; a second node's ranks count on."""
    prepared: list[int] = []

    class Started:
        def __init__(self, target: Any, args: tuple[int], **options: Any) -> None:
            self.number = args[0]

        def start(self) -> None:
            prepared.append(self.number)

    monkeypatch.setattr(device_ahead, "Thread", Started)
    prepare_device(EngineConfig(model="m", device="cpu"), 0)
    assert not prepared
    prepare_device(EngineConfig(model="m"), 0)
    config: Any = SimpleNamespace(device="auto", ranks_per_node=4)
    prepare_device(config, 6)
    assert prepared == [0, 2]
