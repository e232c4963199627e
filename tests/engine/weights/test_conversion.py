"""Converted folders: bit by bit the model that they were made of, or an error that says what."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.conversion import convert
from engine.errors import ConfigError
from engine.models.registry import build_model
from engine.weights import load, load_weights, stream
from engine.weights.converted import MANIFEST, damaged
from engine.weights.huge_pages import give_back
from engine.weights.stream import Loading
from kernels.dispatch import kernels_for
from tests.parity.cases import ALIBI, CASES, EXPERTS, WINDOWS, save

ALL = {**CASES, **WINDOWS, **ALIBI}
# Merged, permuted, transposed; norms with an offset; learned positions; biases; tied and not.
NAMES = ("qwen 2", "phi 3", "gpt-2", "gemma 2", "opt", "internlm 2", "starcoder")


def parameters(folder: Path, dtype: torch.dtype, positions: int = 0) -> dict[str, Tensor]:
    config = ModelConfig.from_folder(folder)
    if positions:
        config = config.within(positions)
    model = build_model(config, dtype, "cpu", kernels_for("cpu"))
    filled = {parameter.name: parameter.tensor for parameter in model.parameters()}
    load_weights(model, folder)
    return filled


def converted(folder: Path, target: Path, **fields: Any) -> Path:
    convert(EngineConfig(model=str(folder), **{"device": "cpu", **fields}), target)
    return target


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_it_starts_equal_bit_by_bit(dtype: str, tmp_path: Path) -> None:
    """A transform that is done twice, or once too few; a norm whose offset is added again."""
    kind = getattr(torch, dtype)
    for name in NAMES:
        folder = tmp_path / name
        save(ALL[name], folder)
        target = converted(folder, tmp_path / f"{name} converted", dtype=dtype)
        for positions in (0, 20):
            want = parameters(folder, kind, positions)
            of_target = parameters(target, kind, positions)
            assert set(of_target) == set(want)
            assert all(torch.equal(of_target[key], want[key]) for key in want), name
        assert damaged(target) == []
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_experts(tmp_path: Path) -> None:
    """Experts that lie one after the other in another order."""
    name = next(iter(EXPERTS))
    save(EXPERTS[name], tmp_path / "model")
    target = converted(tmp_path / "model", tmp_path / "converted", dtype="float32")
    want = parameters(tmp_path / "model", torch.float32)
    of_target = parameters(target, torch.float32)
    assert all(torch.equal(of_target[key], want[key]) for key in want)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(ALL["llama"], tmp_path / "model")
    return converted(tmp_path / "model", tmp_path / "converted", dtype="bfloat16")


def test_nothing_is_changed_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted folder that is slower than the one it was made of."""
    match = load._match

    def direct(*arguments: Any) -> Any:
        transfers = match(*arguments)
        for transfer_read in (transfer for unit in transfers for transfer in unit):
            assert stream._direct(transfer_read) and transfer_read.source.rows is None
        return transfers

    monkeypatch.setattr(load, "_match", direct)
    parameters(folder, torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_other_versions_and_settings(folder: Path) -> None:
    """Bytes of another layout that happen to have the right shapes."""
    with pytest.raises(ConfigError, match=r"was converted for dtype bfloat16.*float32"):
        parameters(folder, torch.float32)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(ConfigError, match=r"version 99, and this Manta reads version 1; convert"):
        parameters(folder, torch.bfloat16)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "device": "cuda"}))
    with pytest.raises(ConfigError, match="was converted for device cuda"):
        parameters(folder, torch.bfloat16)
    (folder / MANIFEST).write_text("[")
    with pytest.raises(ConfigError, match="cannot be read"):
        parameters(folder, torch.bfloat16)


def test_memory_is_given_back() -> None:
    """A model that is in host memory as a whole while it is converted."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    tensor = torch.ones(16 << 20, dtype=torch.uint8)
    before = resident()
    give_back(tensor)
    assert before - resident() > 15 << 20


def test_damage_is_found(folder: Path) -> None:
    """One bit, which changes no size; and gigabytes that are read without a word."""
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    progress: list[Loading] = []
    assert len(damaged(folder, progress.append)) == 1
    assert [loading.fraction for loading in progress] == sorted(
        loading.fraction for loading in progress
    )
    assert len(progress) > 2 and progress[-1].done == progress[-1].total


def test_refusals(folder: Path, tmp_path: Path) -> None:
    """A folder that is written over, or converted twice; weights that nobody has rounded."""
    model = tmp_path / "model"
    with pytest.raises(ConfigError, match="is there already"):
        converted(model, folder)
    with pytest.raises(ConfigError, match="is converted already"):
        converted(folder, tmp_path / "again")
    with pytest.raises(ConfigError, match="quantises weights when the engine starts"):
        converted(model, tmp_path / "int8", quantization="int8")
    assert not (tmp_path / "int8").exists()
