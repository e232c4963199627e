"""BlockMoves: the step loop's side of KV block transfers between replicas.

A request may name another replica as the source of its prefix (`EngineRequest.source`). It then
waits outside the queue while threads receive the blocks (puller.py):

 source   prefix cache -> held -> slot of host memory -> socket
 puller   socket -> slot of host memory -> block -> prefix cache

On one machine the puller reads the source's slots, which may be memory of the source's GPU, and no
byte goes through a socket (shared.py).
Arrived blocks enter the prefix cache under their hashes, which contain model, adapter and salt. The
request then starts as after any other hit. So whatever a move does not deliver, or delivers late,
is a cache miss: those blocks are computed.

Where steps wait on the device for the loads that they need (`early`), the request starts once its
last load is enqueued. If a source then turns out to have filled a slot again before it was read,
the results of the steps since are dropped, and their requests computed again (`confirm`).

Blocks go only between engines of equal `compatibility`, a digest of everything that decides what a
block's bytes mean. The source holds the blocks of a pull until they are sent, and those of a
request with `keep_seconds` until they were pulled or the time is over. When the source itself needs
memory, it releases the blocks that it holds for others.
"""

import hashlib
import logging
import queue
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any

from engine.messages import Answer, KVSource
from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.moves.puller import Arrival, Pull, Puller, split
from engine.scheduling.moves.records import Export, Import, Lease, Load, MoveCopies, MovePlan
from engine.scheduling.moves.shared import PeerSlots, Sharing
from engine.scheduling.moves.source import LEASE_SECONDS, Order, SourceServer, Staged
from engine.scheduling.moves.wire import NO_NUMBERS, Offer, PeerError
from engine.scheduling.request import Request

logger = logging.getLogger("manta.engine")

KV_MOVES_OFF = "kv_moves_off"
_MOST_PULLS = 16  # maximum number of simultaneous pulls; further requests compute their prompts
_LEASED_SHARE = 4  # at most 1 / _LEASED_SHARE of the pool's blocks are leased
_LOG_SECONDS = 5.0
# Blocks are staged in pieces of this fraction of the slots (1 / n), so that source and puller copy
# at the same time. Copies between device memories take less time than their launches, so blocks
# that all fit into the free device slots are one piece.
_PIECES, _DEVICE_PIECES = 8, 2


