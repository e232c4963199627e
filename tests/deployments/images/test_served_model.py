"""Answers about models whose engines take no images, though the folder has a processor."""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from deployments.backend import ModelCard
from deployments.config.load import parse_config
from deployments.router.models import model_loader
from deployments.serve.model_deployments import served_model
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import MODEL
from tests.deployments.images.test_wire import WIDE, Server, part, text, user
from tests.deployments.images.vision_backend import TEMPLATE, VisionBackend, vision_tokenizer
from tests.engine.images.folders import CASES, save_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a tiny Qwen3-VL."""
    monkeypatch.setattr(model_loader, "first_served", lambda app, name, now: now)  # it asks Ray
    folder = tmp_path / MODEL
    save_model(folder, CASES["Qwen3-VL"])
    vision_tokenizer().backend.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def loaded(folder: Path, **sections: Any) -> ModelCard:
    """Return the card that a router makes of a configuration."""
    config = parse_config({"model": str(folder), **sections}, {})
    return model_loader._load(served_model(config, 0), "app")[0]


def download_to(snapshot: Path) -> Callable[..., str]:
    """Return the hub's download out of the folder "hub" beside a snapshot, by patterns of files."""

    def download(name: str, *, revision: str | None, allow_patterns: Sequence[str]) -> str:
        snapshot.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            for file in snapshot.with_name("hub").glob(pattern):
                shutil.copy(file, snapshot)
        return str(snapshot)

    return download


def told(card: ModelCard) -> tuple[bool, bool, Any]:
    """Return whether /v1/models and Ollama's show tell of images, and the answer to one."""
    backend = VisionBackend()
    backend.cards[MODEL] = card
    server = Server(backend)
    listed = asyncio.run(Client(server._client.app).request("GET", "/v1/models", headers=()))
    shown = server.post("/api/show", {"model": MODEL}).json()
    reply = server.chat(user(text("a"), part(WIDE)), stream=True)
    assert (reply.status == 200) == bool(backend.requests)
    listed_image = "image" in listed.json()["data"][0].get("input_modalities", ())
    return listed_image, "vision" in shown["capabilities"], reply


def test_images_that_are_off(folder: Path) -> None:
    """Bug: clients were told that the model sees, and the engine refused inside a stream."""
    assert told(loaded(folder))[:2] == (True, True)
    off = {"images": "off"}
    pools = {"cpu": {"replicas": 1, "engine": off}}
    for card in (loaded(folder, engine=off), loaded(folder, pools=pools)):
        listed, shown, reply = told(card)
        assert not listed and not shown and reply.status == 400
        error = reply.json()["error"]
        assert error["code"] == "modality_not_supported"
        assert error["param"] == "messages[0].content[1].type"
        assert "takes text only (engine.images: off)" in error["message"]


@pytest.mark.parametrize("hub", [False, True])
def test_a_tower_that_engines_leave_out(
    folder: Path, hub: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: routers looked at the processor alone, and told of images that no engine takes."""
    file = folder / "model.safetensors"
    quantized = {
        name.replace("mlp.linear_fc1.weight", "mlp.linear_fc1.weight_packed"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(quantized, file)
    if hub:
        monkeypatch.setattr("huggingface_hub.snapshot_download", download_to(folder.with_name("s")))
        monkeypatch.chdir(folder.parent)
        folder.rename(folder.with_name("hub"))
    listed, shown, reply = told(loaded(Path(f"org/{MODEL}") if hub else folder))
    assert not listed and not shown
    error = reply.json()["error"]
    assert (reply.status, error["code"]) == (400, "modality_not_supported")
    assert error["message"].endswith("takes text only")
