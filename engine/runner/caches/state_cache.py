"""StateCache: states of recurrent layers, and snapshots from which other requests continue.

A slot has one state of each such layer. The first slots are the rows of requests, the others are
for snapshots (see `engine.scheduling.memory.snapshots`). Rows without a request may hold snapshots
too.

Layers know nothing of snapshots: a request continues from a snapshot that was copied into its row.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.runner.caches.cache_memory import CacheMemory


class StateRecord(Protocol):
    """The description of a recurrent layer: the shapes of a request's state."""

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the layer's one to three float32 tensors."""
        ...


class StateCache:
    """The states of all recurrent layers, in slots.

    rows: the number of slots of running requests, padding included.
    snapshots: the number of slots after the rows.
    storages: all memory, [tensors, rows + snapshots, *shape] float32 of each shape.
    layers: the tensors of each recurrent layer, [rows + snapshots, *shape] float32, contiguous. A
        layer with a single tensor has it twice.
    """

    def __init__(
        self,
        recurrent: Sequence[tuple[int, StateRecord]],
        rows: int,
        snapshots: int,
        device: torch.device,
        memory: CacheMemory,
    ) -> None:
        # Tensors of one shape are stacked, [tensors, slots, *shape], so that one copy moves the
        # slot of all of them.
        self.storages: list[Tensor] = []
        shapes: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for layer, record in recurrent:
            for index, shape in enumerate(record.state_shapes):
                shapes.setdefault(shape, []).append((layer, index))
        states: dict[int, dict[int, Tensor]] = {layer: {} for layer, _ in recurrent}
        for shape, places in shapes.items():
            size = (len(places), rows + snapshots, *shape)
            storage = memory.zeros(size, torch.float32, device)
            self.storages.append(storage)
            for own, (layer, index) in zip(storage, places, strict=True):
                states[layer][index] = own
        self.layers = {
            layer: (own[0], own[0]) if len(own) == 1 else tuple(own[i] for i in range(len(own)))
            for layer, own in states.items()
        }

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Launch copies of rows to snapshots.

        pairs: (row, slot) of each copy; no slot is in two pairs.
        """
        for row, slot in pairs:
            self._copy(row, slot)

    def resume(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Launch copies of snapshots to rows, one after the other.

        pairs: (row, slot) of each copy; a row may have been the slot of an earlier pair.
        """
        for row, slot in pairs:
            self._copy(slot, row)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row's states."""
        return sum(storage[:, 0].nbytes for storage in self.storages)

    def copied(self, rows: Tensor) -> list[Tensor]:
        """Return copies of the states of some rows (int64)."""
        return [storage.index_select(1, rows) for storage in self.storages]

    def put_back(self, rows: Tensor, copies: Sequence[Tensor]) -> None:
        """Write the copies that `copied` has returned back into the rows."""
        for storage, copy in zip(self.storages, copies, strict=True):
            storage[:, rows] = copy

    def _copy(self, source: int, target: int) -> None:
        # Copied slot by slot, because an index copy of many slots would need a temporary of their
        # size.
        for storage in self.storages:
            storage[:, target].copy_(storage[:, source])
