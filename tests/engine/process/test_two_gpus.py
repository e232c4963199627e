"""Ranks on GPUs of their own: NCCL, peer memory over NVLink, and what is left of them.

`python -m pytest -m gpu tests/engine/process/test_two_gpus.py`, on a machine with two GPUs. Ranks
that share one are in test_peer_ranks.py."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.errors import EngineDead
from tests.engine.process.ranked import children, model_and_adapters, two_gpus
from tests.engine.process.test_process import running, wait_until

pytestmark = [pytest.mark.gpu, two_gpus]

OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "num_blocks": 64, "max_num_seqs": 8,
    "max_num_batched_tokens": 256, "max_loras": 2, "max_lora_rank": 8, "max_virtual_tokens": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("model")
    return model_and_adapters(folder, head_dim=16, hidden_size=64, num_hidden_layers=4)


def said(model: dict[str, Path], **parts: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities: greedy, sampled, of long prompts and with adapters."""
    adapters = ["", "", "lora", "prefix_tuning", "prompt_tuning", "", "", ""]
    prompts = [[3 + (n + i * i) % 300 for i in range(8 + 30 * n)] for n in range(len(adapters))]
    params = [
        SamplingParams(
            max_tokens=24, ignore_eos=True, temperature=0.9 * (n % 2), seed=n, logprobs=0
        )
        for n in range(len(adapters))
    ]
    with LLM(model["model"], **OPTIONS, **parts) as llm:
        for name in ("lora", "prefix_tuning", "prompt_tuning"):
            llm.add_adapter(name, model[name])
        outputs = llm.generate(prompts, params, adapter=adapters)
        greedy = llm.generate(
            prompts, SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
        )
    found = [each.outputs[0] for each in (*outputs, *greedy)]
    return [
        (list(each.token_ids), [item.logprob for item in each.logprobs or [] if item is not None])
        for each in found
    ]


@pytest.mark.parametrize(
    "parts",
    [
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "cuda_graphs": False},
        {"tensor_parallel": 2, "attention_data_parallel": True},
        {"pipeline_parallel": 2},
    ],
)
def test_texts_are_those_of_one_gpu(model: dict[str, Path], parts: dict[str, Any]) -> None:
    """Bugs: a sum over NVLink that is read before it is there; ranks that have recorded steps of
    other sizes, and wait for each other; activations that the next stage has overwritten."""
    alone, together = said(model), said(model, **parts)
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    for (_, ours), (_, theirs) in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("key", ["tensor_parallel", "pipeline_parallel"])
def test_a_killed_rank_leaves_nothing(model: dict[str, Path], key: str) -> None:
    """Bugs: a kernel that waits for a rank that has ended keeps its GPU busy and its memory taken;
    the engine waits in NCCL for ever."""
    before = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
    with LLM(model["model"], **OPTIONS, **{key: 2}) as llm:
        (rank,) = children(llm.pid)
        handle = llm.start_request([5, 6, 7], SamplingParams(max_tokens=500, ignore_eos=True))
        handle.get(20)
        os.kill(rank, 9)
        with pytest.raises(EngineDead, match="rank 1 of 2 of the engine was killed by signal 9"):
            handle.sync(10)
        assert wait_until(lambda: not running(rank) and not running(llm.pid), 5.0)

    def free() -> bool:
        now = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
        return all(a >= b - (64 << 20) for a, b in zip(now, before, strict=True))

    assert wait_until(free, 5.0)
