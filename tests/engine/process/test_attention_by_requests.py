"""Attention divided by requests: texts are those of one rank, and keys are on one rank alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.lora.device import LoraDevice
from engine.resolve import decide
from engine.runner.forward import OwnInputs
from engine.runner.memory import MemoryPlan, outline, plan_memory
from kernels.metadata import AttentionMeta
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.process.ranked import (
    add_adapters,
    config_of,
    everything,
    logprobs_of,
    model_and_adapters,
    save_with_bytes,
    serve,
    start,
    told,
)

LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with one layer of latent attention."""
    folder = tmp_path_factory.mktemp("model")
    save_with_bytes(folder, "deepseek_v3", **LATENT)
    return folder


def test_texts_with_latents(model: Path, two_cores: None) -> None:
    """Bugs: a rank has latents of another's requests, and room for no more of them than one rank; a
    prefix is computed again beside the rank that has it; a rank without requests in a step waits,
    or adds to others' tokens; all requests go to one rank."""
    requests = [message for message in everything({"model": model}) if not message.adapter]
    outputs = []
    for ranks in (1, 2):
        options = {"tensor_parallel": ranks, "attention_data_parallel": ranks > 1}
        core, others = start(config_of(model, max_loras=0, num_blocks=7, **options))
        pools = core.scheduler.memory.pools
        assert [pool.num_blocks for pool in pools] == [7] * ranks
        assert core.stats().total_blocks == 7 * ranks
        homes: list[int] = []
        launch = core._runner.launch

        def watched(batch: Any, launch: Any = launch, homes: Any = homes) -> Any:
            homes += [new.kv_rank for new in batch.new_rows]
            return launch(batch)

        core._runner.launch = watched  # type: ignore[method-assign]
        outputs.append(serve(core, requests))
        assert core.stats().preemptions > 0
        assert set(homes) == set(range(ranks))
        alone = [
            message
            for message in requests
            if len(message.token_ids) > 40 and not message.params.logprobs
        ]
        del homes[:]
        for _ in range(2):
            again = serve(core, alone[:1])
            assert told(again).items() <= told(outputs[-1]).items()
        assert again[alone[0].id].cached >= 32 and len(set(homes)) == 1
        if others is not None:
            others.close()
    assert told(outputs[0]) == told(outputs[1])
    for id, output in outputs[0].items():
        close = pytest.approx(logprobs_of(output), abs=1e-4)
        assert logprobs_of(outputs[1][id]) == close


@pytest.mark.parametrize("latents", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_texts_where_other_ranks_tokens_are_padding(
    latents: bool, model: Path, tmp_path: Path, two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step as CUDA graphs have it. Bugs: a rank writes keys for another's tokens, or adds to
    their sums; chunks of another rank move its own; tokens have the adapters of others."""
    folders = {"model": model}
    if not latents:
        folders = model_and_adapters(tmp_path, num_hidden_layers=2)
    requests = [message for message in everything(folders) if not (latents and message.adapter)]
    padded = []

    def assemble(
        own: OwnInputs, batch: Batch, lora: LoraDevice | None
    ) -> tuple[None, list[AttentionMeta]]:
        layout = own.padded(batch)
        step = own.inputs.assemble(layout)
        others = np.repeat(np.asarray(layout.rows) == own._pad_row, batch.lengths)
        for meta in step.metas:
            meta.slots[torch.from_numpy(others)] = -1
        if lora is not None:
            step.adapt(lora.step(batch))
        padded.append(others.any() and not others.all())
        return None, step.metas

    outputs = []
    for ranks in (1, 2):
        options = {"tensor_parallel": ranks, "attention_data_parallel": ranks > 1}
        loras = 0 if latents else 2
        with monkeypatch.context() as patched:
            if ranks > 1:
                patched.setattr(OwnInputs, "assemble", assemble)
            core, others = start(config_of(folders["model"], max_loras=loras, **options))
            add_adapters(core, folders)
            outputs.append(serve(core, requests))
            if others is not None:
                others.close()
    assert any(padded)
    assert told(outputs[0]) == told(outputs[1])
    for id, output in outputs[0].items():
        assert logprobs_of(outputs[1][id]) == pytest.approx(logprobs_of(output), abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "gain"), [("latents", 2), ("one key head", 2), ("two key heads", 1)]
)
def test_room_is_for_as_many_times_the_tokens(
    model: Path, tmp_path: Path, kind: str, gain: int
) -> None:
    """Bugs: ranks that keep other requests' keys are planned as if they kept the same, or gain
    where heads are divided anyway; their weights are forgotten."""
    folder = model
    if kind != "latents":
        folder = tmp_path
        save_checkpoint(folder, "llama", num_key_value_heads=1 + (kind == "two key heads"))

    def planned(device: str, by_requests: bool) -> MemoryPlan:
        config = EngineConfig(
            model=str(folder), max_num_seqs=4, kv_cache_bytes=1 << 20, tensor_parallel=2,
            attention_data_parallel=by_requests,
        )  # fmt: skip
        resolved = decide(config, ModelConfig.from_folder(folder), torch.device(device))
        return plan_memory(resolved, outline(resolved), "this", 8 << 30, ("", 0), host_bytes=0)

    for device in ("cuda", "cpu"):
        heads, requests = planned(device, False), planned(device, True)
        assert requests.positions == pytest.approx(gain * heads.positions, abs=2)
        # On the CPU the bytes are those of both ranks.
        assert requests.num_blocks * requests.block_bytes <= 1 << 20
        assert "on each of 2 ranks" in requests.table() and "ranks" not in heads.table()
        assert dict(requests.rows)["weights"] > dict(heads.rows)["weights"]


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({}, {"tensor_parallel": 1}, "ranks of tensor_parallel, which is 1; raise that"),
        ({}, {"pipeline_parallel": 2}, "together with pipeline_parallel 2; leave one of them out"),
        ({"model_type": "qwen3_next"}, {}, "recurrent layers.*leave it out"),
    ],
)
def test_what_is_not_combined_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], why: str,
) -> None:  # fmt: skip
    """Bug: an engine starts whose ranks mix up their requests, or does as if it had no such key."""
    folder = model
    if changes:
        folder = tmp_path
        sizes = {"num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1}
        save_checkpoint(folder, **changes, **sizes, head_dim=16)
    fields = {"tensor_parallel": 2, "device": "cpu", **options}
    with pytest.raises(ConfigError, match=why) as caught:
        config = EngineConfig(model=str(folder), attention_data_parallel=True, **fields)
        decide(config, ModelConfig.from_folder(folder), torch.device(fields["device"]))
    assert caught.value.param == "attention_data_parallel"
