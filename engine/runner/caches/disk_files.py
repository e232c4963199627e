"""DiskFiles: KV blocks and snapshots in files of a folder, which several engines may share.

 folder                     0700, of this user alone
   lock                     held shared by every engine that uses the folder
   kv-FINGERPRINT           of one model, layout, device and version
     tmp-PID-NUMBER         a write that has not ended
     3f/3fa1...e2.0         hash and group of a block; .s for a snapshot of states

A file is written under another name, then renamed, so it is whole or absent (block_file.py). A file
that is short, foreign or damaged is a miss: it is deleted and counted.

A folder below /dev/shm is memory that the replicas of a machine share. Files of a killed replica
stay there for the others and for its successor. The last engine that ends deletes all files. An
engine that starts while no other uses the folder deletes the files of other models.

One thread of low priority writes and deletes files, and scans the folder for other engines' files.
Other threads read files into slots of host memory.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from engine.errors import ConfigError
from engine.runner.caches.block_file import (
    MAGIC,
    PAGE,
    STATES,
    BlockFormat,
    Damaged,
    Key,
    SlotMemory,
    key_of,
    opened,
    path_of,
)
from engine.runner.caches.private_folder import in_memory, make_private, open_folder, refusal

logger = logging.getLogger("manta.engine")

_READERS = 4
_QUEUE_BYTES = 1 << 30  # bytes of writes that wait
_PAUSE_SECONDS = 30.0  # seconds without writes after a failed write
_LOOK_SECONDS = 1.0  # seconds between two scans for other engines' files
_LOOK_SECONDS_IN_MEMORY = 0.1
# resolution of a file system's timestamps: two changes within it may get the same time
_CLOCK_NS = 20_000_000
_STALE_SECONDS = 600.0  # age at which a temporary file counts as abandoned
_MEASURED_SECONDS = 30.0  # age of the measured read rate after which it is measured again
_KEPT_SHARE = 0.9  # share of the maximum bytes that is kept by an eviction
# bytes; smaller reads are dominated by call overhead, so they are not timed
_WORTH_TIMING = 1 << 22
_PROBE_BYTES = 1 << 25


@dataclass(slots=True)
class _Read:
    ticket: int
    left: int
    size: int
    began: float
    used_ns: int  # time of the last use of the prefix, which is that of its first file
    failed: set[Key] = field(default_factory=set)


class DiskFiles:
    """The files of one engine (`engine.scheduling.memory.disk_tier.BlockFiles`)."""

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        identity: Sequence[str],
        blocks: SlotMemory,
        states: SlotMemory | None,
        num_groups: int,
        *,
        key: bytes = b"",
        clear: bool = False,
        free_memory: int = sys.maxsize,
    ) -> None:
        """Open a folder, measure its read rate, and index the existing files.

        num_bytes: the maximum number of bytes of all files of the folder.
        identity: strings, such as the model's key, that decide what the bytes mean.
        key: encrypts the files, 32 bytes; b"" = they are plain.
        clear: whether to delete all files at the start and at `close`, unless others use them.
            A folder in memory is cleared at `close` in any case.
        free_memory: bytes of host memory that a folder in memory may take.
        Raises ConfigError.
        """
        self.folder, self.num_bytes = folder, num_bytes
        self._identity = (*identity, blake2b(key, digest_size=8).hexdigest() if key else "")
        self._in_memory, self._free_memory = in_memory(folder), free_memory
        self._format = BlockFormat(key, direct=not self._in_memory)
        self._memories = {STATES: states} | dict.fromkeys(range(num_groups), blocks)
        self._clear = clear
        self._index: dict[int, dict[bytes, None]] = {group: {} for group in self._memories}
        self._lock = threading.Lock()  # guards the counts that several threads change
        self._reads: SimpleQueue[tuple[_Read, Key, int, int] | None] = SimpleQueue()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        self._finished: deque[tuple[int, frozenset[Key]]] = deque()
        self._written: deque[tuple[Key, int]] = deque()
        self._queued = 0  # bytes of writes that wait
        self._seen: dict[str, tuple[int, int]] = {}  # folder -> time of its last change, bytes
        self._used = 0
        self._paused_until = 0.0
        self._measured_at = 0.0
        self._numbers = 0
        self._closing = False
        self._deleting: set[Key] = set()  # keys whose deletion is queued
        self._clearing = 0  # number of queued requests to delete all files
        self.read_rate = self.write_seconds = self.read_seconds = 0.0
        self.written_bytes = self.dropped = self.evictions = self.damaged = 0
        try:
            self._lock_file = open_folder(folder)
            self.fingerprint, self._own = self._name()
            self._begin()
        except OSError as error:
            raise refusal(folder, error) from error
        self._threads = [
            threading.Thread(target=self._run_reads, name=f"kv-reads-{number}", daemon=True)
            for number in range(_READERS)
        ]
        self._threads.append(threading.Thread(target=self._run_jobs, name="kv-writes", daemon=True))
        for thread in self._threads:
            thread.start()

    # ---- methods for the scheduler -------------------------------------------------------------

    def has(self, key: Key) -> bool:
        return key[1] in self._index[key[0]]

    def hashes(self, group: int) -> dict[bytes, None]:
        """Return the hashes of a group's blocks that have files; other threads change the dict."""
        return self._index[group]

    def look_up(self, digests: Iterable[bytes]) -> bool:
        """Check for blocks that other engines have just written; return whether there are any.

        Only a folder in memory is checked. Files on a disk are found by the next scan, as a disk
        may hang.

        digests: hashes in the order of a prefix; the search ends at the first without a file.
        """
        if not self._in_memory:
            return False
        learned = False
        for digest in digests:
            keys = {
                (group, digest)
                for group, memory in self._memories.items()
                if memory is not None and os.path.exists(path_of(self._own, (group, digest)))
            }
            self._add(keys)
            if all(group == STATES for group, _ in keys):
                break
            learned = True
        return learned

    def _add(self, keys: set[Key]) -> None:
        """Add keys to the index, but not those whose deletion is queued."""
        with self._lock:
            keys = set() if self._clearing else keys - self._deleting
        for group, digest in keys:
            self._index[group][digest] = None

    def room(self) -> int:
        """Return how many writes can be queued now."""
        if time.monotonic() < self._paused_until:
            return 0
        largest = max(m.num_bytes for m in self._memories.values() if m is not None)
        return max(0, _QUEUE_BYTES - self._queued) // largest

    def write(self, key: Key, slot: int, rank: int = 0) -> None:
        """Queue the write of a slot, which must not change until `written` returns it.

        rank: the block's index in its prefix; of equally old files the highest is evicted first.
        """
        own, fingerprint = self._own, self.fingerprint
        size, used_ns = self._memory(key).num_bytes, time.time_ns() - rank
        with self._lock:
            self._queued += size
        self._jobs.put(lambda: self._write_job(own, fingerprint, key, slot, used_ns))

    def written(self) -> list[tuple[Key, int]]:
        """Return (key, slot) of each write that has finished with its slot since the last call."""
        return [self._written.popleft() for _ in range(len(self._written))]

    def has_news(self) -> bool:
        """Whether all queued writes have finished, some of them since the last `written`."""
        return bool(self._written) and not self._queued

    def read(self, ticket: int, entries: Sequence[tuple[Key, int]]) -> None:
        """Begin to read files into host slots, in the order of a prefix; see `finished`."""
        size = sum(self._memory(key).num_bytes for key, _ in entries)
        read = _Read(ticket, len(entries), size, time.monotonic(), time.time_ns())
        for rank, (key, slot) in enumerate(entries):
            self._reads.put((read, key, slot, read.used_ns - rank))

    def finished(self) -> list[tuple[int, frozenset[Key]]]:
        """Return (ticket, keys that could not be read) of each read that ended since the last
        call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def forget(self, keys: Iterable[Key]) -> None:
        """Delete files whose KV may be wrong, after the queued writes."""
        own, keys = self._own, list(keys)
        with self._lock:
            self._deleting.update(keys)
        for group, digest in keys:
            self._index[group].pop(digest, None)
        self._jobs.put(lambda: self._delete(own, keys))

    def clear(self) -> None:
        """Delete all files of this model."""
        own = self._own
        with self._lock:
            self._clearing += 1
        for hashes in self._index.values():
            hashes.clear()
        self._jobs.put(lambda: self._delete_all(own))

    def renew(self) -> None:
        """Switch to a new, empty folder for new weights, which only this process uses."""
        self._identity = (*self._identity, os.urandom(16).hex())
        self.fingerprint, self._own = self._name()
        for hashes in self._index.values():
            hashes.clear()
        own = self._own
        self._jobs.put(lambda: make_private(own))

    def stats(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` that this object counts."""
        return {
            "disk_kv_blocks": sum(len(h) for group, h in self._index.items() if group != STATES),
            "disk_kv_used_bytes": self._used,
            "disk_kv_most_bytes": self.num_bytes,
            "disk_kv_written_bytes": self.written_bytes,
            "disk_kv_write_seconds": self.write_seconds,
            "disk_kv_read_seconds": self.read_seconds,
            "disk_kv_dropped": self.dropped,
            "disk_kv_evicted": self.evictions,
            "disk_kv_damaged": self.damaged,
        }

    def close(self, seconds: float = 5.0) -> None:
        """Finish the queued writes, for at most `seconds`, and release the folder."""
        if self._closing:
            return
        self._closing = True
        self._jobs.put(None)
        for _ in range(_READERS):
            self._reads.put(None)
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._clear or self._in_memory:
            self._clear_if_alone()
        os.close(self._lock_file)

    # ---- the start -----------------------------------------------------------------------------

    def _name(self) -> tuple[bytes, Path]:
        state = blake2b(digest_size=16)
        for part in (MAGIC.decode(), *self._identity, *map(str, self._sizes())):
            state.update(len(part.encode()).to_bytes(8, "little") + part.encode())
        return state.digest(), self.folder / f"kv-{state.hexdigest()}"

    def _sizes(self) -> list[int]:
        return [0 if memory is None else memory.num_bytes for memory in self._memories.values()]

    def _begin(self) -> None:
        alone = False
        if self._clear:
            alone = self._clear_if_alone()
        elif self._in_memory:
            alone = self._clear_if_alone(keep=self._own)
        make_private(self._own)
        for path in self.folder.glob("kv-*/tmp-*"):
            with contextlib.suppress(OSError):
                if alone or time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
        self._look()
        free = shutil.disk_usage(self.folder).free
        if self._in_memory:  # memory of such a folder counts as free until it is written
            free = min(free, self._free_memory)
        free += self._used
        if free < self.num_bytes:
            raise ConfigError(
                f"disk_kv_bytes: {self.num_bytes} bytes were asked for, and {self.folder} has room "
                f"for {free}; lower it, or set disk_kv_folder to another disk",
                param="disk_kv_bytes",
            )
        self._probe()

    def _clear_if_alone(self, keep: Path | None = None) -> bool:
        """Delete all files if no other engine uses the folder; return whether none does.

        keep: the folder of a model whose files are kept.
        """
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fcntl.flock(self._lock_file, fcntl.LOCK_SH)
            return False
        for path in self.folder.glob("kv-*"):
            if path != keep:
                shutil.rmtree(path, ignore_errors=True)
        fcntl.flock(self._lock_file, fcntl.LOCK_SH)
        return True

    def _probe(self) -> None:
        """Measure the read rate, with slots that are not in use yet."""
        memory = self._memory((0, b""))
        count = max(1, min(memory.count, _PROBE_BYTES // memory.num_bytes))
        count = min(count, max(1, self.num_bytes // (memory.num_bytes + PAGE)))
        paths = [self._temporary() for _ in range(count)]
        key = (0, bytes(16))
        try:
            for number, path in enumerate(paths):
                self._format.write(path, self.fingerprint, key, memory, number)
                # dropped from the page cache, so that the disk itself is read
                with opened(path, os.O_RDONLY) as file:
                    os.fdatasync(file)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            threads = [
                threading.Thread(target=self._probe_some, args=(paths, first))
                for first in range(_READERS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = max(1e-9, time.perf_counter() - began)
            self.read_rate = count * memory.num_bytes / seconds
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        self._measured_at = time.monotonic()

    def _probe_some(self, paths: Sequence[Path], first: int) -> None:
        page = mmap.mmap(-1, PAGE)
        for number in range(first, len(paths), _READERS):
            with contextlib.suppress(OSError, Damaged):
                self._get(paths[number], (0, bytes(16)), number, page)

    # ---- files ---------------------------------------------------------------------------------

    def _memory(self, key: Key) -> SlotMemory:
        memory = self._memories[key[0]]
        assert memory is not None
        return memory

    def _temporary(self) -> Path:
        with self._lock:
            self._numbers += 1
            return self._own / f"tmp-{os.getpid()}-{id(self):x}-{self._numbers}"

    def _get(self, path: Path, key: Key, slot: int, page: mmap.mmap) -> None:
        """Read a file into a slot. Raises OSError, and Damaged."""
        self._format.read(path, self.fingerprint, key, self._memory(key), slot, page)

    # ---- reading -------------------------------------------------------------------------------

    def _run_reads(self) -> None:
        page = mmap.mmap(-1, PAGE)
        while (job := self._reads.get()) is not None:
            read, key, slot, used_ns = job
            succeeded = self._read_one(key, slot, used_ns, page)
            with self._lock:
                read.left -= 1
                if not succeeded:
                    read.failed.add(key)
                if not read.left:
                    self._end_read(read)

    def _read_one(self, key: Key, slot: int, used_ns: int, page: mmap.mmap) -> bool:
        path = path_of(self._own, key)
        try:
            self._get(path, key, slot, page)
            with contextlib.suppress(OSError):
                os.utime(path, ns=(used_ns, used_ns))
            return True
        except FileNotFoundError:  # another engine has evicted the file
            pass
        except Damaged as error:
            logger.warning("KV blocks on disk: %s; it is deleted", error)
            with self._lock:
                self.damaged += 1
            with contextlib.suppress(OSError):
                path.unlink()
        except Exception:
            logger.warning("KV blocks on disk: %s could not be read", path, exc_info=True)
        self._index[key[0]].pop(key[1], None)
        return False

    def _end_read(self, read: _Read) -> None:
        seconds = max(1e-9, time.monotonic() - read.began)
        self.read_seconds += seconds
        if read.size >= _WORTH_TIMING and not read.failed:
            self.read_rate = (self.read_rate + read.size / seconds) / 2
            self._measured_at = time.monotonic()
        self._finished.append((read.ticket, frozenset(read.failed)))

    # ---- writing and scanning ------------------------------------------------------------------

    def _run_jobs(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        between = _LOOK_SECONDS_IN_MEMORY if self._in_memory else _LOOK_SECONDS
        look_at = time.monotonic() + between
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, look_at - time.monotonic()))
            except Empty:
                job = self._look_again
            if job is None:
                return
            began = time.monotonic()
            try:
                job()
            except Exception:
                logger.warning("KV blocks on disk: the folder was not kept", exc_info=True)
            if job == self._look_again or time.monotonic() >= look_at:
                # scans, which are slow for a million files, take at most a twentieth of the time
                look_at = time.monotonic() + max(between, 20 * (time.monotonic() - began))

    def _write_job(self, own: Path, fingerprint: bytes, key: Key, slot: int, used_ns: int) -> None:
        began, size = time.monotonic(), self._memory(key).num_bytes
        try:
            if began < self._paused_until:
                self.dropped += 1
                return
            if self._used + size + PAGE > self.num_bytes:
                self._evict(int(_KEPT_SHARE * self.num_bytes) - size - PAGE)
            if self._used + size + PAGE > self.num_bytes:
                self.dropped += 1
                return
            path, temporary = path_of(own, key), own / self._temporary().name
            new = not path.exists()
            if new:
                self._format.write(temporary, fingerprint, key, self._memory(key), slot)
                os.utime(temporary, ns=(used_ns, used_ns))
                path.parent.mkdir(mode=0o700, exist_ok=True)
                temporary.rename(path)
                self._used += size + PAGE
                self.written_bytes += size
            if own == self._own:
                self._index[key[0]][key[1]] = None
        except FileNotFoundError:  # another engine has cleared the folder
            self.dropped += 1
            make_private(own)
        except OSError as error:
            self.dropped += 1
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            logger.warning(
                "KV blocks on disk: %s cannot be written (%s); nothing is written for %d s",
                self.folder, error.strerror or error, _PAUSE_SECONDS,
            )  # fmt: skip
        finally:
            with self._lock:
                self._queued -= size
            self.write_seconds += time.monotonic() - began
            self._written.append((key, slot))
            if self.has_news():
                self.wake()

    def _delete(self, own: Path, keys: Sequence[Key]) -> None:
        for key in keys:
            path_of(own, key).unlink(missing_ok=True)
            if own == self._own:
                self._index[key[0]].pop(key[1], None)
        with self._lock:
            self._deleting.difference_update(keys)

    def _delete_all(self, own: Path) -> None:
        shutil.rmtree(own, ignore_errors=True)
        make_private(own)
        if own == self._own:
            for hashes in self._index.values():
                hashes.clear()
        with self._lock:
            self._clearing -= 1

    def _look_again(self) -> None:
        self._look()
        if self._used > self.num_bytes:  # exceeded by other engines' writes
            self._evict(int(_KEPT_SHARE * self.num_bytes))
        if time.monotonic() - self._measured_at > _MEASURED_SECONDS and not self._closing:
            self._measure_again()

    def _measure_again(self) -> None:
        """Measure the disk's read rate again, by reading some of this engine's files.

        Reads for requests cannot correct a rate that is too low, as they are then not made.
        """
        self._measured_at = time.monotonic()
        memory = self._memory((0, b""))
        hashes = list(self._index[0])[: max(1, _PROBE_BYTES // memory.num_bytes)]
        size, buffers = 0, [page for page in (mmap.mmap(-1, PAGE + memory.num_bytes),) if hashes]
        began = time.perf_counter()
        for digest in hashes:
            with (
                contextlib.suppress(OSError),
                opened(
                    path_of(self._own, (0, digest)),
                    os.O_RDONLY | os.O_NOFOLLOW,
                    direct=self._format.is_direct(memory),
                ) as file,
            ):
                size += os.preadv(file, buffers, 0)
        if size >= _WORTH_TIMING:  # the rate of one reader, which is at most that of all readers
            rate = size / max(1e-9, time.perf_counter() - began)
            self.read_rate = max(self.read_rate, rate)

    def _look(self) -> None:
        """Scan the folder for files that other engines wrote or deleted, and count its bytes."""
        seen: dict[str, tuple[int, int]] = {}
        for path in self.folder.glob("kv-*/??"):
            with contextlib.suppress(OSError):
                changed, own = path.stat().st_mtime_ns, path.parent == self._own
                before = self._seen.get(str(path))
                if before is not None and before[0] == changed:
                    seen[str(path)] = before
                    continue
                if time.time_ns() - changed < _CLOCK_NS:
                    # a later change may get the same timestamp, so this folder is scanned again
                    changed = 0
                seen[str(path)] = changed, self._look_at(path, own)
        for gone in self._seen.keys() - seen.keys():
            path = Path(gone)
            if path.parent == self._own:
                self._forget_folder(path.name, set())
        self._seen = seen
        self._used = sum(size for _, size in seen.values())

    def _look_at(self, path: Path, own: bool) -> int:
        size, keys = 0, set()
        with os.scandir(path) as entries:
            for entry in entries:
                key = key_of(entry.name)
                memory = None if key is None else self._memories.get(key[0])
                if own and key is not None and memory is not None:
                    size += memory.num_bytes + PAGE
                    keys.add(key)
                else:
                    size += entry.stat(follow_symlinks=False).st_size
        if own:
            self._forget_folder(path.name, keys)
            self._add(keys)
        return size

    def _forget_folder(self, prefix: str, keys: set[Key]) -> None:
        """Remove the hashes of one subfolder that have no file any more.

        prefix: the subfolder's name, the first digits of its hashes.
        keys: the keys that have files.
        """
        first = bytes.fromhex(prefix)
        for group, hashes in self._index.items():
            for digest in list(hashes):
                if digest[:1] == first and (group, digest) not in keys:
                    hashes.pop(digest, None)

    def _evict(self, most: int) -> None:
        """Delete the least recently used files, until at most `most` bytes are left."""
        files = []
        for path in self.folder.glob("kv-*/??"):
            with contextlib.suppress(OSError), os.scandir(path) as entries:
                for entry in entries:
                    stat = entry.stat(follow_symlinks=False)
                    files.append((stat.st_mtime_ns, stat.st_size, entry.path))
        self._used = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if self._used <= most:
                break
            path = Path(name)
            path.unlink(missing_ok=True)
            self._used -= size
            self.evictions += 1
            key = key_of(path.name)
            if key is not None and path.parent.parent == self._own:
                self._index.get(key[0], {}).pop(key[1], None)
