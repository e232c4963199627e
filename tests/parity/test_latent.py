"""Latent attention beside what test_architectures.py compares: deterministic mode, weights in fewer
bits, ranks, memory, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from deployments.plan.gpus import GIB
from deployments.plan.memory import Hardware, plan
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import Full, kv_groups
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.layers.linear import LatentProjection
from engine.models.registry import build_model
from engine.resolve import decide
from engine.sampling_params import SamplingParams
from engine.weights import load_weights
from kernels.cpu.codegen.compiler import has_int8
from kernels.dispatch import kernels_for
from kernels.kv.format import KVFormat
from tests.engine.models.checkpoints import load_model
from tests.engine.process.conftest import two_cores
from tests.engine.process.ranked import start
from tests.parity.cases import LATENT, save
from tests.parity.engine_driver import engine, run
from tests.parity.test_deterministic import all_cuts

__all__ = ["two_cores"]  # a fixture

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latent")
    case = LATENT["deepseek v3"]
    save(replace(case, changes={**case.changes, "max_position_embeddings": 256}), path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 15, 16, 17, 40, 33, 48, 41)
    texts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    texts[5][:32] = texts[6][:32] = texts[7][:32]  # something for the prefix cache
    return texts


@pytest.mark.slow
def test_deterministic(folder: Path, prompts: list[list[int]]) -> None:
    """A chunk that is not absorbed, where its tokens alone would be."""
    longer = [prompts[4] + prompts[6] + prompts[5], prompts[4] * 3, prompts[7] * 2, prompts[6] * 2]
    sizes: dict[str, Any] = {"max_model_len": 256}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    assert all_cuts(folder, prompts + longer, params, dtype="float32", deterministic=True, **sizes)


def test_one_latent_a_token(folder: Path) -> None:
    """Memory for values that no layer keeps; or a plan that counts a head's keys."""
    model = ModelConfig.from_folder(folder)
    groups = kv_groups(model)
    assert groups.kinds == (Full(),)
    assert model.kv_bytes_per_token(4) == 3 * (16 + 8) * 4
    assert groups.bytes_per_block(16, KVFormat(bits=32)) == 16 * 3 * (16 + 8) * 4
    planned = plan(model, EngineConfig(model="", dtype="float32"), Hardware("CPU", "cpu", 8 * GIB))
    assert [taken for _, _, taken in planned.kv_per_token] == [3 * (16 + 8) * 4]


def test_heads_products_of_weights_in_fewer_bits(folder: Path) -> None:
    """A packed weight whose numbers come out in another order, or for another rank."""
    if not has_int8():
        pytest.skip("needs AVX512-VNNI")
    config = ModelConfig.from_folder(folder)
    exact = load_model(folder)
    model = build_model(config, torch.bfloat16, "cpu", kernels_for("cpu"), quantization="int8")
    load_weights(model, folder)
    pairs = zip(exact.layers, model.layers, strict=True)  # type: ignore[attr-defined]
    for dense, other in pairs:
        ours, theirs = dense.attention.block.up, other.attention.block.up
        assert isinstance(ours, LatentProjection) and theirs.weight.dtype == torch.bfloat16
        assert (ours.weight - theirs.weight).abs().max() < 0.02 * ours.weight.abs().max()
        assert theirs.num_bytes == theirs.weight.nbytes


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_fewer_bits(folder: Path, prompts: list[list[int]], quantization: str) -> None:
    """Generated products beside latents of sizes that have no generated kernels. Roundings may
    change a token, and what follows it."""
    if quantization == "int8" and not has_int8():
        pytest.skip("needs AVX512-VNNI")
    sizes: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "num_blocks": 400}
    want = run(engine(folder, **sizes), prompts, GREEDY)
    fewer = engine(folder, dtype="bfloat16", quantization=quantization, **sizes)
    outputs = run(fewer, prompts, GREEDY)
    first = [a.token_ids[0] == b.token_ids[0] for a, b in zip(outputs, want, strict=True)]
    assert sum(first) > 0.7 * len(first)


def test_two_ranks(folder: Path, prompts: list[list[int]], two_cores: None) -> None:
    """Heads that are divided over a latent that is not."""
    values: dict[str, Any] = {
        "num_blocks": 400,
        "block_size": 4,
        "num_threads": 1,
        "max_model_len": 64,
    }
    texts = []
    for count in (1, 2):
        config = EngineConfig(
            model=str(folder), device="cpu", dtype="float32", tensor_parallel=count, **values
        )
        core, ranks = start(config)
        texts.append([output.token_ids for output in run(core, prompts, GREEDY)])
        if ranks is not None:
            ranks.close()
    assert texts[0] == texts[1]


def changed(folder: Path, tmp_path: Path, **keys: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", True), ("scoring_func", "softmax"), ("topk_method", "greedy")],
)
def test_refused_keys(folder: Path, tmp_path: Path, key: str, value: Any) -> None:
    """A model that loads and answers wrongly."""
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_folder(changed(folder, tmp_path, **{key: value}))


def test_two_layers_that_belong_together(tmp_path: Path) -> None:
    """A stage that ends between experts and the layer that they give to."""
    save(LATENT["longcat flash"], tmp_path)
    settings = EngineConfig(model=str(tmp_path), pipeline_parallel=2)
    with pytest.raises(ConfigError, match=r"pipeline_parallel: 2: .* give to the next layer"):
        decide(settings, ModelConfig.from_folder(tmp_path), torch.device("cpu"))


def test_refused_settings(folder: Path) -> None:
    """A start that fails far behind the setting that is at fault."""
    model, config = ModelConfig.from_folder(folder), EngineConfig(model=str(folder))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ConfigError, match=r"kv_dtype: int8 .* latents"):
        decide(msgspec.structs.replace(config, kv_dtype="int8"), model, cpu)
    with pytest.raises(ConfigError, match=r"deterministic: .* latent attention"):
        decide(msgspec.structs.replace(config, deterministic=True), model, gpu)


def test_no_adapter_between_latents_and_heads(folder: Path) -> None:
    """An adapter on kv_b_proj that is taken and never applied."""
    names = {part.name for linear in load_model(folder).linears() for part in linear.spec.parts}
    assert "model.layers.0.self_attn.q_b_proj" in names
    assert not any(name.endswith("kv_b_proj") for name in names)
