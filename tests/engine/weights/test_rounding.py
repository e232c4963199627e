"""Checkpoints that we round ourselves: numbers near the model's, in files that are read again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.cli.models.convert import run as run_convert
from engine import LLM, SamplingParams
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.config.quant_formats import CHECKPOINT_FORMATS
from engine.conversion import convert_rounded
from engine.errors import ConfigError
from engine.models.registry import Model, build_model
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from kernels.experts.reference import PackedExperts
from kernels.packed import PackedWeight
from kernels.reference import Kernels
from tests.deployments.config.test_models import tiny
from tests.parity.cases import ALIBI, CASES, EXPERTS, WINDOWS, save

ALL = {**CASES, **WINDOWS, **ALIBI, **EXPERTS}
OFF = {"fp8": 0.04, "w8a8": 0.012, "int8": 0.012, "int4": 0.14, "nf4": 0.13}  # of normal numbers


def rounded(source: Path, name: str) -> Path:
    target = source.with_name(f"{source.name}-{name}")
    convert_rounded(EngineConfig(model=str(source), quantization=name), target)  # type: ignore[arg-type]
    return target


def model_of(folder: Path, runs_on: str = "cuda", **options: Any) -> Model:
    config = ModelConfig.from_folder(folder)
    if runs_on == "cpu":
        model = build_model(config, torch.bfloat16, "cpu", kernels_for("cpu"), **options)
    else:
        model = build_model(config, torch.float32, "cpu", Kernels(), runs_on="cuda", **options)
    load_weights(model, folder)
    return model


def packed(model: Model) -> list[PackedWeight]:
    """Return the packed weights of a model, in the order of the layers."""
    matrices = []
    for linear in model._all_linears():  # type: ignore[attr-defined]
        pieces = getattr(linear.state, "pieces", None)
        states = [linear.state] if pieces is None else [piece.state for piece in pieces]
        matrices += [state for state in states if isinstance(state, PackedWeight)]
    for stack in model._stacks():  # type: ignore[attr-defined]
        if isinstance(stack.state, PackedExperts):
            matrices += [stack.state.gate_up, stack.state.down]
    return matrices


@pytest.mark.parametrize("name", CHECKPOINT_FORMATS)
def test_what_is_written_is_what_loading_rounds(name: str, tmp_path: Path) -> None:
    """Codes of another row, a zero point off by one, a scale that is rounded twice, a head that is
    left out or taken for the embedding."""
    save(ALL["llama"], tmp_path / "llama")
    folder = rounded(tmp_path / "llama", name)
    plain, model = model_of(tmp_path / "llama"), model_of(folder)
    for ours, theirs in zip(model._all_linears(), plain._all_linears(), strict=True):  # type: ignore[attr-defined]
        x = torch.randn(5, ours.spec.in_features)
        want = theirs.forward(x)
        assert (ours.forward(x) - want).norm() < OFF[name] * want.norm()
    at_load = packed(model_of(tmp_path / "llama", quantization=name))
    written = packed(model)
    assert written
    if name in ("fp8", "w8a8", "int8"):
        assert len(written) == len(at_load)
        for ours_packed, other in zip(written, at_load, strict=True):
            assert torch.equal(ours_packed.dense(torch.float32), other.dense(torch.float32))
            assert ours_packed.form == other.form
    model_of(folder, "cpu")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "architecture", ["phi 3", "gpt-2", "gemma 2", next(iter(EXPERTS)), "gpt-oss"]
)
@pytest.mark.parametrize("name", ["int4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_other_shapes(architecture: str, name: str, tmp_path: Path) -> None:
    """Matrices that are divided, [in, out], beside a tied head, or experts: rounded where the file
    has a layout for them, and as they were where not; nothing that the loader then misses."""
    save(ALL[architecture], tmp_path / "model")
    try:
        folder = rounded(tmp_path / "model", name)
    except ConfigError as error:
        assert "can keep none of its matrices" in error.message
        assert architecture == "gpt-2"  # all [in, out]
        return
    for runs_on in ("cuda", "cpu"):
        assert model_of(folder, runs_on).num_bytes
    left = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert any("embed" in key for key in left)


@pytest.mark.parametrize("name", ["int4", pytest.param("nf4", marks=pytest.mark.slow)])
def test_from_the_command(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a folder that is written and that the engine does not start with: tokens beside the
    weights are missing, a file that nothing lists, a format that config.json does not say."""
    source = tiny(tmp_path / "m.gguf", "llama")
    target = tmp_path / "rounded"
    assert (
        run_convert(
            str(source),
            target,
            device="auto",
            dtype="auto",
            quantization=name,
            check=False,
        )
        == 0
    )
    said = capsys.readouterr().out
    assert f"in {name}, for every device" in said
    sizes = re.search(
        r"; (\d+) MB, of which (\d+) MB stay as they are \(\S*embed\S* \.\.\.\)", said
    )
    assert sizes and int(sizes[1]) >= int(sizes[2]), "most of a small model is its embedding"
    listed = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(listed.values()) == {file.name for file in target.glob("*.safetensors")}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(str(target), device="cpu", num_blocks=32, num_threads=1) as llm:
        (answer,) = llm.generate([[5, 6, 7]], params, detokenize=False)
    assert len(answer.outputs[0].token_ids) == 4


def test_refusals(tmp_path: Path) -> None:
    """A model that is rounded twice; half a folder that stays behind."""
    save(ALL["llama"], tmp_path / "llama")
    folder = rounded(tmp_path / "llama", "int8")
    with pytest.raises(ConfigError, match=r"weights are compressed-tensors, 8 bits already"):
        rounded(folder, "int4")
    with pytest.raises(ConfigError, match="is there already"):
        rounded(tmp_path / "llama", "int8")
    file = next((tmp_path / "llama").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="truncated"):
        rounded(tmp_path / "llama", "fp8")
    assert not (tmp_path / "llama-fp8").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
