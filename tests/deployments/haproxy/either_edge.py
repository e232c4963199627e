"""Checks of an application behind Serve's proxy or HAProxy, and checks of HAProxy alone."""

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from deployments.cli.ports import listeners
from loadtest.chaos.server_processes import ServerInstance
from tests.deployments.on_ray.serve_cluster import Cluster

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "the answer"}]


def raw(port: int, head: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(head + b"\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: line.recv(65536), b""))


def until_ready(cluster: Cluster) -> None:
    """Wait until /ready answers: Serve is running a moment before haproxy knows the routers."""
    deadline = time.monotonic() + 20
    while True:
        try:
            if json.loads(cluster.get("/ready"))["status"] == "ready":
                return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def by_handle(handle: Any, model: str) -> tuple[list[Any], int]:
    """Send a chat through a Serve handle; return the answer's choices, and the number of chunks of
    the same answer as a stream."""
    body = {"model": model, "messages": MESSAGES, "max_tokens": 30}
    answer = handle.generate.remote(body).result()
    return answer["choices"], len(list(handle.options(stream=True).stream.remote(body)))


def check_clients(cluster: Cluster, model: str) -> list[Any]:
    """Check the answers, streams and errors of the application at /; return an answer's choices."""
    body = {"model": model, "messages": MESSAGES}
    until_ready(cluster)
    whole = cluster.post(PATH, **body, max_tokens=30)
    streams = [cluster.stream(PATH, **body, max_tokens=30) for _ in range(6)]
    firsts = [next(stream) for stream in streams]
    for first, stream in zip(firsts, streams, strict=True):
        text = "".join(
            c["delta"].get("content") or "" for x in [first, *stream] for c in x["choices"]
        )
        assert text == whole["choices"][0]["message"]["content"]
    answer = cluster.post(PATH, **body, temperature=9)
    assert answer["error"]["param"] == "temperature", answer
    ids = cluster.open(PATH, body | {"max_tokens": 1}).headers.get_all("x-request-id")
    assert len(ids) == 1, ids  # Serve sets this header, too; clients would join two by a comma
    outcome = raw(cluster.port, b"GET /nothing HTTP/1.1\r\nHost: a\r\nX-Request-Id: a <\xff>b")
    assert b" 404 " in outcome and outcome.lower().count(b"x-request-id: ab\r\n") == 1, outcome
    outcome = raw(cluster.port, b"FOO / HTTP/1.1\r\nHost: a")  # what the parser itself refuses
    assert b" 501 " in outcome and b'"code":"not_implemented"' in outcome, outcome
    return list(whole["choices"])


def check_haproxy(port: int, instance: ServerInstance, folder: Path) -> None:
    """Check HAProxy's listeners, permissions and processes. folder: HAProxy's."""
    (haproxy,) = instance.find("haproxy")
    inodes = set()
    for entry in Path(f"/proc/{haproxy.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    open_ = [listener for listener in listeners() if f"socket:[{listener.inode}]" in inodes]
    assert len(open_) == 3 and {listener.address for listener in open_} == {"127.0.0.1"}, open_
    (admin,) = folder.rglob("admin.sock")
    assert admin.stat().st_mode & 0o777 == 0o600 and admin.parent.stat().st_mode & 0o077 == 0
    answer = raw(port, b"OPTIONS * HTTP/1.1\r\nHost: a")
    assert b" 404 " in answer and b'"code":"not_found"' in answer, answer
