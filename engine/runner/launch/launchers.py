"""Launchers: implementations of `launch(batch)`, which runs a step up to its hidden states.

 EagerStep      without CUDA graphs
 ProgramStep    decodes on the CPU, as a recorded program
 GraphStep      a step in a CUDA graph, of a whole model or of a pipeline stage
 StageStep      one of these over a stage's layers, then the send to the next stage

A GraphStep passes steps without a graph to an EagerStep.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.batch import Batch
from engine.parallel.link import Link
from engine.runner.caches.kv_cache import in_views
from engine.runner.forward import ModelForward
from engine.runner.launch.graphs import StepGraphs
from engine.runner.launch.programs import StepPrograms
from engine.sampling.step_sampler import Hidden, StepSampler


@dataclass(slots=True)
class ComingHidden:
    """The future hidden states of a step that other pipeline stages still compute.

    receive: a function that waits for the last stage and returns the hidden states.
    """

    receive: Callable[[], Hidden]


class LayersLauncher(Protocol):
    """An interface that launches the layers of a model or a pipeline stage."""

    def launch(self, batch: Batch) -> Hidden:
        """Launch a step; return its hidden states, after the last layer of this stage."""
        ...


class StepLauncher(Protocol):
    """An interface that launches a step of a model or a pipeline stage."""

    def launch(self, batch: Batch) -> Hidden | ComingHidden | None:
        """Launch a step and return its hidden states; None if another stage samples."""
        ...


class EagerStep:
    """The launcher of steps without CUDA graphs."""

    def __init__(self, forward: ModelForward) -> None:
        self._forward = forward

    def launch(self, batch: Batch) -> Hidden:
        """Launch a step and return its hidden states; see `LayersLauncher.launch`."""
        forward = self._forward
        step = forward.assemble(batch)
        entered = None if forward.link is None else forward.stage_input(step)
        forward.model.routes.begin(forward.wants_routes(batch))
        states = forward.run(step.token_ids, step.metas, entered, step.own, step.images)
        places, every, routes = (
            (step.sample_rows, step.sample_positions),
            forward.tapped(),
            forward.routes_of(batch),
        )
        return Hidden(states, places, step.last, metas=step.metas, every=every, routes=routes)


class ProgramStep:
    """The launcher of decodes on the CPU as a recorded program; see programs.py.

    Other steps, steps that cannot be recorded, and drafts of models with recurrent states are
    launched without a program.
    """

    def __init__(self, forward: ModelForward, programs: StepPrograms, otherwise: EagerStep) -> None:
        self._forward = forward
        self._programs = programs
        self._otherwise = otherwise

    def launch(self, batch: Batch) -> Hidden:
        """Launch a step and return its hidden states; see `LayersLauncher.launch`."""
        forward, programs = self._forward, self._programs
        if forward.wants_routes(batch):
            return self._otherwise.launch(batch)
        step = forward.assemble(batch)
        entered = None if forward.link is None else forward.stage_input(step)
        states, are_logits = None, False
        alone = batch.num_decodes == len(batch.rows) and step.metas[0].state_runs is None
        if alone and not forward.sees_images(batch):
            views = in_views(forward.kv.groups, step.metas, forward.kv.block_size)
            states = programs.through(step.token_ids, views, entered)
        if states is None:
            states = forward.run(step.token_ids, step.metas, entered, step.own, step.images)
        elif programs.gives_logits:
            are_logits = True
        elif entered is None:
            states = forward.model.leave(states)
        places = step.sample_rows, step.sample_positions
        return Hidden(
            states, places, step.last, are_logits, metas=step.metas, every=forward.tapped()
        )


class GraphStep:
    """The launcher of steps as CUDA graphs; see graphs.py.

    In models with recurrent states, steps with drafts have separate graphs or none.
    """

    def __init__(
        self,
        forward: ModelForward,
        graphs: StepGraphs,
        sampling: StepSampler,
        otherwise: EagerStep,
    ) -> None:
        self._forward = forward
        self._graphs = graphs
        self._sampling = sampling
        self._otherwise = otherwise

    def launch(self, batch: Batch) -> Hidden:
        """Launch a step and return its hidden states; see `LayersLauncher.launch`."""
        size = None
        if self._forward.sees_images(batch) or self._forward.wants_routes(batch):
            return self._otherwise.launch(batch)
        # The graph returns only the hidden states of sampling entries.
        if batch.num_decodes == len(batch.rows) or not self._sampling.wants_every_state(batch):
            size = self._graphs.size_of(batch)
        if batch.drafts and self._forward.state_runs is not None and size is not None:
            size = size if self._graphs.verifies(batch, size) else None
        if size is None:
            return self._otherwise.launch(batch)
        return self._graphs.launch(batch, size)


class StageStep:
    """The launcher of a pipeline stage's layers in a step.

    The first stage receives the last stage's output only when a step is sampled, so that further
    steps can be launched meanwhile.
    """

    def __init__(
        self, forward: ModelForward, link: Link, sampling: StepSampler, layers: LayersLauncher
    ) -> None:
        self._forward = forward
        self._link = link
        self._sampling = sampling
        self._layers = layers

    def launch(self, batch: Batch) -> ComingHidden | None:
        """Launch this stage's layers and send their output to the next stage.

        The first stage returns the last stage's future hidden states, other stages return None.
        """
        model, link = self._forward.model, self._link
        hidden = self._layers.launch(batch)
        states, last = hidden.states, hidden.last
        every = last is not None and self._sampling.wants_every_state(batch)
        if model.stage.last and last is not None and not every:
            # only the hidden states of sampling tokens are needed
            states = states.index_select(0, last)
        link.send(states)
        if not model.stage.first:
            return None
        count = batch.num_tokens if every else sum(batch.samples)

        def receive() -> Hidden:
            received = model.leave(link.receive(count))
            return Hidden(received, hidden.places, last if every else None)

        return ComingHidden(receive)
