"""DiskCache: a cache on disk for adapters from object stores, with a budget of bytes. No torch.

 <digest>/    an adapter's two files, complete; the folder's mtime is its last use
 part-.../    an unfinished download; the file `reserved` has its final size

All engines of a user share the cache. The thread that reads or fills a folder locks it with flock,
so that the lock ends with the thread's process. A locked folder is never removed. A part without a
lock was left by a killed process. The cache's own folder is locked while other folders are removed
to make room, or are given their final names.
"""

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from engine.errors import AdapterError

DEFAULT_BYTES = 16 << 30
# maximum seconds to wait for another engine's download of the same adapter
DOWNLOAD_SECONDS = 100.0
# maximum seconds to wait until other threads or engines unlock folders that could be removed
ROOM_SECONDS = 30.0
_POLL_SECONDS = 0.05
_DIGEST = re.compile(r"[0-9a-f]{32}")
_RESERVED = "reserved"


class CachedFolder:
    """A folder of the cache that this thread keeps locked until `close`.

    filled: whether the folder has an adapter's files. Otherwise it is empty, and `close` removes it
        unless `keep` was called before.
    """

    def __init__(self, cache: "DiskCache", folder: Path, lock: int, *, filled: bool) -> None:
        self.folder = folder
        self.filled = filled
        self._cache = cache
        self._lock = lock

    def __enter__(self) -> "CachedFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for the files that will be written to this folder.

        Raises AdapterError: adapter_incompatible if num_bytes exceeds the budget.
        Raises AdapterError: storage_full if other adapters do not free the room in time.
        """
        self._cache.reserve(self, num_bytes)

    def keep(self, digest: str) -> None:
        """Mark the folder as complete, so that it can be found by its digest."""
        self._cache.keep(self, digest)

    def become(self, folder: Path) -> None:
        """Switch to the folder's new path after it was renamed, and make the lock shared.

        From then on other threads and engines can find and read the folder.
        """
        self.folder, self.filled = folder, True
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Mark the files as damaged: `close` removes them, and later callers get a new folder."""
        self.filled = False

    def close(self) -> None:
        if not self.filled:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


