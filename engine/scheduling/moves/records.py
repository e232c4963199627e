"""MovePlan, Export, Import, Lease: the sizes of moves of KV blocks, and the step loop's records."""

from dataclasses import dataclass, field

from engine.scheduling.memory.block_manager import BlockManager
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


@dataclass(eq=False, slots=True)
class Export:
    """The step loop's record of a pull by another replica.

    The pull is answered once the steps in flight are done.
    """

    order: Order
    pool: BlockManager
    step: int  # the last step that was scheduled before the pull
    table: list[int]  # held blocks
    entries: list[tuple[int, int, tuple[int, bytes]]]  # (index in the table, block, name)
    hashes: list[bytes]
    answered: bool = False
    staged: int = 0  # number of entries that are copied or being copied to slots
    staging: int = 0  # number of entries whose copies to slots are in flight
    dropped: bool = False


@dataclass(eq=False, slots=True)
class Import:
    """The step loop's record of a pull: the blocks that have arrived."""

    pull: Pull
    pool: BlockManager
    table: list[tuple[int, int]] = field(default_factory=list)  # (index, adopted block)
    loads: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    ended: bool = False  # whether its threads have ended
    error: str = ""


@dataclass(slots=True)
class Lease:
    """The blocks of a request that has left, held for an expected pull."""

    pool: BlockManager
    blocks: list[int]
    until: float
