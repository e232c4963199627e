"""Ranks on GPUs of their own: NCCL, peer memory over NVLink, and what is left of them.

`python -m pytest -n 0 -m gpu tests/engine/process/test_two_gpus.py`, on a machine with two GPUs, of
which nobody else takes memory meanwhile. Ranks that share one are in test_peer_ranks.py. An engine
is started once for all tests of it, as starts are what takes long."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.errors import EngineDead
from tests.engine.process.ranked import children, model_and_adapters
from tests.engine.process.test_process import running, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "num_blocks": 64, "max_num_seqs": 8,
    "max_num_batched_tokens": 256, "max_loras": 2, "max_lora_rank": 8, "max_virtual_tokens": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("model")
    return model_and_adapters(folder, head_dim=16, hidden_size=64, num_hidden_layers=4)


Said = list[tuple[list[int], list[float]]]


def said(llm: LLM, model: dict[str, Path]) -> Said:
    """Return tokens and log-probabilities: greedy, sampled, of long prompts and with adapters."""
    adapters = ["", "", "lora", "prefix_tuning", "prompt_tuning", "", "", ""]
    prompts = [[3 + (n + i * i) % 300 for i in range(8 + 30 * n)] for n in range(len(adapters))]
    params = [
        SamplingParams(
            max_tokens=24, ignore_eos=True, temperature=0.9 * (n % 2), seed=n, logprobs=0
        )
        for n in range(len(adapters))
    ]
    for name in ("lora", "prefix_tuning", "prompt_tuning"):
        llm.add_adapter(name, model[name])
    outputs = llm.generate(prompts, params, adapter=adapters)
    greedy = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0))
    choices = [result.outputs[0] for result in (*outputs, *greedy)]
    return [
        (
            list(choice.token_ids),
            [item.logprob for item in choice.logprobs or [] if item is not None],
        )
        for choice in choices
    ]


@pytest.fixture(scope="module")
def alone(model: dict[str, Path]) -> Said:
    with LLM(model["model"], **OPTIONS) as llm:
        return said(llm, model)


def free() -> list[int]:
    """Return the free bytes of each GPU."""
    return [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]


@pytest.fixture(
    scope="module",
    params=[
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "cuda_graphs": False},
        {"tensor_parallel": 2, "attention_data_parallel": True},
        {"pipeline_parallel": 2},
    ],
    ids=lambda parts: "-".join(parts),
)
def together(
    request: pytest.FixtureRequest, model: dict[str, Path], alone: Said
) -> Iterator[tuple[LLM, list[int]]]:
    """Yield an engine of two ranks, and the bytes that were free before it.

    alone: the result of the engine of one rank, which has ended.
    """
    before = free()
    with LLM(model["model"], **OPTIONS, **request.param) as llm:
        yield llm, before


def test_texts_are_those_of_one_gpu(
    together: tuple[LLM, list[int]], model: dict[str, Path], alone: Said
) -> None:
    """Bugs: an all-reduce over NVLink that is read too early; ranks that have graphs of steps of
    other sizes, and wait for each other; activations that the next stage has overwritten."""
    outputs = said(together[0], model)
    assert [tokens for tokens, _ in outputs] == [tokens for tokens, _ in alone]
    for (_, ours), (_, theirs) in zip(outputs, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_a_killed_rank_leaves_nothing(together: tuple[LLM, list[int]]) -> None:
    """Bugs: a kernel that waits for a rank that has ended keeps its GPU busy and its memory taken;
    the engine waits in NCCL for ever."""
    llm, before = together
    (rank,) = children(llm.pid)
    handle = llm.start_request([5, 6, 7], SamplingParams(max_tokens=500, ignore_eos=True))
    handle.get(20)
    os.kill(rank, 9)
    with pytest.raises(EngineDead, match="rank 1 of 2 of the engine was killed by signal 9"):
        handle.sync(10)
    assert wait_until(lambda: not running(rank) and not running(llm.pid), 5.0)
    assert wait_until(
        lambda: all(a >= b - (64 << 20) for a, b in zip(free(), before, strict=True)), 5.0
    )
