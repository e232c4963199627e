"""Attention over paged latents for sequences (entries) with several query tokens, with absorbed
queries.

No key or value is computed from a latent, so a step's launches do not depend on the lengths of its
entries. A program's rows are consecutive queries of one entry times a group of heads.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.inputs import AbsorbedInputs
from kernels.attention.latent.decode import aligned, latent_tile, parts_within
from kernels.attention.shapes import LatentHeads, LatentTile
from kernels.launch.device import shared_memory
from kernels.launch.entries import entry_of
from kernels.metadata import AttentionMeta


@triton.jit(
    do_not_specialize=["table_stride", "head_stride", "num_tokens"],
    do_not_specialize_on_alignment=["block_table", "query_start", "kv_len", "counts"],
)
def _latent_prefill_kernel(
    absorbed,  # [heads, tokens, RANK]
    q,  # [tokens, heads, HEAD_DIM]: the last ROPE elements are rotated
    cache,
    out,  # [tokens, heads, RANK]
    block_table,
    query_start,
    kv_len,
    counts,
    scale_log2,
    table_stride,
    head_stride,  # of absorbed
    num_tokens,
    HEADS: tl.constexpr,  # `LatentHeads`
    TILE: tl.constexpr,  # `LatentTile`
    ALIGNED: tl.constexpr,  # 16 divides head_stride
):
    RANKS: tl.constexpr = TILE.ranks
    ROWS: tl.constexpr = TILE.rows
    QUERIES: tl.constexpr = ROWS // HEADS.group
    NUM_HEADS: tl.constexpr = HEADS.parts * HEADS.group
    KEPT: tl.constexpr = HEADS.rank + HEADS.rope
    # Start the last queries of the step first: within a request these see the most keys.
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    num_entries = tl.load(counts + 1)
    entry, begin, first = entry_of(query_start, tl.load(counts), num_entries, index, QUERIES)
    query_len = num_tokens - begin
    if entry < num_entries:
        query_len = tl.load(query_start + entry + 1) - begin
    if first >= query_len:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, RANKS)
    rotary = tl.arange(0, TILE.ropes)
    keys = tl.arange(0, TILE.keys)
    dim_mask = dims < HEADS.rank
    rotary_mask = rotary < HEADS.rope
    query_index = first + rows // HEADS.group
    row_mask = (rows < QUERIES * HEADS.group) & (query_index < query_len)
    tile_mask = row_mask[:, None] & dim_mask[None, :]
    token = (begin + query_index).to(tl.int64)
    heads = tl.program_id(0) * HEADS.group + rows % HEADS.group
    where = (token * NUM_HEADS + heads)[:, None] * HEADS.rank + dims[None, :]
    if entry == num_entries:
        tl.store(out + where, tl.zeros([ROWS, RANKS], out.dtype.element_ty), mask=tile_mask)
        return

    if ALIGNED:
        head_stride = head_stride // 16 * 16
    from_absorbed = absorbed + (heads.to(tl.int64) * head_stride + token * HEADS.rank)[:, None]
    query = tl.load(from_absorbed + dims[None, :], mask=tile_mask, other=0.0)
    from_q = (
        q + ((token * NUM_HEADS + heads) * HEADS.head_dim + (HEADS.head_dim - HEADS.rope))[:, None]
    )
    rotated_mask = row_mask[:, None] & rotary_mask[None, :]
    rotated = tl.load(from_q + rotary[None, :], mask=rotated_mask, other=0.0)
    length = tl.load(kv_len + entry)
    table = block_table + entry.to(tl.int64) * table_stride
    first_position = length - query_len + first
    # Rows after the last query see the same keys as the last query.
    row_position = tl.minimum(first_position + rows // HEADS.group, length - 1)
    end = tl.minimum(first_position + QUERIES, length)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANKS], tl.float32)
    page = tl.load(table + keys // HEADS.block_size, mask=keys < end, other=0)
    for start in range(0, end, TILE.keys):
        position = start + keys
        known = position < end
        offset = (page.to(tl.int64) * HEADS.block_size + position % HEADS.block_size) * KEPT
        page = tl.load(
            table + (position + TILE.keys) // HEADS.block_size,
            mask=position + TILE.keys < end,
            other=0,
        )
        there = known[:, None] & dim_mask[None, :]
        latent = tl.load(cache + offset[:, None] + dims[None, :], mask=there, other=0.0)
        there = known[:, None] & rotary_mask[None, :]
        shared = tl.load(
            cache + offset[:, None] + (HEADS.rank + rotary)[None, :], mask=there, other=0.0
        )
        seen = position[None, :] <= row_position[:, None]
        top, denominator, acc = latent_tile(
            query, rotated, latent, shared, seen, top, denominator, acc, scale_log2, start < end,
        )  # fmt: skip
    acc = acc / denominator[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=tile_mask)


class _Launch(NamedTuple):
    rows: int  # queries times heads of a group, in one program
    keys: int  # keys of a tile
    num_warps: int
    num_stages: int


_LAUNCHES = (_Launch(64, 32, 8, 2), _Launch(32, 32, 4, 2), _Launch(16, 16, 4, 2))


def _launch(group: int, cache: Tensor) -> _Launch:
    """Return the largest launch that fits into registers and shared memory.

    group: padded number of heads in a group; a program has a whole group.
    """
    row, room = cache.shape[3] * cache.element_size(), shared_memory(cache.device)
    for launch in _LAUNCHES[0 if cache.element_size() == 2 else 2 :]:
        rows = max(launch.rows, group)
        if (rows + launch.keys) * row + rows * 256 <= room:
            return launch
    return _LAUNCHES[-1]._replace(num_stages=1)


def latent_prefill(inputs: AbsorbedInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Compute attention over latents of the step's entries that are not decodes.

    Their indices are meta.counts[0] .. meta.counts[1] - 1.
    out: [tokens, num_heads, rank]; tokens after the last entry get zeros.
    """
    absorbed, q, cache, scale = inputs
    num_heads, num_tokens, rank = absorbed.shape
    rope = cache.shape[3] - rank
    parts = parts_within(num_heads, cache)
    group = num_heads // parts
    group_rows = triton.next_power_of_2(group)
    shape = _launch(group_rows, cache)
    rows = max(shape.rows, group_rows)
    blocks = meta.most_blocks(num_tokens, rows // group, decodes=False)
    _latent_prefill_kernel[(parts, blocks)](
        absorbed,
        q,
        cache,
        out,
        meta.block_table,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        scale * 1.4426950408889634,
        meta.block_table.stride(0),
        absorbed.stride(0),
        num_tokens,
        HEADS=LatentHeads(
            parts=parts,
            group=group,
            rank=rank,
            rope=rope,
            head_dim=q.shape[2],
            block_size=cache.shape[2],
        ),
        TILE=LatentTile(
            rows=rows,
            ranks=max(16, triton.next_power_of_2(rank)),
            ropes=max(16, triton.next_power_of_2(rope)),
            keys=shape.keys,
        ),
        ALIGNED=aligned(absorbed),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
