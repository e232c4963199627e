"""Host memory for KV blocks of a model in several ranks: each copies its part of a block."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.messages import EngineRequest, EngineStats
from engine.process.rank import RankLoop
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from tests.engine.models.test_programs import QWEN, SHAPES
from tests.engine.process.ranked import Threads, config_of, save_with_bytes, serve, start, told
from tests.engine.test_memory import SIZES
from tests.fakes import Output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with three layers."""
    path = tmp_path_factory.mktemp("model")
    save_with_bytes(
        path, "llama", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    )
    return path


def turns(core: EngineCore) -> dict[int, Output]:
    """Let four users talk in turn, three times each; the blocks of one fit. Return all outputs."""
    outputs: dict[int, Output] = {}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    texts = [[3 + (user + at * at) % 300 for at in range(70)] for user in range(4)]
    for turn in range(3):
        for user in range(4):
            number = 1 + 4 * turn + user
            request = EngineRequest(number, list(texts[user]), len(texts[user]), params, number)
            outputs |= serve(core, [request])
            texts[user] += outputs[number].tokens
    return outputs


@pytest.mark.parametrize(("tensor", "stages"), [pytest.param(2, 1, marks=pytest.mark.slow), (1, 2)])
def test_states_of_ranks(
    tmp_path: Path,
    two_cores: None,
    tensor: int,
    stages: int,
) -> None:
    """Bug: of two stages one has more slots for states than the other, or none where it has no
    recurrent layer, and a request goes on from half a state."""
    values = {**SIZES, **SHAPES, **QWEN, "max_position_embeddings": 512, "vocab_size": 311}
    values["layer_types"] = ["full_attention", "linear_attention", "linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    options = {"tensor_parallel": tensor, "pipeline_parallel": stages, "load_format": "dummy"}
    tier = {"host_kv_bytes": 1 << 24, "host_kv_store": "all", "snapshot_bytes": 1 << 19}
    check(tmp_path, options, tier)


@pytest.mark.parametrize(
    ("tensor", "stages", "fails"),
    [(1, 2, False), (2, 1, True), pytest.param(2, 2, False, marks=pytest.mark.slow)],
)
def test_texts_are_those_without(
    folder: Path,
    two_cores: None,
    monkeypatch: pytest.MonkeyPatch,
    tensor: int,
    stages: int,
    fails: bool,
) -> None:
    """Bugs: a rank loads into other blocks than rank 0, or after the step that reads them; a copy
    that fails on another rank than 0 ends the engine, or counts as done."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(tensor * stages)))
    if fails:
        load = RankLoop.load_blocks

        def failing(self: RankLoop, ticket: int, pairs: Any, states: Any) -> None:
            host: Any = self._runner.host
            if ticket % 2:
                host._copy = None
            load(self, ticket, pairs, states)
            vars(host).pop("_copy", None)

        monkeypatch.setattr(RankLoop, "load_blocks", failing)
    options: dict[str, Any] = {"tensor_parallel": tensor, "pipeline_parallel": stages}
    tier = {"host_kv_bytes": 1 << 24, "host_kv_store": "all"}
    stats = check(folder, options, tier)
    assert (stats.host_kv_failed_loads > 0) == fails


def check(folder: Path, options: dict[str, Any], tier: dict[str, Any]) -> EngineStats:
    """Assert equal texts without and with a tier; return the latter's stats."""
    told_by = []
    for extra in ({"num_blocks": 60}, tier):
        core, ranks = start(config_of(folder, max_loras=0, **{**options, **extra}), Threads)
        told_by.append(told(turns(core)))
        stats = core.stats()
        assert ranks is not None
        ranks.close()
    assert told_by[0] == told_by[1]
    assert stats.host_kv_loaded_tokens > 100
    return stats
