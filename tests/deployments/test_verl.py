"""verl's rollouts by an engine of Manta: its classes where the package is, and its calls always."""

import ast
import asyncio
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deployments.integrations.bucket import Bucket
from deployments.integrations.verl_server import RolloutServer, read_sampling
from engine.errors import ConfigError, InvalidRequest, UpdateFailed
from engine.text.token_ids import missing_ids
from tests.deployments.on_ray.serve_cluster import tiny_model

PROMPT = [5, 6, 7, 8]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
# The server of verl 0.9.1: the methods that its replica and adapters call, with their arguments.
SERVER = {
    "generate": "prompt_ids sampling_params request_id image_data video_data audio_data "
    "mm_processor_kwargs priority",
    "abort_all_requests": "reject_request",
    "abort_request": "request_id",
    "resume_generation": "",
    "wait_for_requests_to_drain": "",
    "set_global_steps": "global_steps",
    "sleep": "",
    "wake_up": "tags",
    "release_kv_cache": "",
    "resume_kv_cache": "",
    "clear_kv_cache": "",
    "stop_profile": "",
}


def config(**fields: Any) -> Any:
    """Return the fields of verl's RolloutConfig that a server reads, for a CPU."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 64,
        "prompt_length": 32,
        "response_length": 24,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.5,
        "tensor_model_parallel_size": 1,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        "free_cache_engine": True,
        "enable_rollout_routing_replay": False,
        "engine_kwargs": {"manta": {"device": "cpu", "num_blocks": 64, "load_format": "dummy"}},
        "checkpoint_engine": SimpleNamespace(update_weights_bucket_megabytes=1),
    }
    return SimpleNamespace(**{**defaults, **fields})


def test_methods_of_verl() -> None:
    """verl calls a method that the server has not, or by another argument."""
    for name, arguments in SERVER.items():
        method = getattr(RolloutServer, name)
        assert " ".join([*inspect.signature(method).parameters][1:]) == arguments, name
    package = importlib.util.find_spec("verl")
    if package is None or package.submodule_search_locations is None:
        return
    (folder,) = package.submodule_search_locations
    tree = ast.parse((Path(folder) / "workers/rollout/replica.py").read_text("utf-8"))
    called = {
        node.func.value.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "remote"
        and isinstance(node.func.value, ast.Attribute)
    }
    assert len(called) >= 9 and not [name for name in called if not hasattr(RolloutServer, name)]


def test_what_verl_asks_for_is_refused() -> None:
    """A field that changes rollouts is left out in silence."""
    params = read_sampling({**SAMPLING, "logprobs": True, "max_new_tokens": 9}, 24)
    assert (params.max_tokens, params.logprobs, params.top_k) == (9, 0, 0)
    assert read_sampling({**SAMPLING, "logprobs": False}, 24).logprobs is None
    with pytest.raises(InvalidRequest, match="sampling_params: bad_words: not supported"):
        read_sampling({"bad_words": ["x"]}, 24)
    with pytest.raises(ConfigError, match=r"rollout\.data_parallel_size"):
        asyncio.run(RolloutServer(config(data_parallel_size=2), None, "hybrid", "").launch_server())


def messages(model: Any, num_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of an update, in buckets of so many bytes."""
    bucket = Bucket(num_bytes)
    for name, tensor in model.state_dict().items():
        if not bucket.has_room(tensor):
            yield bucket.message()
        bucket.put(name, tensor)
    yield bucket.message()
    bucket.close()


def greedy(model: Any, folder: Path, count: int) -> list[int]:
    """Return the greedy tokens of transformers' model, without those that have no text."""
    ids, never = [*PROMPT], missing_ids(folder, model.config.vocab_size)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        logits[never] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


def tiny(tmp_path: Path) -> tuple[Path, Any]:
    folder = tiny_model(tmp_path / "tiny")
    torch.manual_seed(1)
    return folder, AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()


