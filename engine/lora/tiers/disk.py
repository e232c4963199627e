"""DiskCache: adapters of an object store on this machine's disk, with a budget of bytes. No torch.

    <digest>/    an adapter's two files, complete; the folder's mtime is its last use
    part-.../    one that is being downloaded; the file `reserved` is as long as it will be

All engines of a user share it. The thread that reads or fills a folder locks it (flock, so the lock
ends with its process), and a locked folder is never removed. A part without a lock was left by a
killed process. The folder above is locked while room is made and folders get their names.
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
DOWNLOAD_SECONDS = 100.0  # for another engine to finish the same download
ROOM_SECONDS = 30.0  # for others to let go of what is in the way
_POLL_SECONDS = 0.05
_DIGEST = re.compile(r"[0-9a-f]{32}")
_RESERVED = "reserved"


class CachedFolder:
    """A folder of the cache that this thread holds until `close`.

    filled: it holds an adapter's files. Otherwise it is empty and removed by `close`, unless `keep`
    was called before.
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

        Raises AdapterError: adapter_incompatible if num_bytes is more than the budget, storage_full
        if others keep the room for too long.
        """
        self._cache.reserve(self, num_bytes)

    def keep(self, digest: str) -> None:
        """Mark the folder as complete; from now on its digest finds it."""
        self._cache.keep(self, digest)

    def become(self, folder: Path) -> None:
        """Take over the folder's new path after its renaming, and let others read the folder."""
        self.folder, self.filled = folder, True
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Mark the folder's files as damaged; `close` removes them, and the next caller gets an
        empty folder."""
        self.filled = False

    def close(self) -> None:
        if not self.filled:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


class DiskCache:
    """The cache of downloaded adapters on the disk, shared by all engines of a user.

    folder: where the cache makes a folder of its own, when that is first needed; "" = the machine's
        temporary folder.
    budget: bytes; 0 = the smaller of 16 GiB and a quarter of what is free there.
    """

    def __init__(self, folder: str = "", budget: int = 0) -> None:
        self.folder = Path(folder or tempfile.gettempdir(), f"manta-adapters-{os.getuid()}")
        self._budget = budget

    @property
    def num_bytes(self) -> int:
        with self._alone():
            return sum(size for _, size in self._folders().values())

    def find(self, digest: str) -> CachedFolder | None:
        """Return the adapter with this digest; None if the cache does not have it. Raises
        AdapterError."""
        with self._alone():
            return self._find(digest)

    def open(self, digest: str = "") -> CachedFolder:
        """Return the adapter with this digest, or else an empty entry to fill.

        While another thread or process fills an entry for this digest, the call waits.

        digest: "" = not known: always an empty entry. Raises AdapterError storage_full.
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
                    assert lock is not None  # no other process knows it yet
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
                return  # another has brought it meanwhile; this one goes
            (entry.folder / _RESERVED).unlink(missing_ok=True)
            entry.folder.rename(place)
            os.utime(place)
            entry.become(place)
            self._make_room(self._most())  # its size may not have been told

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
        """Return entries and parts, with the last use and the bytes of each.

        The parts of processes that are gone are removed.
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
        """Remove the least recently used folders that are not locked, until `most` bytes are left.

        Returns whether at most that many bytes are left.
        """
        folders = self._folders()
        held = sum(size for _, size in folders.values())
        for path in sorted(folders, key=lambda path: folders[path]):
            if held > most and _remove_unused(path):
                held -= folders[path][1]
        return held <= most


def _lock(folder: Path, kind: int) -> int | None:
    """A descriptor with the lock on it; None if there is no such folder or another has it."""
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
    """Remove a folder if it is not locked; whether it is gone. Needs the lock of `_alone`."""
    lock = _lock(folder, fcntl.LOCK_EX)
    if lock is None:
        return not folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
    return True


def _look(folder: Path) -> tuple[int, int]:
    """Return a folder's last use, and the bytes that the folder takes or will take."""
    sizes = {}
    try:
        used = folder.stat().st_mtime_ns
        for file in folder.iterdir():
            sizes[file.name] = file.stat().st_size
    except FileNotFoundError:  # its holder is removing it
        return 0, 0
    return used, max(sizes.pop(_RESERVED, 0), sum(sizes.values()))
