"""SharedSlots: slots of host memory that an engine fills, and that others of its machine read.

The memory is a file without a path (memfd), so `/dev/shm` and its limit have no part in it, and the
kernel frees it with the last process that maps it, however that ends. Another process opens it by
the engine's number and the file's (`Place`), which proves nothing: in another container or on
another machine they name something else, or nothing. So both ends prove that they can read the key
in the memory (`Peer.memory_proof`).

A source takes a slot back from a puller that is lost. That puller may live and still read it. So
each slot has a number, which changes before the slot is filled again. What was read counts only if
the number is the announced one after the copy.
"""

import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.scheduling.moves.wire import NUMBER, Peer, Place

_NAME = "manta-kv"
_LINK = f"/memfd:{_NAME} (deleted)"  # target of the file's link in /proc
_KEY_BYTES = 32
_FILL_BYTES = 4
_NEVER_RESIZED = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class SharedSlots:
    """A file of host-memory slots that this process maps, and others of the machine may map.

    memory: the bytes of all slots, one after the other.
    key: a secret that whoever maps the memory can read.
    """

    def __init__(self, file: int, count: int, slot_bytes: int) -> None:
        """Map a file of `_file_bytes(count, slot_bytes)` bytes. Raises OSError and ValueError."""
        self.count, self.slot_bytes = count, slot_bytes
        pages = memoryview(mmap.mmap(file, _file_bytes(count, slot_bytes)))
        self.memory = pages[: count * slot_bytes]
        end = pages[_slots_end(count, slot_bytes) :]
        self._key = end[:_KEY_BYTES]
        self._fills = end[_KEY_BYTES : _KEY_BYTES + _FILL_BYTES * count].cast("I")

    @property
    def key(self) -> bytes:
        return bytes(self._key)

    def fill_of(self, slot: int) -> int:
        """Return the slot's fill number, which is another one after each `begin_fill`."""
        return self._fills[slot]

    def begin_fill(self, slot: int) -> None:
        """Change the slot's fill number, as the slot is about to get other bytes."""
        self._fills[slot] = (self._fills[slot] + 1) & 0xFFFFFFFF


class OwnSlots(SharedSlots):
    """The slots of shared memory that this process has made."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        """Make the memory. Raises OSError where the system has none of this kind."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._file, 0o600)
        os.ftruncate(self._file, _file_bytes(count, slot_bytes))
        # no process can shorten it, after which a read by another one would be a SIGBUS
        seals = sum(getattr(fcntl, name) for name in _NEVER_RESIZED)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        super().__init__(self._file, count, slot_bytes)
        self._key[:] = secrets.token_bytes(_KEY_BYTES)

    def place(self) -> Place:
        """Return where processes of this machine find the memory."""
        return Place(os.getpid(), self._file, self.count, self.slot_bytes)


class PeerSlots(SharedSlots):
    """The memory of another engine. first: number of its first slot among this engine's slots."""

    def __init__(self, place: Place) -> None:
        """Map the memory. Raises OSError and ValueError if this is not the source's machine."""
        self._path = f"/proc/{place.pid}/fd/{place.file}"
        self.first = 0
        if os.readlink(self._path) != _LINK:  # a device or a pipe would do things when opened
            raise ValueError("its process is not one of those that this one sees")
        file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if status.st_uid != os.geteuid():
                raise ValueError("its process has another user")
            if status.st_size != _file_bytes(place.count, place.slot_bytes):
                raise ValueError("its memory has another size")
            self._inode = status.st_dev, status.st_ino
            super().__init__(file, place.count, place.slot_bytes)
        finally:
            os.close(file)

    @property
    def alive(self) -> bool:
        """Whether the process lives that has made the memory."""
        try:
            status = os.stat(self._path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode


@dataclass(frozen=True, slots=True)
class Sharing:
    """The parts that an engine needs to move blocks by shared memory.

    own: the memory of its slots.
    attach: makes another engine's slots known to the copies, and returns the number of the first
        one; raises RuntimeError. Called from any thread.
    detach: forgets attached slots, given the number of the first one.
    """

    own: OwnSlots
    attach: Callable[[memoryview], int]
    detach: Callable[[int], None]


@dataclass(eq=False, slots=True)
class Borrowed:
    """The slots of a source that a pull reads, each until it is given back.

    fills: slot that is not given back -> `SharedSlots.fill_of` when it was announced.
    """

    peer: Peer
    slots: PeerSlots
    fills: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Condition = field(init=False)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)

    def intact(self, slot: int) -> bool:
        """Whether the source has not refilled the slot since it announced it to this pull."""
        return self.slots.fill_of(slot - self.slots.first) == self.fills.get(slot)

    def give_back(self, slot: int) -> None:
        """Tell the source that the slot was read. The step loop calls this, so it waits for nobody:
        a socket without room for four bytes is one that is not read."""
        with self._changed:
            self.fills.pop(slot, None)
            if not self._closed:
                try:
                    os.write(self.peer.sock.fileno(), NUMBER.pack(slot - self.slots.first))
                except OSError:
                    self._close()
            self._changed.notify()

    def finish(self, seconds: float) -> None:
        """Close the connection once all slots are given back, at the latest after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self.fills or self._closed, timeout=seconds)
            self._close()

    def _close(self) -> None:
        # under the lock: a number must not go into another file of the same descriptor
        self._closed = True
        self.peer.close()


def _slots_end(count: int, slot_bytes: int) -> int:
    return -(-count * slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _file_bytes(count: int, slot_bytes: int) -> int:
    return _slots_end(count, slot_bytes) + _KEY_BYTES + _FILL_BYTES * count
