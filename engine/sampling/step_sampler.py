"""StepSampler: turns a step's hidden states into tokens and log-probabilities for the host.

Add lines here with care: the code runs once a step, and nothing may wait for the device (no
.item(), .cpu(), .tolist(), no indexing by a boolean mask).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, NewRow, OutOfMemory
from engine.config.model_config import ModelConfig
from engine.parallel.group import TensorParallelGroup
from engine.pooling import Pooling
from engine.sampling.device_result import DeviceResult, HostLogprobs
from engine.sampling.sampler import Masked, Sampled, SamplePlan, Sampler
from kernels.metadata import AttentionMeta

# Launches sampling with masks [M, ceil(vocab / 32)], which must not change until it is done, or
# with None on a rank that does not sample.
MaskedChoice = Callable[[NDArray[np.int32] | None], Tensor]


class Head(Protocol):
    """The output head of a model, which computes logits from the last layer's hidden states."""

    config: ModelConfig
    group: TensorParallelGroup

    def logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        """Compute logits of hidden states [n, hidden_size]; see `engine.models.registry.Model`.

        whole: whether to compute logits of the whole vocabulary, or only of this rank's shard.
        """
        ...


class GraphChoices(Protocol):
    """The interface of the sampling graphs. size: the (entries, tokens) of the padded step."""

    def choose(self, size: tuple[int, int], plan: SamplePlan) -> Tensor:
        """Sample the next token of each sampling entry and write it into the entry's row.

        Returns [entries] int64, padded.

        plan: a plan for which `SamplePlan.simple` is true.
        """
        ...

    def choose_masked(self, size: tuple[int, int]) -> MaskedChoice:
        """Launch the logits, and return the function that launches the sampling."""
        ...

    def places(self, count: int, mixed: bool) -> tuple[Tensor, Tensor]:
        """Return copies of the rows and positions of the step's new tokens, [count] int64 each.

        mixed: whether the step has chunks of prompts.
        """
        ...


@dataclass(slots=True)
class Hidden:
    """The hidden states of a launched step, after the final norm.

    states: [n, hidden_size], of all tokens or only of those that sample.
    places: rows and positions of the new tokens, [num_samples] int64 each; None = `graphs.places`.
    last: indices in `states` of the tokens that sample, [num_samples] int64; None = all.
    are_logits: whether `states` already are logits, [n, vocab_size].
    graphs: the sampling graphs, if the step was a CUDA graph.
    size: the (entries, tokens) of the step's graph.
    metas: the step's attention metas, by KV group, for a drafter; None if `read` is set or there is
        no drafter.
    every: the hidden states of all tokens of the step, for a drafter; None = `states` has them.
    read: launches a drafter's pass over the step's tokens as a CUDA graph and returns its output
        rows; None = there is no such graph.
    routes: (entry, the experts of its tokens [length, num_layers, chosen]), where requested.
    """

    states: Tensor
    places: tuple[Tensor, Tensor] | None
    last: Tensor | None = None
    are_logits: bool = False
    graphs: GraphChoices | None = None
    size: tuple[int, int] = (0, 0)
    metas: Sequence[AttentionMeta] | None = None
    every: Tensor | None = None
    read: Callable[[], Tensor] | None = None
    routes: Sequence[tuple[int, Tensor]] = ()


@dataclass(slots=True)
class StepSamples:
    """The sampling entries of a batch."""

    rows: list[int]  # [num_samples]
    entries: list[int] | None  # index of each entry in the batch; None = all entries are decodes
    plan: SamplePlan


