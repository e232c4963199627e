"""StateVerification: states of recurrent layers in steps that verify drafts.

A layer overwrites its state with each token, and a rejected draft cannot be undone. So in a step
with drafts, a layer's kernel computes each row's decode and drafts on a temporary copy of the row's
state. The kernel's inputs for these tokens are kept until the next launch. By then the accepted
tokens are known, and the kernel computes only these again, on the state itself. No other part of a
layer runs again. Keeping inputs takes the least memory: a state for each draft would take megabytes
a layer.

On CUDA a step with up to GRAPHED decodes is a CUDA graph, and so is the second computation of its
accepted tokens. The inputs of both are uploaded before each launch.

Layers of a delta rule keep updates instead of inputs (`kernels.recurrent.delta_verify_cuda`). Where
a request has drafts in consecutive steps, the second step's launch applies the accepted tokens of
the first, so nothing else is launched for these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from kernels.metadata import AttentionMeta, KeptRun, KeptRuns, StateRuns

GRAPHED = 64  # decodes of the largest captured step; more would keep gigabytes of copied states


class _Numbers:
    """The int32 inputs of a step's kernels, in memory whose address never changes.

    The caller fills `arrays` on the host, and `upload` copies them to `tensors` on the device.
    """

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


@dataclass(slots=True)
class _Run:
    """A run, which is a request's decode and its drafts, of the newest step that has drafts.

    start, length: the position of the first token, and the number of tokens.
    number, begin: the run's index in the step, and its first token's index among all runs' tokens.
    whole: the value of `KeptRun.whole` for the application of the run's accepted tokens.
    """

    start: int
    length: int
    number: int
    begin: int
    whole: bool = False


class GraphRuns:
    """The runs of a captured step of decodes, and the graph that replays their accepted tokens.

    A run is a decode with its drafts.

    runs: the value of `AttentionMeta.state_runs` while the step is captured.
    settle: computes the accepted tokens, by the graph once that is captured.
    """

    def __init__(
        self,
        decodes: int,
        like: AttentionMeta,
        pad_row: int,
        device: torch.device,
        kept: KeptRuns,
    ) -> None:
        """Set up the runs.

        decodes: the number of decode entries, including drafts.
        like: the AttentionMeta of the captured step.
        kept: the memory for updates of runs.
        """
        self._decodes, self._pad_row = decodes, pad_row
        most = decodes // 2  # a run has at least two tokens
        self._numbers = _Numbers((decodes, decodes, decodes, most, decodes), device)
        others_rows, others_len, tokens, rows, back = self._numbers.tensors
        # rows are indices into the copied states
        self._layout = _Layout(most, like, 0, device)
        self.settled = _Layout(2 * most, like, pad_row, device)
        numbers = len(KeptRun._fields)
        self._kept = _Numbers((most * numbers,), device)
        self._settled = torch.zeros(most, numbers, dtype=torch.int32, device=device)
        self.runs = StateRuns(
            others=torch.arange(decodes, device=device),
            others_meta=replace(like, rows=others_rows, kv_len=others_len),
            tokens=tokens,
            meta=self._layout.meta,
            rows=rows,
            back=back,
            in_place=True,
            kept=kept,
            numbers=self._kept.tensors[0].view(most, numbers),
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
        if not self.resumes:
            self._layout.fill(range(len(rows)), starts, lengths)

    @property
    def resumes(self) -> bool:
        """Whether the step's own launch may apply the last step's accepted tokens to the states."""
        return bool(self.runs.settles) and not self.runs.replays

    def fill_kept(self, runs: Sequence[KeptRun]) -> None:
        """Upload a step's runs for layers that keep updates."""
        array = self._kept.arrays[0].reshape(-1, len(KeptRun._fields))
        array[: len(runs)], array[len(runs) :] = runs, 0
        self._kept.upload()

    def fill_settled(self, runs: Sequence[KeptRun]) -> None:
        """Upload runs without tokens, whose accepted tokens `settle` applies to the states.

        Each call allocates new host memory, as a launch may settle twice, and the copy of the first
        call may still be in flight.
        """
        host = torch.zeros_like(self._settled, device="cpu")
        host[: len(runs)] = torch.tensor(runs, dtype=torch.int32)
        if self._settled.is_cuda:
            host = host.pin_memory()
        self._settled.copy_(host, non_blocking=True)

    def place(self, run: _Run, side: int) -> tuple[int, int]:
        """Return the places of a run's first token and of the run in a half of `KeptRuns`.

        side: the half, 0 or 1; steps write the two halves in turn.
        """
        memory = self.runs.kept
        assert memory is not None
        return side * memory.tokens + run.begin, side * memory.runs + run.number

    def replay(self) -> None:
        """Apply the accepted tokens to the states, by launches without a CUDA graph."""
        for replay in self.runs.replays:
            replay(self.settled.meta)
        for settle in self.runs.settles:
            settle(self._settled)


