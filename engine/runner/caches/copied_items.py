"""CopiedItems: the blocks and snapshots of a copy between the device and slots, and their slots."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engine.runner.caches.host_slots import HostSlots

Pairs = Sequence[tuple[int, int]]

WORTH_TIMING = 1 << 22  # bytes; smaller copies are dominated by launch overhead


def item_numbers(blocks: Collection[int], states: Collection[int] = ()) -> frozenset[int]:
    """Return blocks and snapshots as one set of numbers: n for block n, -1 - n for snapshot n.

    The numbers of slots for both are computed in the same way.
    """
    numbers = frozenset(blocks)
    return numbers.union(-1 - slot for slot in states) if states else numbers


@dataclass
class CopiedItems:
    """The device items of a copy, and the slot of each.

    blocks, block_slots: the blocks, and their slots.
    states, state_slots: the snapshots of recurrent states, and their slots.
    """

    blocks: Sequence[int] = ()
    block_slots: Sequence[int] = ()
    states: Sequence[int] = ()
    state_slots: Sequence[int] = ()

    @classmethod
    def stored(cls, pairs: Pairs, states: Pairs) -> "CopiedItems":
        """Return the items of (block, slot) pairs, and of (snapshot, slot) pairs."""
        return cls(*_columns(pairs), *_columns(states))

    @classmethod
    def loaded(cls, pairs: Pairs, states: Pairs) -> "CopiedItems":
        """Return the items of (slot, block) pairs, and of (slot, snapshot) pairs."""
        (block_slots, blocks), (state_slots, snapshots) = _columns(pairs), _columns(states)
        return cls(blocks, block_slots, snapshots, state_slots)

    # computed only if another copy or a step has to be compared with this one

    @cached_property
    def items(self) -> frozenset[int]:
        """The numbers of the device items (see `item_numbers`)."""
        return item_numbers(self.blocks, self.states)

    @cached_property
    def slots(self) -> frozenset[int]:
        """The numbers of the slots (see `item_numbers`)."""
        return item_numbers(self.block_slots, self.state_slots)

    def num_bytes(self, blocks: HostSlots, states: HostSlots | None) -> int:
        """Return the bytes of all items, which have these slots for blocks and for snapshots."""
        of_states = 0 if states is None else len(self.states) * states.num_bytes
        return len(self.blocks) * blocks.num_bytes + of_states

    def pieces(self, size: int) -> Iterator["CopiedItems"]:
        """Yield the blocks in pieces of up to `size`, then all snapshots if there are any."""
        for at in range(0, len(self.blocks), size):
            yield CopiedItems(self.blocks[at : at + size], self.block_slots[at : at + size])
        if self.states:
            yield replace(self, blocks=(), block_slots=())


def _columns(pairs: Pairs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first elements of all pairs, and the second ones."""
    firsts, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    return firsts, seconds
