"""DraftPasses: a drafter's passes and the sampling between them, launched without CUDA graphs.

Nothing here waits for the device, and all of it can be captured in a CUDA graph: drafts/graphs.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.drafters.drafter import ModelDrafter
from engine.runner.caches.kv_cache import KVCache
from engine.runner.request_rows import RequestRows
from engine.sampling.sampler import SamplePlan, Sampler
from engine.speculation.settings import MAX_TOKENS
from kernels.dispatch import Kernels
from kernels.metadata import AttentionMeta, RotaryPlaces

Number = int | Tensor  # the index of a draft, from 1; in a CUDA graph a tensor [1] int64


class DraftPasses:
    """The passes of a drafter over the requests' rows.

    A table of proposals is [7, n] int64, see `Batch.proposals`. Here ENTRY and FIRST_DRAFT are
    indices of the drafter's output rows, one a token. ENTRY is the row from which the next draft is
    sampled if no draft of the step is accepted; FIRST_DRAFT is the row of the step's first draft.
    POSITION is the batch's, to which `accept` adds the accepted drafts of the step before.
    """

    def __init__(
        self,
        drafter: ModelDrafter,
        kernels: Kernels,
        rows: RequestRows,
        kv: KVCache,
        sampler: Sampler,
        group: int,
        vocab: int,
    ) -> None:
        """Set up the passes.

        kv: the drafter's cache, with as many blocks as the model's.
        group: the index of the KV group whose block tables the drafter shares.
        vocab: the target model's vocabulary size.
        """
        self.drafter, self.kv, self.rows, self.sampler = drafter, kv, rows, sampler
        self.group = group
        self._kernels, self._vocab = kernels, vocab
        self._attention = kv.groups.groups[0].attention
        # each row's newest drafts; a copy, as the verifying step overwrites those in `rows.tokens`
        shape = rows.pad_row + 1, MAX_TOKENS
        self.drafts = torch.zeros(shape, dtype=torch.int64, device=rows.tokens.device)
        # number of positions from the hidden state that the drafter reads to the token that it
        # reads in the same pass
        self._ahead = 1 if drafter.reads_states else 0
        self.cuda = rows.tokens.device.type == "cuda"

    def read(self, metas: Sequence[AttentionMeta], states: Tensor) -> Tensor:
        """Return the drafter's rows of all tokens of a step, after the step's sampling.

        metas: the step's attention metas, by KV group.
        states: the target model's hidden states of all the step's tokens, see `ModelDrafter.fused`.
        """
        meta = metas[self.group]
        meta = meta.elsewhere(meta.slots, meta.block_table)
        meta.window = meta.chunk = 0
        meta.lora = None
        meta.rotary = meta.last_keys = None
        states = self.drafter.fused(states)
        return self.forward(self._next_tokens(meta), states, meta)

    def forward(self, token_ids: Tensor, states: Tensor, meta: AttentionMeta) -> Tensor:
        """Return the drafter's rows of tokens; see `ModelDrafter.forward`."""
        attention, layers = self._attention, self.kv.layers
        cache = next(iter(layers.values()))[0]
        self._kernels.prepare(meta, attention.num_heads, cache, attention.latent_rank)
        return self.drafter.forward(token_ids, states, layers, meta)

    def _next_tokens(self, meta: AttentionMeta) -> Tensor:
        """Return the next token of the request after each of the step's tokens, int64
        [num_tokens]."""
        assert meta.rows is not None
        rows, count = meta.rows.long(), len(meta.positions)
        if len(rows) < count:
            lengths = meta.query_start.diff().long()
            rows = torch.repeat_interleave(rows, lengths, output_size=count)
        return self.rows.tokens[rows, meta.positions.long() + 1].long()

    def accept(self, table: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return, for each proposal, the index of the drafter's row to draft from, and the last
        accepted position. Set `RequestRows.accepted` for the next step.

        Call this once in a step, after its sampling.

        most: the maximum number of a request's drafts that the step verifies.
        """
        row, last, index, first_draft, wanted, verified, synthetic = table.unbind(0)
        tokens, counts = self.rows.tokens, self.rows.accepted
        last = last + counts[row]
        counts.zero_()
        if not most:
            return index, last
        steps = torch.arange(most, device=tokens.device)
        places = (last[:, None] + 1 + steps).clamp(max=tokens.shape[1] - 1)
        agree = (tokens[row[:, None], places] == self.drafts[row, :most]) & (
            steps < verified[:, None]
        )
        accepted = agree.long().cumprod(1).sum(1)
        accepted = torch.where(synthetic >= 0, synthetic, accepted)
        counts[row] = accepted.int()
        # rows without new drafts may have no row of the drafter
        index = torch.where((accepted > 0) & (wanted > 0), first_draft + accepted - 1, index)
        return index, last + accepted

    def draw(
        self, table: Tensor, last: Tensor, states: Tensor, number: Number, plan: SamplePlan
    ) -> Tensor:
        """Sample the next draft of each proposal, write it into the request's row, and return it.

        last: [n] int64, positions of the last accepted tokens.
        states: the drafter's output rows, one a proposal.
        number: the index of this draft within its proposal, from 1.
        """
        tokens, row, counts = self.rows.tokens, table[0], table[4]
        logits, position = self.drafter.logits(states), last + 1 + number
        sampled = self.sampler.sample(logits, row, position, tokens, plan).tokens
        # sampled tokens are undefined in a start that only collects kernels without running them
        drawn = sampled.clamp(0, self._vocab - 1)
        wanted = counts >= number
        own = torch.where(wanted, row, self.rows.pad_row)
        tokens[own, torch.where(wanted, position, 0)] = drawn.to(tokens.dtype)
        return drawn

    def extend(
        self,
        table: Tensor,
        last: Tensor,
        drawn: Tensor,
        states: Tensor,
        number: Number,
        longest: int,
    ) -> Tensor:
        """Run the drafter's pass over the newest drafts; return its output rows.

        drawn: [n] int64, the newest drafts.
        states: the rows from which these drafts were sampled; may be overwritten.
        number: the index of the next draft within its proposal, from 1.
        longest: the maximum number of tokens of a request.
        """
        row, wanted = table[0], table[4] >= number
        at = torch.where(wanted, last + number - self._ahead, last)
        return self.forward(drawn, states, self._single(row, at, wanted, longest))

    def _single(self, row: Tensor, at: Tensor, writes: Tensor, longest: int) -> AttentionMeta:
        """Return the AttentionMeta of a pass over one token of each row.

        row: [n] int64, the rows.
        at: [n] int64, the token's position.
        writes: [n] bool, whether the row has a block for the token's KV.
        longest: the maximum number of tokens of a request.
        """
        size, groups, count = self.kv.block_size, self.rows.num_groups, len(row)
        width = min(-(-longest // size), self.rows.block_table.shape[1] // groups)
        table = self.rows.block_table[row][:, self.group :: groups][:, :width].contiguous()
        block = table.gather(1, (at // size)[:, None])[:, 0].long()
        slots = torch.where(writes, block * size + at % size, -1)
        kv_len, deltas = (at + 1).int(), self.rows.deltas
        return AttentionMeta(
            positions=at.int(),
            slots=slots,
            query_start=torch.arange(count + 1, dtype=torch.int32, device=row.device),
            kv_len=kv_len,
            block_table=table,
            num_decodes=count,
            max_kv_len=min(longest, width * size),
            query_start_host=None if self.cuda else list(range(count + 1)),
            kv_len_host=None if self.cuda else kv_len.tolist(),
            # filled on the device, as a copy from the host would wait
            counts=torch.full((2,), count, dtype=torch.int32, device=row.device),
            rows=row,
            rotary=None if deltas is None else RotaryPlaces((at + deltas[row]).int()),
        )
