"""Experts spread over ranks: texts are those of one rank, and when they are spread."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.config.quantized import Quantized, Scheme
from engine.config.rank_checks import spreads_experts
from engine.errors import ConfigError
from engine.models.registry import build_model
from engine.parallel.group import TensorParallelGroup
from engine.resolve import resolve
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.process.ranked import (
    config_of,
    everything,
    logprobs_of,
    save_with_bytes,
    serve,
    start,
    told,
)
from tests.engine.process.test_packed_ranks import made

SIZES = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_with_bytes(folder, "qwen3_moe", num_attention_heads=4, num_key_value_heads=2, **SIZES)
    return folder


def test_texts_are_those_of_one_rank(model: Path, two_cores: None) -> None:
    """Bugs: a token's experts on another rank are left out, or computed with one that is here; a
    rank reads all experts, or refuses those of others as tensors that are too many; the memory
    that is planned is that of all experts."""
    requests = [message for message in everything({"model": model}) if not message.adapter]
    outputs, weights = [], []
    for ranks in (1, 2):
        core, others = start(config_of(model, tensor_parallel=ranks, max_loras=0))
        runner: Any = core._runner
        ours = (runner if others is None else runner._runner).model
        stacks = [stack for layer in ours.layers for stack in layer.mlp.block.stacks]
        assert {stack.spec.count for stack in stacks} == {6 // ranks}
        weights.append(sum(stack.num_bytes for stack in stacks))
        outputs.append(serve(core, requests))
        if others is not None:
            others.close()
    assert 2 * weights[1] == weights[0]
    assert told(outputs[0]) == told(outputs[1])
    for id, output in outputs[0].items():
        close = pytest.approx(logprobs_of(output), abs=1e-4)
        assert logprobs_of(outputs[1][id]) == close


@torch.inference_mode()
def test_files_in_fewer_bits(tmp_path: Path) -> None:
    """Bug: what another rank has of an expert beside its codes, scales and zero points, is refused
    as a tensor that no layer takes."""
    sizes = {**SIZES, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    sizes["moe_intermediate_size"] = 64
    folder = made(tmp_path / "model", "awq", ("mlp.gate",), num_hidden_layers=1, **sizes)
    config, kernels = ModelConfig.from_folder(folder), kernels_for("cpu")
    x, (weights, ids) = torch.randn(9, 256), torch.rand(9, 8).topk(2)

    def given(rank: int, size: int) -> Tensor:
        group = TensorParallelGroup(rank, size)
        model = build_model(
            config, torch.bfloat16, "cpu", kernels, group=group, spread_experts=size > 1
        )
        load_weights(model, folder)
        (stack,) = model.layers[0].mlp.block.stacks  # type: ignore[attr-defined]
        return stack.apply(x, weights, ids.int(), None)  # type: ignore[no-any-return]

    torch.testing.assert_close(given(0, 2) + given(1, 2), given(0, 1))


def test_when_they_are_spread(model: Path) -> None:
    """Bugs: thin slices of experts by default; a width or a group that cannot be divided is refused
    although whole experts could be had; what was asked for is not done."""
    config = ModelConfig.from_folder(model)
    assert config.experts is not None

    def spread(ranks: int, count: int, size: int, group: int = 0, asked: Any = None) -> bool:
        experts = replace(config.experts, count=count, size=size)  # type: ignore[type-var]
        quantized = Quantized("gptq", (((), Scheme("gptq", group=group)),)) if group else None
        return spreads_experts(replace(config, experts=experts, quantized=quantized), ranks, asked)

    assert not spread(1, 128, 768) and not spread(2, 128, 768) and not spread(4, 128, 768)
    assert spread(8, 128, 768), "many ranks"
    assert spread(4, 128, 192), "48 columns"
    assert spread(4, 32, 1442), "a width that four do not divide"
    assert spread(4, 128, 768, 128) and not spread(2, 128, 768, 128), "groups"
    assert not spread(8, 60, 1408), "60 experts are not for 8 ranks"
    assert spread(2, 128, 768, asked=True) and not spread(8, 128, 768, asked=False)


@pytest.mark.parametrize(
    ("model_type", "sizes", "options", "why"),
    [
        ("qwen3_moe", SIZES, {"tensor_parallel": 4}, "6 experts of .* tensor_parallel 4"),
        ("llama", {}, {"tensor_parallel": 2}, "has no experts"),
        ("llama", {}, {}, "tensor_parallel, which is 1"),
    ],
)
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, sizes: dict[str, int],
    options: dict[str, int], why: str,
) -> None:  # fmt: skip
    """Bug: an option that nothing becomes of."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    save_checkpoint(tmp_path, model_type, num_attention_heads=8, num_key_value_heads=4, **sizes)
    with pytest.raises(ConfigError, match=why) as caught:
        resolve(
            EngineConfig(model=str(tmp_path), device="cpu", expert_parallel=True, **options)  # type: ignore[arg-type]
        )
    assert caught.value.param == "expert_parallel"
