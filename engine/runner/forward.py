"""ModelForward: the forward pass of a step, from a batch to the output of the last layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, NewRow
from engine.lora.device import LoraDevice
from engine.models.image_rows import ImageRows
from engine.models.registry import Model
from engine.parallel.link import Link
from engine.runner.caches.kv_cache import KVCache, in_views
from engine.runner.images import StepImages
from engine.runner.inputs import CpuInputs, CudaInputs, DeviceStep
from engine.runner.request_rows import RequestRows
from engine.runner.state_runs import StateVerification
from kernels.dispatch import Kernels
from kernels.metadata import AttentionMeta, OwnTokens


class OwnInputs:
    """The inputs of requests whose KV is on this rank, with data-parallel attention."""

    def __init__(self, inputs: Any, rank: int, rows: RequestRows) -> None:
        """Set up the inputs.

        inputs: CpuInputs, or separate CudaInputs.
        """
        self.inputs = inputs
        self.rank = rank
        self._pad_row = rows.pad_row
        self._device = rows.tokens.device
        self._kv_rank = np.zeros(rows.pad_row, dtype=np.int64)  # KV rank of each row

    def set_row(self, new: NewRow) -> None:
        """Record which rank has the KV of a row's request."""
        self._kv_rank[new.row] = new.kv_rank

    def padded(self, batch: Batch) -> Batch:
        """Return a copy of the batch in which entries whose KV another rank has are padding."""
        here, pad = self._kv_rank[batch.rows] == self.rank, self._pad_row
        rows = [row if own else pad for row, own in zip(batch.rows, here, strict=True)]
        starts = [start if own else 0 for start, own in zip(batch.starts, here, strict=True)]
        return Batch(batch.step, rows, starts, batch.lengths, batch.samples, batch.num_decodes)

    def assemble(
        self, batch: Batch, lora: LoraDevice | None
    ) -> tuple[Tensor | None, list[AttentionMeta]]:
        """Return `DeviceStep.own`: the tokens with KV on this rank, and their AttentionMetas."""
        here = self._kv_rank[batch.rows] == self.rank
        entries = np.flatnonzero(here)
        tokens = torch.from_numpy(np.flatnonzero(np.repeat(here, batch.lengths)))
        tokens = tokens.to(self._device, non_blocking=True)
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
        step: DeviceStep = self.inputs.assemble(own)
        if lora is not None:
            step.adapt(lora.step(own, beside=True))
        return tokens, step.metas


class ModelForward:
    """The forward pass of one model, or of a pipeline stage's layers, on one device.

    inputs: builds the inputs of steps.
    own: the inputs of this rank's requests, with data-parallel attention.
    lora: the LoRA adapters of the rows; None = adapters are not supported.
    link: the connection to the previous and the next pipeline stage.
    images: the images of the rows; None if the model takes no images.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        rows: RequestRows,
        kv: KVCache,
        inputs: CpuInputs | CudaInputs,
        own: OwnInputs | None = None,
        lora: LoraDevice | None = None,
        link: Link | None = None,
        images: StepImages | None = None,
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.rows = rows
        self.kv = kv
        self.inputs: Any = inputs
        self.own = own
        self.lora = lora
        self.link = link
        self.images = images
        self.device = rows.tokens.device
        # whether each row's request asks for routed experts
        self._routed = np.zeros(rows.pad_row, dtype=np.bool_)
        self._some_routed = False  # whether any request ever has
        self.state_runs: StateVerification | None = None  # set in models with recurrent states
        if kv.states is not None:
            self.state_runs = StateVerification(rows.pad_row, self.device)
        self.cuda = self.device.type == "cuda"

    def set_row(self, new: NewRow) -> None:
        """Assign a row to a new request."""
        if self.own is not None:
            self.own.set_row(new)
        if self.lora is not None:
            self.lora.set_row(new.row, new.lora_slot)
        if self.images is not None:
            self.images.set_row(new)
        self._routed[new.row] = new.params.return_routed_experts
        self._some_routed |= new.params.return_routed_experts

    def sees_images(self, batch: Batch) -> bool:
        """Whether some tokens of the step come before the end of their request's last image.

        CUDA graphs and programs support neither image embeddings nor the rotary positions of
        images.
        """
        return self.images is not None and self.images.within(batch)

    def wants_routes(self, batch: Batch) -> bool:
        """Whether a request of the step asks for the chosen experts of its tokens.

        CUDA graphs and recorded programs do not return these experts.
        """
        return self._some_routed and bool(self._routed[batch.rows].any())

    def routes_of(self, batch: Batch) -> list[tuple[int, Tensor]]:
        """Return (entry, chosen experts) of the last run, for entries whose requests ask for them.

        Experts are [length, num_layers, chosen] on the device.
        """
        if not self.model.routes.on:
            return []
        routes, at, wanted = self.model.routes.collect(self.model.config.num_layers), 0, []
        for entry, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            if self._routed[row]:
                wanted.append((entry, routes[at : at + length]))
            at += length
        return wanted

    def assemble(self, batch: Batch) -> DeviceStep:
        """Return the device tensors of a step."""
        step: DeviceStep = self.inputs.assemble(batch)
        if self.lora is not None:
            step.adapt(self.lora.step(batch))
        if self.own is not None:
            step.own = self.own.assemble(batch, self.lora)
        if self.images is not None:
            self.images.place(batch, step)
        if self.state_runs is not None:
            self.state_runs.lay_out(batch, step.metas)
        return step

    def stage_input(self, step: DeviceStep) -> Tensor:
        """Return the input of this stage's first layer [num_tokens, hidden_size].

        The first stage embeds the tokens, the others receive the output of the stage before.
        """
        if self.link is None or self.model.stage.first:
            return self.model.enter(step.token_ids, step.metas[0].positions, step.images)
        return self.link.receive(len(step.token_ids))

    def run_step(self, step: DeviceStep) -> Tensor:
        """Run the model on an assembled step; return its hidden states, see `run`."""
        return self.run(step.token_ids, step.metas, own=step.own, images=step.images)

    def tapped(self) -> Tensor | None:
        """Return the last run's layer inputs that a drafter reads, [num_tokens, taps *
        hidden_size].

        None if the drafter reads final hidden states.
        """
        model = self.model
        return torch.cat(model.tapped, dim=-1) if model.taps else None

    def run(
        self,
        token_ids: Tensor,
        metas: Sequence[AttentionMeta],
        entered: Tensor | None = None,
        own: tuple[Tensor | None, list[AttentionMeta]] | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Run the model; return the hidden states after the final norm [num_tokens, hidden_size].

        metas: one AttentionMeta for each KV group; this call plans their attention.
        entered: the input of this stage's first layer. The result is then the output of the stage's
            last layer.
        own, images: see DeviceStep.
        """
        layers, groups = self.kv.layers, self.kv.groups
        views = attending = in_views(groups, metas, self.kv.block_size)
        if self.own is not None:
            if own is None:  # in a warm-up all requests belong to this rank
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
            return self.model.through(entered, views, layers, images=images)
        return self.model.forward(token_ids, views, layers, images)
