"""Sampler: samples tokens from logits, with parameters for each row.

The order of operations is that of `SamplingParams`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import NewRow
from engine.sampling import cpu_sampler
from engine.sampling.parameter_rows import (
    BANNED,
    BIASED,
    FILTERED,
    PENALISED,
    SAMPLED,
    ParameterRows,
)
from engine.sampling_params import MAX_LOGPROBS, LogprobsMode

_MINUS_INF = -0x800000  # the bits of float32 -inf, as int32


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The sampler's operations for a batch, decided on the host. Equal plans launch equal kernels.

    logprobs: the maximum number of alternatives that any row reports; -1 = no log-probabilities.
    processed: whether some row reports processed log-probabilities.
    """

    sampled: bool = False  # whether some row has a temperature
    filtered: bool = False  # whether some row with a temperature has top_k, top_p or min_p
    biased: bool = False
    penalised: bool = False
    banned: bool = False  # whether min_tokens may forbid end tokens
    logprobs: int = -1
    processed: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the plan is only an argmax of the edited logits."""
        return not self.sampled

    @property
    def edits(self) -> bool:
        """Whether logits are edited before the choice."""
        return self.biased or self.penalised or self.banned

    @property
    def simple(self) -> bool:
        """Whether the plan is greedy or temperature only, for which there are CUDA graphs."""
        return not (self.filtered or self.edits) and self.logprobs < 0


# The plan with all operations, and with the maximum number of log-probabilities.
MOST = SamplePlan(
    sampled=True,
    filtered=True,
    biased=True,
    penalised=True,
    banned=True,
    logprobs=MAX_LOGPROBS,
    processed=True,
)


@dataclass(frozen=True, slots=True)
class Masked:
    """The masks of allowed tokens for a step's samples that a grammar constrains."""

    mask_of: Tensor  # [S] int32 on the device: the mask of each sample, -1 = none
    # [M, ceil(vocab / 32)] int32 on the device: bit t % 32 of word t // 32 is 1 if token t is
    # allowed
    masks: Tensor

    @classmethod
    def upload(
        cls, which: Sequence[int], count: int, masks: NDArray[np.int32], device: torch.device
    ) -> "Masked":
        """Upload masks to the device, asynchronously on CUDA.

        Masks in memory from `Masked.memory` are not copied on the host.

        which: for each mask the index of its sample.
        count: the number of all samples.
        """
        index = torch.full((count,), -1, dtype=torch.int32)
        index[list(which)] = torch.arange(len(which), dtype=torch.int32)
        words = torch.from_numpy(masks)
        # torch's allocator reuses pinned memory only after the copy is done
        if device.type == "cuda":
            index = index.pin_memory().to(device, non_blocking=True)
            words = words.pin_memory().to(device, non_blocking=True)
        return cls(index, words)

    @staticmethod
    def memory(device: torch.device) -> Callable[[int, int], NDArray[np.int32]]:
        """Return an allocator of host masks for `upload`: (rows, words) -> [rows, words] int32."""

        def allocate(rows: int, words: int) -> NDArray[np.int32]:
            pinned = device.type == "cuda"
            masks: NDArray[np.int32] = torch.empty(
                (rows, words), dtype=torch.int32, pin_memory=pinned
            ).numpy()
            return masks

        return allocate

    @classmethod
    def everything(cls, count: int, vocab_size: int, device: torch.device) -> "Masked":
        """Return masks that allow all tokens, for `count` samples."""
        mask_of = torch.arange(count, dtype=torch.int32, device=device)
        shape = (count, -(-vocab_size // 32))
        return cls(mask_of, torch.full(shape, -1, dtype=torch.int32, device=device))


@dataclass(slots=True)
class Sampled:
    """The sampled tokens, and log-probabilities if the plan has them. Tokens of bad rows are 0.

    Log-probabilities of rows that do not report them are undefined. k is the plan's `logprobs`.
    """

    tokens: Tensor  # [S] int64
    # [S] bool: whether the row's logits have NaN or +inf, or only -inf, so that no token is valid
    bad: Tensor
    logprob: Tensor | None = None  # [S] float32, in the row's `logprobs_mode`
    rank: Tensor | None = None  # [S] int64, 1 = most likely
    top_ids: Tensor | None = None  # [S, k] int64
    top_logprobs: Tensor | None = None  # [S, k] float32
    total: Tensor | None = None  # [S] float32, log-sum-exp of the logits


class Sampler:
    """The sampling parameters of every row, and the sampling of tokens. No method waits for the
    device.

    never: ids that are never chosen, ascending, as the tokenizer lacks them. Raw log-probabilities
        still cover all ids.
    part: half-open range of the ids in this rank's vocabulary shard, for `best`; None = all.
    logprobs_mode: the default of requests without a mode.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        never: Sequence[int] = (),
        part: tuple[int, int] | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        # Such ids at the end of the vocabulary need no ban: sampling reads only the ids before.
        gone = set(never)
        while vocab_size - 1 in gone:
            vocab_size -= 1
        self._width = vocab_size
        holes = [token for token in never if token < vocab_size]
        self._holes = torch.tensor(holes, device=device) if holes else None
        self._part = first, end = part or (0, vocab_size)
        holes = [token - first for token in holes if first <= token < end]
        self._holes_of_part = torch.tensor(holes, device=device) if holes else None
        self._rows = ParameterRows(max_rows, vocab_size, device, logprobs_mode)
        self._scratch: Tensor | None = None
        if device.type == "cuda":
            # Buffers for penalties, 64 entries at a time; allocated here, as memory is planned only
            # at the start.
            shape = (min(max_rows, 64), vocab_size)
            self._scratch = torch.zeros(shape, dtype=torch.int32, device=device)

    def set_row(self, new: NewRow) -> None:
        """Assign a row to a request; the next `flush` or `sample` uploads its parameters."""
        self._rows.set(new)

    def flush(self) -> None:
        """Upload staged rows, asynchronously; call it before replaying a captured `sample`."""
        self._rows.flush()

    def plan(self, rows: Collection[int]) -> SamplePlan:
        """Return the cheapest plan with all operations that the given rows need."""
        needs = 0
        for bits in set(map(self._rows.needs.__getitem__, rows)):
            needs |= bits
        return SamplePlan(
            sampled=bool(needs & SAMPLED),
            filtered=bool(needs & FILTERED),
            biased=bool(needs & BIASED),
            penalised=bool(needs & PENALISED),
            banned=bool(needs & BANNED),
            logprobs=max(map(self._rows.logprobs.__getitem__, rows), default=-1),
            processed=any(map(self._rows.processed.__getitem__, rows)),
        )

    def best(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Find the largest logit in this rank's shard of the vocabulary, for `of_best`.

        Returns [2, S] int32: the float32 bits of the logit, and the token id, the lowest of equals.

        logits: [S, size of the shard], may be overwritten.
        rows: [S] int64, the row of each sample.
        """
        first, end = self._part
        logits = logits[:, : max(0, min(end, self._width) - first)]
        if not logits.shape[1]:
            ids = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
            return torch.stack([torch.full_like(ids, _MINUS_INF), ids])
        if self._holes_of_part is not None:
            logits.index_fill_(1, self._holes_of_part, -torch.inf)
        if self._rows.device_words is not None:
            from kernels.sampling.choose import best_of_part

            return best_of_part(logits, rows, self._rows.device_words, first)
        values, ids = logits.float().max(1)
        return torch.stack([values.view(torch.int32), (ids + first).to(torch.int32)])

    def of_best(self, parts: Tensor) -> Sampled:
        """Return the most likely tokens of the whole vocabulary.

        parts: [ranks, 2, S] int32, the results of `best` on all ranks.
        """
        if self._rows.device_words is not None:
            from kernels.sampling.choose import best_of_parts

            return Sampled(*best_of_parts(parts))
        scores, ids = parts.unbind(1)
        best, which = scores.contiguous().view(torch.float32).max(0)
        bad = ~best.isfinite()
        tokens = ids.gather(0, which[None])[0].to(torch.int64)
        return Sampled(tokens.masked_fill_(bad, 0), bad)

    @staticmethod
    def simple_plan(greedy: bool) -> SamplePlan:
        """Return the plan of a batch of only greedy rows, or of rows with only a temperature."""
        return SamplePlan(sampled=not greedy)

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        tokens: Tensor,
        plan: SamplePlan,
        masked: Masked | None = None,
        targets: Tensor | None = None,
    ) -> Sampled:
        """Return a token for each entry, and log-probabilities if the plan has them.

        logits: [S, vocab], float32, bfloat16 or float16; may be overwritten.
        rows: [S] int64 on the logits' device, contiguous, the row of each entry.
        positions: [S] int64 on the logits' device, contiguous, the position of each new token.
        tokens: [max_rows, max_len] int32, the rows' tokens so far; read only by penalties.
        plan: a plan with at least the operations of these rows.
        masked: grammar masks of these samples, applied after all other edits.
        targets: [S] int64, tokens whose log-probabilities to report, instead of the chosen tokens.
        """
        assert rows.is_contiguous() and positions.is_contiguous()
        self.flush()
        if self._rows.device_words is None:
            return self._sample_on_host(logits, rows, positions, tokens, plan, masked, targets)
        return self._sample_on_device(logits, rows, positions, tokens, plan, masked, targets)

    def _sample_on_device(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        tokens: Tensor,
        plan: SamplePlan,
        masked: Masked | None,
        targets: Tensor | None,
    ) -> Sampled:
        # Imported here because only CUDA needs Triton.
        from kernels.sampling.choose import choose
        from kernels.sampling.edits import add_bias, apply_masks, ban, penalise
        from kernels.sampling.filters import filter_thresholds
        from kernels.sampling.logprobs import logprobs

        words = self._rows.device_words
        assert words is not None and self._scratch is not None
        raw = logits
        logits = logits[:, : self._width]
        # Masks are applied here if filters or log-probabilities need masked logits, otherwise in
        # the sampling kernel.
        masks = None if masked is None else (masked.mask_of, masked.masks)
        early = masks is not None and (plan.filtered or plan.processed)
        changes = plan.edits or early or self._holes is not None
        if changes and plan.logprobs >= 0:
            logits = logits.clone()
        if self._holes is not None:
            logits.index_fill_(1, self._holes, -torch.inf)
        if plan.biased:
            add_bias(logits, rows, words)
        if plan.penalised:
            penalise(logits, rows, positions, words, tokens, self._scratch)
        if plan.banned:
            ban(logits, rows, positions, words)
        if masks is not None and early:
            apply_masks(logits, *masks)
            masks = None
        filters = None
        if plan.filtered or plan.processed:
            filters = filter_thresholds(logits, rows, words)
        # With masks a greedy batch also uses the sampling kernel, which is already compiled.
        sampled = plan.sampled or masks is not None
        chosen, bad = choose(
            logits,
            rows,
            positions,
            words,
            sampled=sampled,
            filters=filters if plan.filtered else None,
            masks=masks,
        )
        chosen = chosen if targets is None else targets
        result = Sampled(chosen, bad)
        if plan.logprobs >= 0:
            parts = logprobs(raw, chosen, plan.logprobs, rows, words)
            if plan.processed:
                assert filters is not None
                logprobs(logits, chosen, plan.logprobs, rows, words, filters=filters, out=parts)
            result.logprob, result.rank, result.top_ids, *last_parts = parts
            result.top_logprobs, result.total = last_parts
        return result

    def _sample_on_host(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        tokens: Tensor,
        plan: SamplePlan,
        masked: Masked | None,
        targets: Tensor | None,
    ) -> Sampled:
        raw = logits.float().numpy()
        row_list: list[int] = rows.tolist()
        at = positions.numpy()
        changes = plan.edits or plan.filtered or masked is not None or self._holes is not None
        edited = (raw.copy() if changes and plan.logprobs >= 0 else raw)[:, : self._width]
        if self._holes is not None:
            edited[:, self._holes.numpy()] = -np.inf
        if plan.edits:
            history = tokens.numpy()
            for s, row in enumerate(row_list):
                cpu_sampler.edit(edited[s], self._rows, row, int(at[s]), history[row, : at[s]])
        if masked is not None:
            cpu_sampler.apply_masks(edited, masked.mask_of.numpy(), masked.masks.numpy())
        chosen, bad = cpu_sampler.choose(edited, self._rows, row_list, at)
        chosen = chosen if targets is None else targets.numpy()
        sampled = Sampled(torch.from_numpy(chosen), torch.from_numpy(bad))
        if plan.logprobs >= 0:
            wanted = [self._rows.logprobs[row] for row in row_list]
            scored = [
                (edited[s], self._rows.scale(row)) if self._rows.processed[row] else (raw[s], 1.0)
                for s, row in enumerate(row_list)
            ]
            parts = _host_logprobs(scored, chosen.tolist(), wanted, plan.logprobs)
            sampled.logprob, sampled.rank, sampled.top_ids, *last_parts = parts
            sampled.top_logprobs, sampled.total = last_parts
        return sampled

    def prompt_logprobs(
        self, logits: Tensor, targets: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute the log-probabilities of prompt tokens.

        logits: [T, vocab], raw, at the positions before the tokens.
        targets: [T] int64, the tokens.
        Returns the targets' log-probabilities [T] float32 and ranks [T] int64; ids of the k most
        likely tokens [T, k] int64 and their log-probabilities [T, k] float32; log-sum-exp of the
        logits [T] float32.
        """
        if self._rows.device_words is not None:
            from kernels.sampling.logprobs import logprobs

            return logprobs(logits, targets, k)
        scored = [(raw, 1.0) for raw in logits.float().numpy()]
        return _host_logprobs(scored, targets.tolist(), [k] * len(targets), k)


def _host_logprobs(
    scored: Sequence[tuple[cpu_sampler.F32, float]], tokens: list[int], wanted: list[int], k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute log-probabilities of tokens; see `Sampler.prompt_logprobs`.

    scored: for each token (logits [vocab], factor by which to scale the logits).
    wanted: for each token the number of alternatives; -1 = no log-probabilities.
    """
    count = len(tokens)
    k = min(k, *(len(logits) for logits, _ in scored)) if scored else k
    logprob = np.zeros(count, np.float32)
    rank = np.ones(count, np.int64)
    top_ids = np.zeros((count, k), np.int64)
    top_logprobs = np.zeros((count, k), np.float32)
    total = np.zeros(count, np.float32)
    for s, ((logits, scale), want) in enumerate(zip(scored, wanted, strict=True)):
        if want >= 0:
            n = min(want, k)
            logprob[s], rank[s], top_ids[s, :n], top_logprobs[s, :n], total[s] = (
                cpu_sampler.logprobs(logits, tokens[s], n, scale)
            )
    return (
        torch.from_numpy(logprob),
        torch.from_numpy(rank),
        torch.from_numpy(top_ids),
        torch.from_numpy(top_logprobs),
        torch.from_numpy(total),
    )
