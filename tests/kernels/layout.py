"""lay_out: the AttentionMeta of a step from a list of entries, as the model runner makes it."""

from collections.abc import Sequence

import torch

from kernels.metadata import AttentionMeta


def lay_out(
    entries: Sequence[tuple[Sequence[int], int, int]], block_size: int, padding: int = 0
) -> AttentionMeta:
    """entries: (block ids, start, length) each; leading ones of length 1 are decodes.

    Tables are filled up with an id that no cache has; padding tokens get slot -1.
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
        max_query_len=max(lengths),
        max_kv_len=max(kv_len),
    )
