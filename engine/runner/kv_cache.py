"""KVCache: the tensors behind the block manager's block ids."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kv_groups import KVGroups


@dataclass(slots=True)
class KVCache:
    """One (keys, values) pair a layer, each [num_blocks, num_kv_heads, block_size, head_dim].

    A head's keys of one block are contiguous: block_size * head_dim elements in one read. Layers of
    several groups lie in the same memory, of which a block belongs to one group at a time.
    """

    groups: KVGroups
    layers: list[tuple[Tensor, Tensor]]
    # All of them: [slots, 2, num_blocks, block_size * elements of a token]
    storage: Tensor
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls,
        groups: KVGroups,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        if len({group.elements for group in groups.groups}) > 1:  # kernels want blocks side by side
            raise ConfigError(
                "layers whose keys have different sizes are not supported in one model",
                param="model",
            )
        shape = (groups.slots, 2, num_blocks, block_size * groups.elements)
        storage = _allocate(shape, dtype, device)
        kv = cls(groups, [], storage, num_blocks, block_size)
        kv.layers += kv._views()
        return kv

    def _views(self) -> list[tuple[Tensor, Tensor]]:
        found = {}
        for group in self.groups.groups:
            heads, dim = group.attention.kept
            shape = (self.num_blocks, heads, self.block_size, dim)
            own = self.block_size * group.elements
            fit = self.storage.shape[3] // own
            for index, layer in enumerate(group.layers):
                begin = index % fit * own
                keys, values = self.storage[index // fit, :, :, begin : begin + own]
                found[layer] = (keys.view(shape), values.view(shape))
        return [found[layer] for layer in sorted(found)]

    def whole(self) -> Tensor:
        """Of a model of one group: [num_layers, 2, num_blocks, num_kv_heads, block_size,
        head_dim]."""
        return self.storage.view(*self.storage.shape[:2], *self.layers[0][0].shape)

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
        self.num_blocks = num_blocks
        self.layers += self._views()


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Zeroed: an attention tile may load a slot that was never written, and 0 * NaN is still NaN.
    if device.type == "cpu":
        # numpy asks the kernel for zero pages, which cost nothing until a block is first used.
        raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(dtype).view(*shape)
    return torch.zeros(*shape, dtype=dtype, device=device)
