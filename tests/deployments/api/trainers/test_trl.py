"""TRL's client of vLLM's server, against a replica with a real engine; skipped without `trl`."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine import WeightSender
from engine.text.token_ids import missing_ids
from tests.deployments.api.server import serve
from tests.deployments.on_ray.serve_cluster import free_port, tiny_model
from tests.deployments.router.real_replicas import RealReplicas

pytest.importorskip("trl", reason="pip install trl")

PROMPT = [5, 6, 7, 8]


class _Group:
    """The trainer's end of vLLM's NCCL group, over gloo.

    packed: whether tensors go packed, as the receivers are told.
    """

    def __init__(self, init_info: dict[str, Any], packed: bool = True) -> None:
        assert packed is init_info.get("packed", True)
        port, receivers = init_info["master_port"], init_info["world_size"] - 1
        self.sender = WeightSender("127.0.0.1", port, receivers, "cpu")
        self.group = SimpleNamespace(store=None, socket=None)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def _send(iterator: Any, **more: Any) -> None:
    group = more["group"] if "group" in more else more["trainer_args"]["group"]
    group.sender.send(iterator)


class _Engine:
    """The methods of vLLM's NCCLWeightTransferEngine before 0.28."""

    trainer_init = _Group
    trainer_send_weights = staticmethod(_send)


def load_client(monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """Import TRL's VLLMClient beside a vLLM of which there is the trainer's group alone."""
    importlib.import_module("trl.generation")
    transfer = "vllm.distributed.weight_transfer"
    modules = (
        _module("vllm.utils.network_utils", get_ip=lambda: "127.0.0.1"),
        _module(f"{transfer}.nccl_common", trainer_init=_Group),
        _module(f"{transfer}.packed_tensor", packed_nccl_broadcast_producer=_send),
        _module(
            f"{transfer}.nccl_engine",
            NCCLWeightTransferEngine=_Engine,
            NCCLTrainerSendWeightsArgs=dict,
        ),
    )
    for name in ("vllm", "vllm.utils", "vllm.distributed", transfer):
        monkeypatch.setitem(sys.modules, name, _module(name, __path__=[]))
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    import_utils = importlib.import_module("trl.import_utils")
    monkeypatch.setattr(
        import_utils, "is_vllm_available", lambda min_version="0": min_version <= version
    )
    monkeypatch.delitem(sys.modules, "trl.generation.vllm_client", raising=False)
    return importlib.import_module("trl.generation.vllm_client").VLLMClient


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("trl") / "tiny")


@pytest.fixture(scope="module")
def root(folder: Path) -> Iterator[str]:
    fields: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "num_blocks": 64,
        "logprobs_mode": "processed_logprobs",
    }
    with serve(RealReplicas(folder, **fields)) as port:
        yield f"http://127.0.0.1:{port}"


def scores(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize("version", ["0.22.0", "0.28.0"])
def test_trl(root: str, folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: TRL's client finds no route or key, or the weights that it sends are not served."""
    client = load_client(monkeypatch, version)(base_url=root, group_port=free_port())
    assert client.get_server_info()["model_config"] == {
        "model": "tiny",
        "dtype": "torch.float32",
        "max_model_len": 256,
        "logprobs_mode": "processed_logprobs",
    }
    torch.manual_seed(len(version))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    for parameter in model.parameters():
        parameter.data *= 20  # so that no two tokens are about equally likely
    client.init_communicator(device="cuda")
    client.update_model_params(model)
    client.reset_prefix_cache()
    outputs = client.generate([PROMPT] * 33, n=2, temperature=0.5, top_k=0, max_tokens=4)
    assert outputs["prompt_ids"] == [PROMPT] * 33
    assert len(outputs["completion_ids"]) == 66
    never = missing_ids(folder, model.config.vocab_size)
    for ids, logprobs, logprob_ids in zip(
        outputs["completion_ids"], outputs["logprobs"], outputs["logprob_token_ids"], strict=True
    ):
        assert logprob_ids == [[token] for token in ids]
        logits = scores(model, PROMPT + ids)[len(PROMPT) - 1 : -1]
        logits[:, never] = -torch.inf
        wanted = (logits / 0.5).log_softmax(-1)[range(len(ids)), ids]
        assert torch.allclose(torch.tensor(logprobs)[:, 0].double(), wanted, atol=1e-3)
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data * 0.5)
            parameter.data *= 0.5
    greedy = client.generate(["the sea"], temperature=0, max_tokens=3, logprobs=2)
    ids = greedy["prompt_ids"][0] + greedy["completion_ids"][0]
    logits = scores(model, ids)
    logits[:, never] = -torch.inf
    assert ids[-3:] == logits[-4:-1].argmax(-1).tolist()[-3:]
    assert all(2 <= len(position) <= 3 for position in greedy["logprobs"][0])
    client.close_communicator()

    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Its name.
        """
        return city

    messages = [[{"role": "user", "content": text}] for text in ("the", "words")]
    chats = client.chat(
        messages, max_tokens=3, tools=[weather], structured_outputs_regex="[a-c]{3}"
    )
    assert [len(ids) for ids in chats["prompt_ids"]] and len(chats["completion_ids"]) == 2
    taught_ids = [*PROMPT, 9, 10]
    taught = client.get_sequence_logprobs([taught_ids], [4], top_logprobs=3)
    wanted = scores(model, taught_ids).log_softmax(-1)[[3, 4], [9, 10]]
    actual = torch.tensor(taught["actual_logprobs"][0])[:, 0].double()
    in_the_top = actual.isfinite()
    assert torch.allclose(actual[in_the_top], wanted[in_the_top], atol=1e-3)
