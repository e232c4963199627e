"""Host memory for KV blocks of a model in several ranks: each copies its part of a block."""

import os
from pathlib import Path
from typing import Any

import pytest

from engine.messages import EngineRequest
from engine.process.rank import RankLoop
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from tests.engine.process.ranked import Threads, config_of, save_with_bytes, serve, start, told
from tests.fakes import Output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers."""
    path = tmp_path_factory.mktemp("model")
    save_with_bytes(
        path, "llama", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    )
    return path


def turns(core: EngineCore) -> dict[int, Output]:
    """Four users talk in turn, three times each; the blocks of one fit."""
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


@pytest.mark.parametrize(
    ("tensor", "stages", "fails"),
    [(2, 1, False), (1, 2, False), (2, 1, True), pytest.param(2, 2, False, marks=pytest.mark.slow)],
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

        def failing(self: RankLoop, ticket: int, pairs: Any) -> None:
            host: Any = self._runner.host
            if ticket % 2:
                host._copy = None
            load(self, ticket, pairs)
            vars(host).pop("_copy", None)

        monkeypatch.setattr(RankLoop, "load_blocks", failing)
    options: dict[str, Any] = {"tensor_parallel": tensor, "pipeline_parallel": stages}
    tier = {"host_kv_bytes": 1 << 24, "host_kv_store": "all"}
    told_by = []
    for extra in ({}, tier):
        core, ranks = start(config_of(folder, max_loras=0, **options, **extra), Threads)
        told_by.append(told(turns(core)))
        stats = core.stats()
        assert ranks is not None
        ranks.close()
    assert told_by[0] == told_by[1]
    assert stats.host_kv_loaded_tokens > 100
    assert (stats.host_kv_failed_loads > 0) == fails
