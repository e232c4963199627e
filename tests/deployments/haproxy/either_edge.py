"""What must hold behind either proxy, and behind haproxy alone. As a program: the latter too, in a
cluster of its own, which haproxy's variables must be there for from the start."""

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from deployments.cli.ports import listeners
from deployments.config.load import MantaConfig, parse_config
from loadtest.chaos.server_processes import instance_at
from tests.deployments.on_ray.serve_cluster import Cluster, fake_engine, ray_and_serve, tiny_model

APP = "edge"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "the answer"}]}
PATH = "/v1/chat/completions"


def config_of(folder: Path, proxy: str) -> MantaConfig:
    return parse_config(
        {
            "model": str(tiny_model(folder / "tiny")),
            "app_name": APP,
            "pools": {"cpu": {"replicas": 2, "num_cpus": 0.4}},
            "router": {"replicas": 2},
            "http": {"proxy": proxy},
            "limits": {"drain_seconds": 1.0},
        },
        {},
    )


def raw(port: int, head: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(head + b"\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: line.recv(65536), b""))


def until_ready(cluster: Cluster) -> None:
    """Serve is running a moment before haproxy knows the routers."""
    deadline = time.monotonic() + 20
    while True:
        try:
            if json.loads(cluster.get("/ready"))["status"] == "ready":
                return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def deploy_and_check(cluster: Cluster, config: MantaConfig) -> Any:
    """Deploys the application at / and looks at what clients get; its handle."""
    from ray import serve

    from deployments.app import assemble

    serve.run(assemble(config, fake_engine), name=APP, route_prefix="/")
    until_ready(cluster)
    whole = cluster.post(PATH, **BODY, max_tokens=30)
    streams = [cluster.stream(PATH, **BODY, max_tokens=30) for _ in range(6)]
    firsts = [next(stream) for stream in streams]
    for first, stream in zip(firsts, streams, strict=True):
        text = "".join(
            c["delta"].get("content") or "" for x in [first, *stream] for c in x["choices"]
        )
        assert text == whole["choices"][0]["message"]["content"]
    answer = cluster.post(PATH, **BODY, temperature=9)
    assert answer["error"]["param"] == "temperature", answer
    ids = cluster.open(PATH, BODY | {"max_tokens": 1}).headers.get_all("x-request-id")
    assert len(ids) == 1, ids  # Serve answers it too; clients would join the two by a comma
    outcome = raw(cluster.port, b"GET /nothing HTTP/1.1\r\nHost: a\r\nX-Request-Id: a <\xff>b")
    assert b" 404 " in outcome and outcome.lower().count(b"x-request-id: ab\r\n") == 1, outcome
    outcome = raw(cluster.port, b"FOO / HTTP/1.1\r\nHost: a")  # what the parser itself refuses
    assert b" 501 " in outcome and b'"code":"not_implemented"' in outcome, outcome
    handle = serve.get_app_handle(APP)  # a driver has the usual settings
    answer = handle.generate.remote({**BODY, "max_tokens": 30}).result()
    assert answer["choices"] == whole["choices"]
    pieces = list(handle.options(stream=True).stream.remote({**BODY, "max_tokens": 30}))
    assert len(pieces) > 20
    return handle


def check_haproxy(cluster: Cluster, folder: Path) -> None:
    """folder: haproxy's."""
    instance = instance_at(f"http://127.0.0.1:{cluster.port}")
    (haproxy,) = instance.find("haproxy")
    inodes = set()
    for entry in Path(f"/proc/{haproxy.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    open_ = [listener for listener in listeners() if f"socket:[{listener.inode}]" in inodes]
    assert len(open_) == 3 and {listener.address for listener in open_} == {"127.0.0.1"}, open_
    (admin,) = folder.rglob("admin.sock")
    assert admin.stat().st_mode & 0o777 == 0o600 and admin.parent.stat().st_mode & 0o077 == 0
    answer = raw(cluster.port, b"OPTIONS * HTTP/1.1\r\nHost: a")
    assert b" 404 " in answer and b'"code":"not_found"' in answer, answer
    # Serve's actor that owns haproxy: its streams end, and the next one serves.
    stream = cluster.stream(PATH, **BODY, max_tokens=100)
    next(stream)
    owner = next(listener for listener in instance.processes() if listener.pid == haproxy.parent)
    assert "HAProxyManager" in owner.title, owner
    owner.send(signal.SIGKILL)
    assert len(list(stream)) > 90
    until_ready(cluster)


def main() -> None:
    from deployments.app import cluster_environment, proxy

    folder = Path(tempfile.mkdtemp(prefix="h"))  # short: haproxy puts sockets in it
    try:
        config = config_of(folder, "haproxy")
        assert proxy(config) == "haproxy"
        os.environ.update(cluster_environment(config, folder))
        with ray_and_serve() as cluster:
            handle = deploy_and_check(cluster, config)
            check_haproxy(cluster, folder)
            pieces = list(handle.options(stream=True).stream.remote({**BODY, "max_tokens": 30}))
            assert len(pieces) > 20
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("fine")


if __name__ == "__main__":
    main()
