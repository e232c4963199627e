"""HostTier: the KV blocks that are kept in host memory, and the loads that bring them back.

A block is copied to the host when a request that used it has left, and is loaded when a waiting
request begins with the block's tokens:

 device   in use -> evictable -> evicted            taken -> in the prefix cache -> in use
               \\  copied while evictable            /  while its request waits outside the batch
 host           `--> slot of (group, hash) --------'

A load only fills the prefix cache of the device. Its request is then queued again, and starts as
after any other hit. So a load that fails is a miss, and a second request with the same tokens waits
for the same load. A load that should end before the running step does fills the cache at once
(`take_ending`): the next step then waits for the copy on the device.

Which blocks are worth their copies is decided in worth.py.

With recurrent layers, snapshots of their states (snapshots.py) are stored and loaded with the
blocks, in separate slots.

Slots of equal hashes hold equal KV, as hashes depend on model, adapter and salt (prefix_hash.py).
The least recently used slot is taken first, and never one that is being read.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import Any

from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.disk_tier import STATES, BlockFiles, DiskTier
from engine.scheduling.memory.host_loads import Load, Loadable, Waiting, resumable
from engine.scheduling.memory.host_plan import HostCopies, HostPlan, Name
from engine.scheduling.memory.snapshots import Snapshots
from engine.scheduling.memory.worth import Worth
from engine.scheduling.request import Request

# Factor on the expected time of a copy, in the decision to start its request before the copy ends.
# Copies in the other direction may slow it down.
_SLOWER = 1.25


class HostTier:
    """The directory of the host's slots, and the choice of what is stored and loaded."""

    def __init__(
        self,
        plan: HostPlan,
        copies: HostCopies,
        num_groups: int,
        files: BlockFiles | None = None,
    ) -> None:
        """Set up an empty directory.

        files: the files of the disk tier below this one; None = there is no disk tier.
        """
        self.plan = plan
        self.copies = copies
        # For each group: hash -> slot.
        self.slots: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._names: list[Name | None] = [None] * plan.blocks
        self._free = list(range(plan.blocks - 1, -1, -1))
        self._order: OrderedDict[int, None] = OrderedDict()  # slots with a name, oldest first
        self._reading: set[int] = set()  # slots of loads in flight
        self._loads: dict[int, Load] = {}  # ticket -> load
        self._coming: dict[Name, int] = {}  # blocks of loads in flight -> ticket
        self.states: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, oldest first
        self._free_states = list(range(plan.states - 1, -1, -1))
        self._reading_states: set[int] = set()
        self._coming_states: dict[bytes, int] = {}  # states of loads in flight -> ticket
        self._waiting: dict[Request, Waiting] = {}
        self._tickets = 0
        self.worth = Worth(plan, copies)
        # Slots that are being read from disk.
        self.filling: set[int] = set()
        self.filling_states: set[int] = set()
        self.disk = None if files is None else DiskTier(self, files)
        # called with the hash of each block that has left host memory
        self.on_drop: Callable[[bytes], None] = lambda digest: None
        self.reset_counts()

    def reset_counts(self) -> None:
        """Set all counts to zero, except those of the disk tier."""
        self.stored_bytes = self.loaded_bytes = self.loaded_tokens = 0
        self.dropped = self.evictions = self.failed_loads = 0
        self.wait_seconds = 0.0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, digest: bytes) -> bool:
        """Whether every group has the block of this hash on the host."""
        return all(digest in slots for slots in self.slots)

    def has(self, digest: bytes) -> bool:
        """Whether every group has the block of this hash on the host or on disk."""
        disk = self.disk
        if disk is None:
            return digest in self
        return all(
            digest in slots or disk.files.has((group, digest))
            for group, slots in enumerate(self.slots)
        )

    @property
    def num_loads(self) -> int:
        """The number of loads and disk transfers in flight; `take_arrived` collects finished
        ones."""
        return len(self._loads) + (0 if self.disk is None else self.disk.num_pending)

    def has_news(self) -> bool:
        """Whether the disk tier has finished its writes; `take_arrived` collects them."""
        return self.disk is not None and self.disk.files.has_news()

    def tables(self, pool: BlockManager) -> list[list[int]]:
        """Return the pool's blocks that each load in flight holds."""
        return [load.table for load in self._loads.values() if load.pool is pool]

    def num_coming(self) -> int:
        """Return how many device blocks become evictable when the loads in flight are done."""
        return sum(load.pool.num_exclusive(load.table) for load in self._loads.values())

    def loading(self) -> list[tuple[Request, int]]:
        """Return the requests that wait for loads, each with the device blocks of its prefix."""
        waiting = self._waiting.items()
        return [(request, wait.num_blocks) for request, wait in waiting if wait.num_blocks]

    # ---- stores --------------------------------------------------------------------------------

    def store(
        self,
        pool: BlockManager,
        blocks: Sequence[int],
        worth: Sequence[bytes],
        snapshots: Snapshots | None = None,
        done_step: int = 0,
    ) -> None:
        """Store a request's blocks and snapshots, if they are worth it and not on the host yet.

        blocks: the request's block table; no step in flight uses these blocks.
        worth: the hashes of the blocks that are worth a copy, from `Worth.leave`.
        done_step: the last step that is done.
        """
        wanted = set(worth)
        named = [(name, block) for block in blocks if (name := pool.name_of(block)) is not None]
        named = [(name, block) for name, block in named if name[1] in wanted]
        absent = [name for name, _ in named if name[1] not in self.slots[name[0]]]
        room = min(self.copies.room(), self.plan.blocks) if absent else 0
        self.dropped += max(0, len(absent) - room)
        chosen = set(absent[:room])
        pairs: list[tuple[int, int]] = []
        for name, block in reversed(named):  # so that a tail is taken before its head
            slot = self.slots[name[0]].get(name[1], -1)
            if slot >= 0:
                self._order.move_to_end(slot)
            elif name in chosen:
                slot = self._take_slot()
                if slot < 0:
                    self.dropped += 1
                    continue
                self._names[slot] = name
                self.slots[name[0]][name[1]] = slot
                self._order[slot] = None
                pairs.append((block, slot))
        states = [] if snapshots is None else self._take_states(snapshots, worth, done_step)
        if not (pairs or states):
            return
        saved = [(slot, self.states[digest]) for digest, slot in states]
        if self.copies.store(pairs, saved):
            if self.disk is not None:
                names = ((self._names[slot], slot) for _, slot in pairs)
                entries = [(name, slot) for name, slot in names if name is not None]
                entries += [((STATES, digest), self.states[digest]) for digest, _ in states]
                self.disk.stored(entries)
            size = len(pairs) * self.plan.block_bytes + len(states) * self.plan.state_bytes
            self.stored_bytes += size
        else:
            self.dropped += len(pairs)
            for _, slot in pairs:
                self._drop(slot)
            for digest, _ in states:
                self._drop_state(digest)

    def _take_states(
        self, snapshots: Snapshots, worth: Sequence[bytes], done_step: int
    ) -> list[tuple[bytes, int]]:
        """Assign host slots to the snapshots of blocks that are not on the host yet.

        Returns (hash, device slot of the snapshot) of each. The longest prefix is evicted last.
        """
        due: dict[bytes, int] = {}
        for digest in worth:
            snapshot = snapshots.saved(digest, done_step)
            if snapshot < 0:
                continue
            if digest in self.states:
                self.states.move_to_end(digest)
                continue
            slot = self._take_state()
            if slot >= 0:
                self.states[digest] = slot
                due[digest] = snapshot
        # a later one may have evicted an earlier one
        return [(digest, snapshot) for digest, snapshot in due.items() if digest in self.states]

    def _take_state(self) -> int:
        """Return a free slot for a snapshot, after evicting one if necessary; -1 = none."""
        if not self._free_states and (oldest := self._oldest_state()) is not None:
            self._drop_state(oldest)
        return self._free_states.pop() if self._free_states else -1

    def _oldest_state(self) -> bytes | None:
        """Return the hash of the least recently used snapshot that is not being read, if any."""
        if self.disk is not None:
            self.disk.take_written()
        busy = self._busy(STATES)
        return next((digest for digest, slot in self.states.items() if slot not in busy), None)

    def _drop_state(self, digest: bytes) -> None:
        slot = self.states.pop(digest)
        if slot not in self._busy(STATES):
            self._free_states.append(slot)

    def _busy(self, group: int) -> Collection[int]:
        """Return the slots that must not be reused, because a load or a write to disk reads them.

        group: STATES for the slots of recurrent states; any KV group for those of blocks.
        """
        reading = self._reading_states if group == STATES else self._reading
        if self.disk is None or not self.disk.writing:
            return reading
        writing = self.disk.writing.items()
        return reading.union(
            slot for key, slot in writing if (key[0] == STATES) == (group == STATES)
        )

    def _take_slot(self) -> int:
        """Return a free slot, after evicting the least recently used block if necessary; -1 =
        none."""
        if self._free:
            return self._free.pop()
        if self.disk is not None:
            self.disk.take_written()
        busy = self._busy(0)
        for slot in self._order:
            if slot not in busy:
                self.evictions += 1
                self._drop(slot)
                return self._free.pop()
        return -1

    def _drop(self, slot: int) -> None:
        name = self._names[slot]
        if name is None:
            return
        self._names[slot] = None
        del self.slots[name[0]][name[1]], self._order[slot]
        if slot not in self._busy(0):
            self._free.append(slot)
        self.on_drop(name[1])

    # ---- loads ---------------------------------------------------------------------------------

    def find(
        self, pool: BlockManager, hashes: Sequence[bytes], snapshots: Snapshots | None = None
    ) -> Loadable | None:
        """Return the prefix to load before a request starts; None if the device has all of it, or
        computing is faster. Changes nothing: follow with `begin`.

        hashes: the hashes of the blocks that the request can share.
        """
        if not (self._order or self.states):
            return None
        groups, first = pool.num_groups, pool.num_blocks
        prefix = Loadable()
        if snapshots is None:
            table = pool.match_prefix(hashes, self.slots)
            if not table or max(table) < first:
                return None
            near = len(pool.match_prefix(hashes))
        else:
            near = len(snapshots.match(hashes, pool.match_prefix, groups)[0])
            table = resumable(pool, hashes, snapshots, near // groups, self.slots, self.states)
            if not table:
                return None
            digest = hashes[len(table) // groups - 1]
            if digest in self._coming_states:
                prefix.awaited.add(self._coming_states[digest])
            elif digest not in snapshots:
                prefix.state = digest
        prefix.num_tokens = (len(table) - near) // groups * pool.block_size
        prefix.num_blocks = sum(entry >= 0 for entry in table)
        for index, entry in enumerate(table):
            name = index % groups, hashes[index // groups]
            if 0 <= entry < first:
                prefix.held.append((index, entry))
            elif entry >= first and name in self._coming:
                prefix.awaited.add(self._coming[name])
            elif entry >= first:
                prefix.missing.append((index, name, entry - first))
        if len(prefix.missing) > pool.num_free - pool.num_unused(block for _, block in prefix.held):
            return None
        size = len(prefix.missing) * self.plan.block_bytes
        size += self.plan.state_bytes if prefix.state else 0
        return prefix if self.worth.loading(prefix.num_tokens, size) else None

    def begin(
        self,
        request: Request,
        pool: BlockManager,
        prefix: Loadable,
        snapshots: Snapshots | None = None,
    ) -> bool:
        """Begin to load a prefix that `find` has just returned; the request waits for it.

        Returns False, and changes nothing, if no slot is free for a snapshot.
        """
        tickets = set(prefix.awaited)
        snapshot = -1
        if prefix.state and snapshots is not None:
            snapshot = snapshots.reserve()
            if snapshot < 0:
                return False
        if prefix.missing or prefix.state:
            pool.share([block for _, block in prefix.held])
            blocks = pool.allocate(len(prefix.missing))
            places = [index for index, _, _ in prefix.missing]
            names = [name for _, name, _ in prefix.missing]
            slots = [slot for _, _, slot in prefix.missing]
            table = sorted([*prefix.held, *zip(places, blocks, strict=True)])
            held = [block for _, block in table]
            self._tickets += 1
            load = Load(pool, held, names, slots, blocks, prefix.num_tokens)
            self._loads[self._tickets] = load
            states: list[tuple[int, int]] = []
            if prefix.state:
                load.state, load.snapshot, load.snapshots = prefix.state, snapshot, snapshots
                load.state_slot = self.states[prefix.state]
                self.states.move_to_end(prefix.state)
                self._reading_states.add(load.state_slot)
                self._coming_states[prefix.state] = self._tickets
                states.append((load.state_slot, snapshot))
            self._coming.update(dict.fromkeys(names, self._tickets))
            self._reading.update(slots)
            for slot in reversed(slots):
                self._order.move_to_end(slot)
            tickets.add(self._tickets)
            self.copies.load(self._tickets, list(zip(slots, blocks, strict=True)), states)
        waiting = Waiting(tickets, time.monotonic(), num_blocks=prefix.num_blocks)
        self._waiting[request] = waiting
        return True

    def take_arrived(self) -> list[Request]:
        """Move the blocks of finished loads into the prefix cache; return the requests that wait
        no longer."""
        if self.disk is not None:
            self.disk.poll()
        for ticket, succeeded in self.copies.finished():
            load = self._loads.pop(ticket, None)
            if load is not None:
                self._finish(ticket, load, succeeded)
        return self._take_ready()

    def take_ending(self, seconds: float) -> list[Request]:
        """Move the blocks of loads that are expected to end within `seconds` into the prefix cache.

        Returns the requests that wait no longer. Their steps wait for the copies on the device.
        """
        for ticket, left in self.copies.ending().items():
            load = self._loads.get(ticket)
            if load is None or load.state or load.stale or load.adopted:
                continue
            if _SLOWER * left <= seconds:
                load.adopted = True
                self._adopt(load)
                self.arrived(ticket)
        return self._take_ready()

    def _take_ready(self) -> list[Request]:
        """Return the requests that wait no longer, each once."""
        now = time.monotonic()
        arrived = [
            request
            for request, waiting in self._waiting.items()
            if not waiting.tickets or now > waiting.until
        ]
        for request in arrived:
            waiting = self._waiting.pop(request)
            if self.disk is not None and waiting.until < inf:
                self.disk.wait_seconds += now - waiting.began
            else:
                self.wait_seconds += now - waiting.began
        return arrived

    def _finish(self, ticket: int, load: Load, succeeded: bool) -> None:
        for name in load.names:
            del self._coming[name]
        self._reading.difference_update(load.slots)
        dropped = [slot for slot in load.slots if self._names[slot] is None]
        if dropped:  # while they were read
            busy = self._busy(0)
            self._free.extend(slot for slot in dropped if slot not in busy)
        if not succeeded:
            for slot in load.slots:
                self._drop(slot)
        assert succeeded or not load.adopted
        usable = succeeded and not load.stale
        if usable and not load.adopted:
            self._adopt(load)
        if load.snapshots is not None:
            del self._coming_states[load.state]
            self._reading_states.discard(load.state_slot)
            # the state was dropped during the load
            if self.states.get(load.state) != load.state_slot:
                if load.state_slot not in self._busy(STATES):
                    self._free_states.append(load.state_slot)
            elif not succeeded:
                self._drop_state(load.state)
            load.snapshots.adopt(load.snapshot, load.state if usable else b"")
        if usable:
            self.loaded_bytes += len(load.names) * self.plan.block_bytes
            self.loaded_bytes += self.plan.state_bytes if load.state else 0
            self.loaded_tokens += load.num_tokens
        elif not succeeded:
            self.failed_loads += 1
        load.pool.free(load.table)
        self.arrived(ticket)

    def _adopt(self, load: Load) -> None:
        """Let the blocks of a load enter the prefix cache of the device."""
        digests = [digest for _, digest in load.names]
        load.pool.adopt(load.blocks, digests, (group for group, _ in load.names))

    def arrived(self, ticket: int) -> None:
        """Remove a ticket from all requests that wait for it."""
        for waiting in self._waiting.values():
            waiting.tickets.discard(ticket)

    def end_request(self, request: Request) -> None:
        """Forget a request that has ended while it waited for its blocks to be loaded."""
        del self._waiting[request]

    # ---- methods for the disk tier -------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """The number of slots for blocks."""
        return self.plan.blocks

    def num_bytes(self, name: Name) -> int:
        """Return the bytes of a block, or of a snapshot."""
        return self.plan.state_bytes if name[0] == STATES else self.plan.block_bytes

    def slot_of(self, name: Name) -> int:
        """Return the slot that has a block or snapshot; -1 = none."""
        group, digest = name
        return (self.states if group == STATES else self.slots[group]).get(digest, -1)

    def copied(self, entries: Sequence[tuple[Name, int]]) -> bool:
        """Whether the copies to all these slots are done.

        entries: (name, slot) pairs.
        """
        blocks = [slot for name, slot in entries if name[0] != STATES]
        return self.copies.stored(blocks, [slot for name, slot in entries if name[0] == STATES])

    def touch(self, name: Name) -> None:
        """Make a block the last to be evicted, if it is in host memory; snapshots stay in place."""
        slot = self.slot_of(name)
        if slot >= 0 and name[0] != STATES:
            self._order.move_to_end(slot)

    def next_ticket(self) -> int:
        """Return the number of a new load or read."""
        self._tickets += 1
        return self._tickets

    def reserve(self, names: Sequence[Name]) -> list[int] | None:
        """Reserve a slot for each block and snapshot to read; None, and no change, if too few are
        free."""
        slots: list[int] = []
        for name in names:
            slot = self._take_slot() if name[0] != STATES else self._take_state()
            if slot < 0:
                for digest, number in zip(names, slots, strict=False):
                    self.fill(digest, number, usable=False)
                return None
            slots.append(slot)
            (self.filling_states if name[0] == STATES else self.filling).add(slot)
        return slots

    def fill(self, name: Name, slot: int, *, usable: bool) -> None:
        """Register a block that was read into a slot, or free the slot if the data is not
        usable."""
        group, digest = name
        usable = usable and self.slot_of(name) < 0
        if group == STATES:
            self.filling_states.discard(slot)
            if usable:
                self.states[digest] = slot
            else:
                self._free_states.append(slot)
            return
        self.filling.discard(slot)
        if usable:
            self._names[slot], self.slots[group][digest] = name, slot
            self._order[slot] = None
        else:
            self._free.append(slot)

    def written(self, name: Name, slot: int) -> None:
        """Free a slot whose write to a file is done, unless the slot has a block or is in use."""
        if slot in self._busy(name[0]):
            return
        if name[0] == STATES:
            if slot not in self.states.values():
                self._free_states.append(slot)
        elif self._names[slot] is None:
            self._free.append(slot)

    def wait_for(self, request: Request, tickets: set[int], until: float) -> None:
        """Make a request wait for reads.

        tickets: the numbers of the reads.
        until: monotonic seconds at which the request stops waiting.
        """
        self._waiting[request] = Waiting(tickets, time.monotonic(), until)

    # ---- the disk tier -------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether other engines, and this one after a restart, can read the stored blocks."""
        return self.disk is not None

    def on_written(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, when `has_news` may have changed."""
        if self.disk is not None:
            self.disk.files.wake = wake

    def delete_files(self) -> None:
        """Delete the files of all blocks."""
        if self.disk is not None:
            self.disk.files.clear()

    def renew_files(self) -> None:
        """Hide all files that were written before, as the weights have changed."""
        if self.disk is not None:
            self.disk.files.renew()

    def close(self) -> None:
        """Finish the queued writes to disk; no method is called afterwards."""
        if self.disk is not None:
            self.copies.wait()
            self.disk.poll()
            self.disk.files.close()

    # ---- dropping blocks -----------------------------------------------------------------------

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Drop the blocks of these hashes, because their KV may be wrong."""
        hashes = list(hashes)
        if self.disk is not None:
            self.disk.forget(hashes)
        for digest in hashes:
            if digest in self.states:
                self._drop_state(digest)
            for group, slots in enumerate(self.slots):
                if (slot := slots.get(digest)) is not None:
                    self._drop(slot)
                if (ticket := self._coming.get((group, digest))) is not None:
                    self._loads[ticket].stale = True

    def clear(self) -> None:
        """Drop all blocks of the host. Loads and reads in flight end without effect."""
        if self.disk is not None:
            self.disk.interrupt()
        for slot in list(self._order):
            self._drop(slot)
        for digest in list(self.states):
            self._drop_state(digest)
        for load in self._loads.values():
            load.stale = True
        self.worth.forget_uses()

    def abandon(self) -> list[Request]:
        """Forget the loads in flight, as the device's pools are replaced; return the waiting
        requests.

        Call this only when no copy is in flight.
        """
        for ticket, load in list(self._loads.items()):
            del self._loads[ticket]
            load.stale = True
            self._finish(ticket, load, succeeded=True)
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    # ---- counts and checks ---------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` about the host tier."""
        return {
            "host_kv_blocks": len(self),
            "host_kv_slots": self.plan.blocks,
            "host_kv_stored_bytes": self.stored_bytes,
            "host_kv_loaded_bytes": self.loaded_bytes,
            "host_kv_loaded_tokens": self.loaded_tokens,
            "host_kv_store_seconds": self.copies.store_seconds,
            "host_kv_load_seconds": self.copies.load_seconds,
            "host_kv_wait_seconds": self.wait_seconds,
            "host_kv_dropped": self.dropped,
            "host_kv_evicted": self.evictions,
            "host_kv_failed_loads": self.failed_loads,
            **({} if self.disk is None else self.disk.stats()),
        }

    def check_integrity(self, waiting: Collection[Request]) -> None:
        """Assert the invariants.

        waiting: the queue's requests that wait for blocks.
        """
        assert self._waiting.keys() == set(waiting), "a request waits for nothing, or for ever"
        named = {slot for slot, name in enumerate(self._names) if name is not None}
        assert named == self._order.keys()
        assert {(g, d): s for g, slots in enumerate(self.slots) for d, s in slots.items()} == {
            name: slot for slot, name in enumerate(self._names) if name is not None
        }
        busy, busy_states = {*self._busy(0)}, {*self._busy(STATES)}
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & (named | busy | self.filling) and not self.filling & (named | busy)
        assert len(free | named | busy | self.filling) == self.plan.blocks, "a slot is lost"
        loads = self._loads.values()
        assert {name for load in loads for name in load.names} == self._coming.keys()
        assert {slot for load in loads for slot in load.slots} == self._reading
        slots = [*self._free_states, *self.filling_states]
        slots += {*self.states.values()} | busy_states
        assert sorted(slots) == list(range(self.plan.states)), "a slot of a state is lost"
        coming = {load.state for load in self._loads.values()} - {b""}
        assert coming == self._coming_states.keys()
        tickets = {*self._loads} if self.disk is None else {*self._loads} | self.disk.tickets
        assert all(waiting.tickets <= tickets for waiting in self._waiting.values())
        if self.disk is not None:
            self.disk.check_integrity()