class StepSampler:
    """The sampling of steps, with log-probabilities and pooling for requests that need them."""

    def __init__(
        self, head: Head, sampler: Sampler, tokens: Tensor, pooling: Pooling | None = None
    ) -> None:
        """Set up the sampler of a model's steps.

        tokens: the rows' tokens [max_num_seqs + 1, max_len] int32, the last row for padding.
        """
        self.sampler = sampler
        self._head = head
        self._tokens = tokens
        self._pooling = pooling
        self._device = tokens.device
        self.cuda = tokens.device.type == "cuda"
        count = len(tokens) - 1
        # Maximum rows of logits computed at once: the number of samples of the largest step, for
        # which memory is planned. Fewer than 64 would save little memory (16 MiB) and lose time.
        self._logits_rows = max(count, 64)
        if self.cuda:
            # Step n's results are read while n + 1 is in flight, so two host buffers alternate.
            self._host_tokens = [
                torch.empty(count, dtype=torch.int64, pin_memory=True) for _ in range(2)
            ]
        self._buffer = 0
        # For each row, on the host: the number of alternatives (as in HostLogprobs.counts), the
        # length of its prompt, the number of virtual tokens in the prompt, and whether its hidden
        # states are pooled.
        self._logprobs = [-1] * count
        self._prompt_logprobs = [-1] * count
        self._num_prompt = [0] * count
        self._num_virtual = [0] * count
        self._pooled = [False] * count

    def set_row(self, new: NewRow) -> None:
        """Assign a row to a new request."""
        row, params = new.row, new.params
        self.sampler.set_row(new)
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs
        wanted = params.prompt_logprobs
        self._prompt_logprobs[row] = -1 if wanted is None else wanted
        self._num_prompt[row] = new.num_prompt_tokens
        self._num_virtual[row] = new.num_virtual
        self._pooled[row] = params.pooled

    def samples_of(self, batch: Batch) -> StepSamples:
        """Return the entries of the batch that sample."""
        if batch.num_decodes == len(batch.rows):
            rows = set(batch.rows) if batch.drafts else batch.rows
            return StepSamples(batch.rows, None, self.sampler.plan(rows))
        entries = [entry for entry, samples in enumerate(batch.samples) if samples]
        rows = [batch.rows[entry] for entry in entries]
        return StepSamples(rows, entries, self.sampler.plan(rows))

    def wants_every_state(self, batch: Batch) -> bool:
        """Whether hidden states of tokens that do not sample are needed."""
        return any(self._prompt_logprobs[row] >= 0 or self._pooled[row] for row in batch.rows)

    def launch(self, batch: Batch, samples: StepSamples, hidden: Hidden) -> DeviceResult:
        """Launch prompt log-probabilities, pooling and sampling; return the pending result.

        If the batch has masks, `DeviceResult.sample` launches the sampling later.
        """
        prompt_logprobs: list[tuple[int, HostLogprobs]] = []
        pooled = None
        if samples.entries is not None and self.wants_every_state(batch):
            prompt_logprobs = self._launch_prompt_logprobs(batch, hidden.states)
            if self._pooling is not None:
                pooled = self._launch_pooled(batch, hidden.states, self._pooling.mode)
        routes = [(entry, self._copied(ids)) for entry, ids in hidden.routes]
        if not samples.rows:
            result = self.launch_nothing(batch.step)
        elif hidden.graphs is not None and samples.plan.simple:
            result = self._launch_graph_choice(batch, samples, hidden.graphs, hidden.size)
        else:
            result = self._launch_choice(batch, samples, hidden)
        result.prompt_logprobs, result.pooled, result.routes = prompt_logprobs, pooled, routes
        return result

    def launch_nothing(self, step: int) -> DeviceResult:
        """Return the result of a step without samples, or of a step that another stage samples."""
        return self._to_host(step, torch.empty(0, dtype=torch.int64), None)

    def _launch_graph_choice(
        self, batch: Batch, samples: StepSamples, graphs: GraphChoices, size: tuple[int, int]
    ) -> DeviceResult:
        """Launch the sampling as a CUDA graph, and return the pending result."""
        step, entries, count = batch.step, samples.entries, len(samples.rows)
        if not batch.masked:
            return self._to_host(step, graphs.choose(size, samples.plan)[:count], entries)
        choose = graphs.choose_masked(size)
        if self._head.group.rank:  # only the first rank has the masks
            return self._to_host(step, choose(None)[:count], entries)
        return _deferred(
            step, entries, lambda masks: self._to_host(step, choose(masks)[:count], entries)
        )

    def _launch_choice(self, batch: Batch, samples: StepSamples, hidden: Hidden) -> DeviceResult:
        """Launch logits and sampling without CUDA graphs; return the pending result."""
        states, plan, masked = hidden.states, samples.plan, batch.masked
        by_parts = self.by_parts(plan, masked)
        if hidden.last is not None:
            states = states.index_select(0, hidden.last)
        logits = states if hidden.are_logits else self._head.logits(states, not by_parts)
        step, count = batch.step, len(samples.rows)
        places = hidden.places
        if places is None:
            assert hidden.graphs is not None
            places = hidden.graphs.places(count, samples.entries is not None)
        rows, positions = places

        def choose(masks: NDArray[np.int32] | None) -> DeviceResult:
            uploaded = None
            if masks is not None:
                uploaded = Masked.upload(masked, count, masks, self._device)
            sampled = self.sample(logits, rows, positions, plan, uploaded, by_parts=by_parts)
            result = self._to_host(step, sampled.tokens, samples.entries)
            if sampled.logprob is not None:
                result.logprobs = self._logprobs_to_host(sampled, samples.rows)
                if result.event is not None:
                    result.event.record()  # recorded again, after these copies
            return result

        if not masked or self._head.group.rank:  # only the first rank has the masks
            return choose(None)
        return _deferred(step, samples.entries, choose)

    def by_parts(self, plan: SamplePlan, masked: Sequence[int] = ()) -> bool:
        """Whether ranks exchange the best token of their vocabulary shards instead of logits.

        masked: indices of the samples that a grammar constrains; with any, logits are exchanged.
        """
        return self._head.group.size > 1 and plan.greedy and plan.simple and not masked

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        plan: SamplePlan,
        masked: Masked | None = None,
        *,
        by_parts: bool = False,
    ) -> Sampled:
        """Sample tokens and write them into their rows.

        logits: [n, vocab_size], or with by_parts this rank's part of the vocabulary.
        rows, positions: [n] int64.
        Returns -1 as the token of a row whose logits are not finite.
        """
        group = self._head.group
        if by_parts:  # all ranks compute the same result
            sampled = self.sampler.of_best(group.gather(self.sampler.best(logits, rows)))
        elif group.rank:  # other ranks do not have all logits
            tokens = rows.new_empty(rows.shape)
            sampled = Sampled(tokens, torch.zeros_like(tokens, dtype=torch.bool))
            sampled.tokens = group.broadcast(sampled.tokens)
        else:
            sampled = self.sampler.sample(logits, rows, positions, self._tokens, plan, masked)
            sampled.tokens = group.broadcast(sampled.tokens)
        if not self.cuda:
            self._write_on_host(sampled, rows, positions)
            return sampled
        # rows without a valid token get 0, which is never read
        self._tokens[rows, positions] = sampled.tokens.to(torch.int32)
        sampled.tokens = torch.where(sampled.bad, -1, sampled.tokens)
        return sampled

    def _write_on_host(self, sampled: Sampled, rows: Tensor, positions: Tensor) -> None:
        """Write tokens into their rows on the CPU.

        This uses numpy, as three torch operations would take as long as a layer of a small model.
        Tokens of bad rows are written too, but never read.
        """
        chosen, bad = sampled.tokens.numpy(), sampled.bad.numpy()
        self._tokens.numpy()[rows.numpy(), positions.numpy()] = chosen
        if bad.any():
            sampled.tokens = torch.from_numpy(np.where(bad, -1, chosen))

    def _to_host(self, step: int, tokens: Tensor, entries: list[int] | None) -> DeviceResult:
        """Launch the copy of the tokens to the host; return the pending result."""
        if not self.cuda:
            return DeviceResult(step, tokens, entries)
        self._buffer ^= 1
        host = self._host_tokens[self._buffer][: tokens.shape[0]]
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return DeviceResult(step, host, entries, event, check=self._head.group.check)

    def _copied(self, tensor: Tensor) -> Tensor:
        """Launch a copy of the tensor to the host, and return the copy, valid once the device is
        done."""
        return tensor.to("cpu", non_blocking=True) if self.cuda else tensor

    def _logprobs_to_host(self, sampled: Sampled, rows: list[int]) -> HostLogprobs:
        assert sampled.logprob is not None and sampled.rank is not None
        assert sampled.top_ids is not None and sampled.top_logprobs is not None
        assert sampled.total is not None
        return HostLogprobs(
            self._copied(sampled.tokens),
            self._copied(sampled.logprob),
            self._copied(sampled.rank),
            self._copied(sampled.top_ids),
            self._copied(sampled.top_logprobs),
            self._copied(sampled.total),
            [self._logprobs[row] for row in rows],
        )

    def _launch_pooled(
        self, batch: Batch, hidden: Tensor, mode: str
    ) -> tuple[list[int], Tensor] | None:
        """Launch the pooling of this step's chunks of texts to embed.

        Returns (entries, [entries, hidden_size] float32), as in `StepResult.pooled`; None without
        such entries.
        """
        entries, spans = [], []
        at = 0
        for entry, (row, start, length) in enumerate(
            zip(batch.rows, batch.starts, batch.lengths, strict=True)
        ):
            first, last = start == 0, start + length == self._num_prompt[row]
            if self._pooled[row] and (mode == "mean" or (first if mode == "cls" else last)):
                entries.append(entry)
                spans.append((at, at + length))
            at += length
        if not entries:
            return None
        if mode == "mean":
            sums = torch.stack([hidden[begin:end].float().sum(0) for begin, end in spans])
        else:
            tokens = [end - 1 if mode == "last" else begin for begin, end in spans]
            sums = torch.stack([hidden[token] for token in tokens]).float()
        return entries, self._copied(sums / self._head.config.logit_scale)

    def _launch_prompt_logprobs(
        self, batch: Batch, hidden: Tensor
    ) -> list[tuple[int, HostLogprobs]]:
        """Launch the log-probabilities of the prompt tokens that chunks predict.

        Returns (entry, its log-probabilities) pairs.
        """
        logprobs = []
        at = 0
        for entry, (row, start, length) in enumerate(
            zip(batch.rows, batch.starts, batch.lengths, strict=True)
        ):
            wanted = self._prompt_logprobs[row]
            # Position p predicts token p + 1, so the chunk predicts start + 1 .. start + length.
            # Only prompt tokens count, without virtual tokens and the first token after them.
            skip = max(0, self._num_virtual[row] - start)
            count = min(length, self._num_prompt[row] - 1 - start) - skip
            if wanted >= 0 and count > 0:
                first = start + skip + 1
                targets = self._tokens[row, first : first + count].long()
                slices = hidden[at + skip : at + skip + count].split(self._logits_rows)
                logits = map(self._head.logits, slices)
                if self._head.group.rank:  # other ranks do not have all logits
                    deque(logits, 0)
                else:
                    logprobs.append((entry, self._prompt_logprobs_of(logits, targets, wanted)))
            at += length
        return logprobs

    def _prompt_logprobs_of(
        self, slices: Iterable[Tensor], targets: Tensor, wanted: int
    ) -> HostLogprobs:
        """Launch the log-probabilities of prompt tokens, and return them.

        slices: logits [at most _logits_rows, vocab_size] of consecutive tokens, in order.
        targets: [n] int64, the tokens.
        wanted: the number of alternatives for each token.
        """
        pieces = [
            self.sampler.prompt_logprobs(logits, next_ids, wanted)
            for logits, next_ids in zip(slices, targets.split(self._logits_rows), strict=True)
        ]
        parts = (self._copied(torch.cat(part)) for part in zip(*pieces, strict=True))
        logprob, rank, top_ids, top_logprobs, total = parts
        counts, ids = [wanted] * len(targets), self._copied(targets)
        return HostLogprobs(ids, logprob, rank, top_ids, top_logprobs, total, counts)


def _deferred(
    step: int, entries: list[int] | None, sample: Callable[[NDArray[np.int32]], DeviceResult]
) -> DeviceResult:
    """Return the pending result of a step that samples once its grammars' masks have arrived.

    sample: launches the sampling under given masks.
    """
    pending = DeviceResult(step, torch.empty(0, dtype=torch.int64), entries)

    def launch(masks: NDArray[np.int32]) -> None:
        """Launch the sampling under the given masks. Raises OutOfMemory."""
        try:
            with torch.inference_mode():
                result = sample(masks)
        except torch.OutOfMemoryError as error:
            message = str(error)
        else:
            pending.tokens, pending.event = result.tokens, result.event
            pending.check, pending.logprobs = result.check, result.logprobs
            return
        raise OutOfMemory(message)

    pending.unsampled = launch
    return pending
