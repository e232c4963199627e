"""Rows 28 to 30: adapters whose files are broken, of another base, too large or not numbers. The
engine's own reader reads them, and HTTP tells it; only the model behind it counts instead of
thinking."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.api.app import build_asgi
from engine import fake
from engine.lora.adapter import Described, Loaded
from engine.lora.fake import FakeLoader
from engine.lora.peft_config import WEIGHTS_FILE, stamp
from engine.lora.weights import LoraLayout, LoraReader
from tests.deployments.api.asgi import Client
from tests.deployments.fake_adapters import settings
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.fleet import Fleet
from tests.engine.checkpoints import load_model, save_checkpoint
from tests.engine.lora.adapters import edit_tensors, save_adapter

RANK = 16  # the most that the engines take
Q = "model__layers__0__self_attn__q_proj__lora_A__weight"


def cut(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_the_header(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:100])


def not_a_number(folder: Path) -> None:
    values = torch.zeros(8, 32)
    values[3, 5] = torch.nan
    edit_tensors(folder, **{Q: values})


# What is done to a good adapter; code and a part of the message.
BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "cut": (cut, "adapter_invalid", WEIGHTS_FILE),
    "header": (cut_in_the_header, "adapter_invalid", WEIGHTS_FILE),
    "nan": (not_a_number, "adapter_invalid", "NaN"),
}
# Made so by peft: fields of the model, fields of the adapter.
MADE: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "rank": ({}, {"r": 2 * RANK}, "adapter_incompatible", f"max_lora_rank {RANK}"),
    "base": ({"hidden_size": 48}, {}, "adapter_incompatible", "shape"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoraReader, Path]:
    """A reader for a tiny model, and a folder with a good adapter and all the others."""
    root = tmp_path_factory.mktemp("adapters")
    theirs = save_checkpoint(root / "model", "llama")
    layout = LoraLayout(linear.spec for linear in load_model(root / "model").linears())
    save_adapter(theirs, root / "good")
    for name, (spoil, *_) in BROKEN.items():
        shutil.copytree(root / "good", root / name)
        spoil(root / name)
    for name, (model, fields, *_) in MADE.items():
        other = save_checkpoint(root / f"model-{name}", "llama", **model) if model else theirs
        save_adapter(other, root / name, **fields)
    return LoraReader(layout, torch.float32, RANK), root


@pytest.fixture
def real_reader(made: tuple[LoraReader, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader(FakeLoader):
        def describe(self, path: str, digest: str = "") -> Described:
            return made[0].describe(Path(path), stamp(Path(path)))

        def read(self, path: str, digest: str = "") -> Loaded:
            return made[0].read(Path(path), stamp(Path(path)))

    monkeypatch.setattr(fake, "FakeLoader", Loader)


Call = Callable[..., Awaitable[tuple[int, Any]]]


def with_server(root: Path, case: Callable[[Call], Awaitable[None]], **paths: str) -> None:
    """paths: adapters of the configuration."""

    async def run() -> None:
        given = settings(root, paths=paths)
        async with Fleet(1, loras=2, adapters=given, tokenizer=tiny_tokenizer()) as fleet:
            client = Client(build_asgi(fleet.dispatcher))

            async def call(url: str, /, **body: object) -> tuple[int, Any]:
                reply = await client.request("POST", url, json.dumps(body).encode())
                return reply.status, reply.json()

            await case(call)

    asyncio.run(asyncio.wait_for(run(), 20))


async def complete(call: Call, model: str) -> tuple[int, Any]:
    return await call("/v1/completions", model=model, prompt=[5, 6], max_tokens=4)


@pytest.mark.parametrize("name", [*BROKEN, *MADE])
@pytest.mark.usefixtures("real_reader")
def test_broken_adapters_are_told(made: tuple[LoraReader, Path], name: str) -> None:
    """E 28-30. A 500, a text of the base, or a path of ours: to who adds it, and to who asks for
    one of the configuration; and the others go on."""
    root = made[1]
    *_, code, part = BROKEN.get(name) or MADE[name]

    async def case(call: Call) -> None:
        assert (await call("/v1/adapters", name="good", path="good"))[0] == 200
        for _ in range(2):  # the second one may be remembered
            status, answer = await call("/v1/adapters", name="bad", path=name)
            assert (status, answer["error"]["code"]) == (422, code), answer
            assert part in answer["error"]["message"], answer
            assert (await complete(call, "bad"))[0] == 404, "it was added all the same"
            for model in ("given", "m:given"):
                status, answer = await complete(call, model)
                assert (status, answer["error"]["code"]) == (422, code), answer
                assert part in answer["error"]["message"], answer
                assert str(root) not in answer["error"]["message"], answer
        for model in ("m", "good"):
            assert (await complete(call, model))[0] == 200

    with_server(root, case, given=str(root / name))


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.usefixtures("real_reader")
def test_broken_while_in_use(made: tuple[LoraReader, Path], tmp_path: Path, name: str) -> None:
    """Who has it in memory goes on; added again it is refused, and stays what it was."""
    shutil.copytree(made[1] / "good", tmp_path / "a")

    async def case(call: Call) -> None:
        _, added = await call("/v1/adapters", name="a", path="a")
        before = await complete(call, "a")
        BROKEN[name][0](tmp_path / "a")
        status, answer = await call("/v1/adapters", name="a")
        assert (status, answer["error"]["code"]) == (422, BROKEN[name][1]), answer
        status, after = await complete(call, "a")
        assert status == before[0] == 200 and after["choices"] == before[1]["choices"]
        shutil.copytree(made[1] / "good", tmp_path / "a", dirs_exist_ok=True)
        assert await call("/v1/adapters", name="a") == (200, added), "it is whole again"

    with_server(tmp_path, case)
