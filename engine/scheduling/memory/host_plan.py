"""HostPlan, HostCopies: the size of the host tier, and the copies from and to its slots."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

Name = tuple[int, bytes]  # group of layers, hash
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The size and policy of the host tier.

    blocks: slots, of block_bytes each.
    least_tokens: the fewest tokens that are loaded; fewer are computed.
    everything: whether blocks are stored at their first use.
    states, state_bytes: slots for snapshots of a recurrent model, and the size of one.
    """

    blocks: int
    block_bytes: int
    least_tokens: int = 1
    everything: bool = False
    states: int = 0
    state_bytes: int = 0


class HostCopies(Protocol):
    """The copies between blocks of the device and slots of the host, all of them asynchronous."""

    @property
    def load_rate(self) -> float:
        """The bytes a second of the last loads, or measured at the start; 0 = unknown."""
        ...

    @property
    def store_seconds(self) -> float:
        """The seconds of copies to the host, since the start."""
        ...

    @property
    def load_seconds(self) -> float:
        """The seconds of copies from the host, since the start."""
        ...

    def room(self) -> int:
        """Return how many further blocks `store` takes now without a queue that grows too long."""
        ...

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        """Begin to copy blocks to slots, (block, slot); return False if that failed.

        All steps that write the blocks are done. Later steps and loads that write them wait for the
        copies.

        states: (slot of a snapshot, slot for it on the host), likewise.
        """
        ...

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        """Begin to copy slots to blocks, (slot, block), after all stores to these slots.

        Returns False if that failed, which `finished` tells too. No step in flight writes the
        blocks, and none reads them before the copies are done.

        states: (slot on the host, slot of a snapshot), which steps in flight may still read.
        """
        ...

    def finished(self) -> list[tuple[int, bool]]:
        """Return (ticket, whether it succeeded) of loads that are done, each once."""
        ...

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        """Whether no store to these slots, or slots for snapshots, is in flight."""
        ...

    def wait(self) -> None:
        """Block until no copy is in flight."""
        ...
