"""slime's two ways of sending tensors, over HTTP to replicas with real engines on the CPU."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.text.token_ids import missing_ids
from tests.deployments.api.server import serve
from tests.deployments.api.trainers.slime import broadcast, bucket, encoded, open_torch_group
from tests.deployments.on_ray.serve_cluster import free_port, tiny_model
from tests.deployments.router.real_replicas import RealReplicas

PROMPT = [5, 6, 7, 8]
REPLICAS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("slime") / "tiny")


@pytest.fixture(scope="module")
def root(folder: Path) -> Iterator[str]:
    fields: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "num_blocks": 64}
    with serve(RealReplicas(folder, REPLICAS, **fields), seconds=90.0) as port:
        yield f"http://127.0.0.1:{port}"


def post(root: str, path: str, **body: Any) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(root + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def model_of(folder: Path, seed: int) -> tuple[list[tuple[str, torch.Tensor]], int]:
    """Return the tensors of a trainer's model, and its greedy token after the prompt."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    for parameter in model.parameters():
        parameter.data *= 20  # so that no two tokens are about equally likely
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    logits[missing_ids(folder, model.config.vocab_size)] = -torch.inf
    return [*model.state_dict().items()], int(logits.argmax())


def says(root: str) -> set[tuple[int, str]]:
    """Return the first token and the weights' version of several requests, at all replicas."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    answers = [
        post(root, "/generate", input_ids=PROMPT, sampling_params=sampling) for _ in range(4)
    ]
    return {(answer["output_ids"][0], answer["meta_info"]["weight_version"]) for answer in answers}


def test_tensors_in_buckets(root: str, folder: Path) -> None:
    """Half of the buckets are served, or the weights at one replica are not those that came."""
    tensors, token = model_of(folder, 1)
    halves = [bucket(tensors[:5]), bucket(tensors[5:])]
    post(root, "/pause_generation", mode="retract")
    post(root, "/flush_cache")
    for half in halves:
        answer = post(
            root,
            "/update_weights_from_tensor",
            serialized_named_tensors=[encoded(half)],
            load_format="flattened_bucket",
            flush_cache=False,
            weight_version="1",
        )
        assert answer["success"] and "weight_version" not in answer
    post(root, "/continue_generation")
    assert says(root) == {(token, "1")}
    tensors, token = model_of(folder, 2)
    halves = [bucket(tensors[:5]), bucket(tensors[5:])]
    versions = [
        post(
            root,
            "/update_weights_from_tensor",
            serialized_named_tensors=[encoded(half)] * REPLICAS,
            load_format="flattened_bucket",
            weight_version="2",
        ).get("weight_version")
        for half in halves
    ]
    assert versions == [None, "2"], "without a pause the last tensor ends the update"
    assert says(root) == {(token, "2")}


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_tensors_of_a_process_group(root: str, folder: Path, load_format: str | None) -> None:
    """Replicas do not find torch's group, or take a tensor for another."""
    tensors, token = model_of(folder, 3 if load_format else 4)
    port, groups, version = free_port(), [], f"version {load_format}"
    name = f"slime-pp_{load_format}"  # torch knows no name twice in a process

    def trainer() -> None:
        groups.append(open_torch_group(port, REPLICAS + 1, name))
        sent = [tensor.detach().contiguous() for _, tensor in tensors]
        for part in (sent[:5], sent[5:]):
            raws = [tensor.flatten().view(torch.uint8) for tensor in part]
            broadcast(groups[0], [torch.cat(raws)] if load_format else part)

    thread = threading.Thread(target=trainer, daemon=True)
    thread.start()
    info = {"master_address": "127.0.0.1", "master_port": port, "group_name": name}
    ranks = {"rank_offset": 1, "world_size": REPLICAS + 1, "backend": "gloo"}
    assert post(root, "/init_weights_update_group", **info, **ranks)["success"]
    post(root, "/pause_generation")
    post(root, "/begin_weight_update")
    for part in (tensors[:5], tensors[5:]):
        post(
            root,
            "/update_weights_from_distributed",
            names=[name for name, _ in part],
            dtypes=[str(tensor.dtype) for _, tensor in part],
            shapes=[[*tensor.shape] for _, tensor in part],
            group_name=name,
            load_format=load_format,
            weight_version=version,
        )
    assert post(root, "/end_weight_update")["weight_version"] == version
    post(root, "/continue_generation")
    thread.join(30)
    assert says(root) == {(token, version)}
    assert post(root, "/destroy_weights_update_group", group_name=name)["success"]
    wrong = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": name}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(root, "/update_weights_from_distributed", **wrong)
    assert "init_weights_update_group first" in json.load(refused.value)["error"]["message"]
