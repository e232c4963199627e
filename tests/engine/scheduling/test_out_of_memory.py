"""The device has no memory for a step: no request fails for it."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import factory
from engine.batch import Batch, OutOfMemory
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.scheduling.core import EngineCore
from tests.fakes import FakeRunner, _Step, expected, make_config, make_request, run

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 128_000, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
WIDE = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_blocks": 256}


class SmallDevice(FakeRunner):
    """A fake runner that raises OutOfMemory at launches for which `short(batch, runner)` is true.

    The real model runner turns torch's error into this one.
    """

    def __init__(self, short: Callable[[Batch, "SmallDevice"], bool], **changes: Any) -> None:
        super().__init__(make_config(**(WIDE | changes)))
        self.short = short
        self.shortages: list[int] = []  # tokens of each step that did not fit
        self.num_blocks = self.config.num_blocks

    def launch(self, batch: Batch) -> _Step:
        if self.short(batch, self):
            self.shortages.append(batch.num_tokens)
            raise OutOfMemory("2 GiB were tried, 1 GiB is free")
        return super().launch(batch)

    def shrink(self, num_blocks: int) -> None:
        super().shrink(num_blocks)
        self.num_blocks = num_blocks


def check(core: EngineCore, count: int, **fields: Any) -> None:
    """Assert that each request's output is the one that it has alone."""
    fields = {"max_tokens": 20, "ignore_eos": True} | fields
    requests = [make_request(i, 3 + 5 * i % 23, **fields) for i in range(count)]
    wanted = {r.id: expected(r, core.config) for r in requests}
    said = {id: (o.tokens, o.finish) for id, o in run(core, requests).items()}
    assert said == wanted


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_step_that_does_not_fit_is_computed_again_in_smaller_ones(async_scheduling: bool) -> None:
    """Bug: out of memory ends the engine, or fails those who were in the step, or the same step is
    tried again and again."""
    runner = SmallDevice(lambda batch, _: batch.num_tokens > 100, async_scheduling=async_scheduling)
    core = EngineCore(runner.config, runner)
    check(core, 40)
    assert 2 <= len(runner.shortages) <= 5
    assert core.stats().out_of_memory == len(runner.shortages)
    assert runner.num_blocks == 256, "it has fitted before the third time"


def test_a_short_time_of_need_leaves_no_trace() -> None:
    """Bug: after one bad moment (another process on the device) the engine is slow for ever."""
    left = [1]

    def once(batch: Batch, _: SmallDevice) -> bool:
        left[0] -= batch.num_tokens > 64
        return left[0] == 0 and batch.num_tokens > 64

    runner = SmallDevice(once)
    core = EngineCore(runner.config, runner)
    check(core, 30)
    assert len(runner.shortages) == 1 and core.scheduler.token_limit < 256
    for _ in range(12):
        check(core, 20, max_tokens=60)
    assert core.scheduler.token_limit == 256


def test_the_third_shortage_in_a_row_takes_memory_from_the_kv_cache() -> None:
    """Bug: the device's memory has become less, and no step, however small, ever fits again."""
    runner = SmallDevice(lambda _, device: device.num_blocks > 200)
    core = EngineCore(runner.config, runner)
    check(core, 12)
    assert len(runner.shortages) == 6 and runner.num_blocks == 196  # 256 * 7 / 8 * 7 / 8
    assert core.stats().total_blocks == 196
    check(core, 12)
    assert len(runner.shortages) == 6


def test_a_device_that_is_full_ends_the_engine_and_does_not_try_for_ever() -> None:
    """Bug: a replica that lives, serves nobody and is never replaced."""
    runner = SmallDevice(lambda *_: True)
    with pytest.raises(OutOfMemory):
        run(EngineCore(runner.config, runner), [make_request(i) for i in range(8)])
    assert len(runner.shortages) < 60


@pytest.mark.slow
def test_the_real_runner_on_the_cpu(default_model: Path, monkeypatch: Any) -> None:
    """Bug: torch's own exception is not recognised, or it keeps the step's tensors alive; text that
    differs after the KV cache was replaced."""
    config = EngineConfig(
        model=str(default_model), device="cpu", dtype="float32", load_format="dummy",
        num_blocks=80, max_num_seqs=4, max_model_len=256, num_threads=1,
    )  # fmt: skip
    core, _ = factory.build(config)
    fields = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}

    def say() -> dict[int, list[int]]:
        requests = [make_request(i, 20 + i, seed=i, **fields) for i in range(4)]
        return {id: output.tokens for id, output in run(core, requests).items()}

    wanted = say()
    core.reset_prefix_cache()
    runner: Any = core._runner
    forward, left = runner.model.forward, [3]

    def short(*args: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(*args)

    monkeypatch.setattr(runner.model, "forward", short)
    assert say() == wanted
    assert core.stats().out_of_memory == 3 and core.stats().total_blocks == 70


@pytest.mark.parametrize(
    ("target", "param", "words"),
    [
        ("rank_part.DeviceAdapters.allocate", "max_loras", "2 of rank 4, max_virtual_tokens"),
        ("runner.RequestRows.allocate", "max_num_seqs", "3 requests, 64 tokens, max_model_len"),
        ("runner.Sampler", "max_num_seqs", "3 requests, 64 tokens, max_model_len"),
        ("runner.KVCache.allocate", "memory_fraction", "8 blocks, kv_cache_bytes, num_blocks"),
        ("runner.ModelRunner", "memory_fraction", "8 blocks, max_num_batched_tokens"),
    ],
)
def test_no_allocation_of_the_start_ends_in_an_error_of_torch(
    target: str, param: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the weights' shortage is explained, that of what is allocated after them is a
    traceback."""

    def short(*args: Any, **fields: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(f"engine.factory.{target}", short)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a small one")
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | small))
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", load_format="dummy", num_blocks=8,
        max_num_seqs=3, max_model_len=64, max_loras=2, max_lora_rank=4, max_virtual_tokens=5,
        num_threads=1,
    )  # fmt: skip
    with pytest.raises(ConfigError) as raised:
        factory.build(config)
    assert raised.value.param == param
    message, ways = raised.value.message.split("Ways out: ")
    assert param in ways and ways.count(", ") >= 2 and ", or " in ways
    for word in ("a small one", "8.00 GiB", "3.00 GiB", "1.00 GiB"):
        assert word in message
    for word in words.split(", "):
        assert word in message + ways


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_a_real_shortage_on_the_device(tmp_path: Path) -> None:
    """Bug: what CUDA does when memory runs out is not what the other tests pretend: graphs that
    know old addresses, a cache that is not given back, a text that differs."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"intermediate_size": 8192}))
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dtype="bfloat16", load_format="dummy",
        num_blocks=4096, max_num_seqs=16, max_model_len=8192, max_num_batched_tokens=8192,
        deterministic=True,
    )  # fmt: skip
    core, _ = factory.build(config)

    def say() -> dict[int, list[int]]:
        common = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
        requests = [make_request(i, 2000, seed=i, **common) for i in range(8)]
        return {id: output.tokens for id, output in run(core, requests).items()}

    wanted = say()
    torch.cuda.empty_cache()
    # All that the device has, and all that torch still holds for the next tensor.
    hog = []
    for size in (2**32, 2**28, 2**26):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                hog.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    # One product of a full step makes 8192 x 2 x 8192 x 2 bytes: four times as much as is left.
    hog.pop()
    core.reset_prefix_cache()  # else it knows the prompts, and a step has little to compute
    assert say() == wanted
    assert 1 <= core.stats().out_of_memory < 20
    del hog
