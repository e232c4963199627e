"""`engine.evaluation.verify`: a checkpoint against transformers and itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.engine_config import EngineConfig
from engine.evaluation import verify as module
from engine.evaluation.prompts import Prompt
from engine.evaluation.verify import Options, Report, verify
from engine.models.registry import Model
from tests.parity.cases import ALIBI, CASES, DELTA_NET, EXPERTS, MIXED, WINDOWS, save

ALL = {**CASES, **WINDOWS, **ALIBI}
PROMPTS = [
    Prompt("", torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    for n in (1, 9, 23)
]


def checked(folder: Path, options: Options | None = None, **fields: Any) -> Report:
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", num_threads=1, **fields)
    return verify(config, PROMPTS, options or Options(8, folder))


SLOW = ("gemma 3", "granite", "bloom", "stablelm 2 12b")


@pytest.mark.parametrize(
    "name", ["qwen 3", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_it_agrees(name: str, tmp_path: Path) -> None:
    """Points that are not where transformers has them: scaled residuals, norms behind blocks, both
    blocks of one residual, blocks that add the residual themselves."""
    save(ALL[name], tmp_path)
    report = checked(tmp_path)
    assert report.verdict == "agrees" and not report.begins, report
    layers = {key: value for key, value in report.layers.items() if key.count(".") < 2}
    assert len(layers) == 4 and max(layers.values()) < 1e-5
    assert report.text is not None and report.text.same == len(PROMPTS)
    assert set(report.own) == {"batch", "chunks", "decode", "prefix"}
    json.dumps(report.as_dict(), allow_nan=False)


def test_each_part_says_how_far_it_is(tmp_path: Path) -> None:
    """Bug: minutes of one line, in the part that takes longest."""
    save(ALL["qwen 3"], tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", num_threads=1)
    said: list[str] = []
    verify(config, PROMPTS, Options(4, tmp_path), said.append)
    for part in ("transformers, prompt 3 of 3", "layer by layer, prompt 3 of 3"):
        assert part in said
    assert "greedy text, 12 of 12 tokens" in said
    assert "greedy text alone, 8 of 8 tokens" in said
    assert "chunks, batches, prefixes, prompt 2 of 2" in said


@pytest.mark.parametrize(
    "name", ["qwen 3 next", *(pytest.param(name, marks=pytest.mark.slow) for name in MIXED)]
)
def test_states(name: str, tmp_path: Path) -> None:
    """A state that has taken in a token takes it in again, where keys are merely written again."""
    save({**DELTA_NET, **MIXED}[name], tmp_path)
    report = checked(tmp_path)
    assert not report.problems and len(report.own) == 4, report


@pytest.mark.slow
def test_a_sum_that_transformers_has_not(tmp_path: Path) -> None:
    """An MLP with experts beside it is laid beside the MLP alone, and every layer looks wrong."""
    save(EXPERTS["gemma 4 26b"], tmp_path)
    report = checked(tmp_path)
    assert report.verdict == "agrees" and max(report.layers.values()) < 1e-5, report
    assert len(report.layers) == 1 + 4 * 2


def test_where_a_difference_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong number in the middle of a network is told from a wrong head only by looking."""
    save(ALL["llama"], tmp_path)
    load = module.load_model

    def faulty(resolved: Any) -> Model:
        model: Any = load(resolved)
        model.layers[1].mlp.before.weight.mul_(1.01)
        return model

    monkeypatch.setattr(module, "load_model", faulty)
    report = checked(tmp_path)
    assert report.verdict == "differs" and report.begins == "layers.1: mlp"
    assert report.layers["layers.1.attention"] < 1e-5 < 1e-3 < report.layers["layers.1.mlp"]
    assert "beginning at layers.1: mlp" in report.problems[0]


def test_without_code_in_transformers(tmp_path: Path) -> None:
    """A folder's own code that is run, or a relative's class that fills the gaps with random
    weights and finds every model wrong."""
    save(ALL["internlm 2"], tmp_path)
    (tmp_path / "modeling.py").write_text("raise SystemExit('was run')")
    report = checked(tmp_path)
    assert report.verdict == "consistent" and report.logits is None
    assert "has no code for InternLM2ForCausalLM" in report.no_reference
    assert report.own["chunks"].logits < 1e-5 and report.own_text["alone"].same == module.FEW


@pytest.mark.slow
def test_missing_weights_are_no_reference(tmp_path: Path) -> None:
    """transformers fills what it does not find with random numbers."""
    save(ALL["llama"], tmp_path)
    other = tmp_path / "other"
    save(ALL["llama"], other)
    tensors = load_file(other / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    report = checked(tmp_path, Options(4, other))
    assert "no weights for model.layers.1.mlp.down_proj.weight" in report.no_reference


@pytest.mark.slow
def test_dump(tmp_path: Path) -> None:
    """Tensors that cannot be laid beside each other."""
    save(ALL["llama"], tmp_path / "model")
    checked(tmp_path / "model", Options(4, tmp_path / "model", dump=tmp_path / "dump"))
    for number, prompt in enumerate(PROMPTS):
        ours = load_file(tmp_path / "dump" / f"ours-{number:03}.safetensors")
        theirs = load_file(tmp_path / "dump" / f"reference-{number:03}.safetensors")
        assert ours["ids"].tolist()[: len(prompt.ids)] == prompt.ids
        assert set(ours) == set(theirs) and "layers.2.mlp" in ours
        assert all(ours[name].shape == theirs[name].shape for name in ours)


@pytest.mark.slow
def test_own_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of chunks that cannot fail."""
    save(ALL["llama"], tmp_path)
    forward = module.Paged.run

    def forgets(self: Any, *entries: Any, lora: Any = None) -> Any:
        logits = forward(self, *entries, lora=lora)
        return [f if e[2] == 0 else f * 1.01 for e, f in zip(entries, logits, strict=True)]

    monkeypatch.setattr(module.Paged, "run", forgets)
    report = checked(tmp_path, Options(4))
    assert {line.split()[2] for line in report.problems} == {"chunks", "decode", "prefix"}
    assert report.verdict == "differs"
