"""ModelFacts: a checkpoint's size, family and precision, from the headers of its files."""

import json
from pathlib import Path

from deployments.checkpoints.facts import read_facts
from deployments.checkpoints.resolve import outlined, resolve_model
from engine.config.model_config import ModelConfig

PARAMETERS = 134_515_008  # of SmolLM2-135M


def test_of_a_model_in_blocks_and_in_16_bits(default_model: Path) -> None:
    """Bug: bytes of blocks are counted as weights, so a model has a third of its parameters."""
    plain = read_facts(default_model, ModelConfig.from_folder(default_model))
    assert (plain.family, plain.quantization, plain.format) == ("llama", "BF16", "safetensors")
    assert plain.parameters() == PARAMETERS and plain.generates
    assert PARAMETERS * 2 < plain.size_bytes < PARAMETERS * 2.01
    assert plain.sizes["block_count"] == 30
    folder = resolve_model("default", progress=lambda what, done, total: None, blocks=True)
    blocks = read_facts(folder, ModelConfig.from_folder(folder))
    assert (blocks.quantization, blocks.format) == ("Q4_1", "gguf")
    assert blocks.parameters() == PARAMETERS and blocks.size_bytes < plain.size_bytes / 2
    outline = outlined("default")
    assert outline is not None
    # To be copied from this folder when conversions change.
    assert json.loads(outline.read_text()) == json.loads((folder / "config.json").read_text())


def test_without_weights(default_model: Path, tmp_path: Path) -> None:
    """Bug: a model of `load_format: dummy` keeps a router from starting."""
    (tmp_path / "config.json").write_bytes((default_model / "config.json").read_bytes())
    facts = read_facts(tmp_path, ModelConfig.from_folder(tmp_path))
    assert (facts.size_bytes, facts.parameters(), facts.family) == (0, 0, "llama")
