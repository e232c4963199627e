"""HostPlan, HostCopies: the size of the host tier, and the copies between its slots and the
device."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

Name = tuple[int, bytes]  # group of layers, hash
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The size and policy of the host tier.

    blocks: number of slots, of block_bytes each.
    least_tokens: prefixes of fewer tokens are computed instead of loaded.
    everything: whether blocks are stored at their first use.
    states, state_bytes: number and size of the slots for snapshots of recurrent states.
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
        """The rate of the last loads in bytes a second, or as measured at the start; 0 =
        unknown."""
        ...

    @property
    def store_seconds(self) -> float:
        """The total seconds of copies to the host since the start."""
        ...

    @property
    def load_seconds(self) -> float:
        """The total seconds of copies from the host since the start."""
        ...

    def room(self) -> int:
        """Return how many more blocks `store` accepts now; the bound keeps its queue short."""
        ...

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        """Begin to copy device blocks to host slots; return False if that failed.

        All steps that write the blocks must be done. The copies wait for loads in flight that write
        them, and later steps and loads that write them wait for the copies.

        pairs: (block, slot) pairs.
        states: (device slot of a snapshot, host slot) pairs.
        """
        ...

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        """Begin to copy host slots to device blocks, after all stores to these slots.

        Returns False if that failed, which `finished` then reports too. No step in flight may write
        the blocks, and no step may read them before the copies are done or `ending` names them.

        pairs: (slot, block) pairs.
        states: (host slot, device slot of a snapshot) pairs; steps in flight may still read the
            latter.
        """
        ...

    def finished(self) -> list[tuple[int, bool]]:
        """Return (ticket, whether it succeeded) of each load that ended since the last call."""
        ...

    def ending(self) -> dict[int, float]:
        """Return the expected seconds until the end of each load that has begun and cannot fail.

        The keys are tickets. A step that reads blocks of such a load waits on the device until it
        ends. The result may leave out loads whose end is not known.
        """
        ...

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        """Whether no store to these slots, or slots for snapshots, is in flight."""
        ...

    def wait(self) -> None:
        """Block until no copy is in flight."""
        ...
