"""Large pages for the memory of weights."""

import sys

import pytest
import torch

from engine.weights.huge_pages import collapse


@pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
def test_collapse_keeps_memory_as_it_is() -> None:
    """Asking for large pages must not change, drop or miss what stands in memory."""
    numbers = torch.arange(16 << 20, dtype=torch.int32)  # 64 MiB
    before = numbers.sum()
    assert collapse() >= numbers.nbytes - (4 << 20)
    assert numbers.sum() == before
