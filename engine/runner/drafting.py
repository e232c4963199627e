"""Drafting: computes drafts of next tokens on the device, after a step has sampled.

A drafter (engine/models/drafters/) first gets all tokens of the step, so that its cache has keys of
each, those of rejected drafts until the next step writes over them. Where the batch has proposals,
the row of the text's last token gives the first draft, and passes of one token the others. A draft
model, which reads no states, reads chunks in their own steps, and other tokens of a row only when
it is to draft for it; at rest it costs nothing. Another drafter reads each token, except in dormant
steps, and requests whose tokens it has not read get worse drafts.

Drafts are drawn as the model's tokens are, with the noise of the same seed, choice and position, so
that they agree wherever the distributions do. They stay on the device, in their rows, where the
next step reads them. Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.models.drafters.drafter import ModelDrafter
from engine.runner.caches.kv_cache import KVCache
from engine.runner.inputs import CpuInputs, CudaInputs
from engine.runner.request_rows import RequestRows
from engine.sampling.device_result import DeviceResult
from engine.sampling.sampler import Sampler
from engine.speculation.settings import MAX_TOKENS
from kernels.dispatch import Kernels
from kernels.metadata import AttentionMeta, RotaryPlaces


class Drafting:
    """The drafts of a runner's steps, with the drafter's own KV cache."""

    def __init__(
        self,
        drafter: ModelDrafter,
        kernels: Kernels,
        rows: RequestRows,
        kv: KVCache,
        sampler: Sampler,
        group: int,
        vocab: int,
        inputs: CpuInputs | CudaInputs | None,
        max_tokens: int,
    ) -> None:
        """Set up drafting.

        kv: the drafter's cache, with as many blocks as the model's.
        group: the model's group of layers whose block tables the drafter shares.
        vocab: the number of tokens that the model knows.
        inputs: make the inputs of a draft model, and of nothing else. They have room for
            max_tokens, and for a token more of each row.
        max_tokens: the most tokens of a step.
        """
        self._inputs, self._max_tokens = inputs, max_tokens
        # by row: how many of its tokens the draft model has computed; -1 = none of this request's
        self._read = [-1] * (rows.pad_row + 1)
        self._drafter, self._kernels, self._sampler = drafter, kernels, sampler
        self._rows, self.kv, self._group = rows, kv, group
        # by row: the newest drafts, as the step that verifies them samples over those in rows
        shape = rows.pad_row + 1, MAX_TOKENS
        self._drafts = torch.zeros(shape, dtype=torch.int64, device=rows.tokens.device)
        self._attention = kv.groups.groups[0].attention
        self.reads_states = drafter.reads_states
        # positions by which the token that a row reads lies after the row's own
        self._ahead = 1 if drafter.reads_states else 0
        self._vocab = vocab
        self._cuda = rows.tokens.device.type == "cuda"

    @property
    def tables(self) -> list[Tensor]:
        """The block tables of its own inputs on a CUDA device."""
        return [self._inputs.block_table] if isinstance(self._inputs, CudaInputs) else []

    def launch(self, batch: Batch, metas: Sequence[AttentionMeta], states: Tensor) -> Tensor | None:
        """Launch the drafter after a step's sampling; return drafts [proposals, most] int64.

        A proposal's drafts after its count have no meaning. None without proposals.

        metas: of the step, by groups.
        states: of all tokens of the step, as `ModelDrafter.fused` takes them.
        """
        if not self.reads_states:
            return self._follow(batch)
        if batch.dormant:
            return None
        meta = metas[self._group]
        meta = meta.elsewhere(meta.slots, meta.block_table)
        meta.window = meta.chunk = 0
        meta.lora = None
        meta.rotary = meta.last_keys = None
        states = self._drafter.fused(states)
        rows = self._pass(self._next_tokens(meta), states, meta)
        if not batch.proposals:
            return None
        ends = [*accumulate(batch.lengths)]
        places = [(ends[p.entry] - 1, p.first_draft) for p in batch.proposals]
        return self._propose(batch, rows, places)

    def _follow(self, batch: Batch) -> Tensor | None:
        """Run a draft model over tokens that it has not seen: of chunks, and of rows that are to
        have drafts."""
        for new in batch.new_rows:
            self._read[new.row] = -1
        # entry -> the tokens to read
        spans: dict[int, tuple[int, int]] = {}
        for entry in range(batch.num_decodes, len(batch.rows)):
            start = batch.starts[entry]
            spans[entry] = start, start + batch.lengths[entry]
            self._read[batch.rows[entry]] = spans[entry][1]
        share = self._max_tokens - sum(end - start for start, end in spans.values())
        share = max(0, share) // max(1, len(batch.proposals))
        for proposal in batch.proposals:
            entry, drafts = proposal.entry, proposal.verified
            start, known = batch.starts[entry], batch.starts[entry] + batch.lengths[entry] + 1
            end = known + drafts  # after the token that follows the last draft
            if entry not in spans:
                read = self._read[proposal.row]
                # The newest token is read in any case. What is left out costs acceptance.
                start = start if read < 0 else min(read, known - 1)
                start = max(start, end - max(share, drafts + 2))
            spans[entry] = start, end
            self._read[proposal.row] = known
        if not spans:
            return None
        starts = [start for start, _ in spans.values()]
        lengths = [end - start for start, end in spans.values()]
        rows = [batch.rows[entry] for entry in spans]
        assert self._inputs is not None
        step = self._inputs.assemble(Batch(batch.step, rows, starts, lengths, [True] * len(rows)))
        out = self._pass(step.token_ids.long(), step.token_ids, step.metas[self._group])
        if not batch.proposals:
            return None
        ends = dict(zip(spans, accumulate(lengths), strict=True))
        places = [(at := ends[p.entry] - 1 - p.verified, at + 1) for p in batch.proposals]
        return self._propose(batch, out, places)

    def _pass(self, token_ids: Tensor, states: Tensor, meta: AttentionMeta) -> Tensor:
        attention, layers = self._attention, self.kv.layers
        cache = next(iter(layers.values()))[0]
        self._kernels.prepare(meta, attention.num_heads, cache, attention.latent_rank)
        return self._drafter.forward(token_ids, states, layers, meta)

    def _next_tokens(self, meta: AttentionMeta) -> Tensor:
        """Return each step token's successor in its request, int64 [num_tokens]."""
        assert meta.rows is not None
        rows, count = meta.rows.long(), len(meta.positions)
        if len(rows) < count:
            lengths = meta.query_start.diff().long()
            rows = torch.repeat_interleave(rows, lengths, output_size=count)
        return self._rows.tokens[rows, meta.positions.long() + 1].long()

    def _propose(self, batch: Batch, rows: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """Return the drafts of the batch's proposals.

        rows: the drafter's rows of the tokens that it has read in this step.
        places: of each proposal the indices in rows of the row that drafts if no draft of the step
            is accepted, and if one is; that of more follow.
        """
        tokens = self._rows.tokens
        table = self._uploaded(_table(batch, places))
        row, last, index, first_draft, counts, verified, synthetic = table.unbind(0)
        most_verified = max(proposal.verified for proposal in batch.proposals)
        if most_verified:
            steps = torch.arange(most_verified, device=tokens.device)
            sampled = tokens[row[:, None], last[:, None] + 1 + steps]
            agree = (sampled == self._drafts[row, :most_verified]) & (steps < verified[:, None])
            accepted = agree.long().cumprod(1).sum(1)
            accepted = torch.where(synthetic >= 0, synthetic, accepted)
            index = torch.where(accepted > 0, first_draft + accepted - 1, index)
            last = last + accepted
        plan = replace(self._sampler.plan([p.row for p in batch.proposals]), logprobs=-1)
        states = rows.index_select(0, index)
        longest = int(max(batch.starts[p.entry] + batch.lengths[p.entry] for p in batch.proposals))
        most = max(proposal.count for proposal in batch.proposals)
        longest += most_verified + most
        drawn: list[Tensor] = []
        for number in range(1, most + 1):
            wanted = counts >= number
            if drawn:
                at = last + number - self._ahead
                meta = self._single(row, torch.where(wanted, at, last), wanted, longest)
                states = self._pass(drawn[-1], states, meta)
            logits, position = self._drafter.logits(states), last + 1 + number
            sampled = self._sampler.sample(logits, row, position, tokens, plan).tokens
            # a start that only collects kernels leaves any number here
            drawn.append(sampled.clamp(0, self._vocab - 1))
            own = torch.where(wanted, row, self._rows.pad_row)
            tokens[own, position] = drawn[-1].to(tokens.dtype)
        drafts = torch.stack(drawn, 1)
        self._drafts[row, :most] = drafts
        return drafts

    def _single(self, row: Tensor, at: Tensor, writes: Tensor, longest: int) -> AttentionMeta:
        """Return the meta of a pass of one token for each row.

        at: [n] int64, the token's position.
        writes: [n] bool, whether the row has a block for the token's keys.
        longest: the most tokens of a row.
        """
        size, groups, count = self.kv.block_size, self._rows.num_groups, len(row)
        width = min(-(-longest // size), self._rows.block_table.shape[1] // groups)
        table = self._rows.block_table[row][:, self._group :: groups][:, :width].contiguous()
        block = table.gather(1, (at // size)[:, None])[:, 0].long()
        slots = torch.where(writes, block * size + at % size, -1)
        kv_len, deltas = (at + 1).int(), self._rows.deltas
        return AttentionMeta(
            positions=at.int(),
            slots=slots,
            query_start=torch.arange(count + 1, dtype=torch.int32, device=row.device),
            kv_len=kv_len,
            block_table=table,
            num_decodes=count,
            max_kv_len=min(longest, width * size),
            query_start_host=None if self._cuda else list(range(count + 1)),
            kv_len_host=None if self._cuda else kv_len.tolist(),
            # filled on the device, where a copy from the host would wait
            counts=torch.full((2,), count, dtype=torch.int32, device=row.device),
            rows=row,
            rotary=None if deltas is None else RotaryPlaces((at + deltas[row]).int()),
        )

    def _uploaded(self, table: np.ndarray) -> Tensor:
        host = torch.from_numpy(table)
        if not self._cuda:
            return host
        return host.pin_memory().to(self._rows.tokens.device, non_blocking=True)

    def add_to(self, result: DeviceResult, batch: Batch, drafts: Tensor | None) -> None:
        """Add the drafts to a step's result, and start their copy to the host."""
        if drafts is None:
            return
        result.drafts = drafts.to("cpu", non_blocking=True) if self._cuda else drafts
        result.draft_counts = [proposal.count for proposal in batch.proposals]
        if self._cuda:
            result.drafted = torch.cuda.Event()
            result.drafted.record()


def _table(batch: Batch, places: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the proposals as a table, [7, n] int64, each line of which is contiguous.

    A column has the row, the position of the last token before its drafts, its places (see
    `_propose`), and the numbers of new drafts, of verified ones and of synthetically accepted ones.
    """
    columns = [
        (
            proposal.row,
            batch.starts[proposal.entry] + batch.lengths[proposal.entry] - 1,
            *place,
            proposal.count,
            proposal.verified,
            proposal.synthetic,
        )
        for place, proposal in zip(places, batch.proposals, strict=True)
    ]
    return np.ascontiguousarray(np.asarray(columns, np.int64).T)
