"""StateVerification: states of recurrent layers in steps that verify drafts.

A layer overwrites its state with each token, and a rejected draft cannot be undone. So in a step
with drafts, a layer's kernel computes each row's decode and drafts on a temporary copy of the row's
state. The kernel's inputs for these tokens are kept until the next launch. By then the accepted
tokens are known, and the kernel computes only these again, on the state itself. No other part of a
layer runs again. Keeping inputs takes the least memory: a state for each draft would take megabytes
a layer.

On CUDA a step with up to GRAPHED decodes is a CUDA graph, and so is the second computation of its
accepted tokens. The inputs of both are uploaded before each launch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from kernels.metadata import AttentionMeta, StateRuns

GRAPHED = 64  # decodes of the largest captured step; more would keep gigabytes of copied states


class _Numbers:
    """The int32 numbers of a step's layout in fixed memory: arrays on the host, device tensors."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        self._packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.arrays = [part.numpy() for part in self._host.split(list(sizes))]
        self.tensors = self._packed.split(list(sizes))

    def upload(self) -> None:
        self._packed.copy_(self._host, non_blocking=True)


class _Layout:
    """The entries of a step in fixed memory: rows, starts and lengths of up to `entries`
    entries."""

    def __init__(self, entries: int, like: AttentionMeta, pad_row: int, device: torch.device):
        self._numbers = _Numbers((entries, entries + 1, entries, 2), device)
        self._pad_row = pad_row
        rows, starts, kv_len, counts = self._numbers.tensors
        self.meta = _layout(like, rows, starts, kv_len, counts)
        self.fill([], [], [])

    def fill(self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Upload the entries of a step; the remaining entries get no tokens."""
        count = len(rows)
        own_rows, query_start, kv_len, counts = self._numbers.arrays
        own_rows[:count], own_rows[count:] = rows, self._pad_row
        query_start[1 : count + 1] = np.cumsum(lengths)
        query_start[count + 1 :] = query_start[count]
        kv_len[:count], kv_len[count:] = np.add(starts, lengths), 0
        counts[1] = count
        self._numbers.upload()


class GraphRuns:
    """The runs of a captured step of decodes, and the graph that replays their accepted tokens.

    A run is a decode with its drafts.

    runs: the value of `AttentionMeta.state_runs` while the step is captured.
    settle: computes the accepted tokens, by the graph once that is captured.
    """

    def __init__(
        self, decodes: int, like: AttentionMeta, pad_row: int, device: torch.device
    ) -> None:
        """Set up the runs.

        decodes: the number of decode entries, including drafts.
        like: the AttentionMeta of the captured step.
        """
        self._decodes, self._pad_row = decodes, pad_row
        most = decodes // 2  # a run has at least two tokens
        self._numbers = _Numbers((decodes, decodes, decodes, most, decodes), device)
        others_rows, others_len, tokens, rows, back = self._numbers.tensors
        # rows are indices into the copied states
        self._layout = _Layout(most, like, 0, device)
        self.settled = _Layout(2 * most, like, pad_row, device)
        self.runs = StateRuns(
            others=torch.arange(decodes, device=device),
            others_meta=replace(like, rows=others_rows, kv_len=others_len),
            tokens=tokens,
            meta=self._layout.meta,
            rows=rows,
            back=back,
            in_place=True,
        )
        self.settle: Callable[[], object] = self.replay
        self.fill([], [], [], [], [], [])

    def fill(
        self,
        others: Sequence[int],
        others_len: Sequence[int],
        tokens: Sequence[int],
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Upload a step's runs.

        others: the row of each decode; the padding row for decodes of runs.
        others_len: the context length of each decode, its token included; 0 for decodes of runs.
        tokens: indices of the runs' tokens among the decodes.
        rows, starts, lengths: each run's row, first position and number of tokens.
        """
        own_others, own_len, own_tokens, own_rows, back = self._numbers.arrays
        # padding counts as the first token of a text
        own_len[: len(others)], own_len[len(others) :] = others_len, 1
        own_others[: len(others)], own_others[len(others) :] = others, self._pad_row
        own_tokens[: len(tokens)], own_tokens[len(tokens) :] = tokens, 0
        own_rows[: len(rows)], own_rows[len(rows) :] = rows, self._pad_row
        back[:] = np.arange(self._decodes)
        back[list(tokens)] = self._decodes + np.arange(len(tokens))
        self._numbers.upload()
        self._layout.fill(range(len(rows)), starts, lengths)

    def replay(self) -> None:
        """Replay the graph that computes the accepted tokens on the states."""
        for replay in self.runs.replays:
            replay(self.settled.meta)


class StateVerification:
    """The verified tokens of the newest step with drafts, until the accepted ones are known.

    A run is a row's decode and the drafts after it.

    pad_row: the row whose state belongs to no request.
    """

    def __init__(self, pad_row: int, device: torch.device) -> None:
        self._pad_row = pad_row
        self._device = device
        self._runs: StateRuns | GraphRuns | None = None
        self._rows: list[int] = []  # the row of each run
        self._starts: list[int] = []
        self._lengths: list[int] = []

    def graphed(self, decodes: int, like: AttentionMeta) -> GraphRuns:
        """Return the runs of verified tokens for a decode step that is about to be captured.

        decodes: the step's number of decode entries, those of drafts included.
        like: the step's attention meta, whose tensors the CUDA graph reads.
        """
        return GraphRuns(decodes, like, self._pad_row, self._device)

    def upload(self, batch: Batch, graph: GraphRuns) -> None:
        """Upload the runs of a batch of decodes, some of which have drafts, for a captured step."""
        tokens = self._record_runs(batch)
        others = np.asarray(batch.rows)
        others_len = np.asarray(batch.starts) + 1
        others[tokens], others_len[tokens] = self._pad_row, 0
        graph.fill(
            others.tolist(), others_len.tolist(), tokens, self._rows, self._starts, self._lengths
        )
        self._runs = graph

    def lay_out(self, batch: Batch, metas: Sequence[AttentionMeta]) -> None:
        """Set up a step so that recurrent layers compute drafts on copies of the states.

        metas: the step's attention metadata, whose `state_runs` is set if the batch has drafts.
        """
        if not batch.drafts:
            return
        tokens = self._record_runs(batch)
        in_run = np.zeros(batch.num_tokens, dtype=bool)
        in_run[tokens] = True
        others = np.flatnonzero(~in_run)
        decodes = np.flatnonzero(~in_run[: batch.num_decodes])
        entries = [*decodes.tolist(), *range(batch.num_decodes, len(batch.rows))]
        back = np.empty(batch.num_tokens, dtype=np.int64)
        back[np.concatenate((others, np.asarray(tokens)))] = np.arange(batch.num_tokens)
        self._runs = StateRuns(
            others=self._on_device(others),
            others_meta=self._entries(
                metas[0],
                [batch.rows[entry] for entry in entries],
                [batch.starts[entry] for entry in entries],
                [batch.lengths[entry] for entry in entries],
                len(decodes),
                short=False,
            ),
            tokens=self._on_device(tokens),
            meta=self._entries(metas[0], range(len(self._rows)), self._starts, self._lengths),
            rows=self._on_device(self._rows),
            back=self._on_device(back),
        )
        for meta in metas:
            meta.state_runs = self._runs

    def _record_runs(self, batch: Batch) -> list[int]:
        """Store the row, start and length of each of a batch's runs.

        Returns the indices of the runs' tokens among the tokens of the batch.
        """
        at = batch.num_decodes - sum(len(drafts) for _, _, drafts in batch.drafts)
        entries = {row: entry for entry, row in enumerate(batch.rows[:at])}
        self._rows = [row for row, _, _ in batch.drafts]
        self._starts = [batch.starts[entries[row]] for row in self._rows]
        self._lengths = [1 + len(drafts) for _, _, drafts in batch.drafts]
        tokens: list[int] = []
        for row, _, drafts in batch.drafts:
            tokens += [entries[row], *range(at, at + len(drafts))]
            at += len(drafts)
        return tokens

    def settle(self, settled: Sequence[tuple[int, int]]) -> None:
        """Advance the rows' states by the accepted tokens, before a step or a snapshot reads them.

        settled: (row, number of accepted tokens of its run) for the last step's runs, except for
            requests that have ended.
        """
        runs, self._runs = self._runs, None
        if not settled:
            return
        assert runs is not None
        counts = dict(settled)
        rows, starts, lengths = [], [], []
        for row, start, length in zip(self._rows, self._starts, self._lengths, strict=True):
            count = counts.get(row, 0)
            # rejected tokens become an entry of the padding row
            for own, first, tokens in ((row, start, count), (self._pad_row, 0, length - count)):
                if tokens:
                    rows.append(own)
                    starts.append(first)
                    lengths.append(tokens)
        if isinstance(runs, GraphRuns):
            runs.settled.fill(rows, starts, lengths)
            runs.settle()
            return
        layout = self._entries(runs.meta, rows, starts, lengths)
        for replay in runs.replays:
            replay(layout)

    def forget(self) -> None:
        """Forget the tokens of a step whose result is discarded."""
        self._runs = None

    def _entries(
        self,
        like: AttentionMeta,
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        num_decodes: int = 0,
        *,
        short: bool = True,
    ) -> AttentionMeta:
        """Return an AttentionMeta of entries with only the fields that recurrent layers read.

        short: whether all entries are short, as no prompt is among them.
        """
        ends = [0, *accumulate(lengths)]
        kv_len = [start + length for start, length in zip(starts, lengths, strict=True)]
        count = len(rows)
        packed = self._on_device([*rows, *ends, *kv_len, num_decodes, count])
        numbers = packed.int()
        own_rows, query_start, lens, counts = numbers.split((count, count + 1, count, 2))
        if self._device.type == "cpu":  # the CPU kernels take int64 rows
            own_rows = packed[:count]
        meta = _layout(like, own_rows, query_start, lens, counts)
        meta.by_token, meta.num_decodes = short, num_decodes
        meta.query_start_host, meta.kv_len_host = ends, kv_len
        return meta

    def _on_device(self, numbers: Sequence[int] | np.ndarray) -> Tensor:
        host = torch.from_numpy(np.asarray(numbers, dtype=np.int64))
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def _layout(
    like: AttentionMeta, rows: Tensor, query_start: Tensor, kv_len: Tensor, counts: Tensor
) -> AttentionMeta:
    """Return an AttentionMeta of short entries for recurrent layers, without decodes and KV."""
    return AttentionMeta(
        positions=like.positions[:0],
        slots=like.slots[:0],
        query_start=query_start,
        kv_len=kv_len,
        block_table=like.block_table[:0],
        num_decodes=0,
        max_kv_len=0,
        counts=counts,
        rows=rows,
        by_token=True,
    )
