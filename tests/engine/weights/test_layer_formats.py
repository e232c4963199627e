"""`quantization_layers`: formats that a configuration gives to some matrices."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.plan.memory import Hardware, plan
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.conversion import convert_rounded
from engine.errors import ConfigError
from engine.models.registry import Model, build_model
from engine.weights import load_weights
from kernels.packed import PackedWeight
from kernels.reference import Kernels
from tests.engine.weights.test_rounding import model_of
from tests.parity.cases import CASES, EXPERTS, save

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(CASES["llama"], tmp_path / "llama")
    return tmp_path / "llama"


def bits(model: Model) -> dict[str, int]:
    """Return bits by the name of a layer's first matrix; 16 for one that is not packed."""
    widths = {}
    for linear in model._all_linears():  # type: ignore[attr-defined]
        states = [piece.state for piece in getattr(linear.state, "pieces", ())] or [linear.state]
        packed = isinstance(states[0], PackedWeight)
        widths[linear.spec.parts[0].name] = states[0].form.bits if packed else 16
    return widths


def outline(folder: Path, layers: dict[str, str], **options: Any) -> Model:
    config = ModelConfig.from_folder(folder)
    options = {"quantization": "int4", "runs_on": "cuda", **options}
    kernels = Kernels()
    return build_model(
        config, torch.bfloat16, "meta", kernels, quantization_layers=layers, **options
    )


def test_layers_have_their_formats(folder: Path) -> None:
    """Bug: a pattern that is read and changes nothing, or changes all layers of its kind."""
    layers = {DOWN: "none", "*.down_proj": "int8"}
    widths = bits(model_of(folder, quantization="int4", quantization_layers=layers))
    assert widths.pop(DOWN) == 16
    eight = {name for name in widths if name.endswith((".down_proj", "lm_head"))}
    assert {widths.pop(name) for name in eight} == {8} and set(widths.values()) == {4}


def test_plan_counts_them(folder: Path) -> None:
    """Bug: memory is planned for the format of the other layers."""
    all_four = outline(folder, {}).num_bytes
    some = outline(folder, {"*.down_proj": "int8"}).num_bytes
    assert all_four < some < outline(folder, {"*": "int8"}).num_bytes


def test_plan_says_them(folder: Path) -> None:
    """Bug: a configuration with a mapping ends `manta plan` in a TypeError."""
    config = EngineConfig(
        model=str(folder),
        quantization="int4",
        quantization_layers={"*.down_proj": "int8"},
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    planned = plan(ModelConfig.from_folder(folder), config, Hardware.gpu("h100"))
    assert planned.weights_kind == "int4, int8"
    assert [line.partition(":")[0] for line in planned.products] == ["int4", "int8"]


def test_a_copy_has_them(folder: Path, tmp_path: Path) -> None:
    """Bug: `convert` rounds all matrices alike, or config.json says so."""
    layers = {"*.down_proj": "fp8", "model.layers.1.*": "none"}
    config = EngineConfig(model=str(folder), quantization="int4", quantization_layers=layers)
    convert_rounded(config, tmp_path / "out")
    widths = bits(model_of(tmp_path / "out"))
    assert widths[DOWN] == 8 and widths["model.layers.0.mlp.gate_proj"] == 4
    assert widths["model.layers.1.mlp.gate_proj"] == 16
    assert widths["model.layers.1.mlp.down_proj"] == 8, "the first match holds"
    quantized = ModelConfig.from_folder(tmp_path / "out").quantized
    assert quantized is not None
    scheme = quantized.scheme(DOWN)
    assert scheme is not None and scheme.kind == "fp8"


def test_refusals(folder: Path, tmp_path: Path) -> None:
    """Bug: a pattern with a slip of the pen is ignored, and the layer has the others' format."""
    with pytest.raises(ConfigError, match=r"'\*.dwn_proj' matches no matrix"):
        outline(folder, {"*.dwn_proj": "int8"})
    with pytest.raises(ConfigError, match=r"multiplied as one matrix .* different formats"):
        outline(folder, {"*.q_proj": "int8"})
    with pytest.raises(ConfigError, match=r"quantization_layers: .*'nf4' does not run on cpu"):
        outline(folder, {DOWN: "nf4"}, quantization="none", runs_on="cpu")
    config = EngineConfig(
        model=str(folder), quantization="int4", quantization_layers={"*.dwn_proj": "int8"}
    )
    with pytest.raises(ConfigError, match=r"'\*.dwn_proj' matches no matrix"):
        convert_rounded(config, tmp_path / "out")
    config = EngineConfig(model=str(folder), quantization="int4", quantization_layers={DOWN: "nf4"})
    with pytest.raises(ConfigError, match="cannot have 'nf4' beside it; there: none, int8, fp8"):
        convert_rounded(config, tmp_path / "out")


def test_experts(tmp_path: Path) -> None:
    """Bug: experts have the format of the other layers, because their matrices are merged."""
    save(EXPERTS[next(iter(EXPERTS))], tmp_path / "mixture")
    model = outline(tmp_path / "mixture", {"*.experts.*": "int8"})
    assert outline(tmp_path / "mixture", {}).num_bytes < model.num_bytes


def test_on_the_cpu(folder: Path) -> None:
    """Bug: the method of the other layers packs a layer that has a format of its own."""
    config = ModelConfig.from_folder(folder)
    from kernels.dispatch import kernels_for

    model = build_model(
        config,
        torch.bfloat16,
        "cpu",
        kernels_for("cpu"),
        quantization_layers={"*.down_proj": "w8a8"},
    )
    load_weights(model, folder)
    kinds = {
        linear.spec.parts[0].name: type(linear.method).__name__
        for linear in model._all_linears()  # type: ignore[attr-defined]
    }
    assert kinds[DOWN] == "RoundedCpu" and kinds["model.layers.0.mlp.gate_proj"] == "DenseCpu"
