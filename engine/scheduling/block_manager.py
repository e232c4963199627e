"""BlockManager: which requests use a KV block, and which blocks hold a cached prefix.

A block is in exactly one of three states:

    used        refs > 0        in the tables of `refs` requests; may have a hash
    evictable   refs == 0       keeps a prefix (has a hash); least recently used goes first
    free        refs == 0       holds nothing (no hash)

free + evictable blocks can be allocated. Everything is O(1) a block.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from engine.scheduling.prefix_hash import extend_hashes
from engine.scheduling.request import Request


class FreeBlocks(Protocol):
    """Which blocks are free; all are at first. len() is exact."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def append(self, block: int, /) -> None: ...

    def extend(self, blocks: Iterable[int], /) -> None: ...

    def take(self, count: int) -> list[int]:
        """Remove `count` <= len(self) blocks."""
        ...


class FreeList(list[int]):
    """The block that was freed last is taken first. The default."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(range(num_blocks - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        blocks = self[: -count - 1 : -1]
        del self[len(self) - count :]
        return blocks


class BlockManager:
    """Owns all KV blocks of a device. It knows nothing of steps: the scheduler frees a block when
    no step in flight uses it.

    Blocks enter and leave the prefix cache in two places only, `_register` and `_forget`. Events
    for the router would be sent from there.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        free_blocks: Callable[[int], FreeBlocks] = FreeList,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # of registered blocks
        self._resident: dict[bytes, int] = {}  # hash -> its block
        self._free = free_blocks(num_blocks)
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Take `count` <= num_free blocks, evicting if it must. Their contents are undefined."""
        while len(self._free) < count:
            self.evict()
        blocks, refs = self._free.take(count), self._refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def evict(self) -> None:
        """Forget the least recently used block. Legal when there is an evictable one."""
        block, _ = self._evictable.popitem(last=False)
        self._forget(block)
        self._free.append(block)

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The resident blocks of the longest prefix. Changes nothing: follow with `share`."""
        resident = self._resident
        blocks = []
        for digest in hashes:
            block = resident.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of them no request uses, so that sharing them takes from num_free."""
        return sum(self._refs[block] == 0 for block in blocks)

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """How many of them one request uses, so that freeing them adds to num_free."""
        return sum(self._refs[block] == 1 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more request for each of these resident blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._evictable[block]
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Count one request less for each block of a request's table.

        Blocks with a hash stay matchable until they are evicted. The tail is evicted before the
        head, because a head without its tail is still a prefix.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was freed twice"
            if self._refs[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Remove the blocks of these hashes from the prefix cache, used or not."""
        for digest in hashes:
            block = self._resident.get(digest)
            if block is None:
                continue
            self._forget(block)
            if block in self._evictable:
                del self._evictable[block]
                self._free.append(block)

    def hash_prefix(self, request: Request, count: int) -> list[bytes]:
        """The hashes of its first `count` blocks, whose tokens must be known."""
        extend_hashes(request.hashes, request.root, request.token_ids, self.block_size, count)
        return request.hashes[:count]

    def hash_blocks(self, request: Request, num_computed: int) -> None:
        """Offer the request's full blocks below num_computed tokens to the prefix cache.

        Legal when the step that computes them is scheduled: a request that matches them runs in
        that step or later, and within a step all keys of a layer are written before any is read.
        """
        count = min(num_computed, len(request.token_ids)) // self.block_size
        if count <= request.num_registered or not request.cacheable:
            return
        hashes, blocks = request.hashes, request.blocks
        extend_hashes(hashes, request.root, request.token_ids, self.block_size, count)
        for index in range(request.num_registered, count):
            self._register(hashes[index], blocks[index])
        request.num_registered = count

    def reset(self) -> None:
        """Empty the prefix cache. Used blocks stay in use, but no request matches them any more."""
        for block in list(self._resident.values()):
            self._forget(block)
        self._free.extend(self._evictable)
        self._evictable.clear()

    def _register(self, digest: bytes, block: int) -> None:
        # Two requests may compute the same block at the same time: the first one keeps the hash.
        if digest not in self._resident and self._hashes[block] is None:
            self._resident[digest] = block
            self._hashes[block] = digest

    def _forget(self, block: int) -> None:
        digest = self._hashes[block]
        if digest is not None:
            del self._resident[digest]
            self._hashes[block] = None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants. tables: the block tables of all requests that use blocks."""
        users = Counter(block for table in tables for block in table)
        for block, refs in enumerate(self._refs):
            assert refs == users[block], f"block {block}: {refs} refs, {users[block]} users"
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & evictable
        assert not (free | evictable) & users.keys(), "a free block is in use"
        assert len(free) + len(evictable) + len(users) == self.num_blocks, "a block is lost"
        assert all(self._hashes[block] is None for block in free)
        assert all(self._hashes[block] is not None for block in evictable)
        named = {digest: block for block, digest in enumerate(self._hashes) if digest is not None}
        assert named == self._resident, "the hash table and the blocks disagree"
