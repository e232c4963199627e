"""What a step launches, operation by operation, recorded through the table of kernels: the fusions
that a model's speed rests on, and what they become where they do not fit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.lora.weights import LoraLayout
from engine.models.registry import Model, build_model
from engine.quantization.method import DenseCuda
from engine.quantization.registry import METHODS
from engine.weights import load_weights
from kernels.cpu.codegen.compiler import has_int8
from kernels.cpu.gemm.dense import PackedLinear
from kernels.dispatch import kernels_for
from kernels.metadata import LoraStep
from kernels.reference import Kernels
from tests.engine.models.checkpoints import Paged, save_checkpoint

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}
RANK = 16


class Recorder:
    """A back end that records which of its operations are called, GEMMs of the CPU included."""

    def __init__(self, kernels: Any, *, deterministic: bool = False) -> None:
        self.calls: list[str] = []
        self._kernels = kernels
        self.DETERMINISTIC = deterministic
        self.GATES = {name: self._noted(name, gate) for name, gate in kernels.GATES.items()}

    def __getattr__(self, name: str) -> Any:
        return self._noted(name, getattr(self._kernels, name))

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            self.calls.append(name)
            return function(*args, **keywords)

        return call

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def layers(model: Model) -> Iterator[Any]:
    return iter(model.layers)  # type: ignore[attr-defined]


def adapters_for(model: Model) -> LoraStep:
    """Return a step of five tokens with one adapter on every layer, for tokens 1 and 3."""
    linears = list(model.linears())
    layout = LoraLayout(linear.spec for linear in linears)
    for linear, place in zip(linears, layout.layers, strict=True):
        linear.lora = place
    torch.manual_seed(1)
    parts = {}
    for number, part in enumerate(layout.parts):
        a, b = torch.randn(RANK, part.in_features), torch.randn(part.out_features, RANK)
        parts[number] = (a / 8, b / 8)
    nothing = torch.empty(0)
    return LoraStep(
        nothing, nothing, 0, nothing, nothing, nothing, RANK,
        segments=[(0, torch.tensor([1, 3]))], parts=[parts],
    )  # fmt: skip


IDS = torch.tensor([5, 17, 99, 3, 64])


def logits(model: Model, lora: LoraStep | None) -> Tensor:
    """Return the logits of five tokens of a prompt."""
    paged = Paged(model)
    paged.kernels = model.kernels  # type: ignore[attr-defined]
    return paged.run((IDS, [3, 1], 0), lora=lora)[0]


def step(kernels: Recorder, model: Model, lora: LoraStep | None) -> tuple[list[str], Tensor]:
    """Return the calls of a step without the lookup of its plan, and its logits."""
    kernels.taken()
    out = logits(model, lora)
    return [call for call in kernels.taken() if call != "prepare"], out


def each_layer(model: Model, calls: list[str]) -> list[str]:
    return calls * len(list(layers(model)))


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    save_checkpoint(tmp_path, request.param, **{**SIZES, **MODELS[request.param]})
    return ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("checkpoint", MODELS, indirect=True)
def test_products_of_cuda(
    checkpoint: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a norm, a gate or a residual is launched apart from its product, and each layer of each
    step is slower; or a step with adapters drops one of them."""
    monkeypatch.setitem(METHODS, "none", {"cpu": DenseCuda})
    kernels = Recorder(Kernels())
    model = build_model(checkpoint, torch.float32, "cpu", kernels)  # type: ignore[arg-type]
    load_weights(model, tmp_path)
    fused = [
        "norm_linear", "rope_kv_write", "attention", "linear_add",
        "norm_gated_linear", "linear_add",
    ]  # fmt: skip
    rest = ["rms_norm", "linear"]
    calls, plain = step(kernels, model, None)
    assert calls == each_layer(model, fused) + rest
    lora = adapters_for(model)
    assert step(kernels, model, None)[0] == calls  # no token of that step has an adapter
    calls, adapted = step(kernels, model, lora)
    assert calls == rest_with_adapters(model, "linear", "linear_add") + rest
    changed = (adapted != plain).any(1)
    assert not changed[0] and changed[1:].all()

    kernels.DETERMINISTIC = True
    apart = [
        "rms_norm", "linear", "rope_kv_write", "attention", "linear_add",
        "rms_norm", "linear", checkpoint.hidden_act, "linear_add",
    ]  # fmt: skip
    assert step(kernels, model, None)[0] == each_layer(model, apart) + rest
    assert step(kernels, model, lora)[0] == calls


def rest_with_adapters(model: Model, product: str, add: str) -> list[str]:
    return each_layer(
        model,
        [
            "rms_norm", product, "lora_add", "rope_kv_write", "attention", add, "lora_add",
            "rms_norm", product, "lora_gated", add, "lora_add",
        ],
    )  # fmt: skip


@pytest.mark.parametrize("checkpoint", MODELS, indirect=True)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    "back_end", [kernels_for("cpu"), kernels_for("cpu", True)], ids=["native", "deterministic"]
)
def test_products_of_the_cpu(
    checkpoint: ModelConfig,
    quantization: str,
    back_end: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: as above, where the products are generated and not in the table."""
    if quantization == "int8" and not has_int8():
        pytest.skip("needs AVX512-VNNI")
    kernels = Recorder(back_end, deterministic=back_end.DETERMINISTIC)
    run = PackedLinear._run

    def noted(self: PackedLinear, name: str, *args: Any) -> Tensor:
        kernels.calls.append(f"packed {name}")
        return run(self, name, *args)

    monkeypatch.setattr(PackedLinear, "_run", noted)
    model = build_model(
        checkpoint, torch.bfloat16, "cpu", kernels, quantization=quantization  # type: ignore[arg-type]
    )  # fmt: skip
    load_weights(model, tmp_path)
    fused = [
        "packed norm", "rope_kv_write", "attention", "packed add",
        f"packed {checkpoint.hidden_act}", "packed add",
    ]  # fmt: skip
    rest = ["rms_norm", "packed plain"]
    calls, _ = step(kernels, model, None)
    if not any(call.startswith("packed") for call in calls):
        pytest.skip("no generated products on this machine")
    assert calls == each_layer(model, fused) + rest
    lora = adapters_for(model)
    same, plain = step(kernels, model, None)
    assert (same == calls) != back_end.DETERMINISTIC  # where sums must be those beside adapters
    calls, adapted = step(kernels, model, lora)
    assert calls == rest_with_adapters(model, "packed plain", "packed add") + rest
    assert not (adapted != plain)[0].any() or not back_end.DETERMINISTIC
    assert (adapted != plain)[1:].any(1).all()
