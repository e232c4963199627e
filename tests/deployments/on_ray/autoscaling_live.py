"""Tests scaling of nodes and replicas by load: Ray's autoscaler with fake nodes, real replicas,
requests over HTTP.

    python -m tests.deployments.on_ray.autoscaling_live [--model fake|default|FOLDER] [--out FILE]

There are a GPU pool of 0 to 3 replicas (which run on the CPU of nodes that claim a GPU) and a CPU
pool of 0 or 1 replicas, on separate nodes. The phases of the load are: light load, which the CPU
replica serves alone; work for more than two GPUs, which begins when Serve's controller is killed;
work for half a GPU; none; one request. Every text is compared with that of the first phase. Writes
a JSON file with phases, counts of replicas and nodes, decisions, and the time from the kill to the
first decision that asks for a GPU.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deployments.app import as_config, assemble, deploy, prepare_engine, serve_config
from deployments.replica.deployment import ReplicaSettings
from deployments.scaling.policy import scaling_decisions
from engine.config.engine_config import EngineConfig
from loadtest.chaos.server_processes import instance_at
from tests.deployments.on_ray.fake_nodes import autoscaling_ray
from tests.deployments.on_ray.serve_cluster import free_port, tiny_model
from tests.faults.clients import Said, ask

NAME = "live"
_NODES = {
    # An engine fits only on nodes of its pool.
    "gpu": {"resources": {"CPU": 1, "GPU": 1, "object_store_memory": 10**8}, "max_workers": 3},
    "cpu": {"resources": {"CPU": 2, "object_store_memory": 10**8}, "max_workers": 1},
}
_ROWS = {"gpu": 8, "cpu": 2}  # rows of an engine, which determine a pool's speed
_STEP = 0.04  # seconds per step of the fake engine
PROMPTS = 4


def config(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    pools = {
        "gpu": {"num_cpus": 1, "num_gpus": 1, "max_replicas": 3, "price": 1.0},
        "cpu": {"num_cpus": 2, "max_replicas": 1, "price": 0.8},
    }
    return {
        "model": model,
        "served_name": NAME,
        "app_name": NAME,
        "engine": {**engine, "device": "cpu"},
        "pools": {
            name: {
                "min_replicas": 0,
                "start_seconds": 10,
                "engine": {"device": "cpu", "num_threads": 1, "max_num_seqs": _ROWS[name]},
                **fields,
            }
            for name, fields in pools.items()
        },
        "scaling": {"ttft": 1.0, "calm_seconds": 6.0, "idle_seconds": 4.0},
        "router": {"replicas": 1, "wait_seconds": 120},
        "limits": {"queue_seconds": 300, "drain_seconds": 20},
    }


def build(arguments: dict[str, Any]) -> Any:
    """Return the application that Serve imports."""
    fake = Path(arguments["config"].get("model", "default")).name == "tiny"
    return assemble(as_config(arguments["config"]), counting if fake else prepare_engine)


def counting(settings: ReplicaSettings) -> EngineConfig:
    """Return the configuration of a fake engine, which replicas run instead of a model."""
    fake = f"fake:vocab_size=250,max_model_len=4096,step_seconds={_STEP}"
    return EngineConfig(model=fake, max_num_seqs=settings.engine["max_num_seqs"])


@dataclass
class Request:
    phase: str
    at_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    error: str = ""


@dataclass
class Seen:
    """A sample at one second: numbers of replicas connected to a router, and of live nodes."""

    at_s: float
    gpu: int
    cpu: int
    gpu_nodes: int
    cpu_nodes: int


@dataclass
class Live:
    """The endpoint under load, and the recorded counts, decisions and answers."""

    port: int
    handle: Any
    tokens: int
    began: float = field(default_factory=time.monotonic)
    requests: list[Request] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    wanted: list[Said] = field(default_factory=list)
    killed_s: float = 0.0  # time of the controller's kill

    def now(self) -> float:
        return round(time.monotonic() - self.began, 2)

    async def ask(self, number: int) -> Said:
        content = f"Count from {number % PROMPTS} on and do not stop."
        body = {"model": NAME, "messages": [{"role": "user", "content": content}]}
        limits = {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        return await ask(self.port, {**body, **limits})

    async def send_request(self, phase: str, number: int) -> Request:
        request = Request(phase, self.now())
        self.requests.append(request)
        said = await self.ask(number)
        request.end_s = self.now()
        request.first_s = round(said.first - self.began, 2) if said.first else 0.0
        request.error = said.error
        if self.wanted and not said.error and said.outcome != self.wanted[number % PROMPTS].outcome:
            request.error = f"{said.texts} instead of {self.wanted[number % PROMPTS].texts}"
        return request

    async def kill_controller(self) -> None:
        instance = await asyncio.to_thread(instance_at, f"http://127.0.0.1:{self.port}")
        (victim,) = await asyncio.to_thread(instance.find, "controller")
        self.killed_s = self.now()
        assert victim.send(signal.SIGKILL)

    @property
    def resumed_s(self) -> float | None:
        """The seconds from the kill to the first decision for a GPU; None if there was none."""
        later = (decision for decision in self.decisions if decision["at_s"] > self.killed_s)
        took = (
            round(decision["at_s"] - self.killed_s, 2)
            for decision in later
            if decision["targets"]["gpu"]
        )
        return next(took, None) if self.killed_s else None

    async def learn(self) -> float:
        """Send each prompt once to record the right answers, one after the other; return the
        requests/s of the only replica."""
        began = time.monotonic()
        self.wanted = [await self.ask(number) for number in range(PROMPTS)]
        assert not any(said.error for said in self.wanted), self.wanted
        return PROMPTS / (time.monotonic() - began)

    async def watch(self) -> None:
        import ray

        seen: float = 0
        while True:
            try:
                state = await asyncio.wait_for(self.handle.state.remote(), 5)
            except TimeoutError:
                continue
            pools = [name.partition("/")[0] for name in state["replicas"]]
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            gpus = sum("GPU" in resources for resources in alive)
            cpus = sum(resources.get("CPU", 0) >= 2 for resources in alive)
            sample = Seen(
                self.now(), pools.count("engine-gpu"), pools.count("engine-cpu"), gpus, cpus
            )
            if not self.seen or asdict(sample) | {"at_s": 0} != asdict(self.seen[-1]) | {"at_s": 0}:
                self.seen.append(sample)
                print(sample, f"{len(self.requests)} requests", file=sys.stderr)
            decision = scaling_decisions(NAME)
            if decision and decision["time"] != seen:
                seen = decision["time"]
                self.decisions.append({**decision, "at_s": self.now()})
                print(decision["targets"], decision["reasons"], file=sys.stderr)
            await asyncio.sleep(0.3)

    async def until(self, condition: Callable[[Seen], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not (self.seen and condition(self.seen[-1])):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {what}; last {self.seen[-1:]}")
            await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def load(self, phase: str, rate: float) -> AsyncIterator[None]:
        """Send requests at a mean rate while the block runs, and wait for the last answer at its
        end."""
        order, numbers = random.Random(7), itertools.count()
        began, tasks = self.now(), list[asyncio.Task[Request]]()

        async def arrivals() -> None:
            while True:
                tasks.append(asyncio.create_task(self.send_request(phase, next(numbers))))
                await asyncio.sleep(order.expovariate(rate))

        source = asyncio.create_task(arrivals())
        try:
            yield
        finally:
            source.cancel()
        self.phases[phase] = {"from_s": began, "to_s": self.now(), "requests_per_s": round(rate, 2)}
        await asyncio.gather(*tasks)


async def scenario(live: Live, fake: bool) -> None:
    """Run the phases of the load, and assert the counts of replicas and nodes in each.

    fake: whether engines are fake, so that their speed does not depend on their number.
    """
    quick = 40.0 if fake else 120.0  # time limit in seconds of changes that need no idle time
    watcher = asyncio.create_task(live.watch())
    try:
        await live.until(lambda seen: (seen.gpu, seen.cpu) == (0, 1), quick, "a CPU replica alone")
        alone = await live.learn()
        gpu = (_ROWS["gpu"] if fake else 3) * alone  # a model is slower in a larger batch
        async with live.load("trickle", 0.5 * alone):
            await asyncio.sleep(8)
            assert live.seen[-1].gpu == 0, "a GPU for what a CPU can do"
        # Replicas of a model share this machine's cores: each further one slows the others, and
        # three may not suffice without the CPU pool.
        async with live.load("heavy", (2.3 if fake else 1.5) * gpu):
            await live.kill_controller()
            await live.until(
                lambda s: s.gpu == 3 and not (fake and s.cpu), 2 * quick, "3 GPUs, no CPU"
            )
        async with live.load("light", max(0.45 * gpu, 2.2 * alone)):
            await live.until(lambda s: (s.gpu, s.gpu_nodes) == (1, 1), 2 * quick, "1 GPU")
        await live.until(lambda s: not (s.gpu or s.cpu), 2 * quick, "no replica")
        await live.until(lambda s: not (s.gpu_nodes or s.cpu_nodes), quick, "no node")
        woken = await live.send_request("wake", 0)
        assert not woken.error, woken
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def report(live: Live, error: str) -> dict[str, Any]:
    phases = {}
    for phase in dict.fromkeys(request.phase for request in live.requests):
        mine = [request for request in live.requests if request.phase == phase]
        first = sorted(request.first_s - request.at_s for request in mine if request.first_s)
        phases[phase] = {
            **live.phases.get(phase, {}),
            "requests": len(mine),
            "failed": sum(bool(request.error) for request in mine),
            "ttft_p50_s": round(first[len(first) // 2], 2) if first else None,
            "ttft_max_s": round(first[-1], 2) if first else None,
        }
    return {
        "error": error,
        "failed": [request.error for request in live.requests if request.error][:5],
        "requests": len(live.requests),
        "phases": phases,
        "most_gpu_replicas": max((request.gpu for request in live.seen), default=0),
        "seen": [asdict(request) for request in live.seen],
        "decisions": live.decisions,
        "controller": {"killed_s": live.killed_s, "first_gpu_after_s": live.resumed_s},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="fake")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    with autoscaling_ray(_NODES) as address:
        result = run(address, options.model)
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return int(bool(result["error"] or result["failed"]))


def run(address: str, model: str) -> dict[str, Any]:
    import ray
    from ray import serve

    fake = model == "fake"
    if fake:
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"manta-{os.getpid()}"
        folder.mkdir()
        model = str(tiny_model(folder / "tiny"))
    engine = {} if fake else {"dtype": "float32", "num_blocks": 200, "max_model_len": 512}
    ray.init(address=address, log_to_driver=False)
    port = free_port()
    schema = serve_config(config(model, engine))
    # All nodes are on one machine and share a port, so only the head node can have the proxy.
    schema |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
    schema["applications"][0]["import_path"] = "tests.deployments.on_ray.autoscaling_live:build"
    deploy(schema)
    deadline = time.monotonic() + 60
    while serve.status().applications[NAME].status != "RUNNING":
        assert time.monotonic() < deadline, serve.status()
        time.sleep(0.2)
    live = Live(port, serve.get_app_handle(NAME), tokens=40 if fake else 24)
    error = ""
    try:
        asyncio.run(scenario(live, fake))
    except AssertionError as failure:
        error = str(failure) or repr(failure)
    finally:
        ray.shutdown()
    return report(live, error)


if __name__ == "__main__":
    sys.exit(main())
