"""SharedSlots: memory slots that an engine fills and other engines on its machine read.

An engine on a GPU also has slots in device memory, from which another GPU copies at the rate of
their link. CUDA opens them by a handle, which is a part of the `Place`. Their key and fill numbers
are in the host memory, which every puller maps.

The host memory is a file without a path (memfd), so `/dev/shm` and its limit have no part in it.
The kernel frees it when the last process that maps it ends. Another process opens it by the
engine's process id and file descriptor (`Place`). In another container or on another machine these
may name a different file or none, so both ends prove that they can read the key in the memory
(`Peer.memory_proof`).

A source reclaims the slots of a puller whose connection is lost, but that puller may still read
them. So each slot has a fill number, which changes before the slot is filled again. A copy is valid
only if the slot still has the announced fill number afterwards.
"""

import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.scheduling.moves.wire import Numbers, Peer, Place, pack_numbers

_NAME = "manta-kv"
_LINK = f"/memfd:{_NAME} (deleted)"  # target of the memfd's symbolic link in /proc
_KEY_BYTES = 32
_FILL_BYTES = 4
_NEVER_RESIZED = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class SharedSlots:
    """A file of host-memory slots that this process maps, and others of the machine may map.

    memory: the bytes of all slots of host memory, one after the other.
    count, device_count: number of slots of host memory, and of those of device memory after them.
    key: a secret in the memory, which every process that maps it can read.
    """

    def __init__(self, file: int, count: int, slot_bytes: int, device_count: int) -> None:
        """Map a file of `_file_bytes` bytes. Raises OSError and ValueError."""
        self.count, self.slot_bytes, self.device_count = count, slot_bytes, device_count
        pages = memoryview(mmap.mmap(file, _file_bytes(count, slot_bytes, device_count)))
        self.memory = pages[: count * slot_bytes]
        end = pages[_slots_end(count, slot_bytes) :]
        self._key = end[:_KEY_BYTES]
        num_fills = count + device_count
        self._fills = np.frombuffer(end[_KEY_BYTES:], np.uint32, num_fills)

    @property
    def key(self) -> bytes:
        return bytes(self._key)

    def fills_of(self, slots: Numbers) -> Numbers:
        """Return the slots' fill numbers, which change with each `begin_fill`."""
        return self._fills[slots].astype(np.int64)

    def begin_fill(self, slots: Sequence[int]) -> Numbers:
        """Change the slots' fill numbers, before new bytes are written into them; return the new
        numbers."""
        places = np.array(slots, np.int64)
        numbers = self._fills[places] + np.uint32(1)
        self._fills[places] = numbers
        return numbers.astype(np.int64)


