"""TokenPool: free KV blocks as a mask on the device, searched by its cumulative sum.

This is LightLLM's memory manager: it takes contiguous blocks if there are any, else the first free
ones. The engine needs block ids on the host, so that taking blocks waits for a few small kernels on
a separate stream. The default, a list on the host, has no such wait. This class exists for
comparison.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class TokenPool:
    """The implementation of block_manager.py's `FreeBlocks` on the device."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self._free = torch.ones(num_blocks, dtype=torch.bool, device=device)
        self._index = torch.arange(num_blocks + 1, device=device)
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._count = num_blocks
        self._returned: list[int] = []  # blocks freed since `take_blocks` was last called

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        ids: list[int] = self._free.nonzero().flatten().tolist()
        return iter(ids + self._returned)

    def append(self, block: int, /) -> None:
        self._returned.append(block)
        self._count += 1

    def extend(self, blocks: Iterable[int], /) -> None:
        for block in blocks:
            self.append(block)

    def take_blocks(self, count: int) -> list[int]:
        """Remove and return `count` free blocks; see `FreeBlocks`.

        Raises RuntimeError if a block was freed twice.
        """
        if not count:
            return []
        assert count <= self._count
        with self._stream_context():
            twice, *blocks = self._take_free_blocks(count).tolist()
        if twice:
            raise RuntimeError("a block was freed twice")
        self._count -= count
        self._returned.clear()
        return blocks

    def _stream_context(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _take_free_blocks(self, count: int) -> Tensor:
        """Return [1 + count]: whether a block was freed twice, then the taken blocks."""
        free, index = self._free, self._index
        returned = torch.tensor(self._returned, dtype=torch.int64).to(free.device)
        twice = free[returned].any()
        free[returned] = True
        total = free.cumsum(0)
        last = len(free) - count + 1
        full = total[count - 1 :] - total[:last] + free[:last] == count
        first = full.int().argmax()  # beginning of the first contiguous run, if there is one
        together = full.index_select(0, first[None])[0]  # full[first] would sync
        apart = torch.searchsorted(total, index[1 : count + 1])  # the n-th free block, n = 1, 2 ..
        blocks = torch.where(together, first + index[:count], apart)
        free[blocks] = False
        return torch.cat((twice[None], blocks))
