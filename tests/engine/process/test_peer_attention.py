"""Attention divided by requests on GPUs, in CUDA graphs and without: two processes on one GPU, as
in test_peer_ranks.py. `python -m pytest -m gpu tests/engine/process/test_peer_attention.py`"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.messages import EngineRequest
from engine.runner.launch.graphs import StepGraphs
from tests.engine.process.ranked import (
    add_adapters,
    everything,
    logprobs_of,
    model_and_adapters,
    save_with_bytes,
    serve,
    start,
    told,
)
from tests.engine.process.test_peer_ranks import LATENT, ON_ONE_GPU, OnOneGpu, on_gpu, one_gpu
from tests.fakes import Output

__all__ = ["one_gpu"]  # a fixture

ALL_PAY = """
from engine.runner.launch.graphs import StepGraphs
StepGraphs._device_seconds = lambda *size: 0.0
"""


class AllRecorded(OnOneGpu):
    """Ranks that record every CUDA graph, as two processes on one GPU cannot tell which ones
    pay."""

    PROGRAM = ("-c", ALL_PAY + ON_ONE_GPU)


@dataclass(frozen=True)
class Alone:
    """A model, and the answers of a single rank to requests."""

    folders: dict[str, Path]
    requests: list[EngineRequest]
    outputs: dict[int, Output]


def config_for(folder: Path, latents: bool, size: int, graphs: bool) -> EngineConfig:
    return on_gpu(
        folder, num_blocks=11 - 2 * size, tensor_parallel=size, cuda_graphs=graphs,
        attention_data_parallel=size > 1, max_num_batched_tokens=96, max_loras=0 if latents else 2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Alone]:
    """Return a function that serves a model by one rank, once for each kind of attention."""

    @cache
    def serve_alone(latents: bool) -> Alone:
        folder = tmp_path_factory.mktemp("model")
        if latents:
            save_with_bytes(folder, "deepseek_v3", hidden_size=64, **LATENT)
            folders = {"model": folder}
        else:
            folders = model_and_adapters(folder, head_dim=16, hidden_size=64)
        requests = [message for message in everything(folders) if not (latents and message.adapter)]
        core, _ = start(config_for(folder, latents, 1, False))
        add_adapters(core, folders)
        return Alone(folders, requests, serve(core, requests))

    return serve_alone


@pytest.mark.gpu
@pytest.mark.parametrize(("latents", "graphs"), [(False, True), (True, True), (False, False)])
def test_texts_are_those_of_one_rank(
    one_gpu: None,
    alone: Callable[[bool], Alone],
    monkeypatch: pytest.MonkeyPatch,
    latents: bool,
    graphs: bool,
) -> None:
    """Bugs: a graph reads where an earlier step's requests of this rank were; another rank's tokens
    write keys, or are added twice; a chunk in a graph has another rank's adapters; where there are
    no graphs, a rank's own adapters are laid out over those of all tokens."""
    monkeypatch.setattr(StepGraphs, "_device_seconds", lambda *size: 0.0)
    wanted = alone(latents)
    config = config_for(wanted.folders["model"], latents, 2, graphs)
    core, others = start(config, AllRecorded)
    add_adapters(core, wanted.folders)
    outputs = serve(core, wanted.requests)
    runner = core._runner._runner
    assert others is not None and (runner.graphs is not None) == graphs
    if runner.graphs is not None:
        sizes = {size for size, adapters in runner.graphs._forwards if adapters or latents}
        assert any(entries == tokens for entries, tokens in sizes)
        assert any(entries < tokens for entries, tokens in sizes)
    runner.model.group.check()
    others.close()
    assert told(wanted.outputs) == told(outputs)
    for id, output in wanted.outputs.items():
        assert logprobs_of(outputs[id]) == pytest.approx(logprobs_of(output), abs=1e-3)
