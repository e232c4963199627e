"""Mixtures of experts: how the CPU keeps them, and what is wrong with a file or an adapter."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.quantization.linear_experts import ExpertsApart
from engine.quantization.method import ExpertsSpec
from engine.quantization.registry import linear_method
from engine.weights.parameter import Source
from kernels.cpu.codegen.compiler import has_int8
from kernels.dispatch import kernels_for
from kernels.experts import reference
from kernels.experts.reference import ExpertWeights
from kernels.experts.routing import CLAMPED
from tests.engine.models.checkpoints import load_model
from tests.parity.cases import EXPERTS, save

COUNT, SIZE, HIDDEN, CHOSEN = 5, 64, 128, 2
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def filled(
    quantization: str, act: str, deterministic: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, Any, ExpertWeights]:
    """Return a method, its finished state, and the expert weights that the state was made of."""
    method = linear_method(quantization, kernels_for("cpu", deterministic), "cpu")
    biases = (Source("b", (1,)),) if act == CLAMPED else ()
    spec = ExpertsSpec(
        "experts", COUNT, SIZE, HIDDEN, (), (), biases, biases,
        dtype, torch.device("cpu"), act, 0.5, False,
    )  # fmt: skip
    torch.manual_seed(0)
    stack, parameters = method.create_experts(spec)
    for parameter in parameters:
        parameter.tensor.normal_(0.0, 0.3)
    stored = {
        name: None if (tensor := getattr(stack, name)) is None else tensor.double()
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
    }
    return method, method.finish_experts(stack), replace(stack, **stored)


@pytest.mark.parametrize(
    ("quantization", "dtype", "bound"),
    [
        ("none", torch.float16, 1e-5),
        ("none", torch.bfloat16, 8e-3),  # rows may be rounded to bfloat16 before either product
        pytest.param("int8", torch.bfloat16, 0.02, marks=pytest.mark.slow),
        pytest.param("uint4-32", torch.bfloat16, 0.2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("act", ["silu", CLAMPED])
def test_packed_on_the_cpu(quantization: str, dtype: torch.dtype, bound: float, act: str) -> None:
    """Each expert's rows with another's weights; the sum into another token's row."""
    if quantization == "int8" and not has_int8():
        pytest.skip("needs AVX512-VNNI")
    method, state, weights = filled(quantization, act, deterministic=False, dtype=dtype)
    assert isinstance(state, ExpertsApart)
    for tokens in (1, 9):
        x, residual = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
        scale, ids = torch.rand(tokens, COUNT).topk(CHOSEN)
        ids = ids.int()
        want = reference.experts(x.double(), scale.double(), ids, weights, residual.double())
        got = method.apply_experts(state, x, scale, ids, residual)
        assert got is residual
        assert float((got - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("act", ["silu", CLAMPED])
def test_deterministic_rows_on_the_cpu(act: str) -> None:
    """A token's numbers that depend on which others meet its experts."""
    method, state, _ = filled("none", act, deterministic=True)
    x = torch.randn(13, HIDDEN)
    scale, ids = torch.rand(13, COUNT).topk(CHOSEN)
    whole = method.apply_experts(state, x, scale, ids.int(), None)
    for at in range(13):
        row = slice(at, at + 1)
        alone = method.apply_experts(state, x[row].clone(), scale[row], ids[row].int(), None)
        assert torch.equal(alone, whole[row])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: 7 of 6 experts cannot be chosen"),
        ({"num_experts": None}, "num_experts: is missing|num_local_experts: is missing"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: must be a positive integer"),
        ({"n_group": 4}, "n_group: 2 of 6 experts cannot be chosen from 1 of 4 groups"),
        ({"use_sliding_window": True}, "use_sliding_window: True is not supported"),
    ],
)
def test_contradictions(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A file that contradicts itself becomes an index error in the first step."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **changes}))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_folder(tmp_path)


def test_a_stack_of_another_shape(tmp_path: Path) -> None:
    """Of tensors that hold all experts of a layer, too, name and shapes are told."""
    save(EXPERTS["granite moe"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["intermediate_size"] = 95
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"input_linear.weight has shape \[6, 192, 64\].*190"):
        load_model(tmp_path)
