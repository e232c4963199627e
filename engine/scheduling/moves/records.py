"""MovePlan, MoveCopies, Export, Import, Lease: the sizes and copies of moves of KV blocks, and the
step loop's records."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.host_plan import HostCopies
from engine.scheduling.moves.puller import Pull
from engine.scheduling.moves.source import Order


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The numbers and sizes of the slots that hold KV blocks during moves between replicas.

    slots: number of host-memory slots for each direction, of block_bytes each.
    device_slots: number of device-memory slots to send from, numbered after those of host memory.
    compatibility: digest of everything that decides what a block's bytes mean, except the version
        of the weights.
    token_bytes: bytes of a token's KV in all KV groups.
    """

    slots: int
    block_bytes: int
    compatibility: bytes
    token_bytes: float = 0.0
    device_slots: int = 0


class MoveCopies(HostCopies, Protocol):
    """The copies between blocks and slots, whose ends threads wait for."""

    def stores_end(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, until the stores so far are done."""
        ...

    def loads_end(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, until the loads so far are done."""
        ...


def _no_copy() -> None:
    pass


@dataclass(eq=False, slots=True)
class Export:
    """The step loop's record of a pull by another replica.

    The pull is answered once the steps and loads in flight are done.

    step, load: numbers of the last step, and of the last load of an import, before the pull.
    matched: the block table of the pull's prefix; None if no step or load was in flight then.
    indices: places in the block table of the blocks to send.
    blocks: the blocks to send, which are held meanwhile.
    staged: number of leading blocks to send that are in slots or are being copied there.
    copied: waits for the copies of the staged blocks.
    """

    order: Order
    pool: BlockManager
    step: int
    load: int
    hashes: list[bytes]
    matched: list[int] | None
    indices: list[int]
    blocks: list[int]
    answered: bool = False
    staged: int = 0
    copied: Callable[[], None] = _no_copy


@dataclass(eq=False, slots=True)
class Load:
    """A copy of blocks that have arrived, from slots to blocks of the device.

    indices: the blocks' places in the pull's table, ascending.
    """

    indices: list[int]
    slots: list[int]
    blocks: list[int]
    _closing: threading.Lock = field(default_factory=threading.Lock)
    _intact: bool | None = None

    def close(self, pull: Pull, give_back: Callable[[Sequence[int], Pull], None]) -> bool:
        """Give the slots back, once, as the copy has ended; return whether the copy is valid.

        The copy is invalid if the source has filled a slot again. Called from any thread.
        """
        with self._closing:
            if self._intact is None:
                self._intact = pull.borrowed is None or pull.borrowed.intact(self.slots)
                give_back(self.slots, pull)
            return self._intact


@dataclass(eq=False, slots=True)
class Import:
    """The step loop's record of a pull: the blocks that have arrived.

    released: whether the request goes on already, though loads are in flight.
    loaded: monotonic seconds at which the last load ended; 0 = not known.
    """

    pull: Pull
    pool: BlockManager
    ended_loads: list[Load] = field(default_factory=list)  # their blocks are held
    loads: dict[int, Load] = field(default_factory=dict)  # by ticket
    ended: bool = False  # no other block comes
    released: bool = False
    loaded: float = 0.0
    error: str = ""

    def free(self) -> None:
        """Free the blocks of ended loads, those of the prefix's end first."""
        for load in sorted(self.ended_loads, key=lambda load: load.indices[0], reverse=True):
            self.pool.free(load.blocks)


@dataclass(slots=True)
class Lease:
    """The blocks of a request that has left, held for an expected pull.

    until: monotonic seconds at which the blocks are released.
    """

    pool: BlockManager
    blocks: list[int]
    until: float
