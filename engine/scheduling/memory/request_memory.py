"""RequestMemory: the rows, blocks and snapshots of requests, and when they become free again.

Only this file assigns rows and blocks. It knows nothing of the queue, of micro-batches or of a
step's contents. The scheduler says which requests start and leave, and which step is done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.messages import PREFIX_BYTES, PREFIX_STRIDE
from engine.scheduling.admission import Footprint, KVMemory
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.memory.block_manager import BlockManager, FreeBlocks, FreeList
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.memory.snapshots import Snapshots
from engine.scheduling.moves.block_moves import BlockMoves
from engine.scheduling.request import Request, RequestPhase
from engine.scheduling.request_start import Start

# maximum bytes of evicted prefixes' hashes in a frame; further hashes are dropped
_MOST_GONE = 1 << 15
# maximum number of remembered prefix names; files of the disk tier may outlive them
_MOST_NAMES = 1 << 18


@dataclass(slots=True)
class DeferredRelease:
    """A row and blocks to free when `step` is done."""

    step: int
    row: int
    kv_rank: int  # the rank that has the blocks
    blocks: list[int]
    adapter_slot: int = -1
    worth: Sequence[bytes] = ()  # hashes of the blocks that the host tier stores


class RequestMemory:
    """The rows, blocks and snapshots of all requests.

    pools: the block pool of each KV rank; block ids start from 0 in each.
    running: id -> request that has a row.
    tier: the blocks in host memory; None = blocks that leave the device are lost.
    moves: sends blocks to other replicas and receives them; None = no blocks are moved.
    reserved_blocks: total blocks of all running requests at their maximum lengths.
    """

    def __init__(
        self,
        config: CoreConfig,
        num_rows: int,
        free_blocks: Callable[[int], FreeBlocks] = FreeList,
        tier: HostTier | None = None,
        moves: BlockMoves | None = None,
    ) -> None:
        self._config = config
        self.tier = tier
        self.moves = moves
        self._free_blocks = free_blocks
        self.num_rows = num_rows
        self.running: dict[int, Request] = {}
        self.deferred: list[DeferredRelease] = []
        self.reserved_blocks = 0
        self._gone, self._lowered = bytearray(), bytearray()
        self.empty(config.num_blocks)

    def empty(self, num_blocks: int) -> None:
        """Reset all pools to num_blocks empty blocks; no request may have a block."""
        assert not self.running and not self.deferred
        config, size = self._config, self._config.block_size
        self.pools = [
            BlockManager(num_blocks, size, self._free_blocks, config.kinds)
            for _ in range(config.kv_ranks)
        ]
        # The hash of a block -> the name by which routers know the prefix that it ends.
        self._routed: dict[bytes, bytes] = {}
        # rows that neither a request nor a snapshot has
        self.free_rows = list(range(self.num_rows - 1, -1, -1))
        self.snapshots: Snapshots | None = None
        if config.snapshots is not None:
            (pool,) = self.pools
            first = config.max_num_seqs + 1  # one row is for padding
            self.snapshots = Snapshots(
                config.snapshots, size, pool.is_resident, self.free_rows, first
            )
        for pool in self.pools:
            pool.on_forget = self._forgotten
        if self.tier is not None:
            self.tier.on_drop = self._dropped

    def _forgotten(self, digests: Sequence[bytes]) -> None:
        """Record that blocks were evicted from the device's prefix cache.

        Their snapshots are dropped. Their prefixes are reported to routers as `gone`, or as
        `lowered` if host memory or disk still has them (see StepFrame).
        """
        if self.snapshots is not None:
            for digest in digests:
                self.snapshots.forget(digest)
        if self.tier is not None:
            self.tier.worth.evicted(digests)
        for digest in filter(self._routed.__contains__, digests):
            if self.tier is None or not self.tier.has(digest):
                name = self._routed.pop(digest)
                if len(self._gone) < _MOST_GONE:
                    self._gone += name
            elif len(self._lowered) < _MOST_GONE:
                self._lowered += self._routed[digest]

    def _dropped(self, digest: bytes) -> None:
        """Report the prefix of a block that left host memory as `gone`, if no tier has it."""
        if digest not in self._routed or any(pool.is_resident(digest) for pool in self.pools):
            return
        if self.tier is None or not self.tier.has(digest):
            name = self._routed.pop(digest)
            if len(self._gone) < _MOST_GONE:
                self._gone += name

    def _name_prefixes(self, request: Request) -> None:
        """Record the routers' names of a request's cached prefixes, for `take_evicted`."""
        names, size = request.prefix_hashes, self._config.block_size
        if not names or PREFIX_STRIDE % size or request.num_virtual or not request.cacheable:
            return
        step = PREFIX_STRIDE // size
        for index, digest in enumerate(request.hashes[step - 1 : request.num_registered : step]):
            name = names[index * PREFIX_BYTES : (index + 1) * PREFIX_BYTES]
            if name:
                self._routed[digest] = name
        while len(self._routed) > _MOST_NAMES:
            del self._routed[next(iter(self._routed))]

    def take_evicted(self) -> tuple[bytes, bytes]:
        """Return and clear the names of evicted prefixes, as two joined byte strings.

        The first has the prefixes that left all caches since the last call, the second those that
        are now only in host memory or on disk.
        """
        evicted = bytes(self._gone), bytes(self._lowered)
        self._gone.clear()
        self._lowered.clear()
        return evicted

    def pool(self, request: Request) -> BlockManager:
        """Return the pool of the request's blocks, while the request has a row."""
        return self.pools[request.kv_rank]

    def by_pool(self, requests: list[Request]) -> list[tuple[BlockManager, list[Request]]]:
        """Return each pool with the requests that have blocks in it; unused pools may be left
        out."""
        if len(self.pools) == 1:
            return [(self.pools[0], requests)]
        by_rank = ([r for r in requests if r.kv_rank == rank] for rank in range(len(self.pools)))
        return [(pool, some) for pool, some in zip(self.pools, by_rank, strict=True) if some]

    # ---- start and release ---------------------------------------------------------------------

    @property
    def has_row(self) -> bool:
        """Whether one more request can have a row."""
        return len(self.running) + len(self.deferred) < self.num_rows

    def start(self, request: Request, start: Start, *, cacheable: bool) -> None:
        """Give the request a free row and the cached blocks of its prefix.

        start: the result of `find_start`.
        cacheable: whether its blocks enter the prefix cache.
        """
        pool = self.pools[start.kv_rank]
        num_cached = len(start.cached) // pool.num_groups
        pool.share([block for block in start.cached if block >= 0])
        request.kv_rank = start.kv_rank
        request.blocks = start.cached
        if pool.regions is not None:
            request.blocks = pool.allocate(pool.blocks_for(start.footprint.final))
        request.num_computed = num_cached * pool.block_size
        request.num_registered = num_cached
        request.cacheable = cacheable
        if self.free_rows:
            request.row = self.free_rows.pop()
        else:
            assert self.snapshots is not None
            begins = request.hashes[num_cached - 1] if num_cached else b""
            request.row = self.snapshots.give_row(begins)
        self.running[request.id] = request
        self.reserved_blocks += self.most_blocks(request)

    def extend_to(self, request: Request, tokens: int) -> list[int]:
        """Allocate blocks for the KV of the request's first `tokens` tokens; enough must be free.

        Returns the new blocks; for a request with a region, the blocks that it already has.
        """
        pool = self.pool(request)
        if pool.regions is not None:
            return request.blocks[: -(-tokens // pool.block_size)]
        count = -(-tokens // pool.block_size) - len(request.blocks)
        return [block for _, _, block in pool.extend((request,), count)]

    def store_computed(self, request: Request, done_step: int) -> None:
        """Write a running request's computed blocks to the disk tier, so that other engines find
        them if this one dies. Blocks of its later tokens are stored when the request leaves.

        done_step: the last step that is done; it has sampled the request's last token.
        """
        tier = self.tier
        if tier is None or not tier.shared or request.id not in self.running:
            return
        pool = self.pool(request)
        count = min((len(request.token_ids) - 1) // pool.block_size, request.num_registered)
        worth = request.hashes[: min(count, request.num_reused)]
        if worth and request.cacheable:
            tier.store(pool, pool.held(request), worth, self.snapshots, done_step)

    def release(self, request: Request) -> None:
        """Release the row and blocks of a request that ended or is preempted.

        Its blocks are hashed for the prefix cache first. `give_back` frees them when the request's
        last step is done.
        """
        pool = self.pool(request)
        pool.hash_blocks(request, request.num_computed)
        self._name_prefixes(request)
        if self.snapshots is not None:
            self.snapshots.leave(request)
        ends = request.phase is RequestPhase.ENDED
        if self.moves is not None and request.keep_seconds and ends:
            self.moves.keep(request, pool, request.keep_seconds)
        tier = self.tier
        worth = () if tier is None else tier.worth.leave(request, pool.block_size)
        del self.running[request.id]
        self.reserved_blocks -= self.most_blocks(request)
        self.deferred.append(
            DeferredRelease(
                request.last_step,
                request.row,
                request.kv_rank,
                pool.held(request),
                request.adapter_slot,
                worth,
            )
        )
        request.row = request.adapter_slot = -1
        request.blocks = []
        request.num_registered = 0

    def give_back(self, done_step: int) -> list[DeferredRelease]:
        """Free the rows and blocks that no later step uses, and return the releases."""
        freed = [release for release in self.deferred if release.step <= done_step]
        for release in freed:
            pool = self.pools[release.kv_rank]
            pool.free(release.blocks)
            if self.tier is not None and release.worth:
                blocks, worth = release.blocks, release.worth
                self.tier.store(pool, blocks, worth, self.snapshots, done_step)
            self.free_rows.append(release.row)
        self.deferred = [release for release in self.deferred if release.step > done_step]
        return freed

    def discard_cached(self, request: Request) -> None:
        """Remove a request's blocks from the prefix cache, because their KV may be wrong."""
        request.cacheable = False
        for pool in self.pools:  # the request may have run in another pool before
            pool.forget(request.hashes)
        if self.tier is not None:
            self.tier.forget(request.hashes)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache and the host tier, and keep blocks of running requests out."""
        for pool in self.pools:
            pool.reset()
        if self.tier is not None:
            self.tier.clear()
        if self.moves is not None:
            self.moves.clear()
        for request in self.running.values():
            request.cacheable = False

    # ---- state ---------------------------------------------------------------------------------

    def most_blocks(self, request: Request) -> int:
        """Return the request's number of blocks at maximum length, where the last token has no
        KV."""
        return self.pool(request).blocks_for(max(request.num_prompt, request.limit - 1))

    def coming(self, rank: int, chunks: Sequence[tuple[Request, int]]) -> int:
        """Return how many blocks of a pool will become free without a preemption.

        These are blocks of requests that have left or are in their last step, and blocks behind the
        chunks' windows.

        chunks: (request, number of tokens that it computes in the step that is being built).
        """
        pool = self.pools[rank]
        count = sum(pool.num_exclusive(r.blocks) for r in self.deferred if r.kv_rank == rank)
        count += sum(
            pool.num_exclusive(pool.held(r))
            for r in self.running.values()
            if r.kv_rank == rank and r.phase is RequestPhase.FINISHING
        )
        if self.tier is not None:
            count += self.tier.num_coming()
        if not pool.whole:
            count += sum(
                pool.num_behind(r, r.num_computed + length)
                for r, length in chunks
                if r.kv_rank == rank
            )
        return count

    def last_in_order(self, rank: int) -> Request:
        """Return the last request in the order of service that is not in its last step.

        rank: the rank of the pool.
        """
        requests = (r for r in self.running.values() if r.kv_rank == rank)
        return max((r for r in requests if r.phase is not RequestPhase.FINISHING), key=_order)

    def footprint(self, request: Request, step_index: int) -> Footprint:
        """Return the request's memory at this step of its decode group."""
        return request.footprint(step_index, len(self.pool(request).held(request)))

    def seen(
        self,
        rank: int,
        computing: Sequence[Request],
        step_index_of: Callable[[Request], int],
        budget: int,
        lag: int,
    ) -> KVMemory:
        """Return the current state of a pool, from which admission strategies decide.

        computing: requests of all pools that are not in a decode group.
        budget, lag: see `KVMemory`.
        """
        pool, snapshots = self.pools[rank], self._config.snapshots
        memory = KVMemory(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            free=pool.room,
            regions=pool.regions is not None,
            kinds=pool.kinds,
            footprints=lambda: self._footprints(rank, step_index_of),
            num_running=len(self.running)
            if len(self.pools) == 1
            else sum(r.kv_rank == rank for r in self.running.values()),
            uncomputed=sum(r.remaining for r in computing),
            budget=budget,
            lag=lag,
            snapshots=snapshots,
        )
        if snapshots is not None:
            memory.cuts = sum(snapshots.cuts(r.remaining) for r in computing if r.remaining > 1)
        memory.promised = sum(
            max(0, memory.blocks(r.num_tokens) - len(pool.held(r)))
            for r in computing
            if r.kv_rank == rank
        )
        # blocks reserved for loads are not free: a loaded prefix is useless if its request then has
        # no room
        if self.tier is not None:
            for request, num_blocks in self.tier.loading():
                memory.num_running += 1
                needed = memory.blocks(len(request.token_ids))
                memory.promised += max(0, needed - num_blocks)
        return memory

    def _footprints(self, rank: int, step_index_of: Callable[[Request], int]) -> list[Footprint]:
        footprints, pool = [], self.pools[rank]
        for release in self.deferred:
            if release.kv_rank == rank:
                held = len(release.blocks)
                tokens = held // pool.num_groups * pool.block_size
                footprints.append(Footprint(now=tokens, final=tokens, held=held))
        running = (r for r in self.running.values() if r.kv_rank == rank)
        return footprints + [self.footprint(r, step_index_of(r)) for r in running]

    def check_integrity(self) -> None:
        """Assert that no row or block is lost or shared. Call this only between steps."""
        held = [(r.row, r.kv_rank, r.blocks) for r in self.running.values()]
        held += [(release.row, release.kv_rank, release.blocks) for release in self.deferred]
        for rank, pool in enumerate(self.pools):
            tables = [] if self.tier is None else self.tier.tables(pool)
            tables += [] if self.moves is None else self.moves.tables(pool)
            pool.check_integrity([*tables, *(blocks for _, its, blocks in held if its == rank)])
        if self.snapshots is not None:
            self.snapshots.check_integrity()
        rows = [row for row, _, _ in held]
        rows += self.snapshots.rows if self.snapshots is not None else []
        assert sorted(rows + self.free_rows) == list(range(self.num_rows)), (
            "a row is lost or shared"
        )
        assert self.reserved_blocks == sum(map(self.most_blocks, self.running.values()))


def _order(request: Request) -> tuple[int, ...]:
    return request.order
