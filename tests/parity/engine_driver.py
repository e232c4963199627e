"""Engine cores with real models in the test's process, so that tests can inspect the scheduler."""

from pathlib import Path
from typing import Any

import msgspec

from engine.config.engine_config import EngineConfig
from engine.evaluation.driver import Output, run
from engine.factory import build
from engine.messages import AddAdapter
from engine.scheduling.core import EngineCore

__all__ = ["Output", "add_adapter", "engine", "run"]


def engine(folder: Path, **fields: Any) -> EngineCore:
    """Return a core on the CPU with a small KV cache, in float32 unless `fields` differ."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 512,
        "num_blocks": 2048,
        "max_num_seqs": 32,
    }
    config = msgspec.convert({"model": str(folder), **defaults, **fields}, EngineConfig)
    core, _ = build(config)
    return core


def add_adapter(core: EngineCore, name: str, folder: Path) -> None:
    core.add_adapter(AddAdapter(1, name, str(folder)))
    while not (answers := core.answers()):
        pass
    assert answers[0].info is not None, answers[0].message
