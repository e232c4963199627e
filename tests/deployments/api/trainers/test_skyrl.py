"""SkyRL's client of inference servers, against a replica with a real engine; skipped without it."""

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import WeightSender
from engine.text.token_ids import missing_ids
from tests.deployments.api.server import serve
from tests.deployments.on_ray.serve_cluster import free_port, tiny_model
from tests.deployments.router.real_replicas import RealReplicas

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def client_module() -> Any:
    """Import SkyRL's client module without its neighbours, which import JAX; return it."""
    place = importlib.util.find_spec("skyrl")
    if place is None or place.submodule_search_locations is None:
        pytest.skip("pip install --no-deps skyrl")
    (folder,) = place.submodule_search_locations
    for name in ("backends", "backends/skyrl_train"):
        module = ModuleType(f"skyrl.{name.replace('/', '.')}")
        module.__path__ = [f"{folder}/{name}"]
        sys.modules[module.__name__] = module
    servers = "skyrl.backends.skyrl_train.inference_servers"
    return importlib.import_module(f"{servers}.remote_inference_client")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("skyrl") / "tiny")


@pytest.fixture(scope="module")
def root(folder: Path, client_module: Any) -> Iterator[str]:
    fields: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "num_blocks": 64,
        "sleep_in_host_memory": True,
    }
    with serve(RealReplicas(folder, **fields)) as port:
        yield f"http://127.0.0.1:{port}"


def test_skyrl(root: str, folder: Path, client_module: Any) -> None:
    """A step of SkyRL does not find a route, or the weights that it sends are not served."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    for parameter in model.parameters():
        parameter.data *= 20  # so that no two tokens are about equally likely
    tensors = [*model.state_dict().items()]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    logits[missing_ids(folder, model.config.vocab_size)] = -torch.inf
    first = int(logits.argmax())

    async def send(client: Any, sender: WeightSender) -> None:
        await client.start_weight_update()
        update = asyncio.create_task(client.update_weights_nccl(sender.update_info(tensors)))
        await asyncio.to_thread(sender.send, tensors)
        await update
        await client.finish_weight_update()

    async def main() -> None:
        client = client_module.RemoteInferenceClient(
            proxy_url=root, server_urls=[root], data_parallel_size=1, model_name="tiny"
        )
        async with client:
            world_size, _ = await client.get_world_size()
            sender = WeightSender("127.0.0.1", free_port(), world_size, "cpu")

            class InitInfo:
                def for_servers(self, *sizes: Any, **more: Any) -> list[Any]:
                    return [self]

                def to_api_payload(self) -> dict[str, Any]:
                    return sender.init_info

            await client.init_weight_update_communicator(InitInfo())
            ask = {
                "prompt_token_ids": [PROMPT] * 3,
                "sampling_params": {"max_tokens": 100, "logprobs": 0, "ignore_eos": True},
                "session_ids": ["a", "b", "c"],
            }
            rollout = asyncio.create_task(client.generate(ask, model="tiny"))
            await asyncio.sleep(0.05)
            await client.pause_generation()
            await send(client, sender)
            await client.reset_prefix_cache()
            await client.resume_generation()
            outputs = await rollout
            assert [len(ids) for ids in outputs["response_ids"]] == [100] * 3
            assert [len(scores) for scores in outputs["response_logprobs"]] == [100] * 3
            assert outputs["stop_reasons"] == ["length"] * 3 and all(outputs["responses"])
            await client.finish_session("a")
            greedy = {"max_tokens": 1, "temperature": 0.0}
            body = {"prompt_token_ids": [PROMPT], "sampling_params": greedy, "session_ids": None}
            assert (await client.generate(body, model="tiny"))["response_ids"] == [[first]]
            await client.sleep(level=2)
            await client.wake_up(["weights"])
            await send(client, sender)
            await client.wake_up(["kv_cache"])
            assert (await client.generate(body, model="tiny"))["response_ids"] == [[first]]
            assert await client.tokenize(["the sea"]) and await client.detokenize([[70, 71]])
            with pytest.raises(Exception, match="method is one of"):
                await client._call_all_servers("/collective_rpc", {"method": "exec"})

    asyncio.run(asyncio.wait_for(main(), 120))
