"""Batch assembly on the device: update the requests' rows, then lay out the step's tokens.

An entry is a sequence of the step. The two kernels need no host synchronisation, so that both can
run before or inside a CUDA graph:

    apply_updates   tokens of new rows, drafts, and block ids that extend a row's table
    assemble        per token: id, position, KV slots; per entry: kv_len and its block tables

Both read one packed int32 buffer, uploaded once per step; engine/runner/inputs.py has its layout.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_texts", "num_blocks"])
def _apply_updates_kernel(
    updates,  # [num_texts * 4 + num_blocks * 3 + num_tokens] int32
    tokens,
    tokens_stride,
    table,
    table_stride,
    num_texts,
    num_blocks,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < num_texts:  # tokens of one row: (row, position, offset in updates, count)
        row = tl.load(updates + pid * 4).to(tl.int64)
        position = tl.load(updates + pid * 4 + 1)
        offset = tl.load(updates + pid * 4 + 2)
        count = tl.load(updates + pid * 4 + 3)
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            mask = i < count
            ids = tl.load(updates + offset + i, mask=mask)
            tl.store(tokens + row * tokens_stride + position + i, ids, mask=mask)
    else:  # BLOCK (row, index, block id) triples
        i = (pid - num_texts) * BLOCK + tl.arange(0, BLOCK)
        mask = i < num_blocks
        triples = updates + num_texts * 4 + i * 3
        rows = tl.load(triples, mask=mask, other=0).to(tl.int64)
        indices = tl.load(triples + 1, mask=mask, other=0)
        blocks = tl.load(triples + 2, mask=mask, other=0)
        tl.store(table + rows * table_stride + indices, blocks, mask=mask)


def apply_updates(
    updates: Tensor, tokens: Tensor, block_table: Tensor, num_texts: int, num_blocks: int
) -> None:
    """Write new token ids to tokens [row, position + i] and block ids to block_table [row, index].

    updates, int32 on the device: num_texts times (row, position, offset of the tokens in updates,
    count), then num_blocks times (row, index in block_table, block id), then the tokens.
    """
    block = 512
    grid = (num_texts + triton.cdiv(num_blocks, block),)
    if grid[0]:
        _apply_updates_kernel[grid](
            updates,
            tokens,
            tokens.stride(0),
            block_table,
            block_table.stride(0),
            num_texts,
            num_blocks,
            BLOCK=block,
        )


# 20 parameters or more: 18 are tensors and strides of the launch.
@triton.jit(do_not_specialize=["pad_row"])
def _assemble_kernel(
    rows,
    starts,
    query_start,
    tokens,
    tokens_stride,
    table,
    table_stride,
    token_ids,
    positions,
    slots,
    slots_stride,
    kv_len,
    out_table,
    out_group_stride,
    out_table_stride,
    pad_row,
    deltas,
    rotary_rows,
    DELTAS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(rows + entry).to(tl.int64)
    start = tl.load(starts + entry)
    first = tl.load(query_start + entry)
    length = tl.load(query_start + entry + 1) - first
    for at in range(0, length, BLOCK):
        i = at + tl.arange(0, BLOCK)
        mask = i < length
        position = start + i
        ids = tl.load(tokens + row * tokens_stride + position, mask=mask, other=0)
        tl.store(token_ids + first + i, ids, mask=mask)
        tl.store(positions + first + i, position, mask=mask)
        if DELTAS:
            tl.store(rotary_rows + first + i, position + tl.load(deltas + row), mask=mask)
        for group in tl.static_range(GROUPS):
            at_block = position // BLOCK_SIZE * GROUPS + group
            block = tl.load(table + row * table_stride + at_block, mask=mask, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            slot = tl.where(row == pad_row, -1, slot)
            tl.store(slots + group * slots_stride + first + i, slot, mask=mask)
    total = start + length
    tl.store(kv_len + entry, total)
    num_blocks = (total + BLOCK_SIZE - 1) // BLOCK_SIZE
    for at in range(0, num_blocks, BLOCK):
        i = at + tl.arange(0, BLOCK)
        mask = i < num_blocks
        for group in tl.static_range(GROUPS):
            ids = tl.load(table + row * table_stride + i * GROUPS + group, mask=mask, other=0)
            own = out_table + group * out_group_stride + entry.to(tl.int64) * out_table_stride
            tl.store(own + i, ids, mask=mask)


def assemble(
    rows: Tensor,  # [num_entries] int32: each entry's request row; pad_row marks padding
    starts: Tensor,  # [num_entries] int32: position of each entry's first token
    query_start: Tensor,  # [num_entries + 1] int32: each entry's first token in the step
    tokens: Tensor,  # [num_rows, row_tokens] int32
    block_table: Tensor,  # [num_rows, max_blocks * groups] int32
    token_ids: Tensor,  # out [num_tokens] int32
    positions: Tensor,  # out [num_tokens] int32
    slots: Tensor,  # out [groups, num_tokens] int64
    kv_len: Tensor,  # out [num_entries] int32
    # out [groups, num_entries, max_blocks] int32, valid up to each entry's last block
    out_table: Tensor,
    block_size: int,
    pad_row: int,
    deltas: Tensor | None = None,  # [num_rows] int32: rotary position minus position
    rotary_rows: Tensor | None = None,  # out [num_tokens] int32: position + delta of the row
) -> None:
    """Write a step's layout (see AttentionMeta) to the tensors marked "out" above.

    Tokens of pad_row get slot -1: their keys are not written.
    """
    _assemble_kernel[(rows.shape[0],)](
        rows,
        starts,
        query_start,
        tokens,
        tokens.stride(0),
        block_table,
        block_table.stride(0),
        token_ids,
        positions,
        slots,
        slots.stride(0),
        kv_len,
        out_table,
        out_table.stride(0),
        out_table.stride(1),
        pad_row,
        rows if deltas is None else deltas,
        positions if rotary_rows is None else rotary_rows,
        DELTAS=deltas is not None,
        BLOCK_SIZE=block_size,
        GROUPS=slots.shape[0],
        BLOCK=128,
    )
