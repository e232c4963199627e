"""DiskTier: the KV blocks that are kept in files below the host tier.

 host     stored by second use -> copied -> written by a thread, if the queue has room
 disk                                       file of (group, hash)
 host     slot without a name <- read by threads <- a waiting request begins with its tokens

A read only fills the host tier. Its request is then queued again, and loads the blocks from there
(host_tier.py). So a missing, short or damaged file is a cache miss.

A prefix is read if the read and the following load take less time than computing the tokens, by the
rates of the last reads. A request waits for a bounded time, as a disk may hang. A slot does not
change while it is written or read.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.host_loads import resumable
from engine.scheduling.memory.snapshots import Snapshots
from engine.scheduling.request import Request

if TYPE_CHECKING:
    from engine.scheduling.memory.host_tier import HostTier

STATES = -1  # the group number in the keys of recurrent states' snapshots
_LEAST_WAIT = 1.0  # minimum timeout, in seconds, of a request that waits for a read
_WAIT_FACTOR = 4.0  # the timeout also has this multiple of the read's expected time

Key = tuple[int, bytes]  # group, hash


class BlockFiles(Protocol):
    """The files of blocks and snapshots, which are written and read by other threads.

    wake: called from any thread when `has_news` may have changed.
    """

    wake: Callable[[], None]

    @property
    def read_rate(self) -> float:
        """The read rate in bytes a second, of the last reads or measured at the start; 0 =
        unknown."""
        ...

    def has(self, key: Key) -> bool:
        """Whether a block has a file, as far as this engine knows."""
        ...

    def hashes(self, group: int) -> Mapping[bytes, Any]:
        """Return the hashes of a group's blocks that have files."""
        ...

    def look_up(self, digests: Iterable[bytes]) -> bool:
        """Look for blocks that other engines have just written; return whether there are any.

        digests: hashes in the order of a prefix; the search ends at the first without a file.
        """
        ...

    def room(self) -> int:
        """Return how many writes can be queued now."""
        ...

    def write(self, key: Key, slot: int, rank: int = 0) -> None:
        """Queue the write of a slot, which must not change until `written` returns it.

        rank: the block's index in its prefix; of equally old files the highest is evicted first.
        """
        ...

    def written(self) -> list[tuple[Key, int]]:
        """Return (key, slot) of each write that has finished with its slot since the last call."""
        ...

    def has_news(self) -> bool:
        """Whether all queued writes have finished, some of them since the last `written`."""
        ...

    def read(self, ticket: int, entries: Sequence[tuple[Key, int]]) -> None:
        """Begin to read files into host slots.

        ticket: number of the read, which `finished` returns.
        entries: (key of a file, slot to read it into) pairs, a prefix's head first.
        """
        ...

    def finished(self) -> list[tuple[int, frozenset[Key]]]:
        """Return (ticket, keys that could not be read) of each read that ended since the last
        call."""
        ...

    def forget(self, keys: Iterable[Key]) -> None:
        """Begin to delete the files of some blocks; `has` returns False for them from now on."""
        ...

    def clear(self) -> None:
        """Delete the files of all blocks."""
        ...

    def renew(self) -> None:
        """Hide all blocks that were written before, as the weights have changed."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` that this object counts."""
        ...

    def close(self) -> None:
        """Finish the queued writes, for a bounded time; no method is called afterwards."""
        ...


class _Either(Mapping[bytes, int]):
    """A view of a group's table, hash -> slot, in which blocks on disk alone have slot `marker`."""

    def __init__(self, slots: Mapping[bytes, int], files: Mapping[bytes, Any], marker: int) -> None:
        self._slots, self._files, self._marker = slots, files, marker

    def __getitem__(self, digest: bytes) -> int:
        slot = self._slots.get(digest, -1)
        if slot < 0 and digest not in self._files:
            raise KeyError(digest)
        return slot if slot >= 0 else self._marker

    def __contains__(self, digest: object) -> bool:
        return digest in self._slots or digest in self._files

    def __iter__(self) -> Iterator[bytes]:
        return iter({**self._slots, **self._files})

    def __len__(self) -> int:
        return len({**self._slots, **self._files})


