"""ModelRunner: launch(batch) -> DeviceResult; its `wait` is in results.py.

The hottest file of the engine: every line here runs once a step, and nothing in `launch` may wait
for the device (no .item(), .cpu(), .tolist(), no indexing by a boolean mask). What a start does is
in warm_up.py. The timeline on CUDA, one batch ahead:

    host    launch n+1 | wait n | publish n | schedule n+2 | launch n+2 | wait n+1 | ...
    device  ... step n ........ | step n+1 ............................ | step n+2

The next token of a request is read from its row on the device (kernels/batch.py), so step n+1 does
not need the host to know what step n sampled.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, OutOfMemory
from engine.lora.device import LoraDevice
from engine.lora.virtual_tokens import VirtualTokensDevice
from engine.models.decoder import Decoder
from engine.models.registry import Model
from engine.parallel.link import Link
from engine.pooling import Pooling
from engine.runner.caches.kv_cache import KVCache, in_views
from engine.runner.graphs import Size, StepGraphs
from engine.runner.inputs import CpuInputs, CudaInputs, DeviceStep
from engine.runner.programs import StepPrograms
from engine.runner.results import DeviceResult, HostLogprobs, StagedResult
from engine.runner.rows import RequestRows
from engine.sampling.sampler import Masked, Sampled, SamplePlan, Sampler
from kernels.dispatch import Kernels
from kernels.metadata import AttentionMeta, OwnTokens


@dataclass(slots=True)
class _Samples:
    """The n samples of a forward pass whose tokens are to be chosen."""

    # [n, vocab_size], or this rank's part of them; launched behind the forward pass, so that masks
    # may be made meanwhile
    logits: Tensor
    rows: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    host_rows: list[int]  # rows, on the host
    entries: list[int] | None  # as of DeviceResult
    plan: SamplePlan
    by_parts: bool  # see `ModelRunner.by_parts`


class ModelRunner:
    """Runs batches of one model on one device. Owns the rows, the KV tensors and the graphs."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        sampler: Sampler,
        rows: RequestRows,
        kv: KVCache,
        *,
        max_num_batched_tokens: int,
        device: torch.device,
        lora: LoraDevice | None = None,
        prompts: VirtualTokensDevice | None = None,
        pooling: Pooling | None = None,
        link: Link | None = None,
        steps: int = 2,
        by_requests: bool = False,
    ) -> None:
        """Set up the runner.

        link: the link to the stages before and after this one.
        steps: the number of steps in flight at once.
        by_requests: whether attention is data-parallel.
        """
        self.model = model
        self.kernels = kernels
        self.sampler = sampler
        self.rows = rows
        self.kv = kv
        self.device = device
        self.lora = lora
        self.link = link
        self._prompts = prompts
        self._pooling = pooling
        self.max_num_batched_tokens = max_num_batched_tokens
        # Logits that are there at once: as many rows as sample in the largest step, which memory is
        # planned for. Fewer than 64 would gain no memory worth mentioning (16 MiB) and lose time.
        self._logits_rows = max(rows.pad_row, 64)
        self.cuda = device.type == "cuda"
        self.inputs: Any
        if self.cuda:
            self.inputs = CudaInputs(rows, kv.block_size, max_num_batched_tokens, device, steps)
            # Step n's results are read while n + 1 is in flight: two host buffers, alternating.
            self._host_tokens = [
                torch.empty(rows.pad_row, dtype=torch.int64, pin_memory=True) for _ in range(2)
            ]
        else:
            self.inputs = CpuInputs(rows, kv.block_size)
        self.own_inputs: Any = None  # of the step's entries whose keys are here
        if by_requests:
            self.own_inputs = self.inputs
            if self.cuda:  # whose buffers each hold one step
                self.own_inputs = CudaInputs(
                    rows, kv.block_size, max_num_batched_tokens, device, steps
                )
        self._kv_rank = np.zeros(rows.pad_row, dtype=np.int64)  # of each row
        self._buffer = 0
        # Per row, on the host: the alternatives it wants (as HostLogprobs.counts), the length of
        # its prompt, how much of that is virtual, and whether its hidden states are pooled.
        self._logprobs = [-1] * rows.pad_row
        self._prompt_logprobs = [-1] * rows.pad_row
        self._num_prompt = [0] * rows.pad_row
        self._num_virtual = [0] * rows.pad_row
        self._pooled = [False] * rows.pad_row
        self.graphs: StepGraphs | None = None  # `warm_up.capture_graphs`
        # Of decodes on the CPU; an encoder has none.
        self.programs: StepPrograms | None = None
        recordable = not self.cuda and not by_requests and model.group.recordable
        if recordable and isinstance(model, Decoder):
            self.programs = StepPrograms(model, rows, kv)

    def launch(self, batch: Batch) -> "DeviceResult | StagedResult":
        """Start a step. Returns at once on CUDA; on the CPU the work, of this stage's layers, is
        done when it returns.

        Raises OutOfMemory.
        """
        try:
            return self._launch(batch)
        except torch.OutOfMemoryError as error:
            message = str(error)
        raise OutOfMemory(message)  # out here, because torch's own holds the step's tensors

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> "DeviceResult | StagedResult":
        for new in batch.new_rows:
            self.sampler.set_row(new)
            params = new.params
            self._logprobs[new.row] = -1 if params.logprobs is None else params.logprobs
            self._prompt_logprobs[new.row] = (
                -1 if params.prompt_logprobs is None else params.prompt_logprobs
            )
            self._num_prompt[new.row] = new.num_prompt_tokens
            self._num_virtual[new.row] = new.num_virtual
            self._pooled[new.row] = params.pooled
            self._kv_rank[new.row] = new.kv_rank
            if self.lora is not None:
                self.lora.set_row(new.row, new.lora_slot)
            if new.num_virtual:
                assert self._prompts is not None
                self._prompts.name(new)
        prefixes = batch.prefixes
        if self.own_inputs is not None:
            prefixes = [each for each in prefixes if each.kv_rank == self.model.group.rank]
        if prefixes:
            assert self._prompts is not None
            self._prompts.copy(prefixes, self.kv.block_size, self.kv.put)
        if self.kv.states is not None and (batch.saved_states or batch.resumed_states):
            self.kv.states.save(batch.saved_states)
            self.kv.states.resume(batch.resumed_states)

        count = len(batch.rows)
        decodes_only = batch.num_decodes == count
        sample_rows = (
            batch.rows
            if decodes_only
            else [row for row, samples in zip(batch.rows, batch.samples, strict=True) if samples]
        )
        plan = self.sampler.plan(sample_rows)
        entries = (
            None if decodes_only else [i for i, samples in enumerate(batch.samples) if samples]
        )
        size = None
        if self.graphs is not None and (decodes_only or not self._wants_hidden(batch)):
            size = self.graphs.size_of(batch)
        if self.graphs is not None and size is not None:
            if self.link is not None:
                return self._launch_recorded_stage(
                    self.link, self.graphs, batch, size, plan, sample_rows, entries
                )
            self.graphs.forward(batch, size)
            if plan.simple:
                return self._launch_choice(self.graphs, batch, size, plan, entries)
            hidden, rows, positions = self.graphs.samples(len(sample_rows), not decodes_only)
            return self._sample_hidden(batch, hidden, rows, positions, sample_rows, entries, plan)
        step = self.inputs.assemble(batch)
        if self.lora is not None:
            step.adapt(self.lora.step(batch))
        if self.own_inputs is not None:
            step.own = self._own(batch)

        def conclude(hidden: Tensor) -> DeviceResult:
            """Launch what follows the last layer: log-probabilities, pooling and sampling."""
            prompt_logprobs = []
            pooled = None
            if not decodes_only:
                prompt_logprobs = self._launch_prompt_logprobs(batch, hidden)
                if self._pooling is not None:
                    pooled = self._launch_pooled(batch, hidden, self._pooling.mode)
            if not sample_rows:
                pending = self._finish(batch.step, hidden.new_empty(0, dtype=torch.int64), None)
                pending.prompt_logprobs, pending.pooled = prompt_logprobs, pooled
                return pending
            if step.last is not None:
                hidden = hidden.index_select(0, step.last)
            places = step.sample_rows, step.sample_positions, sample_rows, entries
            return self._sample_hidden(batch, hidden, *places, plan, prompt_logprobs, pooled)

        if self.link is not None:
            return self._launch_stage(self.link, batch, step, conclude)
        replayed = self._replayed(step) if decodes_only else None
        if replayed is None:
            return conclude(self.forward(step))
        assert self.programs is not None
        if self.programs.gives_logits:
            rows, positions = step.sample_rows, step.sample_positions
            samples = _Samples(replayed, rows, positions, sample_rows, entries, plan, False)
            return self._sample_now_or_later(batch, samples, [], None)
        return conclude(self.model.leave(replayed))

    def _launch_choice(
        self,
        graphs: StepGraphs,
        batch: Batch,
        size: Size,
        plan: SamplePlan,
        entries: list[int] | None,
    ) -> DeviceResult:
        """Launch the recorded choice of a recorded step; with masks, the choice waits for these."""
        count = len(batch.rows) if entries is None else len(entries)
        if not batch.masked:
            return self._finish(batch.step, graphs.choose(size, plan)[:count], entries)
        choose = graphs.choose_masked(size)
        if self.model.group.rank:  # the first rank has the masks
            return self._finish(batch.step, choose(None)[:count], entries)
        return self._later(
            batch,
            entries,
            lambda masks: self._finish(batch.step, choose(masks)[:count], entries),
        )

    def _launch_stage(
        self,
        link: Link,
        batch: Batch,
        step: DeviceStep,
        conclude: Callable[[Tensor], DeviceResult],
    ) -> "DeviceResult | StagedResult":
        """Launch this stage's layers and send their output to the next stage.

        On the first stage `StagedResult` concludes the step when asked to. So other steps are
        launched meanwhile.
        """
        stage, count = self.model.stage, step.token_ids.shape[0]
        if stage.first:
            entered = self.model.enter(step.token_ids, step.metas[0].positions)
        else:
            entered = link.receive(count)
        out = self._replayed(step, entered) if batch.num_decodes == len(batch.rows) else None
        if out is None:
            out = self.run(step.token_ids, step.metas, entered)
        # Of the other tokens nothing is asked at the end.
        last = None if self._wants_hidden(batch) else step.last
        if stage.last and last is not None:
            out = out.index_select(0, last)
        link.send(out)
        if not stage.first:
            return self._finish(batch.step, step.sample_rows.new_empty(0), None)
        if last is not None:
            step.last, count = None, last.shape[0]
        return StagedResult(lambda: conclude(self.model.leave(link.receive(count))))

    def _launch_recorded_stage(
        self,
        link: Link,
        graphs: StepGraphs,
        batch: Batch,
        size: Size,
        plan: SamplePlan,
        sample_rows: list[int],
        entries: list[int] | None,
    ) -> "DeviceResult | StagedResult":
        """Launch this stage's layers as a CUDA graph; see `_launch_stage`."""
        first, count = self.model.stage.first, len(sample_rows)
        out = graphs.through(batch, size, None if first else link.receive(batch.num_tokens))
        link.send(out.clone())  # the next step writes there
        if not first:
            return self._finish(batch.step, torch.empty(0, dtype=torch.int64), None)
        rows, positions = graphs.places(count, entries is not None)

        def conclude() -> DeviceResult:
            hidden = self.model.leave(link.receive(count))
            if not count:
                return self._finish(batch.step, rows, None)
            return self._sample_hidden(batch, hidden, rows, positions, sample_rows, entries, plan)

        return StagedResult(conclude)

    def _sample_hidden(
        self,
        batch: Batch,
        hidden: Tensor,
        rows: Tensor,
        positions: Tensor,
        host_rows: list[int],
        entries: list[int] | None,
        plan: SamplePlan,
        prompt_logprobs: "Sequence[tuple[int, HostLogprobs]]" = (),
        pooled: tuple[list[int], Tensor] | None = None,
    ) -> DeviceResult:
        """Launch the sampling from hidden states [n, hidden_size].

        rows, positions, host_rows, entries, plan: see _Samples.
        """
        parts = self.by_parts(plan, batch.masked)
        logits = self.model.logits(hidden, not parts)
        samples = _Samples(logits, rows, positions, host_rows, entries, plan, parts)
        return self._sample_now_or_later(batch, samples, [*prompt_logprobs], pooled)

    def _sample_now_or_later(
        self,
        batch: Batch,
        samples: "_Samples",
        prompt_logprobs: "list[tuple[int, HostLogprobs]]",
        pooled: tuple[list[int], Tensor] | None,
    ) -> DeviceResult:
        """Launch the sampling now, or when the masks are there if samples wait for masks."""
        if not batch.masked or self.model.group.rank:  # the first rank has the masks
            pending = self._choose(batch.step, samples, prompt_logprobs, None)
            pending.pooled = pooled
            return pending
        masked, count = batch.masked, len(samples.host_rows)

        def sample(masks: NDArray[np.int32]) -> DeviceResult:
            uploaded = Masked.upload(masked, count, masks, self.device)
            return self._choose(batch.step, samples, prompt_logprobs, uploaded)

        pending = self._later(batch, samples.entries, sample)
        pending.pooled = pooled
        return pending

    def _later(
        self,
        batch: Batch,
        entries: list[int] | None,
        sample: Callable[[NDArray[np.int32]], DeviceResult],
    ) -> DeviceResult:
        """Return the result of a step whose sampling waits for masks.

        sample: launches the sampling, given the masks.
        """
        pending = DeviceResult(batch.step, torch.empty(0, dtype=torch.int64), entries)

        def launch(masks: NDArray[np.int32]) -> None:
            """Launch the sampling with these masks. Raises OutOfMemory."""
            try:
                with torch.inference_mode():
                    found = sample(masks)
            except torch.OutOfMemoryError as error:
                message = str(error)
            else:
                pending.tokens, pending.event = found.tokens, found.event
                pending.check = found.check
                pending.logprobs = found.logprobs
                pending.prompt_logprobs = found.prompt_logprobs
                return
            raise OutOfMemory(message)

        pending.unsampled = launch
        return pending

    def _choose(
        self,
        step: int,
        samples: "_Samples",
        prompt_logprobs: list[tuple[int, "HostLogprobs"]],
        masked: Masked | None,
    ) -> DeviceResult:
        """Choose the tokens of a step and send them to the host."""
        given = samples.logits, samples.rows, samples.positions, samples.plan
        sampled = self.sample(*given, masked, by_parts=samples.by_parts)
        pending = self._finish(step, sampled.tokens, samples.entries)
        pending.logprobs = self._launch_logprobs(sampled, samples.host_rows)
        pending.prompt_logprobs = prompt_logprobs
        if self.cuda and (pending.logprobs is not None or prompt_logprobs):
            assert pending.event is not None
            pending.event.record()  # after these copies too
        return pending

    def recover(self) -> bool:
        """Give the memory of a step that raised back; False if the device has failed for good.

        An error such as an illegal access stays with the CUDA context: every later call raises it.
        """
        if self.cuda:
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except RuntimeError:
                return False
        return True

    def shrink(self, num_blocks: int) -> None:
        """Replace the KV cache by `num_blocks` empty blocks. Legal when nothing is in flight."""
        if self.graphs is not None:
            self.graphs.forget()  # they know the old blocks' addresses
        if self.programs is not None:
            self.programs.forget()
        self.kv.shrink(num_blocks)

    def forward(self, step: DeviceStep) -> Tensor:
        """Run the model over a laid-out step: [num_tokens, hidden_size], after the final norm."""
        return self.run(step.token_ids, step.metas, own=step.own)

    def padded_to_own(self, batch: Batch) -> Batch:
        """Return the layout of a step in which entries whose keys another rank has are padding."""
        here, pad = self._kv_rank[batch.rows] == self.model.group.rank, self.rows.pad_row
        rows = [row if own else pad for row, own in zip(batch.rows, here, strict=True)]
        starts = [start if own else 0 for start, own in zip(batch.starts, here, strict=True)]
        return Batch(batch.step, rows, starts, batch.lengths, batch.samples, batch.num_decodes)

    def _own(self, batch: Batch) -> tuple[Tensor, list[AttentionMeta]]:
        """Return `DeviceStep.own`: the tokens whose keys this rank has, and their metas."""
        here = self._kv_rank[batch.rows] == self.model.group.rank
        entries = np.flatnonzero(here)
        tokens = torch.from_numpy(np.flatnonzero(np.repeat(here, batch.lengths)))
        tokens = tokens.to(self.device, non_blocking=True)
        if not len(entries):
            return tokens, []
        own = Batch(
            batch.step,
            [batch.rows[entry] for entry in entries],
            [batch.starts[entry] for entry in entries],
            [batch.lengths[entry] for entry in entries],
            [batch.samples[entry] for entry in entries],
            int(here[: batch.num_decodes].sum()),
        )
        step: DeviceStep = self.own_inputs.assemble(own)
        if self.lora is not None:
            step.adapt(self.lora.step(own, beside=True))
        return tokens, step.metas

    def run(
        self,
        token_ids: Tensor,
        metas: Sequence[AttentionMeta],
        entered: Tensor | None = None,
        own: tuple[Tensor | None, list[AttentionMeta]] | None = None,
    ) -> Tensor:
        """Run the model, or this stage's layers, over tokens that are laid out.

        metas: the meta of each group of layers; attention is planned here.
        entered: the input of this stage's first layer; the result is then the output of its last
            layer.
        own: see DeviceStep.
        """
        layers, groups = self.kv.layers, self.kv.groups
        views = attending = in_views(groups, metas, self.kv.block_size)
        if self.own_inputs is not None:
            if own is None:  # a warm-up, as if all requests were this rank's
                own = torch.arange(len(token_ids), device=self.device), list(metas)
            tokens, metas = own
            others = metas[0].slots[:, None] < 0 if tokens is None else None
            attending = in_views(groups, metas, self.kv.block_size) if metas else []
            for at, meta in enumerate(views):
                meta.own = OwnTokens(tokens, attending[at] if metas else None, others)
        for view, meta in zip(groups.views, attending, strict=bool(groups.views and attending)):
            attention = groups.groups[view.group].attention
            if not attention.bidirectional:
                cache = layers[view.layers[0]][0]
                self.kernels.prepare(meta, attention.num_heads, cache, attention.latent_rank)
        if entered is not None:
            return self.model.through(entered, views, layers)
        return self.model.forward(token_ids, views, layers)

    def _replayed(self, step: DeviceStep, entered: Tensor | None = None) -> Tensor | None:
        """Return the output of `StepPrograms.through` for a step of decodes; None without a
        program.

        entered: see `run`.
        """
        if self.programs is None:
            return None
        views = in_views(self.kv.groups, step.metas, self.kv.block_size)
        return self.programs.through(step.token_ids, views, entered)

    def by_parts(self, plan: SamplePlan, masked: Sequence[int] = ()) -> bool:
        """Whether ranks bring the best token of their part of the vocabulary, not its logits.

        masked: the batch's masked samples.
        """
        return self.model.group.size > 1 and plan.greedy and plan.simple and not masked

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

        logits: [n, vocab_size], or by_parts this rank's part of the vocabulary.
        rows, positions: [n] int64.
        The token of a row whose logits are not finite is -1.
        """
        group = self.model.group
        if by_parts:  # all ranks choose, and alike
            sampled = self.sampler.of_best(group.gather(self.sampler.best(logits, rows)))
        elif group.rank:  # which have not all logits
            tokens = rows.new_empty(rows.shape)
            sampled = Sampled(tokens, torch.zeros_like(tokens, dtype=torch.bool))
            sampled.tokens = group.broadcast(sampled.tokens)
        else:
            sampled = self.sampler.sample(logits, rows, positions, self.rows.tokens, plan, masked)
            sampled.tokens = group.broadcast(sampled.tokens)
        if not self.cuda:
            sampled.tokens = self.inputs.write(sampled.tokens, sampled.bad, rows, positions)
            return sampled
        self.rows.tokens[rows, positions] = sampled.tokens.to(torch.int32)  # bad rows: 0, unread
        sampled.tokens = torch.where(sampled.bad, -1, sampled.tokens)
        return sampled

    def _finish(self, step: int, tokens: Tensor, entries: list[int] | None) -> DeviceResult:
        """Send the tokens to the host behind everything launched so far."""
        if not self.cuda:
            return DeviceResult(step, tokens, entries)
        self._buffer ^= 1
        host = self._host_tokens[self._buffer][: tokens.shape[0]]
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return DeviceResult(step, host, entries, event, check=self.model.group.check)

    def _to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True) if self.cuda else tensor

    def _launch_logprobs(self, sampled: Sampled, rows: list[int]) -> HostLogprobs | None:
        if sampled.logprob is None:
            return None
        assert sampled.rank is not None
        assert sampled.top_ids is not None and sampled.top_logprobs is not None
        assert sampled.total is not None
        return HostLogprobs(
            self._to_host(sampled.tokens),
            self._to_host(sampled.logprob),
            self._to_host(sampled.rank),
            self._to_host(sampled.top_ids),
            self._to_host(sampled.top_logprobs),
            self._to_host(sampled.total),
            [self._logprobs[row] for row in rows],
        )

    def _wants_hidden(self, batch: Batch) -> bool:
        """Whether hidden states of tokens that do not sample are needed; graphs do not return
        these."""
        return any(self._prompt_logprobs[row] >= 0 or self._pooled[row] for row in batch.rows)

    def _launch_pooled(
        self, batch: Batch, hidden: Tensor, mode: str
    ) -> tuple[list[int], Tensor] | None:
        """Return what the chunks of texts add to their embeddings; None if nothing.

        The result is the entries, and [entries, hidden_size] float32.
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
            found = torch.stack([hidden[begin:end].float().sum(0) for begin, end in spans])
        else:
            which = [end - 1 if mode == "last" else begin for begin, end in spans]
            found = torch.stack([hidden[token] for token in which]).float()
        return entries, self._to_host(found / self.model.config.logit_scale)

    def _launch_prompt_logprobs(
        self, batch: Batch, hidden: Tensor
    ) -> list[tuple[int, HostLogprobs]]:
        """Launch the log-probabilities of the chunks' own next tokens, entry by entry; rare and
        eager."""
        found = []
        at = 0
        for entry, (row, start, length) in enumerate(
            zip(batch.rows, batch.starts, batch.lengths, strict=True)
        ):
            wanted = self._prompt_logprobs[row]
            # Position p predicts token p + 1: the chunk predicts start + 1 .. start + length,
            # prompt tokens only, and of these none up to the first that is not virtual.
            skip = max(0, self._num_virtual[row] - start)
            count = min(length, self._num_prompt[row] - 1 - start) - skip
            if wanted >= 0 and count > 0:
                first = start + skip + 1
                targets = self.rows.tokens[row, first : first + count].long()
                some = hidden[at + skip : at + skip + count].split(self._logits_rows)
                logits = map(self.model.logits, some)
                if self.model.group.rank:  # which have not all of them
                    deque(logits, 0)
                else:
                    found.append((entry, self._prompt_logprobs_of(logits, targets, wanted)))
            at += length
        return found

    def _prompt_logprobs_of(
        self, logits: Iterable[Tensor], targets: Tensor, wanted: int
    ) -> HostLogprobs:
        pieces = [
            self.sampler.prompt_logprobs(each, next_ids, wanted)
            for each, next_ids in zip(logits, targets.split(self._logits_rows), strict=True)
        ]
        parts = (self._to_host(torch.cat(part)) for part in zip(*pieces, strict=True))
        logprob, rank, top_ids, top_logprobs, total = parts
        counts, ids = [wanted] * len(targets), self._to_host(targets)
        return HostLogprobs(ids, logprob, rank, top_ids, top_logprobs, total, counts)
