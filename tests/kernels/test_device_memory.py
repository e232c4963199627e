"""Regions of device memory that are given back and taken again."""

import pytest
import torch

from kernels.device_memory import Region

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]
SIZE = 64 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_pages_go_and_come_back_under_the_same_address(device: torch.device) -> None:
    """Bug: memory that stays taken; a graph that reads where the tensor was."""
    region = Region(SIZE, device)
    numbers = region.bytes.view(torch.float32)
    numbers.fill_(3.0)
    result = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(numbers.sum())
    graph.replay()
    torch.cuda.synchronize()
    address, count = numbers.data_ptr(), numbers.numel()
    assert result.item() == 3.0 * count
    for value in (1.0, 2.0):
        free = torch.cuda.mem_get_info(device)[0]
        region.give_pages()
        assert torch.cuda.mem_get_info(device)[0] - free >= SIZE
        region.take_pages()
        assert numbers.data_ptr() == address
        numbers.fill_(value)
        graph.replay()
        assert result.item() == value * count
    free = torch.cuda.mem_get_info(device)[0]
    del numbers
    region.close()
    assert torch.cuda.mem_get_info(device)[0] - free >= SIZE


def test_a_device_that_is_full_says_so(device: torch.device) -> None:
    """Bug: torch's callers do not recognise the error, or the region keeps what it did not get."""
    total = torch.cuda.mem_get_info(device)[1]
    with pytest.raises(torch.OutOfMemoryError):
        Region(2 * total, device)
    region = Region(SIZE, device)
    region.bytes.fill_(1)
    assert region.bytes.sum().item() == region.size
    region.close()
