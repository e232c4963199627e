"""Adapters whose files are broken, of another base, too large, not numbers, or out of reach.

The engine's own reader reads them and HTTP reports their faults; only the model behind it counts
instead of computing.
"""

import asyncio
import errno
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.api.app import build_asgi
from engine.lora.fake import FakeLoader
from engine.lora.loader import AdapterLoader
from engine.lora.peft_config import CONFIG_FILE, WEIGHTS_FILE, stamp
from engine.lora.tiers import remote
from engine.lora.tiers.adapter import AdapterDescription, LoadedAdapter
from engine.lora.tiers.disk import DiskCache
from engine.lora.tiers.store import AdapterStore
from engine.lora.weights import LoraLayout, LoraReader
from engine.process import fake
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_adapters import settings
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import Fleet, until
from tests.engine.lora.adapters import edit_tensors, save_adapter
from tests.engine.models.checkpoints import load_model, save_checkpoint

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
    """Return a reader for a tiny model, and a folder with a good adapter and all the broken
    ones."""
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
        def describe(self, path: str, digest: str = "") -> AdapterDescription:
            return made[0].describe(Path(path), stamp(Path(path)))

        def read(self, path: str, digest: str = "") -> LoadedAdapter:
            return made[0].read(Path(path), stamp(Path(path)))

    monkeypatch.setattr(fake, "FakeLoader", Loader)


Call = Callable[..., Awaitable[tuple[int, Any]]]


def with_server(root: Path, case: Callable[[Call], Awaitable[None]], **paths: str) -> None:
    """Run a case against an API with one replica. paths: adapters of the configuration, by name."""

    async def run() -> None:
        adapters = settings(root, paths=paths)
        async with Fleet(1, loras=2, adapters=adapters, tokenizer=tiny_tokenizer()) as fleet:
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


class Clock:
    """A replacement of the module `time` whose monotonic clock can be advanced by `late`
    seconds."""

    late = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.late

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("deployments.adapters.registry", "deployments.replica.adapters"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr(fake, "AdapterStore", partial(AdapterStore, clock=clock.monotonic))
    return clock


@pytest.mark.usefixtures("real_reader")
def test_a_failure_is_forgotten(
    made: tuple[LoraReader, Path], tmp_path: Path, clock: Clock
) -> None:
    """An adapter that was mended and stays broken, or is read again for each request: to the
    router that asks first, to an engine that reads its weights, to one that hears of it."""
    good = made[1] / "good"
    shutil.copytree(good, tmp_path / "a")

    async def case() -> None:
        adapters = settings(tmp_path, paths={"a": str(tmp_path / "a")})
        async with Fleet(1, loras=2, adapters=adapters, tokenizer=tiny_tokenizer()) as fleet:
            client = Client(build_asgi(fleet.dispatcher))

            async def status() -> int:
                body = {"model": "a", "prompt": [5, 6], "max_tokens": 4}
                return (await client.post("/v1/completions", body)).status

            async def move_to(replica: str) -> None:
                await fleet.add_replica(replica)
                fleet.publish(replica)
                await until(lambda: list(fleet.dispatcher.state().replicas) == [replica])

            for replica, file in (("", WEIGHTS_FILE), ("r1", WEIGHTS_FILE), ("r2", CONFIG_FILE)):
                (tmp_path / "a" / file).write_bytes(b"{")
                if replica:
                    await move_to(replica)
                assert await status() == 422
                shutil.copy(good / file, tmp_path / "a" / file)
                assert await status() == 422, "it was read again at once"
                clock.late += 30
                assert await status() == 200, replica

    asyncio.run(asyncio.wait_for(case(), 20))


@pytest.mark.parametrize(
    ("method", "fault", "code"),
    [
        ("get_file", OSError(errno.ENOSPC, "No space left on device"), "storage_full"),
        ("info", ConnectionRefusedError("Connect call failed"), "store_unavailable"),
        ("get_file", RuntimeError("as of botocore: no OSError"), "store_unavailable"),
        ("get_file", None, "store_unavailable"),  # it does not answer
    ],
)
def test_an_object_store_that_cannot_be_had(
    made: tuple[LoraReader, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    method: str,
    fault: Exception | None,
    code: str,
) -> None:
    """A client that is told that its request was wrong, or a 500, when the disk is full or the
    store does not answer; or requests without the adapter that fail or wait with it."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        store.pipe(f"/store/a/{name}", (made[1] / "good" / name).read_bytes())

    class Loader(AdapterLoader):
        def __init__(self, seconds: float) -> None:
            device: Any = None
            super().__init__((made[0], device), disk=DiskCache(str(tmp_path)))

        def upload(self, weights: Any, slot: int) -> None:
            """Do nothing, as there is no device."""

    monkeypatch.setattr(fake, "FakeLoader", Loader)
    whole = getattr(type(store), method)
    broken = True

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if broken and fault is None:
            time.sleep(1)
        if broken and fault is not None:
            raise fault
        return whole(self, *arguments, **options)

    monkeypatch.setattr(type(store), method, call)
    if fault is None:
        monkeypatch.setattr(remote, "MAX_SECONDS", 0.2)

    async def case() -> None:
        nonlocal broken
        adapters = settings(tmp_path, paths={"a": "memory://store/a"})
        async with Fleet(1, loras=2, adapters=adapters, tokenizer=tiny_tokenizer()) as fleet:
            client = Client(build_asgi(fleet.dispatcher))

            async def ask(model: str) -> Reply:
                body = {"model": model, "prompt": [5, 6], "max_tokens": 4}
                return await client.post("/v1/completions", body)

            waiting = [asyncio.create_task(ask(name)) for name in ("a", "m:a")]
            assert (await ask("m")).status == 200
            replies = [*await asyncio.gather(*waiting), await ask("a")]
            replies.append(await client.post("/v1/adapters", {"name": "a"}))
            for reply in replies:
                error = reply.json()["error"]
                assert (reply.status, error["code"]) == (503, code), error
                assert reply.header("retry-after") == "10"
                assert error["type"] == "overloaded_error"
            assert (await ask("m")).status == 200
            broken = False
            clock.late += 10
            assert (await ask("a")).status == 200
            broken = True
            assert (await ask("a")).status == 200, "the store is not needed any more"

    asyncio.run(asyncio.wait_for(case(), 20))
