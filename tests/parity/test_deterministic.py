"""Deterministic mode: a request's tokens and log-probabilities are the same bit by bit whatever
else runs and however its own work is cut into steps. Without it they are not, or these tests test
nothing. The same on a GPU: test_gpu.py.
"""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from tests.parity.engine_driver import Output, add_adapter, engine, run

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 0,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    max_tokens=12,
    ignore_eos=True,
    logprobs=3,
    logprobs_mode="processed_logprobs",
)


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    if request.param == "llama":
        model: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
        )
    else:
        model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)
        )
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 15, 16, 17, 90, 150, 33, 64, 65, 7, 40]
    prompts = [torch.randint(1, 512, (n,), generator=generator).tolist() for n in lengths]
    prompts[7][:32] = prompts[8][:32] = prompts[9][:32]  # something for the prefix cache
    return prompts


def same(a: Output, b: Output) -> bool:
    """Return whether two outputs are equal bit by bit, floats included."""
    return a.token_ids == b.token_ids and a.logprobs == b.logprobs


def all_cuts(
    folder: Path,
    prompts: list[list[int]],
    params: SamplingParams,
    adapters: dict[str, Path] | None = None,
    **fields: Any,
) -> bool:
    """Return whether outputs are equal however the work is cut.

    They run alone, together, in another order, in chunks of any size, with the prefix cache, and
    after preemptions. adapters: taken in turns with none.
    """
    fields = {"num_threads": 1, "prefix_caching": False, **fields}
    if adapters:
        fields["max_loras"] = len(adapters)
    names = [name for name, _ in zip(cycle(["", *(adapters or ())]), prompts, strict=False)]

    def start(**changes: Any) -> EngineCore:
        core = engine(folder, **fields | changes)
        for name, path in (adapters or {}).items():
            add_adapter(core, name, path)
        return core

    def all_of(core: EngineCore, **how: Any) -> list[Output]:
        return run(core, prompts, params, adapters=names, **how)

    core = start()
    whole = all_of(core)
    assert all(output.finish == "length" for output in whole)
    good = all(map(same, all_of(core, together=False), whole))
    backwards = run(core, prompts[::-1], params, adapters=names[::-1])
    good &= all(map(same, reversed(backwards), whole))
    cuts: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 37},
        {"async_scheduling": not torch.cuda.is_available()},  # not the default
        {"prefix_caching": True, "max_num_batched_tokens": 100},
    ]
    if adapters:
        cuts.append({"max_loras": 1})  # they take turns
    if fields["dtype"] == "bfloat16":  # torch, token by token, fills the last block up
        cuts.append({"block_size": 1, "num_blocks": 4096})
    for cut in cuts:
        good &= all(map(same, all_of(start(**cut)), whole))
    # With how few blocks a request is preempted depends on when adapters have loaded.
    for blocks in range(16 if adapters else 24, 11, -1):
        tight = start(num_blocks=blocks, max_model_len=192)
        good &= all(map(same, all_of(tight), whole))
        if tight.stats().preemptions:
            return good
    pytest.fail("nothing was preempted")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_numbers_depend_on_the_request_alone(
    folder: Path, prompts: list[list[int]], dtype: str
) -> None:
    """Sums in another order for another number of rows, a chunk that is attended to in another way
    than a decode. float32 has no generated kernels and goes row by row."""
    assert all_cuts(folder, prompts, GREEDY, dtype=dtype, deterministic=True)
    # Where rows are rounded to bfloat16 for a product, that takes off the bits that would differ.
    other = "float16" if dtype == "bfloat16" else dtype
    assert not all_cuts(folder, prompts, GREEDY, dtype=other)


@pytest.mark.slow
def test_sampled_texts_too(folder: Path, prompts: list[list[int]]) -> None:
    """Noise that depends on the place in the batch."""
    assert all_cuts(folder, prompts, SAMPLED, dtype="bfloat16", deterministic=True)


def test_it_says_the_same_as_the_default(folder: Path, prompts: list[list[int]]) -> None:
    """A deterministic kernel that is wrong alike in every batch."""
    for dtype, close in (("float32", 1e-4), ("bfloat16", 0.05)):
        fields = {"dtype": dtype, "num_threads": 1}
        plain, exact = (
            run(engine(folder, **fields, deterministic=flag), prompts, GREEDY)
            for flag in (False, True)
        )
        first = [(a.logprobs[0], b.logprobs[0]) for a, b in zip(plain, exact, strict=True)]
        assert all(a.token_id == b.token_id for a, b in first)
        assert max(abs(a.logprob - b.logprob) for a, b in first) < close


@pytest.mark.slow
def test_adapters(folder: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """An adapter's product that depends on how many rows have it, or a row without one that is
    computed in another way because its neighbours have some."""
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from tests.engine.lora.adapters import save_adapter

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapters = {
        name: save_adapter(model, tmp_path / name, seed, r=rank)
        for seed, (name, rank) in enumerate({"a": 8, "b": 40}.items())
    }
    dtype = "bfloat16" if model.config.model_type == "llama" else "float32"
    assert all_cuts(folder, prompts, GREEDY, adapters, dtype=dtype, deterministic=True)
