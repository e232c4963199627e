"""CpuInputs, CudaInputs: turn a Batch into the device tensors of a step.

On the CPU numpy works directly on the rows' memory. On CUDA there is one packed int32 buffer in
pinned memory, one copy a step, then the kernels of kernels/batch.py. Layout of the packed buffer (E
= `max_entries`; fixed offsets, so that a graph can read the first sections):

 rows [E] | starts [E] | mask_of [E] | query_start [E + 1] | last [E] | which [E] | counts [2] |
 updates
 updates: new tokens * 4 (row, position, offset, count) | new blocks * 3 (row, index, block) |
 tokens ...

`last` is, for each sampling entry, the index of its last token in the step's tokens. `which` is its
entry, and `mask_of` its mask or -1, written only if the batch has masks. `counts` are the numbers
of decodes and entries. New tokens are those of new rows and drafts. Offsets count from the start
of the updates.

There are as many pinned buffers as steps in flight: two, or more in a pipeline. Step n + 1 is
packed while n runs. Step n + 2 reuses n's buffer, after n has been waited for.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.models.image_rows import ImageRows
from engine.runner.request_rows import RequestRows
from engine.speculation.computed import ON_DEVICE
from kernels.metadata import AttentionMeta, LoraStep, RotaryPlaces

# int32s of updates in the pinned buffer; a step with more allocates a larger one
UPDATE_CAPACITY = 1 << 18


@dataclass(slots=True)
class DeviceStep:
    """The device tensors of a step; samples are in the order of the sampling entries."""

    token_ids: Tensor  # [num_tokens] int32
    # one AttentionMeta for each KV group; they differ in block tables and slots
    metas: list[AttentionMeta]
    last: Tensor | None  # [num_samples] int64, indices of the tokens that sample; None = all tokens
    sample_rows: Tensor  # [num_samples] int64
    sample_positions: Tensor  # [num_samples] int64: position of the new token
    # With data-parallel attention: (indices [num_own] int64 of tokens whose KV this rank has, the
    # metas of these tokens for each KV group, or [] without tokens). If the indices are None, the
    # metas have all tokens, with tokens of other ranks as padding.
    own: "tuple[Tensor | None, list[AttentionMeta]] | None" = None
    images: ImageRows | None = None  # the embeddings of image tokens

    def adapt(self, lora: LoraStep | None) -> None:
        """Set the step's LoRA metadata in each of its metas; None = no token has an adapter."""
        for meta in self.metas:
            meta.lora = lora


