"""BlockManager: tracks the requests that use each KV block, and the blocks of cached prefixes.

A block is in exactly one of three states:

 used        refs > 0        in the tables of `refs` requests; may have a hash
 evictable   refs == 0       keeps a prefix (has a hash); least recently used is evicted first
 free        refs == 0       holds nothing (no hash)

free + evictable blocks can be allocated. Every operation is O(1) for each block. If groups of
layers keep different tokens (`engine.config.kv_groups`), a request has one block for each position
(block_size tokens) and group. Its table lists the blocks position by position. -1 stands where a
group has no block: the block was freed, as no later token reads it, or was never needed.
"""

import heapq
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice, repeat, takewhile
from typing import Any, Protocol

from engine.config.kv_groups import Full, KVKind, blocks_for, positions
from engine.scheduling.memory.prefix_hash import extend_hashes
from engine.scheduling.memory.regions import Regions
from engine.scheduling.request import Request

_is_block = (0).__le__  # whether a number is that of a block; -1 = none


class FreeBlocks(Protocol):
    """A container of a pool's free blocks, all blocks at first; len() is their number."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def append(self, block: int, /) -> None: ...

    def extend(self, blocks: Iterable[int], /) -> None: ...

    def take_blocks(self, count: int) -> list[int]:
        """Remove and return `count` <= len(self) free blocks."""
        ...


class FreeList(list[int]):
    """A list of free blocks, of which the last freed is taken first. The default."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(range(num_blocks - 1, -1, -1))

    def take_blocks(self, count: int) -> list[int]:
        blocks = self[: -count - 1 : -1]
        del self[len(self) - count :]
        return blocks


