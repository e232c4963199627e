"""A Ray cluster with Serve for a test process: on loopback only, with its own ports and folder."""

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.replica.deployment import ReplicaSettings
from engine.config.engine_config import EngineConfig
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.replica.collector import Collector, collector

# All token ids of the fake engine are in the tiny tokenizer's vocabulary.
FAKE = "fake:vocab_size=250,max_model_len=8192,step_seconds=0.02"


def fake_engine(settings: ReplicaSettings) -> EngineConfig:
    """Return the configuration of a fake engine, which replicas run instead of a model."""
    return EngineConfig(model=FAKE, max_num_seqs=settings.engine.get("max_num_seqs", 0))


def tiny_model(folder: Path, positions: int = 256) -> Path:
    """Write a model folder with tokenizer and config.json, but without weights; return it."""
    folder.mkdir()
    tokenizer = tiny_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": template})
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 512,
                "max_position_embeddings": positions,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
            }
        )
    )
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_server(process: "subprocess.Popen[str]") -> None:
    """End a `manta serve` that still runs, and all processes that it has started.

    After a second SIGTERM it does not wait for streams. SIGKILL would leave processes of Ray.
    """
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            time.sleep(0.5)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Cluster:
    """A Ray cluster with Serve. address: Ray's address, for other drivers. port: Serve's HTTP
    port."""

    address: str
    port: int

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read().decode()

    def open(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            return error

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        with self.open(path, body) as answer:
            return json.loads(answer.read())

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        with self.open(path, {**body, "stream": True}) as answer:
            ended = False
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    ended = True
                elif line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
            assert ended, "the stream was cut"


@contextlib.contextmanager
def fleet(cluster: Cluster, folder: Path) -> Iterator[Cluster]:
    """Deploy an application `manta` at /, and delete it afterwards.

    It has a router, two fake engines, a folder for batches and a store of responses.
    """
    from ray import serve

    from deployments.app import assemble
    from deployments.config.load import parse_config

    config = parse_config(
        {
            "model": str(tiny_model(folder / "tiny")),
            "pools": {"cpu": {"replicas": 2, "num_cpus": 0.4}},
            "router": {"replicas": 1},
            "limits": {"drain_seconds": 2.0},
            "batch": {"folder": str(folder / "batches")},
            "http": {"proxy": "serve", "port": cluster.port, "store_bytes": 1_000_000},
        },
        {},
    )
    try:
        serve.run(assemble(config, fake_engine), name="manta", route_prefix="/")
        state = serve.get_app_handle("manta").state
        deadline = time.monotonic() + 60
        while len(state.remote().result()["replicas"]) < 2:
            assert time.monotonic() < deadline, "the replicas did not come"
            time.sleep(0.1)
        yield cluster
    finally:
        serve.delete("manta")


def _talkative(settings: ReplicaSettings) -> EngineConfig:
    return EngineConfig(model=FAKE, log_level=settings.engine["log_level"])


@contextlib.contextmanager
def traced_pair(cluster: Cluster, folder: Path) -> Iterator[Collector]:
    """Deploy an application `pair` at /, yield the collector of its traces, and delete the
    application afterwards.

    It has two routers and two fake engines, and logs every request as a line of JSON.
    """
    from ray import serve

    from deployments.app import assemble
    from deployments.config.load import parse_config

    with collector() as spans:
        config = parse_config(
            {
                "model": str(tiny_model(folder / "tiny")),
                "app_name": "pair",
                "pools": {"cpu": {"replicas": 2, "num_cpus": 0.2}},
                "router": {"replicas": 2},
                "limits": {"drain_seconds": 2.0},
                "log": {"level": "debug", "format": "json"},
                "tracing": {"endpoint": spans.url, "sample": 0.0},
            },
            {},
        )
        try:
            serve.run(assemble(config, _talkative), name="pair", route_prefix="/")
            handle = serve.get_app_handle("pair")
            deadline = time.monotonic() + 60
            while True:
                routers = handle.broadcast("state").results(timeout_s=10)
                if len(routers) == 2 and all(len(router["replicas"]) == 2 for router in routers):
                    break
                assert time.monotonic() < deadline, "the replicas did not come"
                time.sleep(0.1)
            yield spans
        finally:
            serve.delete("pair")


def look_often() -> None:
    """Let Serve's client in this process poll an application's status ten times a second, instead
    of once."""
    from ray.serve._private import client

    client.CLIENT_POLLING_INTERVAL_S = 0.1


@contextlib.contextmanager
def ray_and_serve(cpus: int = 2) -> Iterator[Cluster]:
    """Start a Ray cluster with Serve, yield it, and stop both in any case."""
    import ray
    from ray import serve

    look_often()
    folder = tempfile.mkdtemp(prefix="r")  # short, because Ray's socket paths are limited
    try:
        context = ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield Cluster(context.address_info["gcs_address"], port)
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
