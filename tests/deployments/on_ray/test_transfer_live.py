"""A trainer that speaks vLLM's routes to a deployed application: broadcasts to real engines."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from deployments.app import assemble
from deployments.config.load import parse_config
from engine import WeightSender
from engine.text.token_ids import missing_ids
from tests.deployments.on_ray.serve_cluster import Cluster, tiny_model
from tests.deployments.on_ray.test_training_live import info, until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

PROMPT = [5, 6, 7, 8]
# Of its own: an application keeps a trainer's weights, for the next one of its name and model, too.
APP = "transfer"


class Trainer:
    """A trainer that has the served model in transformers, with other weights in each step."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        # the tokenizer's vocabulary is smaller than the model's, and the engine says none of these
        self._never = missing_ids(folder, self.model.config.vocab_size)
        self._random = torch.Generator().manual_seed(1)

    def train(self) -> list[tuple[str, Tensor]]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                # large, so that no two tokens are about equally likely
                parameter.add_(torch.randn(parameter.shape, generator=self._random) * 0.3)
        return list(self.model.state_dict().items())

    @torch.inference_mode()
    def says(self, count: int) -> list[int]:
        ids = [*PROMPT]
        for _ in range(count):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            logits[self._never] = -torch.inf
            ids.append(int(logits.argmax()))
        return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("transfer") / "tiny")


@pytest.fixture(scope="module")
def served(shared_cluster: Cluster, folder: Path) -> Iterator[Cluster]:
    from ray import serve

    config = parse_config(
        {
            "model": str(folder),
            "app_name": APP,
            "engine": {
                "load_format": "dummy",
                "dtype": "float32",
                "num_blocks": 64,
                "sleep_in_host_memory": True,
            },
            "pools": {"cpu": {"replicas": 2, "num_cpus": 0.5}},
            "router": {"replicas": 2},
        },
        {},
    )
    serve.run(assemble(config), name=APP, route_prefix="/")
    yield shared_cluster
    serve.delete(APP)


def says(cluster: Cluster, count: int = 6) -> set[tuple[tuple[int, ...], str]]:
    """Return the tokens of some rollouts at any replica, and the versions of their weights."""
    params = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    answers = set()
    for _ in range(8):
        body = {"token_ids": PROMPT, "sampling_params": params}
        (choice,) = cluster.post("/inference/v1/generate", **body)["choices"]
        versions = ",".join(part["version"] for part in choice["weight_versions"])
        answers.add((tuple(choice["token_ids"]), versions))
    return answers


def send(cluster: Cluster, sender: WeightSender, tensors: list[tuple[str, Tensor]]) -> Any:
    """Broadcast tensors, while the order to take them is under way."""
    thread = threading.Thread(target=sender.send, args=(tensors,))
    thread.start()
    answer = cluster.post("/update_weights", update_info=sender.update_info(tensors))
    thread.join()
    return answer


def test_a_trainer_drives_the_fleet(served: Cluster, folder: Path) -> None:
    """A message is lost between router, replica and engine; a replica that restarts has the weights
    of the start; or a sleep loses what was sent."""
    trainer = Trainer(folder)
    until(lambda: len(info(served)["replicas"]) == 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    receivers = json.loads(served.get("/get_world_size"))["world_size"]
    sender = WeightSender("127.0.0.1", port, receivers, "cpu", buffer_bytes=50_000)
    joined = served.post("/init_weight_transfer_engine", init_info=sender.init_info)
    assert joined == {"message": "Weight transfer initialized"}

    tensors = trainer.train()
    served.post("/start_weight_update", is_checkpoint_format=True)
    for part in (tensors[:4], tensors[4:]):
        assert send(served, sender, part) == {"message": "Weights updated"}
    done = served.post("/finish_weight_update", weight_version="one")
    assert done == {"message": "Weight update finished", "weight_version": "one"}
    assert says(served) == {((*trainer.says(6),), "one")}

    served.post("/sleep?level=2")
    assert json.loads(served.get("/is_sleeping")) == {"is_sleeping": True}
    served.post("/wake_up?tags=weights")
    assert send(served, sender, trainer.train())["weight_version"]
    served.post("/wake_up?tags=kv_cache")
    assert json.loads(served.get("/is_sleeping")) == {"is_sleeping": False}
    ((said, version),) = says(served)
    assert said == (*trainer.says(6),)

    from ray import serve

    victim = serve.get_deployment_handle("engine-cpu", APP).stats.remote().result()
    before = set(info(served)["replicas"])
    os.kill(victim["engine_pid"], signal.SIGKILL)

    def renewed() -> bool:
        replicas = info(served)["replicas"]
        now = {replica["weight_version"] for replica in replicas.values()}
        return len(replicas) == 2 and set(replicas) != before and now == {version}

    until(renewed, 120)
    assert says(served) == {(said, version)}