class OwnSlots(SharedSlots):
    """The shared slots that this process owns and fills.

    handle: the CUDA IPC handle of the slots in device memory; empty without such slots.
    """

    def __init__(
        self, count: int, slot_bytes: int, device_count: int = 0, handle: bytes = b""
    ) -> None:
        """Create the host memory. Raises OSError where the system has no memfd."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._file, 0o600)
        os.ftruncate(self._file, _file_bytes(count, slot_bytes, device_count))
        # sealed against shortening, as reads beyond a shortened file raise SIGBUS
        seals = sum(getattr(fcntl, name) for name in _NEVER_RESIZED)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        super().__init__(self._file, count, slot_bytes, device_count)
        self.handle = handle
        self._key[:] = secrets.token_bytes(_KEY_BYTES)

    def place(self) -> Place:
        """Return the process id, file descriptor, sizes and CUDA IPC handle of the memory.

        Other processes on this machine open the memory by this Place.
        """
        sizes = self.count, self.slot_bytes, self.device_count
        return Place(os.getpid(), self._file, *sizes, self.handle)


class PeerSlots(SharedSlots):
    """The mapped slots of another engine.

    first: number that its first slot has among this engine's slots.
    on_device: whether its slots in device memory are read, instead of those in host memory.
    kept: open connections to the engine, whose next message is an Ask; None = no further
        connection is kept.
    """

    def __init__(self, place: Place) -> None:
        """Map the memory. Raises OSError and ValueError if this is not the source's machine."""
        self._path = f"/proc/{place.pid}/fd/{place.file}"
        self.first = 0
        self.on_device = False
        self.kept: list[Peer] | None = []
        # checked first, as opening a device or a pipe may have side effects
        if os.readlink(self._path) != _LINK:
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

    def lends(self, slots: Numbers) -> bool:
        """Whether the other engine has slots of these numbers, at least one, in the memory that is
        read."""
        first, count = (self.count, self.device_count) if self.on_device else (0, self.count)
        return bool(first <= slots.min() and slots.max() < first + count)

    @property
    def alive(self) -> bool:
        """Whether the process that created the memory is alive."""
        try:
            status = os.stat(self._path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode


@dataclass(frozen=True, slots=True)
class Sharing:
    """An engine's own shared slots, and the functions that attach other engines' slots.

    own: the engine's slots.
    attach: registers another engine's host slots as sources of copies, and returns the number of
        the first one. Raises RuntimeError. Called from any thread.
    attach_device: registers slots in device memory, given their handle and the number of the other
        engine's host slots.
    detach: unregisters slots, given the number of the first one.
    """

    own: OwnSlots
    attach: Callable[[memoryview], int]
    attach_device: Callable[[bytes, int], int]
    detach: Callable[[int], None]


@dataclass(eq=False, slots=True)
class Borrowed:
    """The source's slots that a pull reads; each is returned to the source after its copy.

    keep: called once with the connection, when all slots of a pull that succeeded are given back.
    num_lent: number of slots that are not given back.
    """

    peer: Peer
    slots: PeerSlots
    keep: Callable[[Peer, PeerSlots], None]
    num_lent: int = 0
    _fills: Numbers = field(init=False)  # by slot of the source: its fill number as announced
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _announced: bool = False  # whether no slot will be added
    _closes: bool = False  # whether the connection is of no further use

    def __post_init__(self) -> None:
        self._fills = np.full(self.slots.count + self.slots.device_count, -1, np.int64)

    def lend(self, slots: Numbers, fills: Numbers) -> list[int]:
        """Note announced slots and their fill numbers; return the slots' numbers in this engine.

        slots: numbers of the source.
        """
        with self._lock:
            self._fills[slots] = fills
            self.num_lent += len(slots)
        numbers: list[int] = (slots + self.slots.first).tolist()
        return numbers

    def intact(self, slots: Sequence[int]) -> bool:
        """Whether the source has refilled none of the slots since it announced it to this pull."""
        numbers = np.array(slots, np.int64) - self.slots.first
        return np.array_equal(self.slots.fills_of(numbers), self._fills[numbers])

    def give_back(self, slots: Sequence[int]) -> None:
        """Tell the source that the slots were read, without waiting, as the step loop calls this.

        If the socket has no room for the slots' numbers, the source does not read them: the
        connection is then shut down.
        """
        numbers = pack_numbers(np.array(slots, np.int64) - self.slots.first)
        with self._lock:
            self.num_lent -= len(slots)
            if not self._closes:
                try:
                    self._closes = os.write(self.peer.sock.fileno(), numbers) < len(numbers)
                except OSError:
                    self._closes = True
                if self._closes:
                    self.peer.shut()
            self._settle()

    def end(self, *, succeeded: bool) -> None:
        """Note that the source announces no further slot to this pull."""
        with self._lock:
            self._announced = True
            self._closes |= not succeeded
            self._settle()

    def _settle(self) -> None:
        """Keep or close the connection, once no thread and no copy uses it."""
        # under the lock, as `give_back` must not write into a file that reuses a closed descriptor
        if not self._announced or self.num_lent:
            return
        if self._closes:
            self.peer.close()
        else:
            self._closes = True
            self.keep(self.peer, self.slots)


def _slots_end(count: int, slot_bytes: int) -> int:
    return -(-count * slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _file_bytes(count: int, slot_bytes: int, device_count: int) -> int:
    fills = _FILL_BYTES * (count + device_count)
    return _slots_end(count, slot_bytes) + _KEY_BYTES + fills
