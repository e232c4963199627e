"""RequestRows: tokens and block tables of running requests on the device.

A request keeps its row while it runs, and batches refer to rows by number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class RequestRows:
    """The rows on the device: one for each running request, and a last one for padding."""

    # [max_num_seqs + 1, max_model_len + 1] int32: [row, i] is the request's i-th token
    tokens: Tensor
    # [max_num_seqs + 1, max_blocks * groups] int32: [row, j * groups + g] is the block of tokens j
    # * block_size and following, in the layers of group g (engine/config/kv_groups.py)
    block_table: Tensor
    pad_row: int
    # [max_num_seqs + 1] int32: the number of drafts that the last step has accepted, where the next
    # batch's starts do not include them (`Batch.unsettled`); else 0
    accepted: Tensor
    num_groups: int = 1
    # [max_num_seqs + 1] int32: the rotary position of a token after a row's images is its index +
    # delta. None = positions are indices.
    deltas: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        *,
        axes: bool = False,
    ) -> "RequestRows":
        """Allocate the rows.

        axes: whether images have M-RoPE positions (`VisionConfig.mrope_section`).
        """
        max_blocks = -(-max_model_len // block_size) * num_groups
        return cls(
            tokens=torch.zeros(
                max_num_seqs + 1, max_model_len + 1, dtype=torch.int32, device=device
            ),
            block_table=torch.zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device),
            pad_row=max_num_seqs,
            accepted=torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device),
            num_groups=num_groups,
            deltas=torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
            if axes
            else None,
        )

    @property
    def num_bytes(self) -> int:
        deltas = 0 if self.deltas is None else self.deltas.numel()
        numbers = self.tokens.numel() + self.block_table.numel() + self.accepted.numel()
        return 4 * (numbers + deltas)