class BlockMoves:
    """The pulls of KV blocks by this engine from other replicas, and by other replicas from it.

    All methods are called by the step loop.

    wake: called from any thread when `has_news` may have changed.
    """

    def __init__(
        self,
        plan: MovePlan,
        copies: MoveCopies,
        memory: Sequence[memoryview],
        sharing: Sharing | None = None,
        *,
        early: bool = False,
    ) -> None:
        """Set up the moves.

        copies: copies between blocks and slots; it has twice as many host slots as the plan.
        memory: the bytes of these slots.
        sharing: shares the same slots with other engines on this machine.
        early: whether a step waits on the device for loads of the blocks that it reads, and for
            stores of those that it writes.
        """
        self.plan = plan
        self._early = early
        self._broken = False  # whether steps may have read bytes that no source sent
        self.copies = copies
        self.wake: Callable[[], None] = lambda: None
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sharing = sharing
        self._server = SourceServer(
            memory,
            self._post_order,
            self._post_sent,
            self._post_lost,
            None if sharing is None else sharing.own,
        )
        self._puller = Puller(
            memory,
            range(plan.slots, 2 * plan.slots),
            self._post_arrived,
            self._post_ended,
            sharing,
            self._post_gone,
        )
        self._gone: list[PeerSlots] = []
        # free host slots to send from
        self._free = list(range(plan.slots))
        first = 2 * plan.slots
        self._free_on_device = list(range(first, first + plan.device_slots))
        self._exports: dict[Order, Export] = {}
        self._imports: dict[int, Import] = {}  # request id -> import
        self._came: list[tuple[Import, Arrival]] = []
        self._loads: dict[int, Import] = {}  # ticket of a load -> import
        self._loads_ended = 0  # loads that have ended, of which `finished` was not asked yet
        self._leases: dict[bytes, Lease] = {}  # last hash of a request -> lease
        self._pulled: list[int] = []
        self._answers: list[Answer] = []
        self._tickets = 0
        self._pool: BlockManager | None = None
        self._step = self._done_step = 0
        self._weights = b""
        self._logged = 0.0
        self.pulls = self.failed_pulls = self.shared_pulls = self.device_pulls = 0
        self.pulled_tokens = self.pulled_bytes = self.sent_bytes = 0
        self.pull_seconds = 0.0

    # ---- events of the threads -----------------------------------------------------------------

    def _post(self, event: Callable[[], None]) -> None:
        self._events.put(event)
        self.wake()

    def _post_order(self, order: Order) -> None:
        self._post(lambda: self._take_order(order))

    def _post_sent(self, order: Order, slots: Sequence[int]) -> None:
        self._post(lambda: self._note_sent(order, slots))

    def _post_lost(self, order: Order) -> None:
        self._post(lambda: self._drop_order(order))

    def _post_arrived(self, pull: Pull, blocks: Arrival) -> None:
        self._post(lambda: self._take_blocks(pull, blocks))

    def _post_loaded(self) -> None:
        self._post(self._note_loaded)

    def _post_ended(self, pull: Pull, error: str) -> None:
        self._post(lambda: self._end_pull(pull, error))

    def _post_gone(self, slots: PeerSlots) -> None:
        self._post(lambda: self._gone.append(slots))

    # ---- for the core --------------------------------------------------------------------------

    def serve(self, host: str, ticket: int) -> None:
        """Listen on an address for pulls of other replicas.

        The answer's message is "port secret bytes", where bytes is the size of a token's KV.
        """
        try:
            if not self._server.port:
                self._server.listen(host)
        except OSError as error:
            self._answers.append(Answer(ticket, KV_MOVES_OFF, f"kv_moves: {host}: {error}"))
            return
        message = f"{self._server.port} {self._server.secret.hex()} {self.plan.token_bytes:g}"
        self._answers.append(Answer(ticket, message=message))

    def take_answers(self) -> list[Answer]:
        """Return the answers to `serve` since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        self._server.close()
        self._puller.close()

    @property
    def compatibility(self) -> bytes:
        """The digest that both engines of a move must have."""
        state = hashlib.blake2b(self.plan.compatibility, digest_size=16)
        state.update(self._weights)
        return state.digest()

    def weights_changed(self, version: str, updates: int) -> None:
        """Change the name of the weights that other engines compare before they pull blocks.

        updates: number of updates so far. A version "" or equal to this number was not chosen by a
            trainer, so these weights count as different from those of all other engines.
        """
        named = version not in ("", str(updates))
        self._weights = version.encode() if named else secrets.token_bytes(16)

    def has_news(self) -> bool:
        """Whether `poll` has something to do."""
        unanswered = any(
            not export.answered and self._is_loaded(export) for export in self._exports.values()
        )
        # loads may end in `confirm`
        loaded = any(imported.ended and not imported.loads for imported in self._imports.values())
        return not self._events.empty() or self._loads_ended > 0 or unanswered or loaded

    def confirm(self) -> bool:
        """Whether all blocks that steps have read until now had the bytes of their source.

        Call it when a step has ended, before its results are used. After False drop the results of
        all steps in flight, and compute their requests again.
        """
        self._finish_loads()
        broken, self._broken = self._broken, False
        return not broken

    @property
    def holds(self) -> bool:
        """Whether moves hold blocks that will become free without a step."""
        return bool(self._exports or self._leases or self._imports)

    def poll(self, pool: BlockManager, step: int, done_step: int) -> list[int]:
        """Process what threads and copies have completed, and continue all imports and exports.

        Returns the ids of requests that no longer wait for blocks.

        step, done_step: the last step that was scheduled, and the last that is done.
        """
        self._pool, self._step, self._done_step = pool, step, done_step
        while not self._events.empty():
            self._events.get()()
        self._expire()
        self._load_blocks()
        self._finish_loads()
        for export in list(self._exports.values()):
            if done_step >= export.step and self._is_loaded(export):
                self._advance(export)
        for number, imported in list(self._imports.items()):
            if imported.ended and not imported.loads:
                self._finish_import(number, imported)
            elif imported.ended and self._early and not imported.pull.cancelled:
                self._release(number, imported)
        if self._gone:
            self._detach()
        pulled, self._pulled = self._pulled, []
        return pulled

    # ---- the source ----------------------------------------------------------------------------

    def keep(self, request: Request, pool: BlockManager, seconds: float) -> None:
        """Hold the cached blocks of a request that leaves, for `seconds`, for an expected pull."""
        hashes = request.hashes[: request.num_registered]
        blocks = [block for block in pool.match_prefix(hashes) if block >= 0]
        held = sum(len(lease.blocks) for lease in self._leases.values())
        if not blocks or held + len(blocks) > pool.num_blocks // _LEASED_SHARE:
            return
        self._end_lease(hashes[-1])
        pool.share(blocks)
        until = time.monotonic() + min(seconds, LEASE_SECONDS)
        self._leases[hashes[-1]] = Lease(pool, blocks, until)

    def _end_lease(self, last: bytes) -> None:
        lease = self._leases.pop(last, None)
        if lease is not None:
            lease.pool.free(lease.blocks)

    def _expire(self) -> None:
        now = time.monotonic()
        for last in [last for last, lease in self._leases.items() if lease.until <= now]:
            self._end_lease(last)
        for order in [order for order in self._exports if order.deadline <= now]:
            self._drop_order(order)

    def yield_blocks(self) -> bool:
        """Release blocks that are held for other replicas; return whether any became free."""
        held = bool(self._leases or self._exports)
        for last in list(self._leases):
            self._end_lease(last)
        for order in list(self._exports):
            self._drop_order(order)
        return held

    def _take_order(self, order: Order) -> None:
        pool, ask = self._pool, order.ask
        try:
            hashes = split(ask.hashes)
        except PeerError as error:
            self._refuse(order, str(error))
            return
        if pool is None or ask.compatibility != self.compatibility:
            self._refuse(order, "another model, version of its weights, or layout of its KV cache")
            return
        matched = pool.match_prefix(hashes)
        first = max(0, ask.near) * pool.num_groups
        indices = list(range(first, len(matched)))
        if not pool.whole:
            indices = [index for index in indices if matched[index] >= 0]
        if not indices:
            self._refuse(order, "the source has no such blocks")
            return
        blocks = matched[first:] if pool.whole else [matched[index] for index in indices]
        pool.share(blocks)
        expected = None if self._done_step >= self._step and not self._loads else matched
        self._exports[order] = Export(
            order, pool, self._step, self._tickets, hashes, expected, indices, blocks
        )

    def _refuse(self, order: Order, why: str) -> None:
        self._server.forget(order)
        order.ended.set()
        order.answer.put(Offer(why))

    def _is_loaded(self, export: Export) -> bool:
        """Whether no load is in flight that has begun before an export."""
        return next(iter(self._loads), export.load + 1) > export.load

    def _advance(self, export: Export) -> None:
        """Stage blocks of an export, whose keys are computed by now, and send its offer.

        If a block has left the prefix cache meanwhile, the export is dropped instead.
        """
        order, matched = export.order, export.matched
        waited = not export.answered and matched is not None
        if waited and export.pool.match_prefix(export.hashes) != matched:
            self._drop_order(order)
            return
        self._stage(export)
        if not export.answered and order in self._exports:
            export.answered = True
            size, proof = self.plan.block_bytes, order.proof
            order.answer.put(Offer("", order.ticket, export.indices, size, proof))

    def _stage(self, export: Export) -> None:
        """Begin to copy blocks of an export, in pieces, to free slots of host or device memory.

        Further calls copy the blocks for which no slot was free.
        """
        plan, on_device = self.plan, export.order.on_device
        free = self._free_on_device if on_device else self._free
        size = plan.device_slots // _DEVICE_PIECES if on_device else plan.slots // _PIECES
        while free and (count := len(export.indices) - export.staged):
            if not on_device or count > len(free):
                count = min(max(1, size), count)
            slots = free[-count:]
            del free[-count:]
            if not self._stage_piece(export, slots):
                self._drop_order(export.order)
                return

    def _stage_piece(self, export: Export, slots: list[int]) -> bool:
        """Begin to copy the next blocks of an export to slots; return False if that failed."""
        order, first = export.order, export.staged
        end = first + len(slots)
        fills = NO_NUMBERS if self._sharing is None else self._sharing.own.begin_fill(slots)
        if not self.copies.store(list(zip(export.blocks[first:end], slots, strict=True))):
            self.copies.wait()
            self._free_slots(slots)
            return False
        export.staged, export.copied = end, self.copies.stores_end()
        indices, step = export.indices[first:end], len(order.staged)
        for stripe, staged in enumerate(order.staged):
            part = slice((stripe - first) % step, None, step)
            if slots[part]:
                staged.put(Staged(indices[part], slots[part], fills[part], export.copied))
            if end == len(export.indices):
                staged.put(None)
        return True

    def _free_slots(self, slots: Sequence[int]) -> None:
        """Free the slots of an order, all of which are in host memory or all in device memory."""
        if slots:
            on_device = slots[0] >= 2 * self.plan.slots
            (self._free_on_device if on_device else self._free).extend(slots)

    def _note_sent(self, order: Order, slots: Sequence[int]) -> None:
        self._free_slots(slots)
        order.num_sent += len(slots)
        self.sent_bytes += len(slots) * self.plan.block_bytes
        export = self._exports.get(order)
        if export is not None and order.num_sent >= len(export.indices):
            for digest in self._leases.keys() & export.hashes if self._leases else ():
                self._end_lease(digest)
            self._drop_order(order)

    def _drop_order(self, order: Order) -> None:
        """End an export, with or without success. Idempotent."""
        export = self._exports.pop(order, None)
        if export is None:
            return
        self._server.forget(order)
        if not export.answered:
            order.answer.put(Offer("the source gave up its blocks"))
        for stripe in order.staged:
            while not stripe.empty():
                batch = stripe.get()
                if batch is not None:
                    self._free_slots(batch.slots)
            stripe.put(None)
        order.ended.set()
        if not self._early:
            export.copied()  # else later steps and loads that write the blocks wait for the copies
        export.pool.free(export.blocks)

    # ---- the puller ----------------------------------------------------------------------------

    def pull(
        self, request: Request, source: KVSource, pool: BlockManager, hashes: Sequence[bytes]
    ) -> bool:
        """Begin to pull a request's prefix from another replica; return whether the request waits.

        hashes: the hashes of the blocks that the request can share.
        """
        near = len(pool.match_prefix(hashes)) // pool.num_groups
        if near >= len(hashes) or len(self._imports) >= _MOST_PULLS:
            return False
        pull = Pull(
            request.id,
            source,
            self.compatibility,
            list(hashes),
            near,
            pool.num_groups,
            self.plan.block_bytes,
        )
        self._imports[request.id] = Import(pull, pool)
        self.pulls += 1
        self._puller.begin(pull)
        return True

    def cancel(self, request: int) -> None:
        """Cancel the pull of a request that has ended; unknown ids are ignored."""
        imported = self._imports.get(request)
        if imported is not None and not imported.released:
            imported.pull.cancelled = True

    def _import_of(self, pull: Pull) -> Import | None:
        imported = self._imports.get(pull.request)
        return imported if imported is not None and imported.pull is pull else None

    def _take_blocks(self, pull: Pull, blocks: Arrival) -> None:
        imported = self._import_of(pull)
        if imported is not None and blocks.last:
            imported.ended = True
        if imported is None or pull.cancelled:
            self._puller.give_back(blocks.slots, pull)
            return
        self._came.append((imported, blocks))

    def _load_blocks(self) -> None:
        """Begin to copy received blocks from their slots to device blocks."""
        came, self._came = self._came, []
        arrivals: dict[Import, list[Arrival]] = {}
        for imported, arrival in came:
            arrivals.setdefault(imported, []).append(arrival)
        for imported, batch in arrivals.items():
            pull, pool = imported.pull, imported.pool
            indices, slots, _ = batch[0]
            if len(batch) > 1:
                pairs = (zip(arrival.indices, arrival.slots, strict=True) for arrival in batch)
                indices, slots = map(list, zip(*sorted(chain.from_iterable(pairs)), strict=True))
            if pull.cancelled or pool.num_free < len(slots):
                # no free blocks, as running requests have precedence
                pull.cancelled = True
                self._puller.give_back(slots, pull)
                continue
            blocks = pool.allocate(len(slots))
            self._tickets += 1
            load = imported.loads[self._tickets] = Load(indices, slots, blocks)
            self._loads[self._tickets] = imported
            if not self.copies.load(self._tickets, list(zip(slots, blocks, strict=True))):
                pull.cancelled = True
            self._puller.watch(
                self.copies.loads_end(),
                partial(self._close_load, imported, load),
                self._post_loaded,
            )

    def _close_load(self, imported: Import, load: Load) -> None:
        """Give back the slots of a load that has ended. Called by the thread that waits for it."""
        imported.loaded = time.monotonic()
        load.close(imported.pull, self._puller.give_back)

    def _note_loaded(self) -> None:
        self._loads_ended += 1

    def _finish_loads(self) -> None:
        for ticket, succeeded in self.copies.finished():
            self._loads_ended -= 1
            imported = self._loads.pop(ticket)
            pull = imported.pull
            load = imported.loads.pop(ticket)
            intact = load.close(pull, self._puller.give_back)
            if not intact:
                imported.error = "the source took back a slot that was being read"
            elif not succeeded:
                imported.error = "blocks were not copied to the device"
            if not (intact and succeeded):
                pull.cancelled = True
                if imported.released:
                    self._broken = True
                    imported.pool.forget({pull.hashes[i // pull.groups] for i in load.indices})
            if not (pull.cancelled or imported.released):
                self._adopt(imported, load)
            imported.ended_loads.append(load)

    def _adopt(self, imported: Import, load: Load) -> None:
        """Let the blocks of a load enter the prefix cache."""
        groups, hashes = imported.pull.groups, imported.pull.hashes
        digests = [hashes[index // groups] for index in load.indices]
        imported.pool.adopt(load.blocks, digests, (index % groups for index in load.indices))

    def _release(self, number: int, imported: Import) -> None:
        """Let a request start before its last loads have ended. Idempotent.

        number: the request's id.
        imported: the request's import, all of whose loads have been enqueued.
        """
        if not imported.released:
            imported.released = True
            for load in imported.loads.values():
                self._adopt(imported, load)
            self._pulled.append(number)

    def _end_pull(self, pull: Pull, error: str) -> None:
        imported = self._import_of(pull)
        if imported is not None:
            imported.ended = True
            imported.error = imported.error or error

    def _finish_import(self, number: int, imported: Import) -> None:
        """End a pull: release its blocks, which stay in the prefix cache, and let its request
        start."""
        del self._imports[number]
        pull = imported.pull
        imported.free()
        if imported.ended_loads and not pull.cancelled:
            indices = [*chain.from_iterable(load.indices for load in imported.ended_loads)]
            self.pulled_bytes += len(indices) * self.plan.block_bytes
            groups = pull.groups
            positions = indices if groups == 1 else {index // groups for index in indices}
            self.pulled_tokens += len(positions) * imported.pool.block_size
            self.pull_seconds += (imported.loaded or time.monotonic()) - pull.began
            self.shared_pulls += pull.borrowed is not None
            self.device_pulls += pull.borrowed is not None and pull.borrowed.slots.on_device
        if imported.error:
            self.failed_pulls += 1
            if time.monotonic() >= self._logged + _LOG_SECONDS:
                self._logged = time.monotonic()
                logger.warning("KV blocks were not moved here: %s", imported.error)
        if not imported.released:
            self._pulled.append(number)

    def _detach(self) -> None:
        """Forget the slots of engines that have ended, once no pull reads them."""
        borrowed = [imported.pull.borrowed for imported in self._imports.values()]
        read = [borrow.slots for borrow in borrowed if borrow is not None]
        for slots in [slots for slots in self._gone if slots not in read]:
            self._gone.remove(slots)
            assert self._sharing is not None
            self._sharing.detach(slots.first)

    # ---- dropping ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Free the blocks held for other replicas, and cancel the pulls in flight."""
        for last in list(self._leases):
            self._end_lease(last)
        for order in list(self._exports):
            self._drop_order(order)
        for imported in self._imports.values():
            imported.pull.cancelled = True

    def abandon(self) -> None:
        """Forget all blocks, as their pool is replaced. Waiting requests start once their threads
        end."""
        self.clear()
        self.settle()
        for imported in self._imports.values():
            imported.free()
            imported.ended_loads.clear()

    def settle(self) -> None:
        """Wait for the copies in flight, and process their completion."""
        self.copies.wait()
        self._finish_loads()

    # ---- counts and checks ---------------------------------------------------------------------

    def tables(self, pool: BlockManager) -> list[list[int]]:
        """Return the blocks that each move holds."""
        tables = [export.blocks for export in self._exports.values() if export.pool is pool]
        tables += [lease.blocks for lease in self._leases.values() if lease.pool is pool]
        for imported in self._imports.values():
            if imported.pool is pool:
                loads = [*imported.ended_loads, *imported.loads.values()]
                tables += [load.blocks for load in loads]
        return tables

    def waiting(self) -> Collection[int]:
        """Return the ids of requests that wait for blocks."""
        return [number for number, i in self._imports.items() if not i.released]

    def stats(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` about moves."""
        return {
            "moves": self.pulls,
            "moved_tokens": self.pulled_tokens,
            "moved_bytes": self.pulled_bytes,
            "move_seconds": self.pull_seconds,
            "shared_moves": self.shared_pulls,
            "device_moves": self.device_pulls,
            "failed_moves": self.failed_pulls,
            "sent_kv_bytes": self.sent_bytes,
        }
