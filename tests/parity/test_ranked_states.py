"""Layers with states in several ranks: the texts of one, in chunks and batches, from snapshots,
after preemption and with adapters; and what cannot be divided."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.config.rank_checks import check_ranks
from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from tests.engine.models.checkpoints import load_model
from tests.engine.process.conftest import two_cores
from tests.engine.process.ranked import start
from tests.parity.cases import DELTA_NET, MIXED, save
from tests.parity.engine_driver import add_adapter, run

__all__ = ["two_cores"]  # a fixture

ALL = {**DELTA_NET, **MIXED}
NAMES = (
    "qwen 3 next",
    "qwen 3.5",
    "kimi linear",
    "falcon h1",
    "falcon h1, one group",
    "nemotron 3",
    "lfm 2, biases",
    "olmo hybrid",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


def made(name: str, folder: Path, **changes: Any) -> Any:
    base, _, _ = name.partition(", one group")
    case = ALL[base]
    if base != name:
        changes["mamba_n_groups"] = 1
    return save(replace(case, changes={**case.changes, **changes}), folder)


def adapter_of_all(folder: Path) -> Path:
    """Save a random adapter of every matrix in the layers, in PEFT's format.

    PEFT itself would not take the matrices of all mixers.
    """
    torch.manual_seed(2)
    tensors, modules = {}, set()
    for part in (part for linear in load_model(folder).linears() for part in linear.spec.parts):
        modules.add(part.name.rpartition(".")[2])
        name = f"base_model.model.{part.name}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, part.in_features) / 8
        tensors[f"{name}.lora_B.weight"] = torch.randn(part.out_features, 8) / 8
    target = folder / "lora"
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": sorted(modules)}
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def texts(folder: Path, adapter: Path, **ranks: int) -> list[Any]:
    """Return the outputs of prompts, of their next turns, and of prompts with an adapter.

    There are too few blocks for all prompts at once. The next turns find their prompts in the
    prefix cache.
    """
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", num_threads=1, **ranks,
        max_model_len=224, block_size=4, num_blocks=70, max_num_seqs=4, max_num_batched_tokens=24,
        snapshot_bytes=1 << 20, max_loras=1, max_lora_rank=8,
    )  # fmt: skip
    core, others = start(config)
    generator = torch.Generator().manual_seed(3)
    lengths = (113, 99, 30, 7)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    outputs = run(core, prompts[:2], GREEDY)
    preempted = core.stats().preemptions
    add_adapter(core, "lora", adapter)
    outputs += run(core, prompts, GREEDY, adapters=["lora"] * 4)
    for prompt in prompts[:2]:
        said = run(core, [prompt], GREEDY)[0].token_ids
        outputs += run(core, [[*prompt, *said, 5, 6]], GREEDY)
    if others is not None:
        others.close()
    assert preempted and all(output.cached for output in outputs[-2:])
    return [output.token_ids for output in outputs]


TENSOR, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
# The quick stage has states alone beside keys. CI has one of each other kind of state, too.
_QUICK = (("qwen 3.5", STAGES),)
_SLOW = (
    ("falcon h1", TENSOR),
    ("qwen 3 next", TENSOR | STAGES),
    ("kimi linear", TENSOR),
    ("nemotron 3", TENSOR),
    ("lfm 2, biases", STAGES),
)
_WAYS = [
    *((name, ways) for name in NAMES for ways in (TENSOR, STAGES)),
    (NAMES[0], TENSOR | STAGES),
]


def _mark(case: tuple[str, dict[str, int]]) -> Any:
    if case in _QUICK:
        return ()
    return pytest.mark.slow if case in _SLOW else pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "ways"),
    [pytest.param(*case, marks=_mark(case)) for case in _WAYS],
)
def test_texts_of_one_rank(
    name: str,
    ways: dict[str, int],
    two_cores: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A rank with another's heads, or with all of what it has a part of; a sum that is taken twice;
    a state or a snapshot that one rank alone has; a stage without keys, or without states."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    made(name, tmp_path, max_position_embeddings=256)
    adapter = adapter_of_all(tmp_path)
    assert texts(tmp_path, adapter) == texts(tmp_path, adapter, **ways)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("qwen 3 next", 4, "key heads"),
        ("nemotron h", 4, "2 groups of Mamba-2's heads"),
        ("bamba", 4, "2 groups"),
        ("jamba", 2, "Mamba-1, whose steps are projections of all channels"),
    ],
)
def test_refused(name: str, ranks: int, message: str, tmp_path: Path) -> None:
    """A start that fails far behind what is at fault, or a model that is half there."""
    made(name, tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_ranks(ModelConfig.from_folder(tmp_path), ranks)
