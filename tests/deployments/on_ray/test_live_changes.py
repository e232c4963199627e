"""Replicas that follow the load, an update and adapters that come and go, all under load: short
forms on the shared Ray. In full: test_autoscaling_live.py, tests/faults/test_drain.py and
test_adapters_live.py."""

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.app import assemble
from deployments.config.load import parse_config
from deployments.replica.deployment import ReplicaSettings
from engine.config.engine_config import EngineConfig
from loadtest.chaos.server_processes import instance_at
from tests.deployments.fake_adapters import make_folder
from tests.deployments.on_ray.serve_cluster import FAKE, Cluster, tiny_model
from tests.faults.clients import Said
from tests.faults.cluster import NAME, Broken

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(240)]

ROWS = 4  # of an engine, which gives each 50 tokens a second
LENGTHS = (20, 40, 120)  # tokens of answers; the longest take longer than a drain
DRAIN = 1.0  # seconds
HEAVY, LIGHT = 6.0, 1.0  # requests a second: a replica has room for three
ADAPTER = "legal"


def counting(settings: ReplicaSettings) -> EngineConfig:
    """Return the configuration of a counting engine, which replicas run instead of a model."""
    return EngineConfig(model=FAKE, max_num_seqs=ROWS, max_loras=2)


class Changing:
    """An application with one or two replicas, as its policy wants, behind one router."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self.port = cluster.port
        self._model = str(tiny_model(folder / "tiny"))
        self.deploy(DRAIN)
        from ray import serve

        instance = instance_at(f"http://127.0.0.1:{cluster.port}")
        self.broken = Broken(cluster.port, f"/{NAME}", instance, serve.get_app_handle(NAME), 1, 1)

    def deploy(self, drain_seconds: float) -> None:
        from ray import serve

        config = {
            "model": self._model,
            "served_name": NAME,
            "app_name": NAME,
            "pools": {
                "cpu": {"num_cpus": 0.1, "min_replicas": 1, "max_replicas": 2, "start_seconds": 5}
            },
            "scaling": {"ttft": 1.0, "calm_seconds": 2.0},
            "router": {"replicas": 1, "wait_seconds": 120},
            "limits": {"drain_seconds": drain_seconds, "queue_seconds": 120},
            "engine": {"max_loras": 2},
            "adapters": {"roots": [str(self.folder)]},
        }
        application = assemble(parse_config(config, {}), counting)
        serve.run(application, name=NAME, route_prefix=f"/{NAME}")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Return status and answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{NAME}{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    async def engines(self) -> set[int]:
        """Return the process ids of the engines."""
        return {replica["engine_pid"] for replica in (await self.broken.states())["replicas"]}


@pytest.fixture(scope="module")
def changing(
    shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Changing]:
    from ray import serve

    try:
        yield Changing(shared_cluster, tmp_path_factory.mktemp("changing"))
    finally:
        serve.delete(NAME)


def body_of(number: int) -> dict[str, Any]:
    content = f"Write {number % len(LENGTHS)} lines."
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": LENGTHS[number % len(LENGTHS)],
        "temperature": 0,
        "ignore_eos": True,
    }


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def load(broken: Broken, wanted: list[Said], rate: float) -> AsyncIterator[None]:
    """Send so many requests a second while the block runs, and check all their answers."""
    tasks: list[asyncio.Task[Said]] = []

    async def arrivals() -> None:
        while True:
            tasks.append(asyncio.create_task(broken.ask(body_of(len(tasks)))))
            await asyncio.sleep(1 / rate)

    source = asyncio.create_task(arrivals())
    try:
        yield
    finally:
        source.cancel()
        answers = await asyncio.gather(*tasks)
    for number, answer in enumerate(answers):
        assert answer.outcome == wanted[number % len(wanted)].outcome, number
    moves, gap = sum(answer.migrations for answer in answers), max(answer.gap for answer in answers)
    print(f"{len(answers)} answers, {moves} went on elsewhere, longest gap {gap:.2f} s")


def test_replicas_follow_the_load_and_an_update_cuts_nothing(changing: Changing) -> None:
    """Bugs: metrics or a policy that do nothing in Serve; a replica that leaves, by the policy or
    by an update, cuts what it streams; an update sends requests to nobody."""
    broken = changing.broken

    async def case() -> None:
        await broken.settled(60)
        wanted = await asyncio.gather(*(broken.ask(body_of(n)) for n in range(len(LENGTHS))))
        assert not any(answer.error for answer in wanted), wanted

        async def has(count: int) -> bool:
            return await broken.seen() == count

        async with load(broken, wanted, HEAVY):
            await until(lambda: has(2), "a second replica")
        async with load(broken, wanted, LIGHT):
            await until(lambda: has(1), "one replica less")
        before = await changing.engines()
        async with load(broken, wanted, LIGHT):
            await asyncio.sleep(1)
            await asyncio.to_thread(changing.deploy, DRAIN + 0.5)

            async def is_new() -> bool:
                return await has(1) and before.isdisjoint(await changing.engines())

            await until(is_new, "an engine with the new configuration")

    asyncio.run(case())


def test_adapters_come_change_and_go_under_load(changing: Changing) -> None:
    """Bugs: an adapter that is added, replaced, refused or removed while requests run changes the
    answers of others or restarts an engine; a removed one still answers."""
    broken, folder = changing.broken, changing.folder / ADAPTER
    make_folder(folder)

    async def case() -> None:
        await broken.settled(60)
        wanted = await asyncio.gather(*(broken.ask(body_of(n)) for n in range(len(LENGTHS))))
        engines = await changing.engines()

        async def call(
            method: str, path: str, body: dict[str, Any] | None = None
        ) -> tuple[int, Any]:
            return await asyncio.to_thread(changing.call, method, path, body)

        async def ask() -> Said:
            return await broken.ask({**body_of(0), "model": ADAPTER})

        async with load(broken, wanted, LIGHT):
            assert (await ask()).status == 404
            status, answer = await call(
                "POST", "/v1/adapters", {"name": ADAPTER, "path": str(folder)}
            )
            assert (status, answer.get("rank")) == (200, 8), answer
            first = await ask()
            assert not first.error and first.texts != wanted[0].texts
            make_folder(folder, r=4)
            status, answer = await call("POST", "/v1/adapters", {"name": ADAPTER})
            assert (status, answer.get("rank")) == (200, 4), answer
            assert not (await ask()).error
            (folder / "adapter_config.json").write_text("{")
            status, answer = await call("POST", "/v1/adapters", {"name": ADAPTER})
            assert (status, answer["error"]["code"]) == (422, "adapter_invalid"), answer
            status, answer = await call("DELETE", f"/v1/adapters/{ADAPTER}")
            assert status == 200 and answer["deleted"], answer
            assert (await ask()).status == 404
        assert await changing.engines() == engines, "an engine was restarted"

    asyncio.run(case())