@dataclass(slots=True)
class _Read:
    entries: list[tuple[Key, int]]
    num_tokens: int
    size: int
    stale: set[Key] = field(default_factory=set)  # keys whose bytes must not be used


class DiskTier:
    """The choice of blocks to write to and read from files, and the record of these transfers."""

    def __init__(self, host: "HostTier", files: BlockFiles) -> None:
        self.files = files
        self._host = host
        # blocks to write, by store, whose copies to the host are still running
        self._to_write: deque[list[tuple[Key, int]]] = deque()
        self._reads: dict[int, _Read] = {}  # ticket -> read
        self._coming: dict[Key, int] = {}  # key in a read in flight -> its ticket
        self.writing: dict[Key, int] = {}  # key -> slot
        self.reset_counts()

    def reset_counts(self) -> None:
        """Set all counts to zero."""
        self.read_bytes = self.read_tokens = self.dropped = self.failed_reads = 0
        self.wait_seconds = 0.0

    @property
    def tickets(self) -> set[int]:
        """The tickets of reads in flight."""
        return {*self._reads}

    @property
    def num_pending(self) -> int:
        """The number of reads in flight, and of stores whose blocks are still to be written."""
        return len(self._reads) + len(self._to_write)

    # ---- writes --------------------------------------------------------------------------------

    def stored(self, entries: Sequence[tuple[Key, int]]) -> None:
        """Queue blocks for writing to files, while they are still being copied to the host.

        entries: (key, slot) each, a prefix's tail before its head.
        """
        absent = [entry for entry in entries if not self.files.has(entry[0])]
        absent = [entry for entry in absent if entry[0] not in self.writing]
        if absent:
            self._to_write.append(absent)

    def poll(self) -> None:
        """Queue writes of slots whose copies are done, and collect finished writes and reads."""
        self.take_written()
        while self._to_write and self._host.copied(self._to_write[0]):
            # Head first, as nothing can start from a tail if this process is killed.
            head_first = self._to_write.popleft()[::-1]
            pinned = self._host.num_slots // 4 - len(self.writing)
            room = max(0, min(self.files.room(), pinned))
            self.dropped += len(head_first[room:])
            for rank, (key, slot) in enumerate(head_first[:room]):
                if key in self.writing:
                    continue
                if self._host.slot_of(key) != slot:  # evicted meanwhile
                    self.dropped += 1
                else:
                    self.writing[key] = slot
                    self.files.write(key, slot, rank)
        for ticket, failed in self.files.finished():
            self._finish(ticket, self._reads.pop(ticket), failed)

    def take_written(self) -> None:
        """Give the slots whose writes to files are finished back to the host tier."""
        for key, slot in self.files.written():
            del self.writing[key]
            self._host.written(key, slot)

    # ---- reads ---------------------------------------------------------------------------------

    def fetch(
        self,
        request: Request,
        pool: BlockManager,
        hashes: Sequence[bytes],
        snapshots: Snapshots | None,
    ) -> bool:
        """Begin to read more of the request's prefix from disk; return whether the request waits.

        Nothing is read if memory has as much of the prefix, or if computing it is faster.

        hashes: the hashes of the blocks that the request can share.
        """
        host, groups = self._host, pool.num_groups
        files = [self.files.hashes(group) for group in range(groups)]
        if not any(files) and not self.files.look_up(hashes):
            return False
        near, table, entries = self._reach(pool, hashes, snapshots)
        if self.files.look_up(hashes[len(table) // groups :]):
            near, table, entries = self._reach(pool, hashes, snapshots)
        if len(table) <= near:
            return False
        on_disk = pool.num_blocks + host.num_slots
        entries += [
            (index % groups, hashes[index // groups])
            for index, entry in enumerate(table)
            if entry == on_disk
        ]
        tickets = {self._coming[key] for key in entries if key in self._coming}
        missing = [key for key in entries if key not in self._coming]
        num_tokens = (len(table) - near) // groups * pool.block_size
        size = sum(host.num_bytes(key) for key in missing)
        if not host.worth.loading(num_tokens, size, size, self.files.read_rate):
            return False
        for index in range(len(table) - 1, -1, -1):
            host.touch((index % groups, hashes[index // groups]))
        if missing:
            slots = host.reserve(missing)
            if slots is None:
                return False
            ticket = host.next_ticket()
            self._reads[ticket] = _Read(
                list(zip(missing, slots, strict=True)), num_tokens, size
            )  # fmt: skip
            self._coming |= dict.fromkeys(missing, ticket)
            self.files.read(ticket, self._reads[ticket].entries)
            tickets.add(ticket)
        rate = self.files.read_rate
        ahead = sum(self._reads[ticket].size for ticket in self._reads)
        seconds = _LEAST_WAIT + (_WAIT_FACTOR * ahead / rate if rate else 0.0)
        host.wait_for(request, tickets, time.monotonic() + seconds)
        return True

    def _reach(
        self, pool: BlockManager, hashes: Sequence[bytes], snapshots: Snapshots | None
    ) -> tuple[int, list[int], list[Key]]:
        """Return how far a prefix reaches in memory and on disk.

        The result is (number of leading entries of the table in memory, the table including blocks
        on disk, [key of the snapshot to read] if one is needed).
        """
        host, groups = self._host, pool.num_groups
        either = [
            _Either(slots, self.files.hashes(group), host.num_slots)
            for group, slots in enumerate(host.slots)
        ]
        if snapshots is None:
            near = len(pool.match_prefix(hashes, host.slots))
            return near, pool.match_prefix(hashes, either), []
        near = len(snapshots.match(hashes, pool.match_prefix, groups)[0])
        own = resumable(pool, hashes, snapshots, near // groups, host.slots, host.states)
        near = max(near, len(own))
        states = _Either(host.states, self.files.hashes(STATES), host.num_slots)
        table = resumable(pool, hashes, snapshots, near // groups, either, states)
        digest = hashes[len(table) // groups - 1] if table else b""
        absent = bool(table) and digest not in snapshots and digest not in host.states
        return near, table, [(STATES, digest)] if absent else []

    def _finish(self, ticket: int, read: _Read, failed: frozenset[Key]) -> None:
        for key, slot in reversed(read.entries):  # so that a tail is evicted before its head
            del self._coming[key]
            usable = key not in failed and key not in read.stale
            self._host.fill(key, slot, usable=usable)
        if failed:
            self.failed_reads += 1
        elif not read.stale:
            self.read_tokens += read.num_tokens
        self.read_bytes += sum(self._host.num_bytes(k) for k, _ in read.entries if k not in failed)
        self._host.arrived(ticket)

    # ---- dropping blocks -----------------------------------------------------------------------

    def forget(self, digests: Iterable[bytes]) -> None:
        """Delete the files of these hashes, because their KV may be wrong."""
        groups = (STATES, *range(len(self._host.slots)))
        keys = [(group, digest) for digest in digests for group in groups]
        for key in keys:
            if key in self._coming:
                self._reads[self._coming[key]].stale.add(key)
        wrong = {*keys}
        self._to_write = deque(
            [entry for entry in entries if entry[0] not in wrong] for entries in self._to_write
        )
        deleted = [key for key in keys if key in self.writing or self.files.has(key)]
        if deleted:
            self.files.forget(deleted)

    def interrupt(self) -> None:
        """Make all reads in flight stale, so that they are ignored; drop writes not yet begun."""
        self._to_write.clear()
        for read in self._reads.values():
            read.stale |= {key for key, _ in read.entries}

    # ---- counts and checks ---------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` about the disk tier."""
        of_files = self.files.stats()
        return of_files | {
            "disk_kv_read_bytes": self.read_bytes,
            "disk_kv_read_tokens": self.read_tokens,
            "disk_kv_wait_seconds": self.wait_seconds,
            "disk_kv_dropped": self.dropped + of_files.get("disk_kv_dropped", 0),
            "disk_kv_failed_reads": self.failed_reads,
        }

    def check_integrity(self) -> None:
        """Assert the invariants."""
        entries = [entry for read in self._reads.values() for entry in read.entries]
        assert {key for key, _ in entries} == self._coming.keys(), "a read is lost"
        blocks = {slot for key, slot in entries if key[0] != STATES}
        assert blocks == self._host.filling
        assert {slot for key, slot in entries if key[0] == STATES} == self._host.filling_states
