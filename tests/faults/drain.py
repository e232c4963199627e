"""Scale-downs, rolling updates and a node's notice under load.

    python -m tests.faults.drain

50 times a replica is removed and added again, while some streams last longer than the drain limit.
Then 10 updates restart every router and replica; they change the configuration and the model in
turn. Then a node with two replicas gets a drain notice of 10 s, and is removed. HAProxy is used if
it is installed. Engines are fake, or compute the default model in float32 (--model default).

Each answer must be complete, and equal to that of the old or the new model without faults. Writes
bench/results/faults-drain-<date>.json (the figures), .jsonl (every request and event) and .svg.
Exit status 1 if a request failed or differed.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray._private.authentication_test_utils import reset_auth_token_state

from bench.versus.engine import commit
from deployments.app import (
    as_config,
    assemble,
    cluster_environment,
    deploy,
    prepare_engine,
    proxy,
    serve_config,
)
from deployments.checkpoints.resolve import resolve_model
from deployments.config.load import parse_config
from deployments.replica.deployment import ReplicaSettings
from engine.config.engine_config import EngineConfig
from loadtest.chaos.server_processes import instance_at
from tests.deployments.on_ray.serve_cluster import free_port, tiny_model
from tests.faults.cluster import Broken
from tests.faults.load import Kill, Load, Run
from tests.faults.soak import ENGINE, RESULTS
from tests.faults.timeline import picture

NAME = "broken"  # must equal cluster.NAME
_COMMON = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
_NOTICE = 10.0  # seconds
_SHORT_DRAIN, _LONG_DRAIN = 2.0, 30.0  # seconds; some streams last longer than the first
_FIRST = {"a": 32, "b": 40}  # first token id of two fake models, whose answers so differ


def build(arguments: dict[str, Any]) -> Any:
    """Return the application that Serve imports."""
    fake = Path(arguments["config"]["model"]).name.startswith("tiny-")
    return assemble(as_config(arguments["config"]), counting if fake else prepare_engine)


def counting(settings: ReplicaSettings) -> EngineConfig:
    """Return the configuration of a fake engine, whose tokens depend on the model's folder."""
    first = _FIRST[settings.engine["model"][-1]]
    fake = f"fake:vocab_size=250,max_model_len=4096,step_seconds=0.02,first={first}"
    return EngineConfig(model=fake)


class Drained:
    """The deployed application, and the ways to change it."""

    def __init__(
        self, cluster: Any, models: dict[str, Path], engine: dict[str, Any], notices: int
    ) -> None:
        self.cluster = cluster
        self.models = models
        self.model = "a"
        self.engine = engine
        self.counts = {"cpu": 2, "gpu": 2}
        self.drain_seconds = _SHORT_DRAIN
        self.port = free_port()
        self.spots = [  # those that go, and one that stays; each has room for the pool
            cluster.add_node(num_cpus=1, resources={"spot": 1}, **_COMMON)
            for _ in range(notices + 1)
        ]

    def config(self) -> dict[str, Any]:
        where = {"cpu": {"stays": 0.1}, "gpu": {"spot": 0.5}}
        return {
            "model": str(self.models[self.model]),
            "served_name": NAME,
            "app_name": NAME,
            "engine": {**self.engine, "device": "cpu"},
            "pools": {
                name: {
                    "replicas": count,
                    "num_cpus": 0.1,
                    "num_gpus": 0,
                    "resources": where[name],
                    "engine": {"device": "cpu", "num_threads": 1},
                }
                for name, count in self.counts.items()
            },
            "router": {"replicas": 2, "num_cpus": 1.5, "wait_seconds": 120},
            "limits": {"drain_seconds": self.drain_seconds, "queue_seconds": 120},
        }

    def deploy(self) -> None:
        """Deploy the current configuration, as `serve deploy` does."""
        schema = serve_config(self.config())
        http = {"host": "127.0.0.1", "port": self.port}
        # One machine, one port: only the head node can have the proxy.
        schema |= {"proxy_location": "HeadOnly", "http_options": http}
        schema["applications"][0]["import_path"] = "tests.faults.drain:build"
        deploy(schema)

    async def steady(self, seconds: float = 180.0) -> None:
        """Wait until all replicas and routers run as deployed, and none starts or stops."""
        from ray import serve

        deadline = time.monotonic() + seconds
        await asyncio.sleep(0.5)
        while True:
            app = (await asyncio.to_thread(serve.status)).applications.get(NAME)
            if app is not None and app.status == "RUNNING":
                states = [deployment.replica_states for deployment in app.deployments.values()]
                statuses = {deployment.status for deployment in app.deployments.values()}
                total = sum(sum(state.values()) for state in states)
                running = sum(state.get("RUNNING", 0) for state in states)
                if statuses == {"HEALTHY"} and total == running == 2 + sum(self.counts.values()):
                    return
            assert time.monotonic() < deadline, app
            await asyncio.sleep(0.2)

    async def scale(self, pool: str, count: int) -> None:
        self.counts[pool] = count
        await asyncio.to_thread(self.deploy)
        await self.steady()

    async def update(self) -> None:
        await asyncio.to_thread(self.deploy)
        await self.steady()

    async def notice(self) -> None:
        """Give the node with replicas of a pool a drain notice, and remove it at the deadline."""
        from ray._private.state import available_resources_per_node
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        free = await asyncio.to_thread(available_resources_per_node)
        used = {node for node, resources in free.items() if resources.get("spot", 0) < 1}
        old = next(node for node in self.spots if node.node_id in used)
        self.spots.remove(old)
        gcs = GcsClient(address=self.cluster.address)
        deadline = time.time() + _NOTICE
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, why = await asyncio.to_thread(
            gcs.drain_node, old.node_id, reason, "spot", int(deadline * 1000)
        )
        assert accepted, why
        await asyncio.sleep(deadline - time.time())
        await asyncio.to_thread(self.cluster.remove_node, old, allow_graceful=False)
        await self.steady()