class StateVerification:
    """The verified tokens of the newest step with drafts, until the accepted ones are known.

    A run is a row's decode and the drafts after it.

    pad_row: the row whose state belongs to no request.
    """

    def __init__(self, pad_row: int, device: torch.device) -> None:
        self._pad_row = pad_row
        self._device = device
        self._runs: StateRuns | GraphRuns | None = None
        self._of_row: dict[int, _Run] = {}  # the newest step's runs, in the step's order
        # row -> number of accepted tokens, for rows that wait for the next launch
        self._waiting: dict[int, int] = {}
        self._kept: KeptRuns | None = None
        self._side = 0  # the half of `_kept` that the newest step has written

    def graphed(self, decodes: int, like: AttentionMeta) -> GraphRuns:
        """Return the runs of verified tokens for a decode step that is about to be captured.

        decodes: the step's number of decode entries, those of drafts included. The first call has
            the largest number.
        like: the step's attention meta, whose tensors the CUDA graph reads.
        """
        if self._kept is None or self._kept.tokens < decodes:
            self._kept = KeptRuns(decodes, decodes // 2)
        return GraphRuns(decodes, like, self._pad_row, self._device, self._kept)

    def upload(self, batch: Batch, graph: GraphRuns) -> None:
        """Upload the runs of a batch of decodes, some of which have drafts, for a captured step."""
        last_graph = self._runs
        if not (
            graph.resumes
            and isinstance(last_graph, GraphRuns)
            and last_graph.runs.kept is graph.runs.kept
        ):
            self.flush()
        last, waiting, last_side = self._of_row, self._waiting, self._side
        tokens = self._record_runs(batch)
        self._side, self._waiting, self._runs = 1 - last_side, {}, graph
        numbers = []
        for row, run in self._of_row.items():
            accepted = waiting.get(row, 0)
            before = last[row] if accepted else run
            assert not accepted or before.start + accepted == run.start
            run.whole = accepted > 0
            first, draft = tokens[run.begin : run.begin + 2]
            places = *graph.place(before, last_side), *graph.place(run, self._side)
            extent = row, run.start, run.length, first, draft
            numbers.append(KeptRun(*extent, accepted, before.whole, *places))
        if graph.runs.settles or not graph.runs.replays:
            graph.fill_kept(numbers)
        others = np.asarray(batch.rows)
        others_len = np.asarray(batch.starts) + 1
        others[tokens], others_len[tokens] = self._pad_row, 0
        runs = self._of_row.values()
        graph.fill(
            others.tolist(),
            others_len.tolist(),
            tokens,
            [*self._of_row],
            [run.start for run in runs],
            [run.length for run in runs],
        )

    def lay_out(self, batch: Batch, metas: Sequence[AttentionMeta]) -> None:
        """Set up a step so that recurrent layers compute drafts on copies of the states.

        metas: the step's attention metadata, whose `state_runs` is set if the batch has drafts.
        """
        self.flush()
        if not batch.drafts:
            return
        tokens = self._record_runs(batch)
        in_run = np.zeros(batch.num_tokens, dtype=bool)
        in_run[tokens] = True
        others = np.flatnonzero(~in_run)
        decodes = np.flatnonzero(~in_run[: batch.num_decodes])
        entries = [*decodes.tolist(), *range(batch.num_decodes, len(batch.rows))]
        runs = self._of_row.values()
        rows, starts = [*self._of_row], [run.start for run in runs]
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
            meta=self._entries(metas[0], range(len(rows)), starts, [run.length for run in runs]),
            rows=self._on_device(rows),
            back=self._on_device(back),
        )
        for meta in metas:
            meta.state_runs = self._runs

    def _record_runs(self, batch: Batch) -> list[int]:
        """Store the runs of a batch.

        Returns the indices of the runs' tokens among the tokens of the batch.
        """
        at = batch.num_decodes - sum(len(drafts) for _, _, drafts in batch.drafts)
        entries = {row: entry for entry, row in enumerate(batch.rows[:at])}
        self._of_row = {}
        tokens: list[int] = []
        for number, (row, _, drafts) in enumerate(batch.drafts):
            start, length = batch.starts[entries[row]], 1 + len(drafts)
            self._of_row[row] = _Run(start, length, number, len(tokens))
            tokens += [entries[row], *range(at, at + len(drafts))]
            at += len(drafts)
        return tokens

    def settle(self, settled: Sequence[tuple[int, int]], following: Batch | None = None) -> None:
        """Advance the rows' states by the accepted tokens, before a step or a snapshot reads them.

        settled: (row, number of accepted tokens of its run) for the last step's runs, except for
            requests that have ended.
        following: the batch that is launched next. Rows that have drafts in it may wait for this
            launch, if nothing else reads or writes their states before. Call `upload`, `lay_out`
            or `flush` in this launch.
        """
        counts = dict(settled)
        if isinstance(self._runs, GraphRuns) and self._runs.resumes and following is not None:
            again = self._verified_again(following)
            self._waiting = {row: counts.pop(row) for row in again if row in counts}
        self._advance(counts)

    def flush(self) -> None:
        """Advance the states of rows that wait for the next launch."""
        counts, self._waiting = self._waiting, {}
        self._advance(counts)
        self._runs = None

    def _verified_again(self, batch: Batch) -> list[int]:
        """Return the rows whose states may wait for the batch's launch: rows with drafts in it.

        Returns none for a batch with chunks, which has no CUDA graph with drafts. Rows whose states
        are copied or replaced before the step are left out.
        """
        if batch.num_decodes < len(batch.rows):
            return []
        copied = {row for row, _ in (*batch.saved_states, *batch.resumed_states)}
        copied.update(new.row for new in batch.new_rows)
        return [row for row, _, _ in batch.drafts if row not in copied]

    def _advance(self, counts: dict[int, int]) -> None:
        """Advance states by accepted tokens of the last runs. counts: row -> their number."""
        if not counts:
            return
        graph = self._runs
        assert graph is not None
        if not isinstance(graph, GraphRuns):
            layout = self._entries(graph.meta, *self._settled_entries(counts))
            for replay in graph.replays:
                replay(layout)
            return
        if graph.runs.settles:
            numbers = []
            for row, accepted in counts.items():
                run = self._of_row[row]
                places = graph.place(run, self._side)
                extent = row, run.start + accepted, 0, 0, 0
                numbers.append(KeptRun(*extent, accepted, run.whole, *places, 0, 0))
            graph.fill_settled(numbers)
        if graph.runs.replays:
            graph.settled.fill(*self._settled_entries(counts))
        graph.settle()

    def _settled_entries(self, counts: dict[int, int]) -> tuple[list[int], list[int], list[int]]:
        """Return rows, starts and lengths of entries that cover all tokens of the last runs.

        Rejected tokens are entries of the padding row.
        """
        rows, starts, lengths = [], [], []
        for row, run in self._of_row.items():
            count = counts.get(row, 0)
            rejected = self._pad_row, 0, run.length - count
            for own, first, tokens in ((row, run.start, count), rejected):
                if tokens:
                    rows.append(own)
                    starts.append(first)
                    lengths.append(tokens)
        return rows, starts, lengths

    def forget(self) -> None:
        """Forget the tokens of a step whose result is discarded."""
        self._runs, self._waiting = None, {}

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
