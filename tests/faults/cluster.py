"""A small cluster for tests of faults: replicas with fake engines, whose tokens count up, or with a
real model, and real signals to their processes."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.app import assemble, deploy, serve_config
from deployments.config.load import parse_config
from deployments.model_applications import model_app
from deployments.replica.deployment import ReplicaSettings
from engine.config.engine_config import EngineConfig
from loadtest.chaos.server_processes import ServerInstance, ServerProcess, instance_at
from tests.deployments.on_ray.live import resident_mib
from tests.deployments.on_ray.serve_cluster import Cluster
from tests.faults.clients import Said, ask

NAME = "broken"  # name of the application and of the model
# All token ids are in the tiny tokenizer's vocabulary, and a step takes as long as a small model's
# on a GPU. Loading adapters is slow enough to kill an engine meanwhile.
FAKE = (
    "fake:vocab_size=250,max_model_len=4096,step_seconds=0.02,lost_at_signal=true,"
    "adapter_seconds=1.0,lethal=249,lethal_at=5"
)


def counting(settings: ReplicaSettings) -> EngineConfig:
    """Return the configuration of a fake engine, which replicas run instead of a model."""
    return EngineConfig(model=FAKE, max_loras=settings.engine.get("max_loras", 0))


@dataclass
class Broken:
    """A running application whose processes tests kill.

    replicas, routers: expected numbers, of replicas for each model.
    models: served names of the models, which share the routers.
    """

    port: int
    prefix: str
    instance: ServerInstance
    handle: Any
    replicas: int
    routers: int
    models: Sequence[str] = (NAME,)

    @property
    def several(self) -> bool:
        return len(self.models) > 1

    def _engines(self) -> Iterator[Any]:
        """Yield Serve's handle of each model's engines."""
        from ray import serve

        for name in self.models:
            app = model_app(NAME, name) if self.several else NAME
            yield serve.get_deployment_handle("engine-cpu", app)

    def find(self, target: str) -> list[ServerProcess]:
        return self.instance.find(target)

    def kill(
        self, target: str, which: int = 0, number: signal.Signals = signal.SIGKILL
    ) -> ServerProcess:
        """Send the signal `number` to the process `which` of this kind, and return the process."""
        victim = self.find(target)[which]
        assert victim.send(number)
        return victim

    async def ask(self, body: dict[str, Any]) -> Said:
        return await ask(self.port, {"model": NAME, **body}, self.prefix)

    async def same_under_kills(
        self, asked: list[dict[str, Any]], kill: Callable[[int], Awaitable[None]]
    ) -> tuple[list[Said], list[Said]]:
        """Send the same requests without faults and under `kill`, and return both lists of answers.

        Asserts that they are equal, and that a request moved to another replica.
        kill: is called with the process id of an engine that runs some of the requests.
        """
        await self.settled(120)
        wanted = await asyncio.gather(*map(self.ask, asked))
        assert not any(said.error for said in wanted), wanted
        said: list[Said] = []
        for _ in range(3):  # on a busy machine all answers may be complete before the signal
            tasks = [asyncio.create_task(self.ask(body)) for body in asked]
            victims: list[int] = []
            while not victims and not all(task.done() for task in tasks):
                replicas = (await self.states())["replicas"]
                victims = [replica["engine_pid"] for replica in replicas if replica["running"]]
            if victims:
                await kill(victims[0])
            said = await asyncio.gather(*tasks)
            for got, right in zip(said, wanted, strict=True):
                assert got.outcome == right.outcome
            await self.settled(120)  # wait for the replacement
            if victims and any(replica.migrations for replica in said):
                break
        assert any(replica.migrations for replica in said)
        return wanted, said

    async def seen(self) -> int:
        """Return the number of replicas that some router is connected to; 0 if no router
        answers."""
        try:
            return len((await asyncio.wait_for(self.handle.state.remote(), 2))["replicas"])
        except Exception:  # a router that was just killed
            return 0

    async def router_states(self) -> list[dict[str, Any]]:
        """Return the state of every router, ordered by process id."""
        return await _each(self.handle.state, self.routers)

    async def states(self) -> dict[str, list[dict[str, Any]]]:
        """Return the state of every router and replica, ordered by process id.

        Routers' states have open files and memory by the system, too.
        """
        routers = await self.router_states()
        for state in routers:
            state["open_files"] = len(os.listdir(f"/proc/{state['pid']}/fd"))
            state["resident_mib"] = round(resident_mib(state["pid"]), 1)
        replicas = [await _each(engine.stats, self.replicas) for engine in self._engines()]
        return {"routers": routers, "replicas": list(itertools.chain.from_iterable(replicas))}

    async def idle(self, seconds: float = 5.0) -> None:
        """Wait until no router or replica holds a request, choice or block."""
        began = time.monotonic()
        while True:
            states = await self.states()
            held = [value for router in states["routers"] for value in router["held"].values()]
            for router in states["replicas"]:
                held += [router["running"], router["waiting"], router["in_flight"]]
                held.append(router["total_blocks"] - router["free_blocks"])
            if not any(held):
                return
            assert time.monotonic() < began + seconds, states
            await asyncio.sleep(0.05)

    async def streams_on(self, victim: ServerProcess) -> int | None:
        """Return the number of choices at this engine or replica; None without an answer within a
        second."""
        # Serve sends each call to a less busy replica, so several calls reach all.
        calls = [
            engine.stats.remote() for engine in self._engines() for _ in range(3 * self.replicas)
        ]
        try:
            async with asyncio.timeout(1):
                results = await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError:
            return None
        for result in results:
            if isinstance(result, dict) and victim.pid in (result["pid"], result["engine_pid"]):
                return int(result["in_flight"])
        return None

    async def settled(self, seconds: float = 60.0) -> float:
        """Wait until every router has every replica, and return the seconds that it took."""
        began = time.monotonic()
        good, there = 0, self.replicas * len(self.models)
        while good < 3 * self.routers:  # Serve asks any of them
            try:
                state = await asyncio.wait_for(self.handle.state.remote(), 5)
                good = good + 1 if len(state["replicas"]) == there else 0
            except Exception:  # a router that was just killed
                good = 0
            assert time.monotonic() < began + seconds, "the replicas did not come back"
            await asyncio.sleep(0.05)
        return time.monotonic() - began


def _await_running(apps: Sequence[str], seconds: float = 300.0) -> None:
    from ray import serve

    deadline = time.monotonic() + seconds
    while True:
        there = serve.status().applications
        if all(app in there and there[app].status == "RUNNING" for app in apps):
            return
        assert time.monotonic() < deadline, there
        time.sleep(0.5)


async def _each(method: Any, count: int) -> list[dict[str, Any]]:
    """Return the answer of every replica of a deployment to a call.

    Serve sends a call to the less busy one, so as many calls at once as replicas reach nearly all.
    """
    by_name: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 20
    while len(by_name) < count:
        assert time.monotonic() < deadline, f"only {len(by_name)} of {count} answer"
        for state in await asyncio.gather(*(method.remote() for _ in range(2 * count))):
            by_name[state["pid"]] = state
    return [by_name[pid] for pid in sorted(by_name)]


@contextlib.contextmanager
def deployed(
    cluster: Cluster,
    model: Path,
    prepare: Callable[[ReplicaSettings], EngineConfig] | None = counting,
    *,
    replicas: int = 3,
    routers: int = 2,
    num_cpus: float = 0.1,
    models: Sequence[str] = (NAME,),
    **settings: Any,
) -> Iterator[Broken]:
    """Deploy the application on this cluster, yield it, and remove it.

    prepare: returns a replica's EngineConfig; None: the model's own.
    models: names under which the same model is served, each with replicas of its own.
    """
    from ray import serve

    fields = {
        "model": str(model),
        "pools": {"cpu": {"replicas": replicas, "num_cpus": num_cpus}},
    }
    common = {"router": {"replicas": routers}, "limits": {"drain_seconds": 2.0}}
    several = len(models) > 1
    if several:
        assert prepare is None, "the engines of several models are what their configuration says"
        common |= {
            "app_name": NAME,
            "route_prefix": f"/{NAME}",
            "http": {"proxy": "serve", "port": cluster.port},
            "models": dict.fromkeys(models, fields),
        }
    else:
        common |= {"served_name": NAME, **fields}
    config = parse_config(common | settings, {})
    apps = [NAME, *(model_app(NAME, name) for name in models if several)]
    try:
        if several:
            deploy(serve_config(config))
            _await_running(apps)
        else:
            serve.run(assemble(config, prepare), name=NAME, route_prefix=f"/{NAME}")
        instance = instance_at(f"http://127.0.0.1:{cluster.port}")
        handle = serve.get_app_handle(NAME)
        yield Broken(cluster.port, f"/{NAME}", instance, handle, replicas, routers, models)
    finally:
        for app in apps:
            serve.delete(app)
