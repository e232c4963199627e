"""Drafting: computes drafts of next tokens on the device, after a step has sampled.

A drafter (engine/models/drafters/) first processes all tokens of the step, so that its cache has
their KV; the next step overwrites the KV of rejected drafts. The drafter's rows are its output
vectors, one a token. A proposal is a row of a request to draft for (`Batch.proposals`). The
drafter's row of the request's last token gives the first draft, and passes of one token each give
the others.

A draft model, which reads no hidden states of the target model, processes prompts' chunks in the
steps that compute them. It processes a request's other tokens only when it drafts for the request,
so that it costs nothing while drafts are paused. Other drafters process each token, except in
dormant steps, those of a long pause of drafts; requests with skipped tokens get worse drafts.

Drafts are sampled like the model's tokens, with the noise of the same seed, choice and position, so
that they agree wherever the distributions do. Drafts stay on the device, in the requests' rows,
where the next step reads them. Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import COUNT, ENTRY, FIRST_DRAFT, POSITION, ROW, VERIFIED, Batch
from engine.runner.drafts.graphs import DraftGraphs, Record, chain_sizes
from engine.runner.drafts.passes import DraftPasses
from engine.runner.inputs import CpuInputs, CudaInputs
from engine.sampling.device_result import DeviceResult
from kernels.metadata import AttentionMeta


class Drafting:
    """The drafts of a runner's steps, with the drafter's own KV cache."""

    def __init__(
        self,
        passes: DraftPasses,
        inputs: CpuInputs | CudaInputs | None,
        max_tokens: int,
    ) -> None:
        """Set up drafting.

        inputs: builds the inputs of a draft model's passes, with room for max_tokens and one more
            token for each row; None for a drafter that reads the target model's hidden states.
        max_tokens: the maximum number of tokens in a step.
        """
        self.passes, self.kv, self.reads_states = passes, passes.kv, passes.drafter.reads_states
        self._inputs, self._max_tokens = inputs, max_tokens
        # row -> number of its request's tokens that the draft model has processed; -1 = none
        self._read = [-1] * (passes.rows.pad_row + 1)
        self._read_in = self._read.copy()  # row -> the step in which these were processed
        self._like: Tensor | None = None  # an output row of the drafter, for its width and dtype
        self.graphs: DraftGraphs | None = None  # CUDA graphs of the drafting passes
        self._counted = False  # whether a step since `begin` has set `RequestRows.accepted`

    @property
    def tables(self) -> list[Tensor]:
        """The block tables in a draft model's separate inputs on a CUDA device."""
        return [self._inputs.block_table] if isinstance(self._inputs, CudaInputs) else []

    @property
    def like(self) -> Tensor:
        """An output row of the drafter [1, width], for width and dtype; set by the warm-up."""
        assert self._like is not None, "the drafter has not run yet"
        return self._like

    def chains(self, record: Record) -> DraftGraphs:
        """Return the graphs of the drafting passes, not captured yet. Call this after a warm-up."""
        rows = self.passes.rows
        sizes, longest = chain_sizes(rows.pad_row), rows.tokens.shape[1] - 1
        return DraftGraphs(self.passes, sizes, self.like, longest, record)

    def shrink(self, num_blocks: int) -> None:
        """Replace the drafter's cache by empty blocks, and drop graphs with the old addresses."""
        self.graphs = None
        self.kv.shrink(num_blocks)

    def begin(self, batch: Batch) -> None:
        """Reset the numbers of accepted drafts if the batch's starts include them.

        Call this before the step's inputs are assembled.
        """
        if self._counted and not batch.unsettled:
            self.passes.rows.accepted.zero_()
            self._counted = False

    def launch(
        self,
        batch: Batch,
        metas: Sequence[AttentionMeta],
        states: Tensor,
        read: Callable[[], Tensor] | None = None,
    ) -> Tensor | None:
        """Launch the drafter after a step's sampling; return drafts [proposals, most] int64.

        Elements after a proposal's count are undefined. None without proposals. The numbers of
        drafts that the step has accepted are set for the next one.

        metas: the step's attention metas, by KV group.
        states: the target model's hidden states of all the step's tokens, see `ModelDrafter.fused`.
        read: launches the pass over the step's tokens as a CUDA graph, and returns the drafter's
            rows.
        """
        drafts: Tensor | None = None
        if not self.reads_states:
            drafts = self._follow(batch)
        elif not batch.dormant:
            drafts = self._read_step(batch, metas, states, read)
        table = batch.proposals
        if table is not None:
            self._counted = True
            if drafts is None:
                self.passes.accept(self._uploaded(table), int(table[VERIFIED].max()))
        return drafts

    def _read_step(
        self,
        batch: Batch,
        metas: Sequence[AttentionMeta],
        states: Tensor,
        read: Callable[[], Tensor] | None,
    ) -> Tensor | None:
        """Run a drafter that reads hidden states over all tokens of a step; return the drafts of
        proposals.

        metas, states, read: see `launch`.
        """
        rows = self.passes.read(metas, states) if read is None else read()
        table = _proposing(batch)
        if table is None:
            return None
        if batch.num_decodes < len(batch.rows):  # tokens of chunks come after those of decodes
            table = table.copy()
            table[ENTRY] = np.cumsum(batch.lengths)[table[ENTRY]] - 1
        return self._propose(table, rows, batch.unsettled)

    def _follow(self, batch: Batch) -> Tensor | None:
        """Run a draft model over tokens that it has not processed; return the drafts of proposals.

        The pass has the tokens of chunks, and of rows with proposals. Returns None without
        proposals.
        """
        for new in batch.new_rows:
            self._read[new.row] = -1
        # entry -> range of the tokens to process
        spans: dict[int, tuple[int, int]] = {}
        for entry in range(batch.num_decodes, len(batch.rows)):
            start = batch.starts[entry]
            spans[entry] = start, start + batch.lengths[entry]
            self._read[batch.rows[entry]] = spans[entry][1]
        proposals = _proposing(batch)
        if proposals is not None:
            share = self._max_tokens - sum(end - start for start, end in spans.values())
            share = max(0, share) // int(np.count_nonzero(proposals[COUNT]))
            columns = proposals[[ROW, ENTRY, POSITION, VERIFIED]][:, proposals[COUNT] > 0]
            for row, entry, position, drafts in columns.T.tolist():
                start, known = batch.starts[entry], position + 2
                end = known + drafts  # position after the token that follows the last draft
                if entry not in spans:
                    read = self._read[row]
                    # The newest token is always processed. Skipped tokens only lower the acceptance
                    # rate.
                    start = start if read < 0 else min(read, known - 1)
                    if self._read_in[row] < batch.step - 1:
                        # the device adds drafts that the draft model has not read
                        start = max(0, start - batch.unsettled)
                    start = max(start, end - max(share, drafts + 2))
                spans[entry] = start, end
                self._read[row] = known
        if not spans:
            return None
        for entry in spans:
            self._read_in[batch.rows[entry]] = batch.step
        starts = [start for start, _ in spans.values()]
        lengths = [end - start for start, end in spans.values()]
        rows = [batch.rows[entry] for entry in spans]
        assert self._inputs is not None
        own = Batch(
            batch.step, rows, starts, lengths, [True] * len(rows), unsettled=batch.unsettled
        )
        step = self._inputs.assemble(own)
        meta = step.metas[self.passes.group]
        out = self.passes.forward(step.token_ids.long(), step.token_ids, meta)
        if proposals is None:
            return None
        ends = dict(zip(spans, accumulate(lengths), strict=True))
        table = proposals.copy()
        # entries without new drafts are in no span, and need no output row
        last = np.asarray([ends.get(entry, 1) - 1 for entry in table[ENTRY].tolist()])
        table[ENTRY] = np.maximum(last - table[VERIFIED], 0)
        table[FIRST_DRAFT] = table[ENTRY] + 1
        return self._propose(table, out, batch.unsettled)

    def _propose(self, host: NDArray[np.int64], rows: Tensor, unsettled: int) -> Tensor:
        """Return the drafts of the batch's proposals.

        host: the table of `DraftPasses`.
        rows: the drafter's rows of the tokens that it has processed in this step.
        unsettled: see `Batch`.
        """
        if self._like is None:
            self._like = rows[:1].clone()
        most = int(host[COUNT].max())
        plan = replace(self.passes.sampler.plan(host[ROW].tolist()), logprobs=-1)
        if self.graphs is not None:
            drafts = self.graphs.propose(host, rows, plan, most)
            if drafts is not None:
                return drafts
        passes, table = self.passes, self._uploaded(host)
        most_verified = int(host[VERIFIED].max())
        index, last = passes.accept(table, most_verified)
        states = rows.index_select(0, index)
        longest = int(host[POSITION].max()) + unsettled + 1 + most_verified + most
        drawn = [passes.draw(table, last, states, 1, plan)]
        for number in range(2, most + 1):
            states = passes.extend(table, last, drawn[-1], states, number, longest)
            drawn.append(passes.draw(table, last, states, number, plan))
        drafts = torch.stack(drawn, 1)
        passes.drafts[table[0], :most] = drafts
        return drafts

    def _uploaded(self, table: np.ndarray) -> Tensor:
        host = torch.from_numpy(table)
        if not self.passes.cuda:
            return host
        return host.pin_memory().to(self.passes.rows.tokens.device, non_blocking=True)

    def add_to(self, result: DeviceResult, drafts: Tensor | None) -> None:
        """Add the drafts to a step's result, and start their copy to the host."""
        if drafts is None:
            return
        result.drafts = drafts.to("cpu", non_blocking=True) if self.passes.cuda else drafts
        if self.passes.cuda:
            result.drafted = torch.cuda.Event()
            result.drafted.record()


def _proposing(batch: Batch) -> NDArray[np.int64] | None:
    """Return `Batch.proposals` if it orders new drafts, and not only counts of accepted ones."""
    table = batch.proposals
    return table if table is not None and table[COUNT].any() else None