class Answers(Load):
    """A load of requests of several lengths, each with a right answer for each model."""

    def __init__(self, broken: Broken, tokens: int) -> None:
        super().__init__(broken, tokens)
        for number, body in enumerate(self._bodies):
            body["max_tokens"] = tokens * (1, 2, 5)[number % 3]
        self._right: list[list[Any]] = [[] for _ in self._bodies]

    async def learn(self) -> None:
        await super().learn()
        for right, said in zip(self._right, self._wanted, strict=True):
            right.append(said.outcome)

    def right(self, which: int) -> list[Any]:
        return self._right[which]


async def drain(drained: Drained, options: argparse.Namespace) -> tuple[Run, dict[str, Any]]:
    from ray import serve

    await asyncio.to_thread(drained.deploy)
    await drained.steady()
    instance = instance_at(f"http://127.0.0.1:{drained.port}")
    broken = Broken(drained.port, "", instance, serve.get_app_handle(NAME), 4, 2)
    await broken.settled(60)
    load = Answers(broken, options.tokens)
    for model in ("a", "b") if options.updates > 1 else ("a",):
        if model != drained.model:
            drained.model = model
            await drained.update()
        await load.learn()
    run = Run(options.rate, options.tokens)
    began = time.monotonic()
    tasks: list[asyncio.Task[None]] = []

    async def request(number: int) -> None:
        run.requests.append(await load.send_request(number, began))

    async def arrivals() -> None:
        order = random.Random(0)
        for number in itertools.count():
            tasks.append(asyncio.create_task(request(number)))
            await asyncio.sleep(order.expovariate(options.rate))

    async def watcher() -> None:
        while True:
            run.replicas.append((round(time.monotonic() - began, 2), await broken.seen()))
            await asyncio.sleep(1)

    def mark(what: str) -> Callable[[], None]:
        event = Kill(round(time.monotonic() - began, 2), what, sum(drained.counts.values()))
        run.kills.append(event)
        print(f"{event.at_s:7.1f} s  {what}", file=sys.stderr, flush=True)
        return lambda: times.setdefault(what, []).append(time.monotonic() - began - event.at_s)

    times: dict[str, list[float]] = {}
    error = ""
    background = [asyncio.create_task(arrivals()), asyncio.create_task(watcher())]
    try:
        await asyncio.sleep(2)
        for number in range(options.scale_downs):
            pool = ("cpu", "gpu")[number % 2]
            done = mark("scale-down")
            await drained.scale(pool, 1)
            done()
            await drained.scale(pool, 2)
        drained.drain_seconds = _LONG_DRAIN
        for number in range(options.updates):
            if number % 2:
                drained.model = "b" if drained.model == "a" else "a"
                done = mark("model update")
            else:
                drained.drain_seconds += 1
                done = mark("configuration update")
            await drained.update()
            done()
        for _ in range(options.notices):
            done = mark("notice")
            await drained.notice()
            done()
    except Exception as failure:  # report what has come so far
        error = repr(failure)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await asyncio.gather(*tasks)
    run.seconds = time.monotonic() - began
    held = {} if error else (await broken.handle.state.remote())["held"]
    summary = run.summary()
    return run, {
        "error": error,
        **{name: summary[name] for name in summary if not name.startswith("kill")},
        "events": {what: len(took) for what, took in times.items()},
        "longest_event_s": {what: round(max(took), 1) for what, took in times.items()},
        "left_behind": {what: count for what, count in held.items() if count},
        "marks": summary["kill_marks"],
    }