class DiskCache:
    """The cache of downloaded adapters on the disk, shared by all engines of a user.

    folder: the parent of the cache's folder, which the first use creates; "" = the machine's
        temporary folder.
    budget: maximum bytes; 0 = the smaller of 16 GiB and a quarter of the free space.
    """

    def __init__(self, folder: str = "", budget: int = 0) -> None:
        self.folder = Path(folder or tempfile.gettempdir(), f"manta-adapters-{os.getuid()}")
        self._budget = budget

    @property
    def num_bytes(self) -> int:
        with self._alone():
            return sum(size for _, size in self._folders().values())

    def find(self, digest: str) -> CachedFolder | None:
        """Return the adapter with a digest; None if it is not cached. Raises AdapterError."""
        with self._alone():
            return self._find(digest)

    def open(self, digest: str = "") -> CachedFolder:
        """Return the cached adapter with a digest, or an empty folder into which to download it.

        While another thread or process downloads the same digest, the call waits.

        digest: the adapter's digest; "" = unknown, which always gives an empty folder.
        Raises AdapterError storage_full.
        """
        known = digest if _DIGEST.fullmatch(digest) else ""
        prefix = f"part-{known}-"
        end = time.monotonic() + DOWNLOAD_SECONDS
        while True:
            with self._alone():
                if (copy := self._find(known)) is not None:
                    return copy
                coming = known and any(path.name.startswith(prefix) for path in self._folders())
                if not coming or time.monotonic() > end:
                    part = Path(tempfile.mkdtemp(prefix=prefix, dir=self.folder))
                    lock = _lock(part, fcntl.LOCK_EX)
                    assert lock is not None  # no other process knows the folder yet
                    return CachedFolder(self, part, lock, filled=False)
            time.sleep(_POLL_SECONDS)

    def _find(self, digest: str) -> CachedFolder | None:
        if not _DIGEST.fullmatch(digest):
            return None
        lock = _lock(self.folder / digest, fcntl.LOCK_SH)
        if lock is None:
            return None
        os.utime(lock)
        return CachedFolder(self, self.folder / digest, lock, filled=True)

    def reserve(self, entry: CachedFolder, num_bytes: int) -> None:
        end = time.monotonic() + ROOM_SECONDS
        while True:
            with self._alone():
                budget = self._most()
                if num_bytes > budget:
                    raise AdapterError(
                        f"{num_bytes} bytes are more than the {budget} that lora_disk_bytes allows "
                        f"for all adapters in {self.folder}",
                        code="adapter_incompatible",
                    )
                if self._make_room(budget - num_bytes):
                    with (entry.folder / _RESERVED).open("wb") as file:
                        file.truncate(num_bytes)
                    return
            if time.monotonic() > end:
                raise AdapterError(
                    f"no room for {num_bytes} bytes in {self.folder}: all that lora_disk_bytes "
                    f"{budget} allows is in use",
                    code="storage_full",
                )
            time.sleep(_POLL_SECONDS)

    def keep(self, entry: CachedFolder, digest: str) -> None:
        with self._alone():
            place = self.folder / digest
            if place.exists():
                return  # another download has finished first, so this copy is removed
            (entry.folder / _RESERVED).unlink(missing_ok=True)
            entry.folder.rename(place)
            os.utime(place)
            entry.become(place)
            # again, as the download's size may not have been known in advance
            self._make_room(self._most())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid not in (0, os.getuid()):
                    raise PermissionError(errno.EPERM, "it belongs to another user")
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)
        except OSError as error:
            raise AdapterError(
                f"adapters cannot be kept in {self.folder} (lora_disk_folder): {error.strerror}",
                code="storage_full",
            ) from None

    def _folders(self) -> dict[Path, tuple[int, int]]:
        """Return {folder: (time of last use, bytes)} of all folders of the cache.

        Unfinished folders of killed processes are removed first.
        """
        folders = {}
        for path in self.folder.iterdir():
            part = path.name.startswith("part-")
            if (part or _DIGEST.fullmatch(path.name)) and not (part and _remove_unused(path)):
                folders[path] = _look(path)
        return folders

    def _most(self) -> int:
        if self._budget:
            return self._budget
        held = sum(size for _, size in self._folders().values())
        return min(DEFAULT_BYTES, (shutil.disk_usage(self.folder).free + held) // 4)

    def _make_room(self, most: int) -> bool:
        """Remove the least recently used unlocked folders until at most `most` bytes are left.

        Returns whether that succeeded.
        """
        folders = self._folders()
        held = sum(size for _, size in folders.values())
        for path in sorted(folders, key=lambda path: folders[path]):
            if held > most and _remove_unused(path):
                held -= folders[path][1]
        return held <= most


def _lock(folder: Path, kind: int) -> int | None:
    """Open and lock a folder; return the descriptor, or None if it is missing or locked.

    kind: LOCK_SH or LOCK_EX.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _remove_unused(folder: Path) -> bool:
    """Remove a folder unless it is locked, and return whether it no longer exists.

    The caller holds the `_alone` lock.
    """
    lock = _lock(folder, fcntl.LOCK_EX)
    if lock is None:
        return not folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
    return True


def _look(folder: Path) -> tuple[int, int]:
    """Return (nanoseconds of a folder's last use, bytes of its files or reserved for them).

    Both are 0 for a folder that has just been removed.
    """
    sizes = {}
    try:
        used = folder.stat().st_mtime_ns
        for file in folder.iterdir():
            sizes[file.name] = file.stat().st_size
    except FileNotFoundError:  # the process that has locked the folder is removing it
        return 0, 0
    return used, max(sizes.pop(_RESERVED, 0), sum(sizes.values()))
