"""StateVerification: states of recurrent layers in steps that verify drafts.

A layer overwrites its state with each token, and a rejected draft cannot be taken back. So in such
a step each row's decode and drafts are computed on a copy of the row's state, which lives as long
as the layer's kernel. What the kernel read of these tokens is kept until the next launch. That
names the tokens that the text got, and each kernel computes them once more, now on the state
itself. No other part of a layer runs again. Inputs are the smallest of what a step could keep: a
state for each draft would take megabytes a layer.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from kernels.metadata import AttentionMeta, StateRuns


class StateVerification:
    """The runs of the newest step that verified drafts, until their accepted tokens are known.

    pad_row: the row whose state belongs to no request.
    """

    def __init__(self, pad_row: int, device: torch.device) -> None:
        self._pad_row = pad_row
        self._device = device
        self._runs: StateRuns | None = None
        self._rows: list[int] = []  # of each run
        self._starts: list[int] = []
        self._lengths: list[int] = []

    def lay_out(self, batch: Batch, metas: Sequence[AttentionMeta]) -> None:
        """Set `state_runs` of a step's metas, if its batch has drafts."""
        if not batch.drafts:
            return
        first_draft = batch.num_decodes - sum(len(drafts) for _, _, drafts in batch.drafts)
        entries = {row: entry for entry, row in enumerate(batch.rows[:first_draft])}
        self._rows = [row for row, _, _ in batch.drafts]
        self._starts = [batch.starts[entries[row]] for row in self._rows]
        self._lengths = [1 + len(drafts) for _, _, drafts in batch.drafts]
        tokens: list[int] = []
        for row, _, drafts in batch.drafts:
            tokens += [entries[row], *range(first_draft, first_draft + len(drafts))]
            first_draft += len(drafts)
        in_run = np.zeros(batch.num_tokens, dtype=bool)
        in_run[tokens] = True
        others = np.flatnonzero(~in_run)
        decodes = np.flatnonzero(~in_run[: batch.num_decodes])
        rest = [*decodes.tolist(), *range(batch.num_decodes, len(batch.rows))]
        back = np.empty(batch.num_tokens, dtype=np.int64)
        back[np.concatenate((others, np.asarray(tokens)))] = np.arange(batch.num_tokens)
        self._runs = StateRuns(
            others=self._on_device(others),
            others_meta=self._layout(
                metas[0],
                [batch.rows[entry] for entry in rest],
                [batch.starts[entry] for entry in rest],
                [batch.lengths[entry] for entry in rest],
                len(decodes),
            ),
            tokens=self._on_device(tokens),
            meta=self._layout(metas[0], range(len(self._rows)), self._starts, self._lengths),
            rows=self._on_device(self._rows),
            back=self._on_device(back),
        )
        for meta in metas:
            meta.state_runs = self._runs

    def settle(self, settled: Sequence[tuple[int, int]]) -> None:
        """Bring the states of rows up to the ends of their texts, before a step or a snapshot reads
        them.

        settled: (row, how many tokens of the run the text got) of the last step's runs; without
            the rows whose requests have ended.
        """
        runs, self._runs = self._runs, None
        if not settled:
            return
        assert runs is not None
        counts = dict(settled)
        rows, starts, lengths = [], [], []
        for row, start, length in zip(self._rows, self._starts, self._lengths, strict=True):
            count = counts.get(row, 0)
            # rejected tokens are an entry of no request, which begins and ends with them
            for own, first, tokens in ((row, start, count), (self._pad_row, 0, length - count)):
                if tokens:
                    rows.append(own)
                    starts.append(first)
                    lengths.append(tokens)
        layout = self._layout(runs.meta, rows, starts, lengths)
        for replay in runs.replays:
            replay(layout)

    def forget(self) -> None:
        """Drop the runs of a step whose result is dropped."""
        self._runs = None

    def _layout(
        self,
        like: AttentionMeta,
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        num_decodes: int = 0,
    ) -> AttentionMeta:
        """Return the layout of entries, as far as layers that keep a state read it."""
        ends = [0, *accumulate(lengths)]
        kv_len = [start + length for start, length in zip(starts, lengths, strict=True)]
        count = len(rows)
        packed = self._on_device([*rows, *ends, *kv_len, num_decodes, count])
        own_rows, query_start, lens, counts = packed.split((count, count + 1, count, 2))
        return AttentionMeta(
            positions=like.positions[:0],
            slots=like.slots[:0],
            query_start=query_start.int(),
            kv_len=lens.int(),
            block_table=like.block_table[:0],
            num_decodes=num_decodes,
            max_kv_len=max(kv_len, default=0),
            query_start_host=ends,
            kv_len_host=kv_len,
            counts=counts.int(),
            rows=own_rows,
        )

    def _on_device(self, numbers: Sequence[int] | np.ndarray) -> Tensor:
        host = torch.from_numpy(np.asarray(numbers, dtype=np.int64))
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)
