"""StepGraphs: CUDA graphs of whole steps of certain sizes, of decodes alone or with chunks.

A step is two graphs. The first has input assembly and the forward pass, up to the hidden states of
the sampling entries. The second has logits, sampling and the write of the next token, if all rows
are greedy or have only a temperature. With grammars the logits are a separate graph, because
sampling waits for masks. Sampling with other parameters takes a dozen kernel launches after the
first graph.
Launching a graph costs the host microseconds, whatever the number of layers. Launching its kernels
takes longer than the device needs for a few hundred tokens. Without graphs for mixed steps, every
short prompt would wait for the host. A size is (entries, tokens), which are equal for decodes.

Steps are padded to the next size: padding uses the padding row, writes no KV, and its token is
dropped.
A graph of a pipeline stage has only the layers. It reads the previous stage's activations from one
buffer and writes its output to another. Sampling waits for the last stage while further steps are
uploaded, so it is launched without CUDA graphs.
A batch with drafts has several decodes of a row, for which attention reads the row's KV once. Such
steps have separate graphs, as their kernel is slower for rows with one decode. In models with
recurrent states another graph advances the states by the accepted tokens before the next step
(state_runs.py).
With data-parallel attention, graphs do not depend on the number of this rank's requests. A graph's
attention runs over all tokens of the step, and tokens of other ranks are padding.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch
from engine.runner.drafts.graphs import Record
from engine.runner.drafts.passes import DraftPasses
from engine.runner.forward import ModelForward
from engine.runner.inputs import CudaInputs, max_entries
from engine.runner.state_runs import GRAPHED, GraphRuns
from engine.sampling.sampler import Masked, Sampled, SamplePlan
from engine.sampling.step_sampler import Hidden, MaskedChoice, StepSampler
from kernels.metadata import AttentionMeta

Size = tuple[int, int]  # (entries, tokens)
# how tokens are chosen; "masked" = sampled under grammar masks
How = Literal["greedy", "sampled", "masked"]

_FEW = 64  # number of tokens up to which matmuls are bound by reading the weights

# Entries -> numbers of tokens. One entry is for padding, as batches are often powers of two.
MIXED_SIZES: dict[int, tuple[int, ...]] = {
    16: (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048),
    72: (96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 2048),
    136: (160, 192, 256, 320, 384, 512, 768, 1024, 2048),
    264: (288, 320, 352, 384, 448, 512, 640, 768, 1024, 2048),
}


def default_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes of decodes to capture: 1, 2, 4, multiples of 8 up to 256, then of 32.

    The last size is always max_num_seqs. Padding takes at most 7 rows up to 256, and one in eight
    above.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs + 1, 32)]
    sizes = [size for size in sizes if size <= max_num_seqs]
    return sizes if sizes[-1] == max_num_seqs else [*sizes, max_num_seqs]


def draft_sizes(decodes: Sequence[int]) -> list[int]:
    """Return the batch sizes to capture for steps with drafts: the powers of two among
    `decodes`."""
    return [size for size in decodes if size > 1 and size & (size - 1) == 0]


@dataclass(slots=True)
class _Choice:
    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # [entries] int64
    # a separate graph of the logits, if sampling waits for masks
    logits: torch.cuda.CUDAGraph | None = None


class StepGraphs:
    """The CUDA graphs of a model's steps, all captured at start, as capturing stalls the device.

    If the engine supports adapters, each step is captured with and without them, so that steps
    without adapters have no extra cost.
    """

    def __init__(
        self,
        forward: ModelForward,
        sampling: StepSampler,
        sizes: Sequence[int],
        max_tokens: int,
        *,
        drafts: bool = False,
        drafter: bool = False,
    ) -> None:
        """Set up the graphs; `capture` captures them.

        sizes: the numbers of decodes to capture.
        max_tokens: the number of tokens of the largest step.
        drafts: whether batches may have drafts to verify.
        drafter: whether a drafter reads the hidden states of all tokens after each step.
        """
        self._drafter = drafter
        self._forward = forward
        self._sampling = sampling
        self._rows = forward.rows
        self._inputs: CudaInputs = forward.inputs
        self._own_inputs: CudaInputs | None = None if forward.own is None else forward.own.inputs
        self._decodes = sorted(sizes)
        drafts = drafts and forward.own is None
        self._with_drafts = draft_sizes(self._decodes) if drafts else []
        if forward.state_runs is not None:
            self._with_drafts = [size for size in self._with_drafts if size <= GRAPHED]
        self._max_tokens = max_tokens
        # The padding entry may have up to size - 1 tokens, which must fit into the padding row.
        limit = min(max_tokens, self._rows.tokens.shape[1] - 1)
        most = max_entries(self._rows.pad_row)
        self._mixed: dict[int, list[int]] = {}
        for entries, tokens in MIXED_SIZES.items():
            fitting = [size for size in tokens if entries <= size <= limit]
            self._mixed.setdefault(min(entries, most), fitting)
        # The key is (size, whether tokens may have adapters).
        self._forwards: dict[tuple[Size, bool], torch.cuda.CUDAGraph] = {}
        self._verifications: dict[tuple[Size, bool], torch.cuda.CUDAGraph] = {}  # of draft steps
        self._state_runs: dict[
            tuple[Size, bool], GraphRuns
        ] = {}  # `GraphRuns` of these graphs, in models with recurrent states
        # The key is (entries, whether the step is mixed, how tokens are chosen).
        self._choices: dict[tuple[int, bool, How], _Choice] = {}
        # (number of decodes, whether a request may have several tokens) -> a function that launches
        # the drafter's pass over such a step.
        self._reads: dict[tuple[int, bool], Callable[[], Tensor]] = {}
        self._hidden: Tensor  # [most, hidden_size]: output of the first graph, input of the second
        self._every: Tensor  # [tokens, hidden_size]: hidden states of all tokens, for a drafter
        # [tokens, hidden_size]: input and output of a pipeline stage's layers.
        self._entered: Tensor
        self._handed_on: Tensor
        self._masks: Tensor  # [most, ceil(vocab / 32)] int32: input of masked sampling
        self._pool: Any = None

    def size_of(self, batch: Batch) -> Size | None:
        """Return the size of the graph for a batch; None = launch the batch without CUDA graphs."""
        count = len(batch.rows)
        if batch.num_decodes == count:
            for sizes in (self._with_drafts if batch.drafts else (), self._decodes):
                at = bisect_left(sizes, count)
                if at < len(sizes):
                    return sizes[at], sizes[at]
            return None
        for entries, sizes in self._mixed.items():
            if count < entries:  # one entry is for padding
                at = bisect_left(sizes, batch.num_tokens)
                return (entries, sizes[at]) if at < len(sizes) else None
        return None

    def matmul_sizes(self) -> tuple[list[int], list[int]]:
        """Return the numbers of tokens and of samples for which `Model.tune` is called."""
        tokens = {*self._decodes, *chain.from_iterable(self._mixed.values()), self._max_tokens}
        return sorted(tokens), [*self._decodes, *self._mixed]

    def capture(self) -> None:
        """Capture all sizes, largest first so that smaller graphs reuse the memory of larger ones.

        A mixed size is left out if the device takes longer for its step than the host takes to
        launch it. A graph gains nothing there, and padding costs. All ranks leave out the same
        sizes, as all-reduces have the size of the padded step.
        With data-parallel attention a graph's attention has the tokens of all ranks. Sizes of many
        decodes are left out if that takes longer than only this rank's tokens.
        """
        group = self._forward.model.group
        self._forward.model.tune(*self.matmul_sizes())
        self._allocate()
        variants = self._variants()
        pays = self._own_inputs is None
        for count in reversed(self._decodes):
            self._capture_forward((count, count), adapters=False)
            pays = pays or count <= _FEW
            if not pays:
                device = self._device_seconds((count, count))
                pays = bool(group.least(device <= self._divided_seconds(count)))
            if not pays:
                del self._forwards[(count, count), False]
                self._decodes.remove(count)
            elif len(variants) > 1:
                self._capture_forward((count, count), adapters=True)
        self._with_drafts = self._sizes_of_runs()
        for count in reversed(self._with_drafts):
            for adapters in variants:
                self._capture_verification((count, count), adapters)
        for entries, sizes in self._mixed.items():
            launch = self._launch_seconds((entries, sizes[0])) if sizes else 0.0
            for at, num_tokens in enumerate(sizes):
                self._capture_forward((entries, num_tokens), adapters=False)
                if not group.least(self._device_seconds((entries, num_tokens)) <= launch):
                    del self._forwards[(entries, num_tokens), False]
                    del sizes[at:]
                    break
                if len(variants) > 1:
                    self._capture_forward((entries, num_tokens), adapters=True)
        for choice in self._each_choice():
            self._capture_choice(*choice)

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launch all steps that may be captured, without capturing, so that their kernels
        compile."""
        self._allocate()
        mixed = ((entries, size) for entries, sizes in self._mixed.items() for size in sizes)
        for size in chain(((count, count) for count in reversed(self._decodes)), mixed):
            self._all_padding(size)
            for adapters in self._variants():
                self._launch_layers(size, adapters)
        for count in reversed(self._sizes_of_runs()):
            self._all_padding((count, count))
            runs = self._runs_of((count, count))
            self._launch_layers((count, count), adapters=False, drafts=True, runs=runs)
            if runs is not None:
                runs.replay()
        for count, is_mixed, how in self._each_choice():
            self._sample(*self._logits(count, is_mixed, how), how)

    def capture_reads(self, passes: DraftPasses, like: Tensor, record: Record) -> None:
        """Capture a drafter's pass over the tokens of steps of decodes; after `capture`.

        like: output rows of the drafter [any, width], for their width and dtype.
        """
        out = like.new_zeros(max(self._decodes), like.shape[1])
        for key, launch in self._drafter_reads(passes, out):
            replay = record(launch)
            self._reads[key] = partial(_replayed, replay, out[: key[0]])

    @torch.inference_mode()
    def launch_reads(self, passes: DraftPasses, like: Tensor) -> None:
        """Launch what `capture_reads` would capture, to compile its kernels; after `launch_all`."""
        out = like.new_zeros(max(self._decodes), like.shape[1])
        for (count, _), launch in self._drafter_reads(passes, out):
            self._all_padding((count, count))
            launch()

    def drop_reads(self) -> None:
        """Launch a drafter's passes without CUDA graphs from now on."""
        self._reads.clear()

    def _drafter_reads(
        self, passes: DraftPasses, out: Tensor
    ) -> Iterator[tuple[tuple[int, bool], Callable[[], None]]]:
        """Yield the key of each pass, largest first, and the function that launches it into `out`.

        The input assembly is launched again, for layers outside the step's graph.
        """
        longest = self._rows.tokens.shape[1] - 1

        def read(count: int, runs: bool) -> None:
            _, metas = self._inputs.lay_out(count, count, count, longest, runs=runs)
            out[:count].copy_(passes.read(metas, self._every[:count]))

        for count in reversed(self._decodes):
            for runs in (False, True)[: 1 + (count in self._with_drafts)]:
                yield (count, runs), partial(read, count, runs)

    def _allocate(self) -> None:
        model, device = self._forward.model, self._forward.device

        def zeros(rows: int) -> Tensor:
            size = model.config.hidden_size
            return torch.zeros(rows, size, dtype=model.dtype, device=device)

        tokens = max([*self._decodes, *chain.from_iterable(self._mixed.values())])
        if self._drafter:
            self._every = zeros(tokens).repeat(1, max(1, len(model.taps)))
        if not model.stage.alone:
            self._entered, self._handed_on = zeros(tokens), zeros(tokens)
            return
        most, words = max_entries(self._rows.pad_row), -(-model.config.vocab_size // 32)
        self._hidden = zeros(most)
        self._masks = torch.zeros(most, words, dtype=torch.int32, device=device)

    def _variants(self) -> tuple[bool, ...]:
        """Return the adapter variants of each step: (False,), or (False, True) with adapters."""
        return (False, True)[: 1 + (self._forward.lora is not None)]

    @torch.inference_mode()
    def _sizes_of_runs(self) -> list[int]:
        """Return the batch sizes to capture with drafts; none if that gains nothing."""
        sizes = [size for size in self._with_drafts if size in self._decodes]
        if not sizes:
            return []
        self._all_padding((sizes[0], sizes[0]))
        metas = self._launch_layers((sizes[0], sizes[0]), adapters=False, drafts=True)
        # needed for correctness: other graphs would add rejected drafts to recurrent states
        if self._forward.state_runs is not None:
            return sizes
        return (
            sizes if any(meta.plan is not None and meta.plan.queries > 1 for meta in metas) else []
        )

    def _each_choice(self) -> Iterator[tuple[int, bool, How]]:
        """Yield (entries, whether the step is mixed, how tokens are chosen), largest first."""
        if not self._forward.model.stage.alone:
            return
        hows: tuple[How, ...] = ("greedy", "sampled", "masked")
        for mixed, counts in ((False, self._decodes), (True, list(self._mixed))):
            for count in reversed(counts):
                for how in hows:
                    yield count, mixed, how

    def _launch_seconds(self, size: Size) -> float:
        """Return the host's seconds to launch a step of the given size without a CUDA graph."""
        self._all_padding(size)
        return self._seconds(lambda: self._launch_layers(size, adapters=False), whole=False)

    def _device_seconds(self, size: Size) -> float:
        """Return the device's seconds for the graph of this size.

        All inputs are padding, so attention reads no earlier tokens.
        """
        self._all_padding(size)
        return self._seconds(self._forwards[size, False].replay)

    def _divided_seconds(self, count: int) -> float:
        """Return the seconds of a step of decodes without a graph, with data-parallel attention.

        Host and device time count together. This rank's attention has only its share of the
        decodes.

        count: the number of decodes of all ranks.
        """
        forward, inputs, own_inputs = self._forward, self._inputs, self._own_inputs
        assert own_inputs is not None
        share = -(-count // forward.model.group.size)
        inputs.all_padding(count, count)
        own_inputs.all_padding(share, share)
        longest = self._rows.tokens.shape[1] - 1

        def launch() -> None:
            token_ids, metas = inputs.lay_out(count, count, count, longest)
            _, own = own_inputs.lay_out(share, share, share, longest)
            forward.run(token_ids, metas, own=(torch.arange(share, device=forward.device), own))

        return self._seconds(launch)

    @torch.inference_mode()
    def _seconds(self, launch: Callable[[], object], *, whole: bool = True) -> float:
        """Return the seconds of a launch, after an unmeasured first one.

        whole: whether to measure until the device is done, or only until the launch returns.
        """
        launch()  # the first launch loads kernels and uploads graphs
        torch.cuda.synchronize()
        start = time.perf_counter()
        launch()
        if whole:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds

    def _all_padding(self, size: Size) -> None:
        self._inputs.all_padding(*size)
        if self._own_inputs is not None:
            self._own_inputs.all_padding(*size)

    def forget(self) -> None:
        """Drop all graphs; each is captured again when it is first needed."""
        self._forwards.clear()
        self._verifications.clear()
        self._state_runs.clear()
        self._choices.clear()
        self._reads.clear()
        self._pool = None

    def launch(self, batch: Batch, size: Size) -> Hidden:
        """Upload the batch and replay the step up to its hidden states.

        A whole model returns the states of the sampling entries, valid until the next call. A
        pipeline stage returns a copy, of the sampling entries on the last stage, else of all
        tokens.
        """
        stage, link = self._forward.model.stage, self._forward.link
        mixed = size[1] > size[0]
        count = sum(batch.samples) if mixed else len(batch.rows)
        if link is not None and not stage.first:
            self._entered[: batch.num_tokens].copy_(link.receive(batch.num_tokens))
        lora = self._forward.lora
        slots = None if lora is None else lora.slots_of(batch)
        verifies = self.verifies(batch, size)
        graphs = self._verifications if verifies else self._forwards
        key = (size, slots is not None)
        if key not in graphs:
            (self._capture_verification if verifies else self._capture_forward)(*key)
        self._inputs.upload(batch, *size)
        if self._forward.own is not None and self._own_inputs is not None:
            self._own_inputs.upload(self._forward.own.padded(batch), *size)
        if lora is not None and slots is not None:
            lora.upload_step(slots, size[1])
        states = self._forward.state_runs
        if states is not None and verifies:
            states.upload(batch, self._state_runs[key])
        elif states is not None:
            states.flush()
        graphs[key].replay()
        if stage.alone:
            hidden = Hidden(self._hidden[:count], None, graphs=self, size=size)
            if self._drafter:
                hidden.every = self._every[: size[1]]
                hidden.read = None if mixed else self._reads.get((size[0], verifies))
                if hidden.read is None:
                    # input assembly again, for layers outside the graph
                    longest = max(map(sum, zip(batch.starts, batch.lengths, strict=True)))
                    longest += batch.unsettled
                    _, hidden.metas = self._inputs.lay_out(*size, size[0], longest, runs=verifies)
            return hidden
        # Copies, since the next step overwrites the buffers.
        places = self.places(count, mixed) if stage.first else None
        tokens = count if stage.last else batch.num_tokens
        return Hidden(self._handed_on[:tokens].clone(), places)

    def verifies(self, batch: Batch, size: Size) -> bool:
        """Whether the batch has drafts, so that a graph for steps with drafts is used."""
        return bool(batch.drafts) and size[0] == size[1] and size[0] in self._with_drafts

    def choose(self, size: Size, plan: SamplePlan) -> Tensor:
        """Sample the next token of each sampling entry and write it into the entry's row.

        Returns [entries] int64 (padded), valid until the next call.

        plan: a plan of only greedy rows and rows with a temperature.
        """
        choice = self._choice(size, "greedy" if plan.greedy else "sampled")
        choice.graph.replay()
        return choice.tokens

    def choose_masked(self, size: Size) -> MaskedChoice:
        """Launch the logits of a batch with masks; return the function that launches the sampling.

        The function takes the masks [M, ceil(vocab / 32)], or None on a rank that does not sample.
        Masks must not change until sampling is done. Call the function before the next `launch`.
        """
        choice = self._choice(size, "masked")
        assert choice.logits is not None
        choice.logits.replay()

        def choose(masks: NDArray[np.int32] | None) -> Tensor:
            if masks is not None:
                # returns the same tensor if the masks are already pinned
                host = torch.from_numpy(masks).pin_memory()
                self._masks[: len(masks)].copy_(host, non_blocking=True)
            choice.graph.replay()
            return choice.tokens

        return choose

    def _choice(self, size: Size, how: How) -> _Choice:
        """Return the sampling graph, after uploading the rows' sampling parameters."""
        entries, num_tokens = size
        self._sampling.sampler.flush()
        key = (entries, num_tokens > entries, how)
        if key not in self._choices:
            self._capture_choice(*key)
        return self._choices[key]

    def places(self, count: int, mixed: bool) -> tuple[Tensor, Tensor]:
        """Return copies of the rows and positions of the step's new tokens, [count] int64 each.

        mixed: whether the step has chunks of prompts.
        """
        inputs = self._inputs
        rows, positions = inputs.rows, inputs.kv_len
        if mixed:
            which = inputs.which[:count]
            rows, positions = rows.index_select(0, which), positions.index_select(0, which)
        return rows[:count].long(), positions[:count].long()

    def _logits(self, entries: int, mixed: bool, how: How) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits of the sampling entries, and the rows and positions of new tokens.

        mixed: whether the step has prompt tokens, so that only some entries sample.
        how: the sort of sampling, by which ranks keep their parts of the logits or gather them.
        """
        by_parts = self._sampling.by_parts(self._plan(how))
        logits = self._forward.model.logits(self._hidden[:entries], not by_parts)
        return logits, *self.places(entries, mixed)

    def _sample(self, logits: Tensor, rows: Tensor, positions: Tensor, how: How) -> Sampled:
        sampling, plan = self._sampling, self._plan(how)
        mask_of = self._inputs.mask_of[: len(logits)]
        masked = Masked(mask_of, self._masks) if how == "masked" else None
        by_parts = sampling.by_parts(plan)
        return sampling.sample(logits, rows, positions, plan, masked, by_parts=by_parts)

    def _plan(self, how: How) -> SamplePlan:
        return self._sampling.sampler.simple_plan(how == "greedy")

    def _capture_forward(self, size: Size, adapters: bool) -> None:
        with self._recording() as graph:
            self._launch_layers(size, adapters)
        self._forwards[size, adapters] = graph

    def _runs_of(self, size: Size) -> GraphRuns | None:
        """Return a new `GraphRuns` for a step with drafts; None without recurrent layers."""
        states = self._forward.state_runs
        if states is None:
            return None
        _, metas = self._inputs.lay_out(*size, size[0], self._rows.tokens.shape[1] - 1)
        return states.graphed(size[0], metas[0])

    def _capture_verification(self, size: Size, adapters: bool) -> None:
        runs = self._runs_of(size)
        with self._recording() as graph:
            self._launch_layers(size, adapters, drafts=True, runs=runs)
        self._verifications[size, adapters] = graph
        if runs is not None:
            with self._recording() as replay:
                runs.replay()
            runs.settle = replay.replay
            self._state_runs[size, adapters] = runs

    def _capture_choice(self, entries: int, mixed: bool, how: How) -> None:
        first = None
        if how == "masked":
            with self._recording() as first:
                samples = self._logits(entries, mixed, how)
            with self._recording() as graph:
                tokens = self._sample(*samples, how).tokens
        else:
            with self._recording() as graph:
                tokens = self._sample(*self._logits(entries, mixed, how), how).tokens
        # Buffers between the two graphs can be in the pool: only other graphs of the pool overwrite
        # them, and none is launched in between.
        self._choices[entries, mixed, how] = _Choice(graph, tokens, first)

    @contextmanager
    def _recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture the `with` block as a CUDA graph, and yield the graph.

        Nothing else may run meanwhile. Missing kernels are compiled first.
        """
        graph = torch.cuda.CUDAGraph()
        # Checks only this thread's calls, as another thread may be loading an adapter.
        with (
            torch.inference_mode(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            yield graph
        self._pool = graph.pool()

    def _launch_layers(
        self, size: Size, adapters: bool, drafts: bool = False, runs: GraphRuns | None = None
    ) -> list[AttentionMeta]:
        """Launch a padded step up to its hidden states; return the AttentionMeta of each KV group.

        drafts: whether the step verifies drafts.
        runs: the step's `GraphRuns`, for recurrent layers; each run is a decode with its drafts.
        """
        forward, stage = self._forward, self._forward.model.stage
        entries, num_tokens = size
        mixed = num_tokens > entries
        max_kv_len = self._rows.tokens.shape[1] - 1
        layout = entries, num_tokens, entries, max_kv_len
        token_ids, metas = self._inputs.lay_out(*layout, runs=drafts)
        for meta in metas:
            meta.state_runs = None if runs is None else runs.runs
        own: list[AttentionMeta] = []
        if self._own_inputs is not None:
            _, own = self._own_inputs.lay_out(*layout)
        if adapters:
            assert forward.lora is not None
            for meta in (*metas, *own):
                meta.lora = forward.lora.graph_step(num_tokens)
        divided = (None, own) if own else None
        if stage.alone:
            hidden, out = forward.run(token_ids, metas, own=divided), self._hidden
        else:
            entered = self._entered[:num_tokens]
            if stage.first:
                entered = forward.model.enter(token_ids, metas[0].positions)
            hidden, out = forward.run(token_ids, metas, entered, own=divided), self._handed_on
        if self._drafter:
            tapped = forward.tapped()
            self._every[:num_tokens].copy_(hidden if tapped is None else tapped)
        if mixed and stage.last:
            torch.index_select(hidden, 0, self._inputs.last[:entries], out=out[:entries])
        else:
            out[: len(hidden)].copy_(hidden)
        return metas


def _replayed(replay: Callable[[], None], out: Tensor) -> Tensor:
    replay()
    return out