class CpuInputs:
    """The builder of step inputs on the CPU, on numpy views of the rows' tensors.

    For 32 entries this takes microseconds, less than tensor operations.
    """

    def __init__(self, rows: RequestRows, block_size: int) -> None:
        self._rows = rows
        self._tokens = rows.tokens.numpy()
        self._table = rows.block_table.numpy()
        self._accepted = rows.accepted.numpy()
        self._deltas = None if rows.deltas is None else rows.deltas.numpy()
        groups = rows.num_groups
        self._tables = [self._table[:, group::groups] for group in range(groups)]
        self._block_size = block_size

    def assemble(self, batch: Batch) -> DeviceStep:
        for new in batch.new_rows:
            self._tokens[new.row, : len(new.token_ids)] = new.token_ids
        for row, first, drafts in batch.drafts:
            if drafts[0] != ON_DEVICE:
                self._tokens[row, first : first + len(drafts)] = drafts
        for row, index, block in batch.new_blocks:
            self._table[row, index] = block

        rows = np.asarray(batch.rows, dtype=np.int64)
        starts = np.asarray(batch.starts, dtype=np.int64)
        if batch.unsettled:
            starts += self._accepted[rows]
        size = self._block_size
        samples = None
        if batch.num_decodes == len(batch.rows):  # each entry has one token and samples
            query_start = np.arange(len(rows) + 1, dtype=np.int32)
            token_rows, positions, ends = rows, starts, starts + 1
        else:
            lengths = np.asarray(batch.lengths, dtype=np.int64)
            samples = np.asarray(batch.samples, dtype=bool)
            query_start = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(lengths, out=query_start[1:])
            entry = np.repeat(np.arange(len(rows)), lengths)
            positions = starts[entry] + np.arange(query_start[-1]) - query_start[entry]
            token_rows, ends = rows[entry], starts + lengths
        kv_len = ends.astype(np.int32)
        max_kv_len = int(kv_len.max())
        metas: list[AttentionMeta] = []
        for tables in self._tables:
            slots = tables[token_rows, positions // size].astype(np.int64) * size
            slots += positions % size
            table = torch.from_numpy(tables[rows, : -(-max_kv_len // size)])
            if metas:
                metas.append(metas[0].elsewhere(torch.from_numpy(slots), table))
                continue
            meta = AttentionMeta(
                positions=torch.from_numpy(positions.astype(np.int32)),
                slots=torch.from_numpy(slots),
                query_start=torch.from_numpy(query_start),
                kv_len=torch.from_numpy(kv_len),
                block_table=table,
                num_decodes=batch.num_decodes,
                max_kv_len=max_kv_len,
                query_start_host=query_start.tolist(),
                kv_len_host=kv_len.tolist(),
                rows=torch.from_numpy(rows),
            )
            if self._deltas is not None:
                places = (positions + self._deltas[token_rows]).astype(np.int32)
                meta.rotary = RotaryPlaces(torch.from_numpy(places))
            metas.append(meta)
        token_ids = torch.from_numpy(self._tokens[token_rows, positions])
        if samples is None:
            return DeviceStep(
                token_ids, metas, None, torch.from_numpy(rows), torch.from_numpy(ends)
            )
        all_sample = len(positions) == len(rows) and bool(samples.all())
        return DeviceStep(
            token_ids=token_ids,
            metas=metas,
            last=None
            if all_sample
            else torch.from_numpy((query_start[1:] - 1)[samples].astype(np.int64)),
            sample_rows=torch.from_numpy(rows[samples]),
            sample_positions=torch.from_numpy(ends[samples]),
        )


class _Staging:
    """A pinned host buffer, and a numpy view for filling it."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self.array = self.tensor.numpy()


def make_inputs(
    rows: RequestRows, block_size: int, max_num_tokens: int, device: torch.device, steps: int = 2
) -> "CpuInputs | CudaInputs":
    """Return the builder of step inputs for a device.

    max_num_tokens: the number of tokens of the largest step.
    steps: the number of steps in flight at once.
    """
    if device.type == "cuda":
        return CudaInputs(rows, block_size, max_num_tokens, device, steps)
    return CpuInputs(rows, block_size)


def max_entries(max_num_seqs: int) -> int:
    """Return the maximum number of entries of a step on CUDA, a multiple of 8.

    A mixed batch needs one further entry for padding.
    """
    return (max_num_seqs + 8) // 8 * 8


class CudaInputs:
    """The builder of step inputs on CUDA: packs a Batch, uploads it in one copy, and launches
    kernels that assemble the tensors."""

    def __init__(
        self,
        rows: RequestRows,
        block_size: int,
        max_num_tokens: int,
        device: torch.device,
        steps: int = 2,
    ) -> None:
        """Allocate the buffers.

        steps: the number of steps in flight at once.
        """
        self._rows = rows
        self._block_size = block_size
        entries = max_entries(rows.pad_row)
        self._entries = entries
        self._counts_at = 6 * entries + 1
        self._updates_at = self._counts_at + 2
        capacity = self._updates_at + UPDATE_CAPACITY
        self._staging = [_Staging(capacity) for _ in range(max(2, steps))]
        self._packed = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.rows = self._packed[:entries]
        self.starts = self._packed[entries : 2 * entries]
        self.mask_of = self._packed[2 * entries : 3 * entries]
        self.query_start = self._packed[3 * entries : 4 * entries + 1]
        self.last = self._packed[4 * entries + 1 : 5 * entries + 1]
        self.which = self._packed[5 * entries + 1 : 6 * entries + 1]
        self.counts = self._packed[self._counts_at : self._updates_at]
        # Outputs of the assembly kernels have fixed addresses, because graphs read them.
        num_tokens = max(max_num_tokens, entries)
        self.token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.rotary_rows = None if rows.deltas is None else torch.zeros_like(self.positions)
        groups = rows.num_groups
        self.slots = torch.zeros(groups, num_tokens, dtype=torch.int64, device=device)
        self.kv_len = torch.zeros(entries, dtype=torch.int32, device=device)
        max_blocks = rows.block_table.shape[1] // groups
        self.block_table = torch.zeros(
            groups, entries, max_blocks, dtype=torch.int32, device=device
        )
        self._buffer = 0

    def upload(self, batch: Batch, num_entries: int, num_tokens: int) -> None:
        """Copy a batch to the device, padded to num_entries and num_tokens, and apply its updates.

        Padding entries use the padding row. Decodes are padded by decodes. After a mixed batch one
        padding entry has all padding tokens, and padding samples are that entry's.
        """
        from kernels.batch import apply_updates

        self._buffer = (self._buffer + 1) % len(self._staging)
        entries, count = self._entries, len(batch.rows)
        new_tokens = [(new.row, 0, new.token_ids) for new in batch.new_rows]
        new_tokens += [drafts for drafts in batch.drafts if drafts[2][0] != ON_DEVICE]
        num_texts, num_blocks = len(new_tokens), len(batch.new_blocks)
        num_updates = 4 * num_texts + 3 * num_blocks + sum(len(ids) for _, _, ids in new_tokens)
        staging, packed = self._staging[self._buffer], self._packed
        # for example a hundred long, fully cached prompts at once
        if num_updates > UPDATE_CAPACITY:
            staging = _Staging(self._updates_at + num_updates)
            packed = torch.empty_like(staging.tensor, device=self._packed.device)
        array = staging.array

        array[:count] = batch.rows
        array[entries : entries + count] = batch.starts
        if num_entries > count:
            array[count:num_entries] = self._rows.pad_row
            array[entries + count : entries + num_entries] = 0
        if batch.masked:
            mask_of = array[2 * entries : 2 * entries + num_entries]
            mask_of[:] = -1
            mask_of[list(batch.masked)] = np.arange(len(batch.masked))
        query_start = array[3 * entries : 4 * entries + 1]
        query_start[0] = 0
        if batch.num_decodes == count:
            query_start[1 : num_entries + 1] = np.arange(1, num_entries + 1)
            counts = num_entries, num_entries
        else:
            query_start[1 : count + 1] = np.cumsum(batch.lengths)
            query_start[count + 1 : num_entries + 1] = num_tokens
            which = np.flatnonzero(np.asarray(batch.samples, dtype=bool))
            last = array[4 * entries + 1 : 4 * entries + 1 + num_entries]
            last[: len(which)] = query_start[which + 1] - 1
            last[len(which) :] = num_tokens - 1
            chosen = array[5 * entries + 1 : 5 * entries + 1 + num_entries]
            chosen[: len(which)] = which
            chosen[len(which) :] = count  # read by padding entries alone
            counts = batch.num_decodes, count
        array[self._counts_at : self._updates_at] = counts

        if num_updates:
            updates = array[self._updates_at : self._updates_at + num_updates]
            at = 4 * num_texts + 3 * num_blocks
            for i, (row, first, ids) in enumerate(new_tokens):
                length = len(ids)
                updates[4 * i : 4 * i + 4] = (row, first, at, length)
                updates[at : at + length] = ids
                at += length
            if num_blocks:
                updates[4 * num_texts : 4 * num_texts + 3 * num_blocks] = np.asarray(
                    batch.new_blocks, dtype=np.int32
                ).reshape(-1)

        used = self._updates_at + num_updates
        packed[:used].copy_(staging.tensor[:used], non_blocking=True)
        if packed is not self._packed:
            self._packed[: self._updates_at].copy_(packed[: self._updates_at])
        if batch.unsettled:  # the padding row has accepted none
            rows = self.rows[:num_entries]
            self.starts[:num_entries] += self._rows.accepted.index_select(0, rows)
        if num_updates:
            apply_updates(
                packed[self._updates_at : used],
                self._rows.tokens,
                self._rows.block_table,
                num_texts,
                num_blocks,
            )

    def all_padding(self, num_entries: int, num_tokens: int) -> None:
        """Fill the inputs as for a batch that consists only of padding."""
        decodes = num_entries == num_tokens
        self.rows[:num_entries].fill_(self._rows.pad_row)
        self.starts[:num_entries].zero_()
        self.mask_of[:num_entries].fill_(-1)
        if decodes:
            first = torch.arange(num_entries + 1, dtype=torch.int32)
        else:
            first = torch.full((num_entries + 1,), num_tokens, dtype=torch.int32)
            first[0] = 0
        self.query_start[: num_entries + 1].copy_(first)
        self.last[:num_entries].zero_()
        self.which[:num_entries].zero_()
        self.counts.fill_(num_entries if decodes else 0)

    def lay_out(
        self,
        num_entries: int,
        num_tokens: int,
        num_decodes: int,
        max_kv_len: int,
        *,
        runs: bool = False,
    ) -> tuple[Tensor, list[AttentionMeta]]:
        """Launch the assembly of an uploaded batch; return its token ids and each group's meta.

        A CUDA graph can capture this: addresses are fixed, and sizes are arguments.

        runs: whether a row may have several decodes, because the batch has drafts.
        """
        from kernels.batch import assemble

        assemble(
            self.rows[:num_entries],
            self.starts[:num_entries],
            self.query_start[: num_entries + 1],
            self._rows.tokens,
            self._rows.block_table,
            self.token_ids,
            self.positions,
            self.slots,
            self.kv_len,
            self.block_table,
            self._block_size,
            self._rows.pad_row,
            self._rows.deltas,
            self.rotary_rows,
        )
        meta = AttentionMeta(
            positions=self.positions[:num_tokens],
            slots=self.slots[0, :num_tokens],
            query_start=self.query_start[: num_entries + 1],
            kv_len=self.kv_len[:num_entries],
            block_table=self.block_table[0, :num_entries],
            num_decodes=num_decodes,
            max_kv_len=max_kv_len,
            counts=self.counts,
            rows=self.rows[:num_entries],
            runs=self.rows[:num_entries] if runs else None,
            rotary=None
            if self.rotary_rows is None
            else RotaryPlaces(self.rotary_rows[:num_tokens]),
        )
        others = [
            meta.elsewhere(slots[:num_tokens], table[:num_entries])
            for slots, table in zip(self.slots[1:], self.block_table[1:], strict=True)
        ]
        return self.token_ids[:num_tokens], [meta, *others]

    def assemble(self, batch: Batch) -> DeviceStep:
        """Upload one step without a CUDA graph; return its device tensors."""
        count = len(batch.rows)
        self.upload(batch, count, batch.num_tokens)
        decodes_only = batch.num_decodes == count
        lengths = batch.lengths
        kv_len = [start + length for start, length in zip(batch.starts, lengths, strict=True)]
        sizes = count, batch.num_tokens, batch.num_decodes, max(kv_len) + batch.unsettled
        token_ids, metas = self.lay_out(*sizes, runs=bool(batch.drafts))
        for meta in metas:
            meta.query_start_host = [0, *accumulate(lengths)]
            meta.kv_len_host = kv_len
        if decodes_only:
            positions = metas[0].kv_len.long()
            return DeviceStep(token_ids, metas, None, self.rows[:count].long(), positions)
        num_samples = sum(batch.samples)
        last = self.last[:num_samples].long()
        which = self.which[:num_samples]
        positions = metas[0].kv_len[which].long()
        return DeviceStep(token_ids, metas, last, self.rows[which].long(), positions)
