"""Loadable, Load: a prefix that is on the host, and the load that brings it to the device."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.host_plan import Name
from engine.scheduling.memory.snapshots import Snapshots


@dataclass(slots=True)
class Loadable:
    """A prefix of which the host has more blocks than the device.

    held: the blocks of the prefix on the device.
    missing: (index in the table, name, slot) of each block to load.
    state: the hash of the block whose recurrent state has to be loaded; b"" = none.
    awaited: tickets of loads in flight that load other parts of the prefix.
    num_tokens: number of the prefix's tokens whose KV the device lacks.
    num_blocks: number of device blocks that the whole prefix takes.
    """

    held: list[tuple[int, int]] = field(default_factory=list)  # (index in the table, block)
    missing: list[tuple[int, Name, int]] = field(default_factory=list)
    state: bytes = b""
    awaited: set[int] = field(default_factory=set)
    num_tokens: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class Load:
    """A load in flight: a prefix's blocks, and perhaps a snapshot, from the host to the device."""

    pool: BlockManager
    table: list[int]  # device blocks that the load holds, in the order of a table
    names: list[Name]  # of the blocks to load
    slots: list[int]  # in host memory
    blocks: list[int]  # on the device
    num_tokens: int
    # The next three are set if the load includes a snapshot.
    state: bytes = b""
    state_slot: int = -1  # on the host
    snapshot: int = -1  # the device slot reserved for the state
    snapshots: Snapshots | None = None
    stale: bool = False  # whether the loaded KV must not be used
    adopted: bool = False  # whether the blocks are in the prefix cache already


@dataclass(slots=True)
class Waiting:
    """A request that waits for loads, or for reads from disk."""

    tickets: set[int]
    began: float
    # monotonic seconds at which it starts without the blocks; finite if it waits for a disk
    until: float = inf
    num_blocks: int = 0  # device blocks of the prefix that is being loaded


def resumable(
    pool: BlockManager,
    hashes: Sequence[bytes],
    snapshots: Snapshots,
    near: int,
    slots: Sequence[Mapping[bytes, int]],
    states: Collection[bytes],
) -> list[int]:
    """Return the block table of the longest prefix of more than `near` blocks with a snapshot.

    Blocks and snapshots in other memory count as present. Returns [] if there is no such prefix.

    hashes: the hashes of the request's blocks.
    slots: for each group, hash -> slot of a block in other memory; see `BlockManager.match_prefix`.
    states: the hashes of snapshots in other memory.
    """
    table = pool.match_prefix(hashes, slots)
    groups = pool.num_groups
    reach = len(table) // groups
    for count in range(reach, near, -1):
        if hashes[count - 1] in snapshots or hashes[count - 1] in states:
            if count < reach:
                table = pool.match_prefix(hashes[:count], slots)
            if len(table) == count * groups:
                return table
    return []
