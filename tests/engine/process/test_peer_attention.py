"""Attention divided by requests on GPUs, in CUDA graphs and without: two processes on one GPU, as
in test_peer_ranks.py. `python -m pytest -m gpu tests/engine/process/test_peer_attention.py`"""

from pathlib import Path
from typing import Any

import pytest

from engine.runner.graphs import StepGraphs
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.process.ranked import (
    add_adapters,
    everything,
    logprobs_of,
    model_and_adapters,
    serve,
    start,
    told,
)
from tests.engine.process.test_peer_ranks import LATENT, ON_ONE_GPU, OnOneGpu, on_gpu, one_gpu
from tests.engine.text import small_tokenizers

__all__ = ["one_gpu"]  # a fixture

ALL_PAY = """
from engine.runner.graphs import StepGraphs
StepGraphs._device_seconds = lambda *size: 0.0
"""


class AllRecorded(OnOneGpu):
    """Two processes that take turns on a GPU cannot tell which steps pay as graphs."""

    PROGRAM = ("-c", ALL_PAY + ON_ONE_GPU)


@pytest.mark.gpu
@pytest.mark.parametrize(("latents", "graphs"), [(False, True), (True, True), (False, False)])
def test_texts_are_those_of_one_rank(
    one_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latents: bool, graphs: bool
) -> None:
    """Bugs: a graph reads where an earlier step's requests of this rank were; another rank's tokens
    write keys, or are added twice; a chunk in a graph has another rank's adapters; where there are
    no graphs, a rank's own adapters are laid out over those of all tokens."""
    monkeypatch.setattr(StepGraphs, "_device_seconds", lambda *size: 0.0)
    if latents:
        tokenizer = small_tokenizers.byte_level()
        save_checkpoint(
            tmp_path, "deepseek_v3", vocab_size=tokenizer.vocab_size + 6, hidden_size=64,
            max_position_embeddings=512, eos_token_id=list(tokenizer.eos_token_ids), **LATENT,
        )  # fmt: skip
        tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
        folders = {"model": tmp_path}
    else:
        folders = model_and_adapters(tmp_path, head_dim=16, hidden_size=64)
    requests = [each for each in everything(folders) if not (latents and each.adapter)]
    given: dict[str, Any] = {"cuda_graphs": graphs, "max_num_batched_tokens": 96}
    given["max_loras"] = 0 if latents else 2
    found = []
    for size in (1, 2):
        options = {"tensor_parallel": size, "attention_data_parallel": size > 1, **given}
        config = on_gpu(folders["model"], num_blocks=11 - 2 * size, **options)
        core, others = start(config, AllRecorded)
        add_adapters(core, folders)
        found.append(serve(core, requests))
        if others is not None:
            runner = core._runner._runner
            assert (runner.graphs is not None) == graphs
            if runner.graphs is not None:
                sizes = {size for size, adapters in runner.graphs._forwards if adapters or latents}
                assert any(entries == tokens for entries, tokens in sizes)
                assert any(entries < tokens for entries, tokens in sizes)
            runner.model.group.check()
            others.close()
            del runner
        del core
    assert told(found[0]) == told(found[1])
    for id, output in found[0].items():
        assert logprobs_of(found[1][id]) == pytest.approx(logprobs_of(output), abs=1e-3)
