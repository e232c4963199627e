"""Whether a model sees images, as commands and the engine's log tell it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.cli import doctor
from deployments.cli.models.verify import lines
from deployments.cli.plan import run as run_plan
from deployments.config.load import parse_config
from deployments.plan.memory import Hardware
from engine.config.engine_config import EngineConfig
from engine.evaluation.verify import Bounds, Report
from engine.factory.plans import image_plan
from engine.resolve import resolve
from tests.engine.images.folders import CASES
from tests.engine.images.test_processors import write_folder

SEES = "sees images"
BLIND = "sees no images: preprocessor_config.json is missing"
OFF = "sees no images: engine.images is off"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path, CASES["Qwen3-VL"])
    tower = "model.visual.patch_embed.proj.weight"
    save_file({tower: torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def checked(folder: Path, **engine: Any) -> list[tuple[str, str]]:
    config = parse_config({"model": str(folder), "engine": engine}, check_files=False)
    checks = doctor.model_checks(config, None, Hardware("cpu", "cpu", 8 << 30))
    all_checks = list(checks)
    (model,) = [check.text for check in all_checks if check.name == "model"]
    assert model.startswith("Qwen3VLForConditionalGeneration, "), "named by its text model"
    return [(check.state, check.text) for check in all_checks if check.name == "images"]


def test_a_folder_without_its_processor(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a model whose tower is there answered pictures with errors, and nothing said why."""
    config = EngineConfig(model=str(folder), device="cpu")
    assert run_plan(str(folder), "h200", 1, None) == 0
    assert capsys.readouterr().out.count(SEES) == 1
    assert checked(folder) == [("ok", SEES)]
    assert checked(folder, images="off") == [("ok", OFF)]
    assert image_plan(resolve(config)) is not None and not caplog.text

    (folder / "preprocessor_config.json").unlink()
    assert run_plan(str(folder), "h200", 1, None) == 0
    assert capsys.readouterr().out.count(BLIND) == 1
    assert checked(folder) == [("note", BLIND)]
    assert image_plan(resolve(config)) is None
    assert [record.message for record in caplog.records] == [f"{folder}: {BLIND}"]


def test_images_larger_than_the_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a processor's images are refused by a cache of the default size, and nothing said so."""
    settings = folder / "preprocessor_config.json"
    size = {"shortest_edge": 65536, "longest_edge": 1 << 24}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"size": size}))
    allowed = "the processor allows 16,384"
    assert checked(folder)[1] == ("note", f"images of at most 4,096 tokens, {allowed}")
    assert checked(folder, image_cache_tokens=16384) == [("ok", SEES)]
    config = folder.parent / "manta.yaml"
    config.write_text(f"model: {folder}\nengine: {{image_cache_tokens: 8192}}\n")
    assert run_plan(str(config), "h200", 1, None) == 0
    assert f"images of at most 8,192 tokens, {allowed}; raise" in capsys.readouterr().out


def test_folders_of_text_are_told_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text model that was cut out of a multimodal one lacks no file."""
    (folder / "preprocessor_config.json").unlink()
    text = "model.language_model.norm.weight"
    save_file({text: torch.zeros(1)}, folder / "model.safetensors")
    assert run_plan(str(folder), "h200", 1, None) == 0
    assert "images" not in capsys.readouterr().out
    assert checked(folder) == []


def test_verify_says_what_it_leaves_out() -> None:
    """A verdict on the text model passes for one on the tower."""
    report = Report("m", "a", "float32", "cpu", "", Bounds(None, 1.0, 1.0, 1.0))
    assert any("tower is not run" in line for line in lines(report, tower=True))
    assert not any("tower" in line for line in lines(report))
