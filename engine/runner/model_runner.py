"""ModelRunner: launches a batch, and returns a DeviceResult to wait for.

 prepare rows -> launch/launchers.py: layers, hidden states -> step_sampler.py: logits, tokens
 -> drafts/drafting.py: drafts, where a model computes them

Every line of this path runs once a step, and nothing in `launch` may wait for the device (no
.item(), .cpu(), .tolist(), no indexing by a boolean mask). Code that runs only at the start is in
warm_up.py. The timeline on CUDA, one batch ahead:

 host    launch n+1 | wait n | publish n | schedule n+2 | launch n+2 | wait n+1 | ...
 device  ... step n ........ | step n+1 ............................ | step n+2

The next token of a request is read from its row on the device (kernels/batch.py), so that step n+1
does not need the host to know the tokens of step n.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, NewRow, OutOfMemory, PrefixCopy
from engine.lora.virtual_tokens import VirtualTokensDevice
from engine.models.decoder import Decoder
from engine.runner.caches.block_pages import BlockPages
from engine.runner.caches.host_copies import Copies
from engine.runner.drafts.drafting import Drafting
from engine.runner.forward import ModelForward
from engine.runner.launch.graphs import StepGraphs
from engine.runner.launch.launchers import (
    ComingHidden,
    EagerStep,
    GraphStep,
    LayersLauncher,
    ProgramStep,
    StageStep,
    StepLauncher,
)
from engine.runner.launch.programs import StepPrograms
from engine.runner.staged_result import StagedResult
from engine.sampling.device_result import DeviceResult
from engine.sampling.step_sampler import Hidden, StepSampler


class ModelRunner:
    """The runner of a model's batches on one device: rows, KV cache, launcher and sampler."""

    def __init__(
        self,
        forward: ModelForward,
        sampling: StepSampler,
        prompts: VirtualTokensDevice | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """Set up the runner.

        prompts: the virtual tokens of adapters.
        drafting: computes drafts after each step.
        """
        self.drafting = drafting
        self.forward = forward
        self.sampling = sampling
        self.model, self.rows, self.kv = forward.model, forward.rows, forward.kv
        self.lora, self.link = forward.lora, forward.link
        self._prompts = prompts
        self.host: Copies | None = None  # set by an engine with a host tier
        self.moved: Copies | None = None  # set by an engine whose steps wait for moved blocks
        self.graphs: StepGraphs | None = None  # set by `warm_up.capture_graphs`
        # Programs of decodes on the CPU; an encoder has none.
        self.programs: StepPrograms | None = None
        recordable = not forward.cuda and forward.own is None and self.model.group.recordable
        recordable &= not self.model.taps  # programs do not copy layer inputs for a drafter
        self.eager = EagerStep(forward)
        layers: LayersLauncher = self.eager
        if recordable and isinstance(self.model, Decoder):
            self.programs = StepPrograms(
                self.model, self.rows, self.kv, leaves=drafting is None or not drafting.reads_states
            )
            layers = ProgramStep(forward, self.programs, self.eager)
        self.launcher: StepLauncher = self._on_stage(layers)

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Run steps as CUDA graphs from now on, if a graph fits them."""
        self.graphs = graphs
        self.launcher = self._on_stage(GraphStep(self.forward, graphs, self.sampling, self.eager))

    def set_pages(self, pages: BlockPages) -> None:
        """Register the block tables and copies that may read blocks with growing KV memory."""
        if self.forward.cuda:
            pages.tables = [self.rows.block_table, self.forward.inputs.block_table]
            if self.drafting is not None:
                pages.tables += self.drafting.tables
        pages.copying = lambda: any(c is not None and c.storing for c in (self.host, self.moved))

    def _on_stage(self, layers: LayersLauncher) -> StepLauncher:
        if self.link is None:
            return layers
        return StageStep(self.forward, self.link, self.sampling, layers)

    def launch(self, batch: Batch) -> DeviceResult | StagedResult:
        """Launch a step. The call returns at once on CUDA, and on the CPU after this stage's
        layers.

        Raises OutOfMemory.
        """
        try:
            return self._launch(batch)
        except torch.OutOfMemoryError as error:
            message = str(error)
        # raised outside the except block, as torch's error keeps the step's tensors alive
        raise OutOfMemory(message)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> DeviceResult | StagedResult:
        if self.host is not None:
            self.host.before(batch)
        if self.moved is not None:
            self.moved.before(batch)
        if batch.new_rows:
            self._set_rows(batch.new_rows)
        images, encode_seconds = self.forward.images, None
        if images is not None:
            if batch.images or batch.dropped_images:
                images.encode(batch.images, batch.dropped_images)
            encode_seconds = images.timer()
        if batch.prefixes:
            self._copy_prefixes(batch.prefixes)
        if self.forward.state_runs is not None:
            self.forward.state_runs.settle(batch.settled, batch)
        if self.kv.states is not None and (batch.saved_states or batch.resumed_states):
            self.kv.states.save(batch.saved_states)
            self.kv.states.resume(batch.resumed_states)
        if self.drafting is not None:
            self.drafting.begin(batch)
        samples = self.sampling.samples_of(batch)

        def sample(hidden: Hidden) -> DeviceResult:
            result = self.sampling.launch(batch, samples, hidden)
            result.encode_seconds = encode_seconds
            return result

        hidden = self.launcher.launch(batch)
        result: DeviceResult | StagedResult
        if hidden is None:
            result = self.sampling.launch_nothing(batch.step)
        elif isinstance(hidden, ComingHidden):
            receive = hidden.receive
            result = StagedResult(lambda: sample(receive()))
        else:
            result = sampled = sample(hidden)
            if self.drafting is not None:
                self._draft(self.drafting, batch, hidden, sampled)
        # launched after the step, which then need not wait for the encode
        if images is not None and batch.ahead_images:
            images.encode(batch.ahead_images)
        return result

    def _draft(
        self, drafting: Drafting, batch: Batch, hidden: Hidden, result: DeviceResult
    ) -> None:
        """Launch the drafter after the step's sampling, which may have to wait for masks."""

        def draft() -> None:
            metas, read = hidden.metas or (), hidden.read
            states = hidden.states if hidden.every is None else hidden.every
            assert metas or read is not None
            drafting.add_to(result, drafting.launch(batch, metas, states, read))

        sample = result.unsampled
        if sample is None:
            draft()
            return

        def then(masks: NDArray[np.int32]) -> None:
            sample(masks)
            with torch.inference_mode():
                draft()

        result.unsampled = then

    def _set_rows(self, new_rows: Iterable[NewRow]) -> None:
        """Assign rows to new requests."""
        for new in new_rows:
            self.sampling.set_row(new)
            self.forward.set_row(new)
            if new.num_virtual:
                assert self._prompts is not None
                self._prompts.name(new)

    def _copy_prefixes(self, prefixes: Sequence[PrefixCopy]) -> None:
        """Launch the copies of adapters' prefixes into this rank's blocks."""
        assert self._prompts is not None
        if self.forward.own is not None:
            rank = self.forward.own.rank
            prefixes = [prefix for prefix in prefixes if prefix.kv_rank == rank]
        if prefixes:
            self._prompts.copy(prefixes, self.kv.block_size, self.kv.write_entries)

    def recover(self) -> bool:
        """Free the memory of a step that raised, and drop all images.

        Returns False if the device is lost: after an error such as an illegal access, every later
        call in the CUDA context raises it.
        """
        if self.forward.images is not None:
            self.forward.images.clear()
        if self.forward.state_runs is not None:
            self.forward.state_runs.forget()
        if self.forward.cuda:
            try:
                torch.cuda.synchronize(self.forward.device)
                torch.cuda.empty_cache()
            except RuntimeError:
                return False
        return True

    def shrink(self, num_blocks: int) -> None:
        """Replace the KV cache by `num_blocks` empty blocks; no step may be in flight."""
        if self.host is not None:
            self.host.wait()
        if self.graphs is not None:
            self.graphs.forget()  # graphs contain the old blocks' addresses
        if self.programs is not None:
            self.programs.forget()
        self.kv.shrink(num_blocks)
        if self.drafting is not None:
            self.drafting.shrink(num_blocks)
