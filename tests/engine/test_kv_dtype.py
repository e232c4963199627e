"""The option kv_dtype: its effect on the memory plan, on the KV cache and on the text of an
engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.plan.gpus import GIB
from deployments.plan.memory import Hardware, plan
from engine import LLM, SamplingParams
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.factory.plans import model_key
from engine.resolve import decide, resolve
from engine.runner.caches.kv_cache import KVCache
from kernels.kv.quantized import QuantizedKV
from tests.engine.models.test_programs import answers, core_of
from tests.engine.test_memory import config_of, held
from tests.engine.weights.test_rounded_cuda import MODEL

HEADS: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "head_dim": 64}
names = pytest.mark.parametrize("name", ["int8", "fp8", "int4"])


def blocks_of(folder: Path, dim: int, **options: Any) -> int:
    config = config_of(folder, HEADS | {"head_dim": dim}, **options)
    hardware = Hardware("here", "cpu", 64 * GIB)
    return plan(ModelConfig.from_folder(folder), config, hardware).num_blocks


@pytest.mark.parametrize("dim", [64, 128])
def test_the_same_memory_holds_so_many_more_tokens(dim: int, tmp_path: Path) -> None:
    """Bug: scales are not counted, or so large that half the gain is theirs."""
    plain = blocks_of(tmp_path, dim, dtype="bfloat16")
    assert blocks_of(tmp_path, dim, kv_dtype="bf16") == plain
    for name, least in (("int8", 1.9), ("fp8", 1.9), ("int4", 3.5)):
        assert blocks_of(tmp_path, dim, kv_dtype=name) >= least * plain


@names
def test_the_cache_holds_what_was_planned(name: str, tmp_path: Path) -> None:
    """Bug: blocks of two layers overlap; more memory is taken than the sum says."""
    resolved = resolve(config_of(tmp_path, HEADS, kv_dtype=name))
    groups = kv_groups(resolved.model)
    cpu = torch.device("cpu")
    kv = KVCache.allocate(groups, 5, 4, resolved.dtype, cpu, resolved.kv)
    assert held(kv.storage) == 5 * groups.bytes_per_block(4, resolved.kv)
    kv.shrink(3)
    assert held(kv.storage) == 3 * groups.bytes_per_block(4, resolved.kv)
    for number, layer in enumerate(kv.layers.values()):
        for cache in layer:
            assert isinstance(cache, QuantizedKV) and cache.shape == (3, 2, 4, 64)
            assert not cache.codes.view(torch.uint8).any() and not cache.numbers.any()
            cache.codes.view(torch.uint8).fill_(number + 1)
            cache.numbers.fill_(number + 1)


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    """Bug: an error in a kernel, minutes later, or none."""
    a100 = Hardware.gpu("a100")
    config = config_of(tmp_path, HEADS, kv_dtype="fp8")
    model = ModelConfig.from_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"kv_dtype: A100 .*8\.9; int8 keeps as many"):
        plan(model, config, a100)
    for name in ("int8", "int4"):
        assert plan(model, config_of(tmp_path, HEADS, kv_dtype=name), a100).num_blocks
    odd = config_of(tmp_path, HEADS | {"head_dim": 60}, kv_dtype="int4")
    odd_model = ModelConfig.from_folder(tmp_path)
    odd_model = replace(
        odd_model,
        attention=tuple(
            replace(layer, rope=replace(layer.rope, dim=6)) for layer in odd_model.attention
        ),
    )
    with pytest.raises(ConfigError, match=r"kv_dtype: int4 .* even number of elements on CUDA"):
        decide(odd, odd_model, torch.device("cuda"))
    odd = config_of(tmp_path, HEADS | {"head_dim": 60}, kv_dtype="int4", block_size=1)
    with pytest.raises(ConfigError, match=r"even block_size on CUDA where heads have 60 elements"):
        decide(odd, ModelConfig.from_folder(tmp_path), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"kv_dtype: bf16 .* float32 here"):
        resolve(config_of(tmp_path, HEADS, kv_dtype="bf16", dtype="float32"))
    with pytest.raises(ConfigError, match="kv_dtype: int4 needs heads of a multiple of 4"):
        resolve(config_of(tmp_path, HEADS | {"head_dim": 66}, kv_dtype="int4"))
    with pytest.raises(ConfigError, match="kv_dtype must be"):
        EngineConfig(model=str(tmp_path), kv_dtype="int2")  # type: ignore[arg-type]


def test_blocks_of_another_type_have_other_keys(tmp_path: Path) -> None:
    """Bug: a prefix is taken from blocks whose numbers mean something else."""
    kinds = ("auto", "int8", "fp8", "int4")
    keys = [model_key(resolve(config_of(tmp_path, HEADS, kv_dtype=kind))) for kind in kinds]
    assert len(set(keys)) == len(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_text_is_the_same_after_a_preemption_and_from_the_prefix_cache(
    name: str, tmp_path: Path
) -> None:
    """Bug: keys of a second computation differ from the first's, in blocks that were another
    request's; a step's own keys are read before they are rounded."""
    plainly: dict[str, Any] = {"dtype": "float32", "deterministic": True, "block_size": 4}
    options = plainly | {"kv_dtype": name}
    roomy = core_of(tmp_path, {}, **options)
    scarce = core_of(
        tmp_path, {}, num_blocks=16, max_num_batched_tokens=16, max_model_len=64,
        **options | {"prefix_caching": True},
    )  # fmt: skip
    first = answers(roomy)
    assert answers(scarce) == first
    assert scarce.scheduler.counters.preemptions > 0
    assert answers(scarce) == first
    plain = core_of(tmp_path, {}, **plainly)
    assert answers(plain) != first, "the cache is as it was"


# ---- On a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@names
def test_graphs_and_eager_steps_agree(name: str, deterministic: bool, tmp_path: Path) -> None:
    """A kernel that launches something else inside of a graph, or reads a cache's address of
    before; keys that another kernel of the same step has not written yet. Forty prompts of 1 to 400
    tokens take chunks, decodes and both."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    prompts = [[(7 * i + j) % 2048 for j in range(1 + 10 * i)] for i in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    texts = []
    for graphs in (True, False):
        with LLM(
            str(tmp_path), load_format="dummy", dtype="bfloat16", num_blocks=2048,
            cuda_graphs=graphs, max_num_seqs=64, prefix_caching=graphs, kv_dtype=name,
            deterministic=deterministic,
        ) as llm:  # fmt: skip
            for _ in range(2):  # with graphs the second time from the prefix cache
                texts.append([
                    output.outputs[0].token_ids
                    for output in llm.generate(prompts, params, detokenize=False)
                ])  # fmt: skip
    same = [sum(a == b for a, b in zip(texts[0], other, strict=True)) for other in texts[1:]]
    # Products of several tokens differ in the last bit where a graph pads a step.
    assert min(same) >= (40 if deterministic else 28), same
