"""KVCache: the cache tensors that are indexed by the block manager's block ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config.kv_groups import KVGroups
from engine.errors import ConfigError
from engine.runner.caches.block_pages import BlockPages
from engine.runner.caches.cache_memory import CacheMemory
from engine.runner.caches.state_cache import StateCache
from kernels.kv.format import KVFormat
from kernels.kv.quantized import KV, QuantizedKV, by_hadamard
from kernels.metadata import AttentionMeta


@dataclass(slots=True)
class KVCache:
    """The keys and values of all layers, one pair of tensors a layer.

    Each tensor is [blocks, num_kv_heads, block_size, head_dim]. The number of blocks is num_blocks,
    or `KVView.parts` times that. A layer that reads another layer's KV has that layer's pair. For a
    layer of latents both tensors are the latents. A recurrent layer has the tensors of its states,
    after those of keys and values if the layer has attention too.
    A head's keys in one block are contiguous: block_size * head_dim elements in one read. Layers of
    several groups share memory, in which a block belongs to one group at a time. Quantised keys and
    values are `QuantizedKV`s over the same storage, which then consists of bytes.
    """

    groups: KVGroups
    layers: dict[int, KV]  # layer number -> its tensors, in order of layers
    # All memory: [slots, KVGroups.tensors, num_blocks, block_size * elements (or bytes) of a token]
    storage: Tensor
    num_blocks: int  # number of blocks; in a growing cache the number of reserved blocks
    block_size: int
    form: KVFormat
    memory: CacheMemory
    least: int = 0  # number of blocks that are always mapped
    states: StateCache | None = None  # states of recurrent layers

    @classmethod
    def allocate(
        cls,
        groups: KVGroups,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        form: KVFormat = KVFormat(),  # noqa: B008, it is frozen
        rows: int = 0,
        snapshots: int = 0,
        memory: CacheMemory | None = None,
        pages: BlockPages | None = None,
    ) -> "KVCache":
        """Allocate the cache, all zeros.

        dtype: the element type of an unquantised cache. A quantised one needs layers of equal
            shape.
        rows, snapshots: numbers of state slots of recurrent layers.
        memory: the allocator.
        pages: the pages of a growing cache, num_blocks of which are mapped now.
        Raises ConfigError.
        """
        memory = memory or CacheMemory()
        for group in groups.groups:
            if groups.elements % group.elements:
                raise ConfigError(
                    f"a layer keeps {group.elements} elements of a token's keys and another one "
                    f"{groups.elements}: layers whose keys have different sizes are supported in "
                    "one model only where the smaller size divides the larger one",
                    param="model",
                )
        form = form if form.name else KVFormat(bits=8 * dtype.itemsize)
        dtype = torch.uint8 if form.name else dtype
        width = block_size * groups.place_bytes(form) // dtype.itemsize
        least = num_blocks
        if pages is None:
            shape = (groups.slots, groups.tensors, num_blocks, width)
            storage = memory.zeros(shape, dtype, device)
        else:
            shape = (groups.slots, groups.tensors, pages.most, width)
            storage = pages.storage(shape, dtype, device, num_blocks)
            num_blocks = pages.most
        kv = cls(groups, {}, storage, num_blocks, block_size, form, memory, least)
        if groups.recurrent:
            kv.states = StateCache(groups.recurrent, rows, snapshots, device, memory)
        kv.layers |= kv._views()
        return kv

    def _views(self) -> dict[int, KV]:
        states: Mapping[int, KV] = {} if self.states is None else self.states.layers
        views = dict(states)
        for group in self.groups.groups:
            heads, dim = group.attention.kept
            parts = self.groups.elements // group.elements
            shape = (self.num_blocks * parts, heads, self.block_size, dim)
            for index, layer in enumerate(group.layers):
                place = self.storage[index // parts]
                keys, values = place[0], place[group.tensors - 1]
                if self.form.name:
                    views[layer] = (
                        QuantizedKV.over(self.form, keys, *shape[1:]),
                        QuantizedKV.over(self.form, values, *shape[1:]),
                    )
                else:
                    views[layer] = (keys.view(shape), values.view(shape))
                views[layer] += states.get(layer, ())
        for layer, source in self.groups.borrowed:
            views[layer] = views[source]
        return dict(sorted(views.items()))

    def write_entries(self, blocks: Tensor, places: Tensor, values: Tensor) -> None:
        """Write precomputed keys and values, such as an adapter's prefix, in a model of one KV
        group.

        values: [n, 2 * num_layers, num_kv_heads, head_dim]: the first layer's keys, its values, the
            second layer's keys, ...
        blocks, places: int64 [n], the block of each token and its position in the block.
        """
        if not self.form.name:
            shape = next(iter(self.layers.values()))[0].shape
            whole = self.storage.view(*self.storage.shape[:2], *shape)
            whole.flatten(0, 1)[:, blocks, :, places] = values
            return
        count, _, heads, dim = values.shape
        head = torch.arange(heads, device=blocks.device).repeat(count)
        at = (blocks.repeat_interleave(heads), head, places.repeat_interleave(heads))
        for number, (keys, own) in enumerate(self.layers.values()):
            assert isinstance(keys, QuantizedKV) and isinstance(own, QuantizedKV)
            # The Hadamard transform that layers apply to their keys before they write them.
            key = by_hadamard(self.form, values[:, 2 * number].float())
            keys.write(*at, key.reshape(-1, dim))
            own.write(*at, values[:, 2 * number + 1].reshape(-1, dim))

    def shrink(self, num_blocks: int) -> None:
        """Replace the storage by `num_blocks` empty blocks; the old storage is freed first."""
        old = self.storage
        shape, dtype, device, address = list(old.shape), old.dtype, old.device, old.data_ptr()
        shape[2] = num_blocks
        self.layers.clear()
        self.storage = old = old.new_empty(0)
        self.memory.release(address)
        self.storage = self.memory.zeros(shape, dtype, device)
        self.num_blocks = self.least = num_blocks
        self.layers |= self._views()


def in_views(
    groups: KVGroups, metas: Sequence[AttentionMeta], block_size: int
) -> list[AttentionMeta]:
    """Return the AttentionMeta of each `KVView` of the groups, as models take them.

    The function launches only arithmetic on the device, so a CUDA graph can capture it.

    metas: the AttentionMeta of each KV group, returned unchanged if the groups have no view.
    """
    views = []
    for view in groups.views:
        meta, attention = metas[view.group], groups.groups[view.group].attention
        if view.parts > 1:
            block = meta.slots.div(block_size, rounding_mode="floor") * view.parts + view.part
            slots = block * block_size + meta.slots % block_size
            slots = torch.where(meta.slots < 0, meta.slots, slots)
            meta = meta.elsewhere(slots, meta.block_table * view.parts + view.part)
        meta.window, meta.chunk = attention.window, attention.chunk
        views.append(meta)
    return views or list(metas)  # a pipeline stage may have no layer with KV
