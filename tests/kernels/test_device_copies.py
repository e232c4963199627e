"""Copies of rows between device addresses, in the interpreter and on a GPU."""

import numpy as np
import pytest
import torch

from kernels.device_copies import copy_device_rows

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("width", [4, 36, 64, 16 * 640], ids=lambda width: f"{width} bytes")
def test_blocks_there_and_back(width: int) -> None:
    """Bugs: a row of another block; the last bytes of a row that is no multiple of a vector; bytes
    beside a row that are overwritten."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stream = torch.cuda.current_stream() if device.type == "cuda" else None
    rows, blocks, slots = 3, 5, 4
    pool = torch.randint(0, 256, (rows, blocks, width), dtype=torch.uint8, device=device)
    slot_memory = torch.zeros(slots, rows * width, dtype=torch.uint8, device=device)
    pairs = [(4, 0), (1, 3)]  # (block, slot)
    first, pitch = pool.data_ptr(), pool.stride(0)
    blocks_at = [first + block * width for block, _ in pairs]
    slots_at = [slot_memory[slot].data_ptr() for _, slot in pairs]
    copy_device_rows(np.array([slots_at, blocks_at]).T, width, pitch, width, rows, stream)
    assert torch.equal(slot_memory[[0, 3]].view(2, rows, width), pool[:, [4, 1]].transpose(0, 1))
    assert not slot_memory[[1, 2]].any()
    before = pool.clone()
    pool[:, [4, 1]] = 0
    copy_device_rows(np.array([blocks_at, slots_at]).T, pitch, width, width, rows, stream)
    assert torch.equal(pool, before)
