"""Positions beyond the model's by `rope_scaling`, against transformers with the same parameters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.models.registry import build_model
from engine.resolve import resolve
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from tests.engine.models.checkpoints import Paged
from tests.parity.cases import CASES, WINDOWS, relative, save

IDS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(7))
_TRAINED = 16  # positions
_YARN = {"rope_type": "yarn", "factor": 4.0}
_GEMMA = {"rope_type": "default", "rope_theta": 1e4}


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("llama", _YARN),
        ("llama", {**_YARN, "beta_fast": 8.0, "attention_factor": 1.3}),
        ("llama", {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0}),
        ("phi 2", _YARN),
        ("gemma 3", {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_logits(name: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    """A stretch that is read and not applied, or to layers with a window too, is fluent for as long
    as texts are short."""
    case = {**CASES, **WINDOWS}[name]
    rope: dict[str, Any] = {"rope_theta": 1e4, "original_max_position_embeddings": _TRAINED}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if "3" in scaling["rope_type"] else {}
    rope |= scaling
    if name == "phi 2":
        rope["partial_rotary_factor"] = 0.5
    if name == "gemma 3":
        rope = {"full_attention": rope, "sliding_attention": _GEMMA}
    longer = {"max_position_embeddings": 4 * _TRAINED, "rope_parameters": rope}
    theirs = save(replace(case, changes={**case.changes, **longer}), tmp_path / "stretched")
    short = {"max_position_embeddings": _TRAINED}
    if name == "gemma 3":
        short["rope_parameters"] = {"full_attention": _GEMMA, "sliding_attention": _GEMMA}
    save(replace(case, changes={**case.changes, **short}), tmp_path / "short")
    config = ModelConfig.from_folder(tmp_path / "short", scaling)
    assert config.max_positions == 4 * _TRAINED
    model = build_model(config, torch.float32, "cpu", kernels_for("cpu"))
    load_weights(model, tmp_path / "short")
    ours = Paged(model).run((IDS, list(range(10)), 0))[0]
    assert relative(ours, case.logits(theirs, IDS)) < 1e-5


def test_what_is_refused(tmp_path: Path) -> None:
    """A longer text than the model was made for, without a word of how."""
    short = {"max_position_embeddings": _TRAINED}
    save(replace(CASES["llama"], changes=short), tmp_path / "llama")
    save(CASES["gpt-2"], tmp_path / "gpt2")

    def asked(model: str, **fields: Any) -> Any:
        settings = {"model": str(tmp_path / model), "device": "cpu", **fields}
        return resolve(msgspec.convert(settings, EngineConfig))

    with pytest.raises(ConfigError, match=r"exceeds .* 16 positions.*{rope_type: yarn, factor: 4}"):
        asked("llama", max_model_len=64)
    resolved = asked("llama", max_model_len=64, rope_scaling=_YARN)
    assert resolved.max_model_len == 64 and hash(resolved)  # a key of the plan's cache
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(resolved.config), type=EngineConfig)
    with pytest.raises(ConfigError, match=r"rope_type: must be one of yarn.*'dynamic'"):
        asked("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ConfigError, match="factor: is missing"):
        asked("llama", rope_scaling={"rope_type": "linear"})
    with pytest.raises(ConfigError, match="no layer of GPT2LMHeadModel rotates"):
        asked("gpt2", rope_scaling=_YARN)
    with pytest.raises(ConfigError, match="rope_scaling must be a mapping"):
        EngineConfig(model="llama", rope_scaling=3)  # type: ignore[arg-type]
