"""LoraDevice: the LoRA adapters in device memory, and the adapter of each token of a step.

Slots, and the metadata of decode steps, have fixed addresses, so that CUDA graphs can read them.

The metadata is small and computed on the host. Each step with adapters uploads it in one copy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.lora.uploader import AdapterUploader
from engine.lora.weights import HostLora, padded
from kernels.metadata import LoraStep


def slot_sizes(
    slots: int, slot_elements: int, num_parts: int, tokens: int, max_rank: int, deterministic: bool
) -> tuple[int, int, int]:
    """Return the sizes of the tensors for adapters on CUDA.

    The result is (elements of the slots, int32s of the slots' tables, float32s of a step's partial
    sums).

    slot_elements: elements of the largest adapter.
    num_parts: the number of parts of the `LoraLayout`.
    tokens: the maximum number of tokens of a step.
    """
    try:
        from kernels.lora import partial_size
    except ImportError:  # without Triton the plan is for another machine, and may lack some MiB
        return slots * slot_elements, slots * num_parts * 4, 0
    partial = partial_size(tokens, max_rank, deterministic)
    return slots * slot_elements, slots * num_parts * 4, partial


@dataclass(slots=True)
class _Layout:
    """The buffers for the metadata of steps on CUDA."""

    meta: Tensor  # int32, on the device
    # pinned host buffers: step n + 1 is packed while n runs, and n + 2 reuses n's buffer
    staging: list[Tensor]
    staging_index: int = 0

    @classmethod
    def allocate(cls, capacity: int, device: torch.device, steps: int) -> "_Layout":
        """Allocate the buffers.

        capacity: maximum int32s of a step's metadata.
        steps: the number of steps in flight at once.
        """
        return cls(
            torch.zeros(capacity, dtype=torch.int32, device=device),
            [
                torch.empty(capacity, dtype=torch.int32, pin_memory=True)
                for _ in range(max(2, steps))
            ],
        )

    def next_staging(self) -> Tensor:
        self.staging_index = (self.staging_index + 1) % len(self.staging)
        return self.staging[self.staging_index]


class LoraDevice:
    """The adapters in device slots, and for each step the slot of each token.

    slots: the number of slots.
    slot_elements: the elements of the largest adapter.
    num_parts: the number of parts of the `LoraLayout`.
    deterministic: see `LoraStep`.
    steps: the number of steps in flight at once.
    layouts: the number of metadata layouts that a step needs: 2 with data-parallel attention, for
        all tokens and for those of this rank's requests.
    """

    def __init__(
        self,
        slots: int,
        slot_elements: int,
        num_parts: int,
        max_rank: int,
        dtype: torch.dtype,
        uploader: AdapterUploader,
        *,
        max_rows: int,
        max_tokens: int,
        deterministic: bool = False,
        steps: int = 2,
        layouts: int = 1,
    ) -> None:
        self.max_rank = max_rank
        self._deterministic = deterministic
        self._uploader = uploader
        device = uploader.device
        self.num_slots = slots
        self._row_slots = np.full(max_rows + 1, -1, dtype=np.int16)  # the last row is for padding
        self._used = False  # whether any row has ever had an adapter
        self._parts: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(slots)]
        self._cuda = device.type == "cuda"
        tokens = max(max_tokens, max_rows)
        sizes = (0, slots * num_parts * 4, 0)  # on the CPU slots refer to host memory
        if self._cuda:
            sizes = slot_sizes(slots, slot_elements, num_parts, tokens, max_rank, deterministic)
        self._slab = torch.zeros(slots, sizes[0] // slots, dtype=dtype, device=device)
        table = torch.zeros(sizes[1], dtype=torch.int32, device=device)
        self._table = table.view(slots, num_parts, 4)
        self._partial = torch.empty(sizes[2], dtype=torch.float32, device=device)
        if self._cuda:
            capacity = tokens + 3 * self._max_tiles(tokens, 16)
            self._layouts = [_Layout.allocate(capacity, device, steps) for _ in range(layouts)]

    @property
    def num_bytes(self) -> int:
        return self._slab.nbytes + self._table.nbytes + self._partial.nbytes

    # ---- slots ---------------------------------------------------------------------------------

    def upload(self, weights: HostLora, slot: int) -> None:
        """Copy an adapter into an unused slot; return when the copy is done.

        Thread-safe.
        """
        if not self._cuda:
            self._parts[slot] = weights.parts
            return
        place = self._slab[slot, : weights.blob.numel()]
        self._uploader.copy([(weights.blob, place), (weights.table, self._table[slot])])

    def warm_up_step(self, num_tokens: int) -> LoraStep:
        """Return a step for warm-up, with adapters of the largest rank in all slots and layers.

        Tokens are spread evenly over the slots. Call `forget` afterwards. CUDA only.
        """
        self._table[:, :, 0] = padded(self.max_rank)
        return self.lay_out((np.arange(num_tokens) % self.num_slots).astype(np.int16))

    def forget(self) -> None:
        """Remove the adapters of `warm_up_step` from all slots."""
        self._table.zero_()

    # ---- steps ---------------------------------------------------------------------------------

    def set_row(self, row: int, slot: int) -> None:
        """Set the slot that the request of this row uses; -1 = none."""
        self._row_slots[row] = slot
        self._used |= slot >= 0

    def slots_of(self, batch: Batch) -> "np.ndarray[Any, np.dtype[np.int16]] | None":
        """Return the slot of each of a batch's tokens, -1 = no adapter; None if no token has
        one."""
        if not self._used:
            return None
        slots = self._row_slots[batch.rows]
        if slots.max() < 0:
            return None
        return slots if batch.num_decodes == len(slots) else np.repeat(slots, batch.lengths)

    def step(self, batch: Batch, *, beside: bool = False) -> LoraStep | None:
        """Upload the LoRA metadata of a step without a CUDA graph; None if no token has an adapter.

        beside: whether the batch is a part of the last prepared step, whose metadata must stay
            valid.
        """
        slots = self.slots_of(batch)
        return None if slots is None else self.lay_out(slots, beside=beside)

    def lay_out(
        self, slots: "np.ndarray[Any, np.dtype[np.int16]]", *, beside: bool = False
    ) -> LoraStep:
        """Upload the LoRA metadata of a step without a CUDA graph, from its tokens' slots.

        slots: the slot of each token; -1 = no adapter.
        beside: see `step`.
        """
        if self._cuda:
            return self._upload(slots, self._layouts[beside])
        order = np.argsort(slots, kind="stable")
        starts = np.flatnonzero(np.diff(slots[order], prepend=-2))
        segments = [
            (int(slots[tokens[0]]), torch.from_numpy(tokens))
            for tokens in np.split(order, starts[1:])
            if slots[tokens[0]] >= 0
        ]
        return self._make(torch.empty(0), torch.empty(0), 0, segments)

    def upload_step(self, slots: "np.ndarray[Any, np.dtype[np.int16]]", num_tokens: int) -> None:
        """Upload the metadata that a CUDA graph of num_tokens tokens reads.

        slots: the adapter slot of each of the batch's tokens, -1 = no adapter. The graph's further
            tokens are padding.
        """
        padded_slots = np.full(num_tokens, -1, dtype=np.int16)
        padded_slots[: len(slots)] = slots
        self._upload(padded_slots, self._layouts[0])

    def graph_step(self, num_tokens: int) -> LoraStep:
        """Return the step for capturing a CUDA graph; it reads the buffers that `upload_step`
        writes."""
        return self._view(num_tokens, self._layouts[0])

    def _tile_rows(self, tokens: int) -> int:
        from kernels.lora import tile_rows

        return tile_rows(1 if self._deterministic else tokens, self.num_slots)

    def _max_tiles(self, tokens: int, block: int) -> int:
        """Return the maximum number of a step's tiles of `block` tokens.

        Each slot has at most one partial tile.
        """
        return tokens // block + min(self.num_slots + 1, tokens)

    def _upload(self, slots: "np.ndarray[Any, Any]", layout: "_Layout") -> LoraStep:
        count, block = len(slots), self._tile_rows(len(slots))
        tiles = self._max_tiles(count, block)
        order = np.argsort(slots, kind="stable")
        staging = layout.next_staging()
        array = staging.numpy()
        array[:count] = order
        table = array[count : count + 3 * tiles].reshape(tiles, 3)
        packed = make_tiles(slots[order], block)
        table[: len(packed)] = packed
        table[len(packed) :] = (-1, 0, 0)
        used = count + 3 * tiles
        layout.meta[:used].copy_(staging[:used], non_blocking=True)
        return self._view(count, layout)

    def _view(self, count: int, layout: "_Layout") -> LoraStep:
        block = self._tile_rows(count)
        tiles = self._max_tiles(count, block)
        table = layout.meta[count : count + 3 * tiles].view(tiles, 3)
        return self._make(layout.meta[:count], table, block, ())

    def _make(self, order: Tensor, tiles: Tensor, block: int, segments: Any) -> LoraStep:
        return LoraStep(
            order,
            tiles,
            block,
            self._slab,
            self._table,
            self._partial,
            self.max_rank,
            segments,
            self._parts,
            self._deterministic,
        )


def make_tiles(slots: "np.ndarray[Any, Any]", block: int) -> "np.ndarray[Any, Any]":
    """Cut sorted slots [n] into tiles of one slot each.

    Returns [num_tiles, 3]: (slot, first token, number of tokens <= block).
    """
    first = np.flatnonzero(np.diff(slots, prepend=-2))
    counts = np.diff(first, append=len(slots))
    per = -(-counts // block)
    group = np.repeat(np.arange(len(first)), per)
    inner = (np.arange(len(group)) - np.repeat(np.cumsum(per) - per, per)) * block
    rows = np.minimum(block, counts[group] - inner)
    return np.stack((slots[first[group]], first[group] + inner, rows), axis=1)
