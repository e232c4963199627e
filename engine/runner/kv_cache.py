"""KVCache: the tensors behind the block manager's block ids."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model_config import ModelConfig


@dataclass(slots=True)
class KVCache:
    """One (keys, values) pair a layer, each [num_blocks, num_kv_heads, block_size, head_dim].

    A head's keys of one block are contiguous: block_size * head_dim elements in one read.
    """

    layers: list[tuple[Tensor, Tensor]]
    # All of them: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
    storage: Tensor
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        shape = (
            model.num_layers,
            2,
            num_blocks,
            model.num_kv_heads,
            block_size,
            model.head_dim,
        )
        storage = _allocate(shape, dtype, device)
        return cls([(layer[0], layer[1]) for layer in storage], storage, num_blocks, block_size)

    def shrink(self, num_blocks: int) -> None:
        """So few blocks, all empty; the memory of the others is free before that of these is
        taken."""
        old = self.storage
        shape, dtype, device = list(old.shape), old.dtype, old.device
        shape[2] = num_blocks
        self.layers.clear()
        self.storage = old = old.new_empty(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self.storage = _allocate(shape, dtype, device)
        self.layers += [(layer[0], layer[1]) for layer in self.storage]
        self.num_blocks = num_blocks


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Zeroed: an attention tile may load a slot that was never written, and 0 * NaN is still NaN.
    if device.type == "cpu":
        # numpy asks the kernel for zero pages, which cost nothing until a block is first used.
        raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(dtype).view(*shape)
    return torch.zeros(*shape, dtype=dtype, device=device)


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of all layers for one block."""
    return model.kv_bytes_per_token(dtype.itemsize) * block_size
