"""Regions: free blocks as gaps between regions of consecutive blocks, each taken by first fit.

OpenPPL and liteqwen keep KV memory like this: a request has one region from its start to its end,
as long as it may ever become. Attention then needs no block table. But no other request can use the
unused rest of a region, and gaps may be too small although enough blocks are free in all.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator


class Regions:
    """An implementation of block_manager.py's `FreeBlocks` that gives consecutive blocks only."""

    def __init__(self, num_blocks: int) -> None:
        # Ascending, disjoint, and never adjacent: (first block, block behind the last).
        self._gaps = [(0, num_blocks)] if num_blocks else []
        self._count = num_blocks

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for begin, end in self._gaps:
            yield from range(begin, end)

    @property
    def largest(self) -> int:
        """The number of blocks of the largest gap, which is the longest region that can be
        taken."""
        return max((end - begin for begin, end in self._gaps), default=0)

    def take_blocks(self, count: int) -> list[int]:
        """Remove and return `count` <= largest consecutive blocks, from the first gap with them."""
        if not count:
            return []
        for index, (begin, end) in enumerate(self._gaps):
            if end - begin >= count:
                self._gaps[index : index + 1] = [(begin + count, end)] * (end - begin > count)
                self._count -= count
                return list(range(begin, begin + count))
        raise AssertionError(f"no gap has {count} blocks, the largest has {self.largest}")

    def append(self, block: int) -> None:
        """Free a block, and merge it with adjacent gaps."""
        index = bisect_left(self._gaps, (block, block))
        begin, end = block, block + 1
        first, last = index, index
        if index and self._gaps[index - 1][1] >= block:
            begin, before_end = self._gaps[index - 1]
            assert before_end == block, f"block {block} was freed twice"
            first = index - 1
        if index < len(self._gaps) and self._gaps[index][0] <= end:
            after_begin, end = self._gaps[index]
            assert after_begin == block + 1, f"block {block} was freed twice"
            last = index + 1
        self._gaps[first:last] = [(begin, end)]
        self._count += 1

    def extend(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.append(block)
