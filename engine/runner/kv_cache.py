"""KVCache: the tensors behind the block manager's block ids."""

import math
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
        # Zeroed: an attention tile may load a slot nobody wrote yet, and 0 * NaN is still NaN.
        if device.type == "cpu":
            # numpy asks the kernel for zero pages, which cost nothing until a block is first used.
            raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
            storage = torch.from_numpy(raw).view(dtype).view(shape)
        else:
            storage = torch.zeros(shape, dtype=dtype, device=device)
        layers = [(storage[i, 0], storage[i, 1]) for i in range(model.num_layers)]
        return cls(layers=layers, num_blocks=num_blocks, block_size=block_size)


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of all layers for one block."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * block_size * dtype.itemsize
