"""Ranks whose sums go through the memory of GPUs. Where a machine has one GPU they are processes on
it: torch's symmetric memory takes them, and what NCCL would do, which does not, goes through that
memory too. Where it has two, the same tests run on both, with NCCL."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from engine import resolve
from engine.config.engine_config import EngineConfig
from engine.parallel import peer_group, rendezvous
from engine.parallel.peer_group import PeerGroup
from engine.parallel.ranks import Ranks
from kernels.all_reduce import LARGEST
from tests.engine.process.ranked import (
    add_adapters,
    config_of,
    everything,
    logprobs_of,
    model_and_adapters,
    save_with_bytes,
    serve,
    start,
    told,
)

ON_ONE_GPU = """
import os
import torch
from engine import resolve
from engine.parallel import rendezvous
resolve._device = lambda config, rank: torch.device("cuda", 0)
rendezvous.BACKEND = "gloo"
from engine.process import rank
os._exit(rank.main())
"""


class OnOneGpu(Ranks):
    PROGRAM = ("-c", ON_ONE_GPU)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setattr(resolve, "_device", lambda config, rank: torch.device("cuda", 0))
    monkeypatch.setattr(rendezvous, "BACKEND", "gloo")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(params=["one", pytest.param("two", marks=pytest.mark.two_gpus)])
def kind(request: pytest.FixtureRequest) -> Iterator[type[Ranks]]:
    """Yield the class of ranks that share the first GPU, or that have one each."""
    if request.param == "one":
        request.getfixturevalue("one_gpu")
    yield OnOneGpu if request.param == "one" else Ranks
    if dist.is_initialized():
        dist.destroy_process_group()


def on_gpu(folder: Path, **changes: object) -> EngineConfig:
    return msgspec.structs.replace(config_of(folder, **changes), device="cuda")


@pytest.mark.gpu
@pytest.mark.own_process
def test_texts_are_those_of_one_rank(kind: type[Ranks], tmp_path: Path) -> None:
    """Bugs: a graph that is replayed on one rank reads what another brought to an earlier step; a
    norm that was made with the sum of another layer; a best token of the wrong part of the
    vocabulary."""
    model = model_and_adapters(tmp_path, head_dim=16, hidden_size=64)
    requests = everything(model)
    outputs = []
    for size in (1, 2):
        core, others = start(on_gpu(model["model"], tensor_parallel=size), kind)
        add_adapters(core, model)
        outputs.append(serve(core, requests))
        runner = core._runner._runner if size > 1 else core._runner
        assert runner.graphs is not None and runner.graphs._forwards
        if others is not None:
            group = runner.model.group
            assert isinstance(group, PeerGroup)
            assert all(layer.mlp.block.down.group is group for layer in runner.model.layers)
            group.check()
            others.close()
        del core, runner
    assert told(outputs[0]) == told(outputs[1])
    for id, output in outputs[0].items():
        assert logprobs_of(outputs[1][id]) == pytest.approx(logprobs_of(output), abs=1e-3)


LATENT = {
    "kv_lora_rank": 128, "q_lora_rank": 96, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "num_key_value_heads": 4, "first_k_dense_replace": 2, "head_dim": 32,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.own_process
@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [("llama", {"num_key_value_heads": 1, "head_dim": 16}), ("deepseek_v3", LATENT)],
)
def test_attention_by_requests(
    kind: type[Ranks], tmp_path: Path, architecture: str, sizes: dict[str, Any]
) -> None:
    """Bug: a rank's own requests are laid out in memory that the step in flight still reads."""
    save_with_bytes(tmp_path, architecture, hidden_size=64, **sizes)
    requests = [message for message in everything({"model": tmp_path}) if not message.adapter]
    outputs = []
    for size in (1, 2):
        options = {"tensor_parallel": size, "attention_data_parallel": size > 1}
        config = on_gpu(tmp_path, max_loras=0, num_blocks=9 - 2 * (size - 1), **options)
        core, others = start(config, kind)
        outputs.append(serve(core, requests))
        if others is not None:
            core._runner._runner.model.group.check()
            others.close()
        del core
    assert told(outputs[0]) == told(outputs[1])
    for id, output in outputs[0].items():
        assert logprobs_of(outputs[1][id]) == pytest.approx(logprobs_of(output), abs=1e-3)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["plain", "deterministic"])
def test_stages_on_two_gpus(tmp_path: Path, options: dict[str, Any]) -> None:
    """Bug: activations reach the next GPU before they are written, or are written over while they
    are on their way."""
    model = model_and_adapters(tmp_path, head_dim=16, hidden_size=64)
    requests = everything(model)
    outputs = []
    for stages in (1, 2):
        config = on_gpu(model["model"], pipeline_parallel=stages, **options)
        core, others = start(config, Ranks)
        add_adapters(core, model)
        outputs.append(serve(core, requests))
        if others is not None:
            graphs = core._runner._runner.graphs
            assert graphs is not None and graphs._forwards and not graphs._choices
            others.close()
        del core
    dist.destroy_process_group()
    assert told(outputs[0]) == told(outputs[1])


def test_crossings_are_of_as_many_ranks_or_the_next_more() -> None:
    """Bug: a number of ranks that the table does not have."""
    for size, row in ((2, 2), (3, 4), (4, 4), (6, 8), (8, 8), (16, 8)):
        assert PeerGroup(0, size).crossings == peer_group.CROSSINGS[row]
    for few, most in peer_group.CROSSINGS.values():
        assert few <= most <= LARGEST
