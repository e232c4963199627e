"""Paged: a model with its own KV cache, whose steps return the logits of every token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config.kv_groups import kv_groups
from engine.models.registry import Model, build_model
from engine.resolve import Resolved
from engine.runner.caches.kv_cache import KVCache, in_views
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from kernels.kv.format import KVFormat
from kernels.metadata import AttentionMeta, LoraStep

# A request of a step: (all token ids, block ids, the first position that the step computes).
Entry = tuple[Tensor, Sequence[int], int]


def lay_out(
    entries: Sequence[tuple[Sequence[int], int, int]], block_size: int, padding: int = 0
) -> AttentionMeta:
    """Return the AttentionMeta of a step, as the model runner would build it.

    entries: (block ids, first position, number of tokens) of each request.
    padding: number of padding tokens at the end.
    """
    positions: list[int] = []
    slots: list[int] = []
    query_start, kv_len = [0], []
    for blocks, start, length in entries:
        for position in range(start, start + length):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
        query_start.append(query_start[-1] + length)
        kv_len.append(start + length)
    widest = max(len(blocks) for blocks, _, _ in entries)
    table = torch.full((len(entries), widest), 2**30, dtype=torch.int32)
    for row, (blocks, _, _) in zip(table, entries, strict=True):
        row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    lengths = [length for _, _, length in entries]
    num_decodes = next((i for i, n in enumerate(lengths) if n > 1), len(lengths))
    return AttentionMeta(
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int32),
        slots=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        query_start=torch.tensor(query_start, dtype=torch.int32),
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        block_table=table,
        num_decodes=num_decodes,
        max_kv_len=max(kv_len),
    )


def load_model(resolved: Resolved) -> Model:
    """Load a model as an engine would, but without scheduler and runner."""
    config = resolved.config
    model = build_model(
        resolved.model,
        resolved.dtype,
        resolved.device,
        kernels_for(resolved.device.type, config.deterministic),
        quantization=config.quantization,
        quantization_layers=config.quantization_layers,
    )
    dummy = config.load_format == "dummy"
    load_weights(model, None if dummy else resolved.folder, seed=config.seed or 0)
    return model


class Paged:
    """A model with its own KV cache, whose steps return the logits of every token.

    num_blocks: the number of blocks; steps may use block ids 0 to num_blocks - 1.
    """

    def __init__(
        self,
        model: Model,
        num_blocks: int = 32,
        block_size: int = 4,
        form: KVFormat = KVFormat(),  # noqa: B008, it is frozen
    ) -> None:
        self.model = model
        self.device = model.device
        self.kernels = kernels_for(self.device.type)
        self.block_size = block_size
        groups = kv_groups(model.config, model.head_group.size, model.head_group.rank)
        # Each KV group needs separate blocks, as all groups share one pool.
        count = num_blocks * len(groups.groups)
        self.kv = KVCache.allocate(
            groups, count, block_size, model.dtype, self.device, form, rows=num_blocks
        )

    @torch.inference_mode()
    def run(self, *entries: Entry, lora: LoraStep | None = None) -> list[Tensor]:
        """Compute a step; return the logits [end - start, vocab_size] of each request.

        entries: (token ids [end], block ids, start) of each request, of which the step computes the
            tokens from `start` on.
        """
        metas = self.metas(entries, lora)
        token_ids = torch.cat([ids[start:] for ids, _, start in entries]).int().to(self.device)
        logits = self.model.logits(self.model.forward(token_ids, metas, self.kv.layers))
        return list(logits.split([len(ids) - start for ids, _, start in entries]))

    def metas(
        self, entries: Sequence[Entry], lora: LoraStep | None = None
    ) -> Sequence[AttentionMeta]:
        """Return the planned AttentionMeta of each view of the KV groups for a step; see `run`."""
        meta = lay_out(
            [(blocks, start, len(ids) - start) for ids, blocks, start in entries], self.block_size
        )
        for name in ("positions", "slots", "query_start", "kv_len", "block_table"):
            setattr(meta, name, getattr(meta, name).to(self.device))
        meta.lora = lora
        # A request's recurrent state lies in the row with the number of its first block.
        meta.rows = meta.block_table[:, 0].long()
        metas = []
        groups, size = self.kv.groups, self.block_size
        count = len(groups.groups)
        for number in range(count):
            block = meta.slots.div(size, rounding_mode="floor") * count + number
            slots = torch.where(meta.slots < 0, -1, block * size + meta.slots % size)
            metas.append(meta.elsewhere(slots, meta.block_table * count + number))
        metas = in_views(groups, metas, size)
        for view, view_meta in zip(groups.views, metas, strict=True):
            attention = groups.groups[view.group].attention
            cache = self.kv.layers[view.layers[0]][0]
            self.kernels.prepare(view_meta, attention.num_heads, cache, attention.latent_rank)
        return metas
