"""A model in several ranks: its texts are those of one rank, and its ranks die together."""

import gc
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from engine import LLM, SamplingParams
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead
from engine.process import rank as rank_process
from tests import drafters
from tests.engine.lora.adapters import save_prompt
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.process.ranked import (
    add_adapters,
    children,
    config_of,
    everything,
    logprobs_of,
    model_and_adapters,
    serve,
    start,
    told,
)
from tests.engine.process.test_process import running, wait_until
from tests.engine.text import small_tokenizers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a model and of adapters for it, by name."""
    return model_and_adapters(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


SLOW = [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (2, 4))]


@pytest.mark.parametrize("kv_heads, size", [(2, 2), *SLOW])
def test_texts_are_those_of_one_rank(
    model: dict[str, Path], two_cores: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    kv_heads: int, size: int,
) -> None:  # fmt: skip
    """Bugs: a rank misses an adapter, or has all heads of a prefix; ranks that choose tokens of
    their own part ways; a preempted request's keys are another rank's; the prefix cache finds
    what only one rank has. Where attention is divided by requests: adapters and prefixes of one
    rank's tokens are those of the step's."""
    if (kv_heads, size) != (2, 2):
        folder = tmp_path / "model"
        theirs = save_checkpoint(
            folder, "llama", vocab_size=311, max_position_embeddings=512,
            num_key_value_heads=kv_heads,
        )  # fmt: skip
        small_tokenizers.byte_level().backend.save(str(folder / "tokenizer.json"))
        model = {"model": folder, "prefix_tuning": save_prompt(
            theirs, folder / "prefix", "prefix_tuning", 5
        )}  # fmt: skip
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(size)))
    requests = [
        message for message in everything(model) if not message.adapter or message.adapter in model
    ]
    outputs = []
    for ranks, by_requests in ((1, False), (size, False), (size, True)):
        options = {"tensor_parallel": ranks, "attention_data_parallel": by_requests}
        blocks = 7 if by_requests else 10  # of each rank's own requests, or of all
        core, others = start(config_of(model["model"], num_blocks=blocks, **options))
        add_adapters(core, model)
        first = serve(core, requests)
        assert core.stats().preemptions > 0 or (by_requests and size > 2)
        again = serve(core, requests[-3:])
        if not by_requests:  # where they may have gone: see test_attention_by_requests.py
            assert any(output.cached for output in again.values())
        assert told(again).items() <= told(first).items()
        drafted = [
            msgspec.structs.replace(
                m, prediction=m.token_ids[m.num_prompt_tokens :] + first[m.id].tokens
            )
            for m in requests
        ]
        core.scheduler.speculate(drafters.told("mixed", [3, 7]))
        assert told(serve(core, drafted)) == told(first) and core.stats().draft_tokens > 0
        core.scheduler.speculate(None)
        greedy = [message for message in requests if not message.params.temperature]
        assert told(serve(core, greedy)).items() <= told(first).items()
        outputs.append(first)
        if others is not None:
            others.close()
    for other in outputs[1:]:
        assert told(outputs[0]) == told(other)
        for id, output in outputs[0].items():
            close = pytest.approx(logprobs_of(output), abs=1e-4)
            assert logprobs_of(other[id]) == close


def test_deterministic_numbers_are_a_request_s_own(model: dict[str, Path], two_cores: None) -> None:
    """Bug: what ranks add up depends on how large the step is, so a request has other bits beside
    others, or where its prompt was cut elsewhere, than alone."""
    requests = [
        msgspec.structs.replace(
            message, params=msgspec.structs.replace(message.params, logprobs=1, prompt_logprobs=0)
        )
        for message in everything(model)
        if not message.adapter and message.params.structured is None
    ]
    options = {"tensor_parallel": 2, "dtype": "bfloat16", "deterministic": True, "max_loras": 0}
    core, ranks = start(config_of(model["model"], num_blocks=24, **options))
    together = serve(core, requests)
    for message in requests:
        core.reset_prefix_cache()
        alone = serve(core, [message])
        assert told(alone).items() <= told(together).items()
        assert logprobs_of(alone[message.id]) == logprobs_of(together[message.id])
    assert ranks is not None
    ranks.close()


def test_a_failed_step_costs_the_requests_that_are_to_blame(
    model: dict[str, Path], two_cores: None
) -> None:
    """Bugs: a step that raises on one rank leaves the others waiting for its sum, or a sum of the
    next step takes what was brought for that of the failed one."""
    core, ranks = start(config_of(model["model"], tensor_parallel=2, max_loras=0))
    requests = [message for message in everything(model) if not message.adapter][:3]
    want = told(serve(core, requests))
    assert ranks is not None
    poison = msgspec.structs.replace(requests[0], id=9, seed=99)

    for where in (0, 1):
        runner = core._runner._runner if where == 0 else _runner_of_rank_1()
        launch = runner.launch

        def launch_or_fail(batch: Any, launch: Any = launch, runner: Any = runner) -> Any:
            if any(new.seed == 99 for new in batch.new_rows):
                raise ValueError("planted")
            return launch(batch)

        runner.launch = launch_or_fail
        outputs = serve(core, [*requests, poison])
        assert outputs[9].finish == "error"
        assert {id: output for id, output in told(outputs).items() if id != 9} == want
        runner.launch = launch
    ranks.close()


def _runner_of_rank_1() -> Any:
    loops = [
        candidate for candidate in gc.get_objects() if type(candidate) is rank_process.RankLoop
    ]
    return loops[-1]._runner


@pytest.mark.parametrize(
    "changes, ranks, why",
    [
        ({}, 3, "4 attention heads and 2 key heads.*it can be 2, 4"),
        ({"intermediate_size": 57}, 2, "width of Llama.*MLPs"),
        ({}, 4, "need as many cores, and this process may use 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: dict[str, Path], two_cores: None, tmp_path: Path,
    changes: dict[str, Any], ranks: int, why: str,
) -> None:  # fmt: skip
    """Bug: a model starts that computes with the wrong heads, or fails deep inside with a shape."""
    from engine.resolve import resolve

    config = json.loads((model["model"] / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=why) as caught:
        resolve(EngineConfig(model=str(tmp_path), device="cpu", tensor_parallel=ranks))
    assert caught.value.param == "tensor_parallel"


@pytest.mark.parametrize(
    ("others", "peers", "why"),
    [
        ([], True, "so many ranks need as many GPUs, and this process sees 1; .*num_gpus"),
        ([("H100", 80)], True, "of one kind.* GPU 1 H100 with 80 GiB; .*CUDA_VISIBLE_DEVICES"),
        ([("H200", 70)], True, "of one kind.* GPU 1 H200 with 70 GiB"),
        ([("H200", 141)], False, ""),
        ([("H200", 141)], True, ""),
    ],
)
def test_gpus_of_ranks(
    model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    others: list[tuple[str, int]], peers: bool, why: str,
) -> None:  # fmt: skip
    """Bugs: ranks start on GPUs that are too few, or of which one decides for all; nobody is told
    why sums are slow."""
    from engine.resolve import resolve

    gpus = [("H200", 141), *others]
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: len(gpus),
        "get_device_properties": lambda n: SimpleNamespace(
            name=gpus[n][0], total_memory=gpus[n][1] << 30
        ),
        "can_device_access_peer": lambda one, other: peers,
        "get_device_capability": lambda device: (9, 0),
        "get_device_name": lambda device: "H200",
    }
    for name, does in cuda.items():
        monkeypatch.setattr(torch.cuda, name, does)
    config = EngineConfig(model=str(model["model"]), device="cuda", tensor_parallel=2)
    if why:
        with pytest.raises(ConfigError, match=f"tensor_parallel 2: .*{why}") as caught:
            resolve(config)
        assert caught.value.param == "tensor_parallel"
        return
    assert resolve(config).device == torch.device("cuda", 0)
    messages = [record.message for record in caplog.records if "peer access" in record.message]
    assert len(messages) == (not peers) and all(
        "GPUs 0 and 1 have no peer" in message for message in messages
    )


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_die_together(model: dict[str, Path], real_cores: None, tmp_path: Path) -> None:
    """Bugs: a request waits for ever for a rank that was killed; the error names no rank; a process
    stays behind; a rank's refusal of the files is lost."""
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "tensor_parallel": 2}
    with LLM(model["model"], num_blocks=64, **options) as llm:
        (rank,) = children(llm.pid)
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 5
        handle = llm.start_request([5, 6, 7], SamplingParams(max_tokens=500, ignore_eos=True))
        handle.get(10)
        began = time.monotonic()
        os.kill(rank, 9)
        with pytest.raises(EngineDead, match="rank 1 of 2 of the engine was killed by signal 9"):
            handle.sync(10)
        assert time.monotonic() - began < 2.0  # a second, on a machine that has nothing else to do
        assert wait_until(lambda: not running(rank) and not running(llm.pid), 1.0)

    folder = tmp_path / "model"
    save_checkpoint(folder, "llama", num_hidden_layers=1)
    small_tokenizers.byte_level().backend.save(str(folder / "tokenizer.json"))
    weights = folder / "model.safetensors"
    tensors = torch.frombuffer(bytearray(weights.read_bytes()), dtype=torch.uint8)
    weights.write_bytes(tensors[: len(tensors) // 2].numpy().tobytes())
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        LLM(folder, num_blocks=64, **options)
