"""KVShare: an engine's share of the KV memory that several engines on a device divide.

A folder in shared memory has a file for each engine, with the numbers of bytes in `Holding`. Only
its engine writes a file, and holds a lock on it that the system frees when the process ends in any
way. So the share of a dead engine is free at once, and the next engine that reads the folder
deletes the file.

Another lock protects claims, so that two engines never claim the same bytes.
"""

import contextlib
import fcntl
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

_RECORD = struct.Struct("<6q")
_SUFFIX = ".share"
_AGAIN = 0.05  # seconds between two attempts to claim


@dataclass(slots=True)
class Holding:
    """The bytes of KV memory that one engine holds, which are the record in its file.

    least: the bytes that the engine never gives away; 0 while it sleeps.
    claimed: the bytes that the engine has mapped or is about to map.
    mapped: the bytes that the engine has mapped.
    used: the bytes that its requests use.
    short: the bytes that its requests lack.
    kept: the bytes that the engine needs for other things than blocks, such as activations, and has
        not allocated yet.
    """

    least: int = 0
    claimed: int = 0
    mapped: int = 0
    used: int = 0
    short: int = 0
    kept: int = 0

    @property
    def taken(self) -> int:
        """The bytes that no other engine can claim."""
        return max(self.least, self.claimed)

    @property
    def spare(self) -> int:
        """The bytes that the engine can do without."""
        return 0 if self.short else max(0, self.claimed - max(self.least, self.used))


def shares_folder(device: str) -> Path:
    """Return the folder that has a file for each engine on a device: its share of the KV memory.

    The folder is in shared memory where the system has it, and need not exist yet.

    device: a name of the device that is the same in all processes.
    """
    shared = Path("/dev/shm")
    root = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return root / f"manta-kv-{os.getuid()}" / device


class KVShare:
    """This engine's share of the device's KV memory, and its view of the other engines' shares.

    total: the bytes that all engines of the folder have together.
    free: returns the number of free bytes of the device.
    kept: returns `Holding.kept` of this engine.
    own: this engine's holding; `report` writes it.
    sleeping: whether the engine needs memory for nothing but blocks, as its weights are freed.
    """

    def __init__(
        self,
        folder: Path,
        total: int,
        free: Callable[[], int],
        kept: Callable[[], int] = lambda: 0,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.total = total
        self.own = Holding()
        self._folder = folder
        self._free = free
        self._kept = kept
        self.sleeping = False
        with self._mutex():
            file, name = tempfile.mkstemp(suffix=_SUFFIX, dir=folder)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file, self._path = file, Path(name)
            self._write()

    @contextlib.contextmanager
    def _mutex(self) -> Iterator[None]:
        with open(self._folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self) -> None:
        os.pwrite(self._file, _RECORD.pack(*astuple(self.own)), 0)

    def report(self, *, used: int, short: int) -> None:
        """Publish the bytes that this engine's requests use and lack."""
        own, reserved = self.own, 0 if self.sleeping else self._kept()
        if (used, short, reserved) != (own.used, own.short, own.kept):
            own.used, own.short, own.kept = used, short, reserved
            self._write()

    def others(self) -> list[Holding]:
        """Return the shares of the other engines, and delete the files of dead ones."""
        with self._mutex():
            return self._others()

    def _others(self) -> list[Holding]:
        # Under the lock, because a new file is locked a moment after it appears.
        holdings = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path == self._path:
                continue
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                raw = file.read(_RECORD.size)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if len(raw) == _RECORD.size:
                        holdings.append(Holding(*_RECORD.unpack(raw)))
                else:
                    path.unlink(missing_ok=True)
        return holdings

    def room(self) -> int:
        """Return the bytes that this engine could claim now."""
        return max(0, self._room(self.others()))

    def _room(self, others: list[Holding]) -> int:
        """Return the bytes that this engine could claim; negative if others hold too much."""
        promised = sum(max(0, holding.claimed - holding.mapped) for holding in (*others, self.own))
        promised += sum(holding.kept for holding in (*others, self.own))
        # The part of another engine's `least` that it has not claimed yet is reserved for it.
        promised += sum(other.taken - other.claimed for other in others)
        bounded = self.total - sum(other.taken for other in others) - self.own.claimed
        return min(bounded, self._free() - promised)

    def claim(self, size: int, *, last: bool = False) -> int:
        """Claim up to `size` bytes of free memory; return the number of claimed bytes.

        last: whether to leave free the bytes that the other engines lack.
        """
        with self._mutex():
            others = self._others()
            room = self._room(others)
            if last:
                room -= sum(other.short for other in others)
            granted = max(0, min(size, room))
            self.own.claimed += granted
            self._write()
        return granted

    def _claim_whole(self, size: int) -> bool:
        with self._mutex():
            fits = self._room(self._others()) >= size
            self.own.claimed += size * fits
            self._write()
        return fits

    def wait_for(self, size: int, seconds: float) -> bool:
        """Claim memory, waiting for other engines to free some; return whether it was claimed.

        The other engines also free what this one needs for other things than blocks
        (`Holding.kept`).

        size: bytes of blocks; either all of them are claimed or none.
        seconds: the longest wait.
        """
        until = time.monotonic() + seconds
        self.report(used=size, short=max(1, size))
        while not self._claim_whole(size):
            if time.monotonic() > until:
                self.report(used=0, short=0)
                return False
            time.sleep(_AGAIN)
        self.report(used=size, short=0)
        return True

    def settle(self, mapped: int, *, least: int | None = None) -> None:
        """Record in the engine's file that it has `mapped` bytes mapped and no further claims.

        least: the bytes that it keeps from now on; None = as before.
        """
        self.own.claimed = self.own.mapped = mapped
        if least is not None:
            self.own.least = least
        self._write()

    def asked(self) -> int:
        """Return how many bytes this engine should free for engines that lack memory.

        Free memory is used first, and each engine frees bytes in proportion to its `Holding.spare`.
        """
        others = self.others()
        short = sum(other.short for other in others)
        if not short or not self.own.spare:
            return 0
        short -= self._room(others)
        spare = self.own.spare + sum(other.spare for other in others)
        return max(0, min(self.own.spare, -(-short * self.own.spare // spare)))

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)