class LowestFirst(list[int]):
    """A heap of free blocks that gives the lowest number first, so that the last blocks stay
    free."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(range(num_blocks))

    def append(self, block: int, /) -> None:
        heapq.heappush(self, block)

    def extend(self, blocks: Iterable[int], /) -> None:
        super().extend(blocks)
        heapq.heapify(self)

    def take_blocks(self, count: int) -> list[int]:
        return [heapq.heappop(self) for _ in range(count)]

    def grow(self, blocks: range) -> None:
        """Add blocks that are all higher than any other."""
        super().extend(blocks)

    def cut(self, num_blocks: int) -> None:
        """Remove the free blocks numbered num_blocks or higher."""
        self[:] = [block for block in self if block < num_blocks]
        heapq.heapify(self)


class BlockManager:
    """The owner of all KV blocks of a device, or of several devices with equal tables.

    The manager knows nothing of steps: the scheduler frees a block when no step in flight uses it.
    Blocks enter and leave the prefix cache only in `_register` and `_forget`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        free_blocks: Callable[[int], FreeBlocks] = FreeList,
        kinds: Sequence[KVKind] = (Full(),),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kinds = kinds
        self.num_groups = len(kinds)
        # whether all KV groups keep all tokens, so that no running request frees a block
        self.whole = all(kind.whole for kind in kinds)
        self._by_position = [kind.by_position for kind in kinds]
        self._growing = sum(self._by_position)
        # number of groups in which a request has a single block, such as recurrent states
        self._fixed = len(kinds) - self._growing
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # hash of each registered block
        self._group_of = [0] * num_blocks  # group of each registered block
        # For each group: hash -> its block.
        self._resident: list[dict[bytes, int]] = [{} for _ in kinds]
        self._free = free_blocks(num_blocks)
        # the free blocks if each request has one region of its whole length; else None
        self.regions = self._free if isinstance(self._free, Regions) else None
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        # Called with the hashes whose blocks leave the prefix cache, in any group.
        self.on_forget: Callable[[Sequence[bytes]], None] | None = None

    @property
    def num_free(self) -> int:
        """The number of blocks that `allocate` can return."""
        return len(self._free) + len(self._evictable)

    @property
    def num_empty(self) -> int:
        """The number of blocks that `allocate` can return without evicting a prefix."""
        return len(self._free)

    @property
    def room(self) -> int:
        """The maximum number of blocks that one new request can have now."""
        return self.num_free if self.regions is None else self.regions.largest

    def allocate(self, count: int) -> list[int]:
        """Allocate and return `count` blocks, at most `room`, evicting prefixes if necessary.

        Their contents are undefined.
        """
        self.evict(count - len(self._free))
        blocks, refs = self._free.take_blocks(count), self._refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def evict(self, count: int) -> None:
        """Evict the `count` least recently used blocks; none if count is below 1."""
        blocks = list(islice(self._evictable, max(0, count)))
        for block in blocks:
            del self._evictable[block]
        self._forget(blocks)
        self._free.extend(blocks)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are num_blocks. The free blocks must be a `LowestFirst`."""
        assert isinstance(self._free, LowestFirst)
        new = num_blocks - self.num_blocks
        assert new >= 0
        self._refs += [0] * new
        self._hashes += [None] * new
        self._group_of += [0] * new
        self._free.grow(range(self.num_blocks, num_blocks))
        self.num_blocks = num_blocks

    def withdraw(self, num_blocks: int) -> int:
        """Remove the last blocks that no request uses, down to num_blocks at most; return how many
        blocks remain.

        Cached prefixes in blocks from num_blocks on are evicted, even if a block in use cannot be
        removed yet.
        """
        assert isinstance(self._free, LowestFirst)
        first = self.num_blocks  # the first of the last blocks that are not used
        while first > num_blocks and not self._refs[first - 1]:
            first -= 1
        for block in range(num_blocks, self.num_blocks):
            if block in self._evictable:
                del self._evictable[block]
                self._forget([block])
                self._free.append(block)
        if first < self.num_blocks:
            self._free.cut(first)
            columns: tuple[list[Any], ...] = (self._refs, self._hashes, self._group_of)
            for entries in columns:
                del entries[first:]
            self.num_blocks = first
        return self.num_blocks

    def blocks_for(self, tokens: int) -> int:
        """Return the peak number of blocks of a request with the given number of tokens."""
        return blocks_for(self.kinds, tokens, self.block_size)

    def positions(self, blocks: int) -> int:
        """Return how many positions the blocks hold, for requests of `kv_groups.TYPICAL` tokens."""
        return positions(self.kinds, blocks, self.block_size)

    def next_cost(self, request: Request, count: int = 1) -> int:
        """Return the number of blocks that the request's next `count` positions need."""
        growing = count * self._growing
        return growing if request.blocks else growing + self._fixed

    def num_extensions(self, request: Request) -> int:
        """Return how many further positions of the request the free blocks allow.

        The number is sys.maxsize if the request needs no further blocks.
        """
        free = self.num_free if request.blocks else self.num_free - self._fixed
        if not self._growing:
            return sys.maxsize if free >= 0 else 0
        return max(0, free) // self._growing

    def extend(self, requests: Sequence[Request], count: int = 1) -> list[tuple[int, int, int]]:
        """Allocate blocks for `count` more positions of each request; enough must be free.

        Returns (row, index in the request's table, block) of each block.
        """
        needed = len(requests) * count * self._growing
        if self._fixed:
            needed += self._fixed * sum(not request.blocks for request in requests)
        new_blocks = iter(self.allocate(needed))
        new = []
        for request in requests:
            row, table = request.row, request.blocks
            for _ in range(count):
                first = not table
                for by_position in self._by_position:
                    if by_position or first:
                        block = next(new_blocks)
                        new.append((row, len(table), block))
                        table.append(block)
                    else:
                        table.append(-1)
        return new

    def drop_behind(self, request: Request, position: int) -> None:
        """Free the blocks that no token of the request from `position` on reads.

        A launched step may still read the block: the next request that takes the block writes it in
        a later step, and the device runs steps in order.
        """
        table, groups = request.blocks, self.num_groups
        dropped = []
        for group, kind in enumerate(self.kinds):
            at = (kind.behind(position, self.block_size) - 1) * groups + group
            while at >= 0 and table[at] >= 0:
                dropped.append(table[at])
                table[at] = -1
                at -= groups
        self.free(dropped)

    def num_behind(self, request: Request, position: int) -> int:
        """Return how many blocks `drop_behind` would free."""
        table, groups, count = request.blocks, self.num_groups, 0
        for group, kind in enumerate(self.kinds):
            at = (kind.behind(position, self.block_size) - 1) * groups + group
            while at >= 0 and table[at] >= 0:
                count += self._refs[table[at]] == 1
                at -= groups
        return count

    def held(self, request: Request) -> list[int]:
        """Return the blocks of the request's table."""
        if self.whole and not self._fixed:
            return request.blocks
        return [block for block in request.blocks if block >= 0]

    def match_prefix(
        self, hashes: Sequence[bytes], elsewhere: Sequence[Mapping[bytes, int]] = ()
    ) -> list[int]:
        """Return the block table of the longest resident prefix from which a request can continue.

        This changes no counts: call `share` to use the blocks.

        elsewhere: for each group, hash -> slot of blocks that are in other memory. They count as
            resident, and slot n is entry num_blocks + n of the table.
        """
        if self.num_groups == 1 and self.whole and not elsewhere:
            return [*takewhile(_is_block, map(self._resident[0].get, hashes, repeat(-1)))]
        count = len(hashes)
        tables: list[list[int]] = []  # the positions' blocks of each group
        for group, (kind, resident) in enumerate(zip(self.kinds, self._resident, strict=True)):
            blocks = []
            for digest in hashes[:count]:
                block = resident.get(digest, -1)
                if block < 0 and elsewhere:
                    slot = elsewhere[group].get(digest, -1)
                    block = slot if slot < 0 else self.num_blocks + slot
                if block < 0 and kind.whole:
                    break
                blocks.append(block)
            count = len(blocks)
            tables.append(blocks)
        if not self.whole:
            count = self._resumable(tables, count)
        return [block for position in zip(*tables, strict=False) for block in position][
            : count * self.num_groups
        ]

    def _resumable(self, tables: list[list[int]], count: int) -> int:
        """Return the maximum number of positions, up to count, after which each group has the
        blocks that it reads.

        tables: by group, the block of each position; entries that a group does not read become -1.
        """
        size, best = self.block_size, 0
        runs = [0] * self.num_groups  # number of consecutive resident blocks
        for end in range(1, count + 1):
            for group, blocks in enumerate(tables):
                runs[group] = runs[group] + 1 if blocks[end - 1] >= 0 else 0
            if all(
                run >= end - kind.behind(end * size, size)
                for run, kind in zip(runs, self.kinds, strict=True)
            ):
                best = end
        for kind, blocks in zip(self.kinds, tables, strict=True):
            behind = min(kind.behind(best * size, size), len(blocks))
            blocks[:behind] = [-1] * behind
        return best

    def name_of(self, block: int) -> tuple[int, bytes] | None:
        """Return the group and hash of a block in the prefix cache; None for other blocks."""
        digest = self._hashes[block]
        return None if digest is None else (self._group_of[block], digest)

    def adopt(
        self, blocks: Sequence[int], hashes: Sequence[bytes], groups: Iterable[int] = ()
    ) -> None:
        """Register blocks whose KV was loaded from another memory in the prefix cache.

        A block is left out if another block is registered under its hash.

        hashes, groups: the hash and the group of each block; groups are not read if there is one.
        """
        if self.num_groups == 1:
            self._register(hashes, blocks, 0)
            return
        of_blocks = list(groups)
        for group in range(self.num_groups):
            own = [number == group for number in of_blocks]
            self._register([*compress(hashes, own)], [*compress(blocks, own)], group)

    def is_resident(self, digest: bytes) -> bool:
        """Whether every group has the block of this hash."""
        groups = zip(self._resident, self._by_position, strict=True)
        return all(digest in resident for resident, named in groups if named)

    def num_unused(self, blocks: Iterable[int]) -> int:
        """Return the number of blocks that no request uses; sharing them lowers num_free."""
        return sum(self._refs[block] == 0 for block in blocks)

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """Return the number of blocks that one request alone uses; freeing them raises num_free."""
        return sum(self._refs[block] == 1 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Increment the reference counts of cached blocks that a request shares."""
        refs = self._refs
        for block in blocks:
            count = refs[block]
            if not count:
                del self._evictable[block]
            refs[block] = count + 1

    def free(self, blocks: Sequence[int]) -> None:
        """Decrement the reference count of each block in a request's table.

        Blocks with a hash stay matchable until they are evicted. The tail is evicted before the
        head, because a head without its tail is still a prefix.
        """
        refs, hashes, evictable = self._refs, self._hashes, self._evictable
        for block in reversed(blocks):
            count = refs[block] = refs[block] - 1
            if count <= 0:
                assert not count, f"block {block} was freed twice"
                if hashes[block] is None:
                    self._free.append(block)
                else:
                    evictable[block] = None

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Remove the blocks with the given hashes from the prefix cache, used or not."""
        for digest in hashes:
            for resident in self._resident:
                block = resident.get(digest)
                if block is None:
                    continue
                self._forget([block])
                if block in self._evictable:
                    del self._evictable[block]
                    self._free.append(block)

    def hash_prefix(self, request: Request, count: int) -> list[bytes]:
        """Return the hashes of the request's first `count` blocks, whose tokens must be known."""
        self._extend_hashes(request, count)
        return request.hashes[:count]

    def hash_blocks(self, request: Request, num_computed: int) -> None:
        """Register the request's full blocks below num_computed tokens in the prefix cache.

        The step that computes them need only be scheduled. A request that matches them runs in that
        step or later, and within a step all keys of a layer are written before any is read.
        """
        count = min(num_computed, len(request.token_ids)) // self.block_size
        if count <= request.num_registered or not request.cacheable:
            return
        hashes, blocks, groups = request.hashes, request.blocks, self.num_groups
        self._extend_hashes(request, count)
        for group, kind in enumerate(self.kinds):
            if kind.by_position:
                first = request.num_registered
                table = blocks[first * groups + group : count * groups : groups]
                self._register(hashes[first:count], table, group)
        request.num_registered = count

    def _extend_hashes(self, request: Request, count: int) -> None:
        root, size, images = request.root, self.block_size, request.images
        extend_hashes(request.hashes, root, request.token_ids, size, count, images)

    def reset(self) -> None:
        """Empty the prefix cache. Used blocks stay in use, but are no longer matched."""
        for resident in self._resident:
            self._forget([*resident.values()])
        self._free.extend(self._evictable)
        self._evictable.clear()

    def _register(self, hashes: Sequence[bytes], blocks: Sequence[int], group: int) -> None:
        # Two requests may compute the same block at the same time: the first block keeps the hash.
        resident, names, group_of = self._resident[group], self._hashes, self._group_of
        for digest, block in zip(hashes, blocks, strict=True):
            if digest not in resident and names[block] is None and block >= 0:
                resident[digest] = block
                names[block] = digest
                group_of[block] = group

    def _forget(self, blocks: Iterable[int]) -> None:
        names, resident, group_of = self._hashes, self._resident, self._group_of
        digests: list[bytes] = []
        for block in blocks:
            digest = names[block]
            if digest is not None:
                del resident[group_of[block]][digest]
                names[block] = None
                digests.append(digest)
        if digests and self.on_forget is not None:
            self.on_forget(digests)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants.

        tables: the block tables of all requests that use blocks.
        """
        users = Counter(block for table in tables for block in table if block >= 0)
        for block, refs in enumerate(self._refs):
            assert refs == users[block], f"block {block}: {refs} refs, {users[block]} users"
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & evictable
        assert not (free | evictable) & users.keys(), "a free block is in use"
        assert len(free) + len(evictable) + len(users) == self.num_blocks, "a block is lost"
        assert all(self._hashes[block] is None for block in free)
        assert all(self._hashes[block] is not None for block in evictable)
        named: list[dict[bytes, int]] = [{} for _ in self.kinds]
        for block, digest in enumerate(self._hashes):
            if digest is not None:
                named[self._group_of[block]][digest] = block
        assert named == self._resident, "the hash table and the blocks disagree"
