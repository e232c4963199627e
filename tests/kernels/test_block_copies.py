"""The copies of blocks by CUDA's driver, with a driver that copies on the CPU at once."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels import block_copies
from kernels.block_copies import MAX_PITCH, copy_rows

ROWS, BLOCKS, WIDTH = 3, 5, 8


def _copy_2d(record: Any, stream: Any) -> int:
    copy = record._obj
    for row in range(copy.height):
        target = copy.target + row * copy.target_pitch
        ctypes.memmove(target, copy.source + row * copy.source_pitch, copy.width)
    return 0


def _copy(target: Any, source: Any, size: Any, stream: Any) -> int:
    ctypes.memmove(target.value, source.value, size.value)
    return 0


@pytest.mark.parametrize("most", [MAX_PITCH, WIDTH])
def test_blocks_and_slots(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a copy has the addresses of the one before, or the pitches are swapped."""
    driver = SimpleNamespace(cuMemcpy2DAsync_v2=_copy_2d, cuMemcpyAsync=_copy)
    monkeypatch.setattr(block_copies, "_driver", lambda: driver)
    monkeypatch.setattr(block_copies, "MAX_PITCH", most)
    pool = np.arange(ROWS * BLOCKS * WIDTH, dtype=np.uint8).reshape(ROWS, BLOCKS, WIDTH)
    host = np.zeros((4, ROWS, WIDTH), np.uint8)
    stored = {2: 3, 0: 1}  # block -> slot
    places = [
        (host[slot].ctypes.data, pool[0, block].ctypes.data) for block, slot in stored.items()
    ]
    copy_rows(places, WIDTH, BLOCKS * WIDTH, WIDTH, ROWS, 0)
    for block, slot in stored.items():
        assert np.array_equal(host[slot], pool[:, block])
    assert not host[0].any() and not host[2].any()
    before = pool.copy()
    copy_rows(
        [(pool[0, 4].ctypes.data, host[1].ctypes.data)], BLOCKS * WIDTH, WIDTH, WIDTH, ROWS, 0
    )
    before[:, 4] = before[:, 0]
    assert np.array_equal(pool, before)


def test_an_error_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a copy that the driver refuses counts as done."""

    def text(code: int, place: Any) -> int:
        place._obj.value = b"invalid argument"
        return 0

    refused = SimpleNamespace(cuMemcpy2DAsync_v2=lambda *_: 1, cuGetErrorString=text)
    monkeypatch.setattr(block_copies, "_driver", lambda: refused)
    with pytest.raises(RuntimeError, match="cuMemcpy2DAsync_v2: invalid argument"):
        copy_rows([(0, 0)], WIDTH, WIDTH, WIDTH, ROWS, 0)