@contextmanager
def nodes(edge: str) -> Iterator[Any]:
    """Start a Ray cluster with Serve, to which nodes can be added."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="h")  # short, as socket paths are limited
    settings = parse_config({"model": "default", "http": {"proxy": edge}}, {})
    os.environ.update(cluster_environment(settings, folder))
    # A separate folder and token, so that other programs do not join this cluster by mistake.
    token = Path(folder) / "token"
    token.write_text(secrets.token_hex(32))
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    reset_auth_token_state()  # Ray has read them when it was imported
    args = {"num_cpus": 8, "resources": {"stays": 1}, "temp_dir": folder, **_COMMON}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def models_of(name: str, folder: Path) -> dict[str, Path]:
    """Return the folders of two models with one tokenizer, by name."""
    if name == "fake":
        return {which: tiny_model(folder / f"tiny-{which}") for which in "ab"}
    import torch
    from safetensors.torch import load_file, save_file

    a = resolve_model(name, progress=lambda what, done, total: None)
    b = folder / "b"
    shutil.copytree(a, b)
    for file in b.glob("*.safetensors"):
        tensors = load_file(file)
        torch.manual_seed(0)
        for key, tensor in tensors.items():
            if key.endswith("norm.weight"):
                tensors[key] = tensor * (1 + 0.1 * torch.randn_like(tensor))
        save_file(tensors, file, metadata={"format": "pt"})
    return {"a": a, "b": b}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale-downs", type=int, default=50)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--notices", type=int, default=1)
    parser.add_argument("--rate", type=float, help="requests a second; default 6, a model 0.5")
    parser.add_argument("--tokens", type=int, help="of the shortest answers; default 40, a model 8")
    parser.add_argument("--model", default="fake", help="fake, default or a folder")
    parser.add_argument("--proxy", default="auto", choices=("auto", "haproxy", "serve"))
    parser.add_argument("--out", type=Path, help="of the report, without .json, .jsonl and .svg")
    options = parser.parse_args()
    fake = options.model == "fake"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster is stopped
    options.rate = options.rate or (6.0 if fake else 0.5)
    options.tokens = options.tokens or (40 if fake else 8)
    now = datetime.now(UTC)
    out: Path = options.out or RESULTS / f"faults-drain-{now:%Y-%m-%d}"
    folder = Path(tempfile.mkdtemp(prefix="manta-drain-"))
    try:
        models = models_of(options.model, folder)
        with nodes(options.proxy) as cluster:
            from ray import serve

            drained = Drained(cluster, models, {} if fake else ENGINE, options.notices)
            http = {"host": "127.0.0.1", "port": drained.port}
            serve.start(proxy_location="HeadOnly", http_options=http)
            run, report = asyncio.run(drain(drained, options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings = parse_config({"model": "default", "http": {"proxy": options.proxy}}, {})
    report = {
        "commit": commit(),
        "date": f"{now:%Y-%m-%d}",
        "device": f"{os.cpu_count()} CPU cores",
        "when": now.isoformat(timespec="seconds"),
        "proxy": proxy(settings),
        "model": "an engine that counts" if fake else f"{options.model}, float32",
        **report,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    title = ", ".join(f"{count} x {what}" for what, count in report["events"].items())
    out.with_suffix(".svg").write_text(picture(run, f"{title}: {report['requests']} requests", ""))
    lines = [{"kind": "event", **asdict(mark)} for mark in run.kills]
    lines += [{"kind": "request", **asdict(request)} for request in run.requests]
    out.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "marks"}, indent=1))
    wrong = ("error", "failed", "different", "left_behind")
    return int(any(report[name] for name in wrong))


if __name__ == "__main__":
    sys.exit(main())
