"""Decodes in CUDA graphs, without a GPU: a replay launches the kernels of the graph again.

They run in Triton's interpreter. What only a device can tell is in tests/parity/test_gpu.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch, StepResult
from engine.runner import inputs
from engine.runner.forward import ModelForward
from engine.runner.inputs import CudaInputs
from engine.runner.launch.graphs import How, Size, StepGraphs
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.sampling.step_sampler import StepSampler
from engine.sampling_params import SamplingParams
from tests.batches import BLOCK_SIZE, new_row
from tests.engine.test_image_steps import IMAGES, SIZE, TOKENS, qwen3_vl, with_images
from tests.engine.test_runner import CONFIG, CPU, NUM_ROWS, make_runner, prompt, step
from tests.kernels.oracle import DEVICE
from tests.kernels.test_batch import Unpinned

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(DEVICE != "cpu", reason="emulates a device"),
]


@dataclass
class Replay:
    """A graph whose replay calls a function."""

    replay: Any


@dataclass
class Choice:
    graph: Replay
    tokens: torch.Tensor
    logits: Replay | None = None


class Replayed(StepGraphs):
    """Step graphs of decodes without a GPU.

    log: the size of each forward pass, and how each choice was made.
    """

    log: list[Size | How]

    def prepare(self) -> None:
        self.log, self._mixed = [], {}
        self._allocate()

    def _capture_forward(self, size: Size, adapters: bool) -> None:
        def replay() -> None:
            self.log.append(size)
            self._launch_layers(size, adapters)

        self._forwards[size, adapters] = Replay(replay)  # type: ignore[assignment]

    def _capture_choice(self, entries: int, mixed: bool, how: How) -> None:
        tokens = torch.zeros(entries, dtype=torch.int64)
        between: list[Any] = []  # as of one graph and the next

        def logits() -> None:
            between[:] = self._logits(entries, mixed, how)

        def choose() -> None:
            self.log.append(how)
            if how != "masked":
                logits()
            tokens.copy_(self._sample(*between, how).tokens)

        choice = Choice(Replay(choose), tokens, Replay(logits) if how == "masked" else None)
        self._choices[entries, mixed, how] = choice  # type: ignore[assignment]


def graphed(monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, Replayed]:
    """Return a runner with the inputs of CUDA, over the same model as `make_runner`, and its
    graphs."""
    monkeypatch.setattr(inputs, "_Staging", Unpinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    eager = make_runner()
    rows = eager.rows
    cuda = CudaInputs(rows, BLOCK_SIZE, 64, CPU)
    forward = ModelForward(eager.model, eager.forward.kernels, rows, eager.kv, cuda)
    forward.cuda = True
    sampler = Sampler(NUM_ROWS + 1, CONFIG.vocab_size, CPU)
    runner = ModelRunner(forward, StepSampler(eager.model, sampler, rows.tokens))
    graphs = Replayed(forward, runner.sampling, [1, 2, 4], 64)
    graphs.prepare()
    runner.use_graphs(graphs)
    return runner, graphs


def test_images_are_launched_kernel_by_kernel_and_decodes_behind_them_in_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bugs: a graph embeds an image's token ids; a decode in a graph stands at its index."""
    monkeypatch.setattr(inputs, "_Staging", Unpinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    seeing = qwen3_vl(tmp_path)
    cuda = CudaInputs(seeing.rows, SIZE, 64, CPU)
    kernels, kv = seeing.forward.kernels, seeing.forward.kv
    forward = ModelForward(
        seeing.model, kernels, seeing.rows, kv, cuda, images=seeing.forward.images
    )
    runner = ModelRunner(forward, seeing.runner.sampling)
    graphs = Replayed(forward, runner.sampling, [1, 2], 64)
    graphs.prepare()
    runner.use_graphs(graphs)
    ids, text = [*TOKENS], [5, 6, 7]
    new = [with_images(0, ids, IMAGES), with_images(1, text, ())]
    batch = seeing.batch([(0, 0, len(ids)), (1, 0, len(text))], new_rows=new, images=[*IMAGES])
    for _ in range(3):
        result = runner.launch(batch).wait()
        for row, token in zip((ids, text), result.tokens, strict=True):
            assert token == int(seeing.wanted(row, IMAGES if row is ids else ())[-1].argmax())
            row.append(token)
        batch = seeing.batch([(0, len(ids) - 1, 1), (1, len(text) - 1, 1)])
    assert graphs.log == [(2, 2), "greedy"] * 2


def outputs_of(runner: ModelRunner) -> list[StepResult]:
    """Return the results of steps whose rows are greedy, or want log-probabilities, or have a
    mask."""
    greedy = SamplingParams(temperature=0.0)
    scored = SamplingParams(temperature=0.0, logprobs=2)
    new = [new_row(row, prompt(9 + row), scored if row == 2 else greedy) for row in range(3)]
    results = [
        step(runner, *((row, 0, 9 + row, True) for row in range(3)), new_rows=tuple(new)),
        step(runner, (0, 9, 1, True), (1, 10, 1, True)),
        step(runner, (1, 11, 1, True)),
        step(runner, (0, 10, 1, True), (1, 12, 1, True), (2, 11, 1, True)),
    ]
    masked = Batch(5, [0, 1], [11, 13], [1, 1], [True, True], num_decodes=2, masked=[1])
    pending = runner.launch(masked)
    masks = np.zeros((1, -(-CONFIG.vocab_size // 32)), np.int32)
    masks[0, 1] = 1 << 2
    pending.sample(masks)
    results.append(pending.wait())
    return results


def test_decodes_in_graphs_are_those_of_kernels_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bugs: padding is sampled in place of an entry; a choice reads another step's rows, logits or
    masks; rows that want more than a choice get none; a step that fits no graph is not launched."""
    wanted = outputs_of(make_runner())
    runner, graphs = graphed(monkeypatch)
    results = outputs_of(runner)
    assert graphs.log == [(2, 2), "greedy", (1, 1), "greedy", (4, 4), (2, 2), "masked"]
    assert [result.tokens for result in results] == [result.tokens for result in wanted]
    assert results[-1].tokens[1] == 34, "the only token that the mask allows"
    for result, want in zip(results, wanted, strict=True):
        assert result.logprobs.keys() == want.logprobs.keys() and not result.errors
        for entry, item in result.logprobs.items():
            assert (item.token_id, item.rank) == (want.logprobs[entry].token_id, 1)
            assert item.logprob == pytest.approx(want.logprobs[entry].logprob, abs=1e-4)
