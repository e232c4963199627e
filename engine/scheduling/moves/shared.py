"""SharedSlots: slots of memory that an engine fills, and that others of its machine read.

An engine on a GPU also has slots of its device's memory, from which another GPU copies at the rate
of their link. CUDA opens them by a handle, which is a part of the `Place`. The key and the numbers
of these slots' fills are in the host memory, which every puller maps.

The host memory is a file without a path (memfd), so `/dev/shm` and its limit have no part in it.
The kernel frees it with the last process that maps it, however that ends. Another process opens it
by the engine's number and the file's (`Place`), which proves nothing: in another container or on
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.scheduling.moves.wire import NUMBER, Peer, Place

_NAME = "manta-kv"
_LINK = f"/memfd:{_NAME} (deleted)"  # target of the file's link in /proc
_KEY_BYTES = 32
_FILL_BYTES = 4
_NEVER_RESIZED = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class SharedSlots:
    """A file of host-memory slots that this process maps, and others of the machine may map.

    memory: the bytes of all slots of host memory, one after the other.
    count, device_count: number of slots of host memory, and of those of device memory after them.
    key: a secret that whoever maps the memory can read.
    """

    def __init__(self, file: int, count: int, slot_bytes: int, device_count: int) -> None:
        """Map a file of `_file_bytes` bytes. Raises OSError and ValueError."""
        self.count, self.slot_bytes, self.device_count = count, slot_bytes, device_count
        pages = memoryview(mmap.mmap(file, _file_bytes(count, slot_bytes, device_count)))
        self.memory = pages[: count * slot_bytes]
        end = pages[_slots_end(count, slot_bytes) :]
        self._key = end[:_KEY_BYTES]
        num_fills = count + device_count
        self._fills = end[_KEY_BYTES : _KEY_BYTES + _FILL_BYTES * num_fills].cast("I")

    @property
    def key(self) -> bytes:
        return bytes(self._key)

    def fill_of(self, slot: int) -> int:
        """Return the slot's fill number, which is another one after each `begin_fill`."""
        return self._fills[slot]

    def begin_fill(self, slots: Iterable[int]) -> None:
        """Change the slots' fill numbers, as the slots are about to get other bytes."""
        fills = self._fills
        for slot in slots:
            fills[slot] = (fills[slot] + 1) & 0xFFFFFFFF


class OwnSlots(SharedSlots):
    """The slots of shared memory that this process has made.

    handle: opens the slots of device memory; empty without such slots.
    """

    def __init__(
        self, count: int, slot_bytes: int, device_count: int = 0, handle: bytes = b""
    ) -> None:
        """Make the host memory. Raises OSError where the system has none of this kind."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._file, 0o600)
        os.ftruncate(self._file, _file_bytes(count, slot_bytes, device_count))
        # no process can shorten it, after which a read by another one would be a SIGBUS
        seals = sum(getattr(fcntl, name) for name in _NEVER_RESIZED)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        super().__init__(self._file, count, slot_bytes, device_count)
        self.handle = handle
        self._key[:] = secrets.token_bytes(_KEY_BYTES)

    def place(self) -> Place:
        """Return where processes of this machine find the memory."""
        sizes = self.count, self.slot_bytes, self.device_count
        return Place(os.getpid(), self._file, *sizes, self.handle)


class PeerSlots(SharedSlots):
    """The memory of another engine.

    first: number of its first slot among this engine's slots.
    on_device: whether its slots of device memory are read, not those of host memory.
    """

    def __init__(self, place: Place) -> None:
        """Map the memory. Raises OSError and ValueError if this is not the source's machine."""
        self._path = f"/proc/{place.pid}/fd/{place.file}"
        self.first = 0
        self.on_device = False
        if os.readlink(self._path) != _LINK:  # a device or a pipe would do things when opened
            raise ValueError("its process is not one of those that this one sees")
        file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if status.st_uid != os.geteuid():
                raise ValueError("its process has another user")
            sizes = place.count, place.slot_bytes, place.device_count
            if status.st_size != _file_bytes(*sizes):
                raise ValueError("its memory has another size")
            self._inode = status.st_dev, status.st_ino
            super().__init__(file, *sizes)
        finally:
            os.close(file)

    def lends(self, slot: int) -> bool:
        """Whether this engine reads slots of this number."""
        if self.on_device:
            return self.count <= slot < self.count + self.device_count
        return 0 <= slot < self.count

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
    attach: makes another engine's slots of host memory known to the copies, and returns the number
        of the first one; raises RuntimeError. Called from any thread.
    attach_device: does so with slots of device memory, given the handle and the number of the slots
        of host memory before them.
    detach: forgets attached slots, given the number of the first one.
    """

    own: OwnSlots
    attach: Callable[[memoryview], int]
    attach_device: Callable[[bytes, int], int]
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

    def intact(self, slots: Iterable[int]) -> bool:
        """Whether the source has refilled none of the slots since it announced it to this pull."""
        fill_of, first = self.slots.fill_of, self.slots.first
        return all(fill_of(slot - first) == self.fills.get(slot) for slot in slots)

    def give_back(self, slots: Sequence[int]) -> None:
        """Tell the source that the slots were read. The step loop calls this, so it waits for
        nobody: a socket without room for their numbers is one that is not read."""
        numbers = b"".join(NUMBER.pack(slot - self.slots.first) for slot in slots)
        with self._changed:
            for slot in slots:
                self.fills.pop(slot, None)
            if not self._closed:
                try:
                    sent = os.write(self.peer.sock.fileno(), numbers) == len(numbers)
                except OSError:
                    sent = False
                if not sent:
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


def _file_bytes(count: int, slot_bytes: int, device_count: int) -> int:
    fills = _FILL_BYTES * (count + device_count)
    return _slots_end(count, slot_bytes) + _KEY_BYTES + fills