@pytest.mark.slow
def test_a_step_of_verl(tmp_path: Path) -> None:
    """Weights that come in buckets are not served, or a partial rollout loses its tokens."""
    folder, model = tiny(tmp_path)
    ask = {**SAMPLING, "temperature": 0.0, "logprobs": True, "ignore_eos": True}

    async def main() -> None:
        server = RolloutServer(config(), SimpleNamespace(local_path=str(folder)), "hybrid", "")
        await server.launch_server()
        first = await server.generate(PROMPT, {**ask, "max_tokens": 8}, "a")
        assert first.extra_fields == {"global_steps": None}
        await server.wait_for_requests_to_drain()
        await server.sleep()
        await server.wake_up(["weights"])
        await server.start_weight_update()
        parts = 0
        for info in messages(model, 4096):
            await server.take_weights(info)
            parts += 1
        assert parts > 3
        await server.finish_weight_update(7)
        await server.wake_up(["kv_cache"])
        await server.clear_kv_cache()
        rollout = await server.generate(PROMPT, {**ask, "max_tokens": 8}, "b")
        assert rollout.token_ids == greedy(model, folder, 8) and rollout.stop_reason == "completed"
        assert rollout.log_probs is not None and len(rollout.log_probs) == 8
        assert rollout.extra_fields == {"global_steps": 7}
        # a trainer that breaks an update off leaves the weights, and the next update begins anew
        await server.start_weight_update()
        await server.take_weights(next(messages(model, 4096)))
        await server.start_weight_update()
        with pytest.raises(UpdateFailed):
            await server.finish_weight_update(8)
        again = await server.generate(PROMPT, {**ask, "max_tokens": 8}, "c")
        assert again.token_ids == rollout.token_ids and again.extra_fields == {"global_steps": 7}
        # fully asynchronous: the trainer goes on with the tokens of an aborted request
        running = asyncio.create_task(server.generate(PROMPT, ask, "d"))
        while "d" not in server._running:
            await asyncio.sleep(0)
        answer = await server.abort_all_requests()
        assert answer == {"aborted_count": 1, "request_ids": ["d"]}
        part = await running
        assert part.stop_reason in ("aborted", "completed")
        waiting = asyncio.create_task(server.generate([*PROMPT, *part.token_ids], ask, "e"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await server.resume_generation()
        whole = part.token_ids + (await waiting).token_ids
        assert whole[:24] == greedy(model, folder, 24)
        await server.abort_all_requests(reject_request=True)
        refused = await server.generate(PROMPT, ask, "f")
        assert (refused.token_ids, refused.stop_reason) == ([], "aborted")
        await server.resume_generation()
        with pytest.raises(InvalidRequest, match="texts only"):
            await server.generate(PROMPT, ask, "g", image_data=["x"])
        await server.close()

    asyncio.run(main())


class Handle:
    """An actor's handle, whose methods run in this process."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._server, name))


@pytest.mark.slow
def test_classes_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl does not find the rollout by its name, or its adapter sends weights in another form."""
    for name in ("verl", "tensordict", "omegaconf"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"pip install --no-deps {name}")
    monkeypatch.setenv("RANK", "0")
    module = importlib.import_module("deployments.integrations.verl")
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import TokenOutput, get_rollout_replica_class

    assert get_rollout_class("manta", "async") is module.ServerAdapter
    replica = get_rollout_replica_class("manta")
    assert replica is module.Replica and not inspect.isabstract(replica)
    folder, model = tiny(tmp_path)

    async def main() -> None:
        server = module.Server(config(), SimpleNamespace(local_path=str(folder)), "hybrid", "")
        await server.launch_server()
        adapter = module.ServerAdapter(config(), SimpleNamespace(), None)
        adapter._server = Handle(server)
        await adapter.release()
        await adapter.resume(["weights"])
        await adapter.update_weights(iter(model.state_dict().items()), global_steps=3)
        await adapter.resume(["kv_cache"])
        ask = {**SAMPLING, "temperature": 0.0, "ignore_eos": True, "max_tokens": 6}
        output = await server.generate(
            request_id="a", prompt_ids=PROMPT, sampling_params=ask, image_data=None, video_data=None
        )
        assert isinstance(output, TokenOutput) and output.token_ids == greedy(model, folder, 6)
        assert output.extra_fields == {"global_steps": 3} and output.log_probs is None
        wrong = dict(model.state_dict())
        wrong["model.norm.weight"] = torch.ones(3)
        with pytest.raises(UpdateFailed, match=r"model\.norm\.weight"):
            await adapter.update_weights(iter(wrong.items()), global_steps=4)
        with pytest.raises(UpdateFailed, match="delta_flush is not supported"):
            await adapter.update_weights(iter(()), wire_format="delta_flush")
        again = await server.generate(request_id="b", prompt_ids=PROMPT, sampling_params=ask)
        assert again.token_ids == output.token_ids and again.extra_fields == {"global_steps": 3}
        await server.close()

    asyncio.run(main())


@pytest.mark.gpu
def test_buckets_by_cuda_ipc(tmp_path: Path) -> None:
    """A bucket that is written again shows the bytes of the message before, or is closed too early.

    The trainer is another process, as CUDA opens no handle in the process that made it.
    """
    folder, model = tiny(tmp_path)
    model = model.to("cuda", torch.bfloat16)
    ask = {**SAMPLING, "temperature": 0.0, "ignore_eos": True, "max_tokens": 8}
    on_gpu = {"manta": {"device": "cuda", "num_blocks": 64, "load_format": "dummy"}}

    async def main() -> None:
        fields = config(dtype="bfloat16", engine_kwargs=on_gpu)
        server = RolloutServer(fields, SimpleNamespace(local_path=str(folder)), "hybrid", "")
        await server.launch_server()
        for num_bytes in (1 << 30, 1 << 16, 4096):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(-1.0)
            await server.start_weight_update()
            for info in messages(model, num_bytes):
                await server.take_weights(info)
            await server.finish_weight_update(num_bytes)
            sent = await server.generate(PROMPT, ask, "a")
            model.save_pretrained(tmp_path / str(num_bytes))
            await server._engine.update_weights(tmp_path / str(num_bytes))
            assert (await server.generate(PROMPT, ask, "b")).token_ids == sent.token_ids
        await server.close()

    asyncio.run(main())
