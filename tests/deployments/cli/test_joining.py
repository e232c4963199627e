"""Addresses where no Ray is, or one that does not want us. Ray's own client tried for 88 seconds,
in lines of its log, and said nothing that a user could act on."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from deployments import environment
from deployments.cli import chat, status
from deployments.cli.serving import joining
from deployments.cli.serving.joining import ClusterError, join
from engine.errors import ConfigError


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove this machine's token, and fail a test that goes beyond probing to Ray's own client."""
    import ray

    def init(**_: Any) -> None:
        raise AssertionError("Ray's client was asked")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")
    monkeypatch.setattr(joining, "_ANSWER", 0.5)
    monkeypatch.setattr(joining, "_CONNECT", 0.5)


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the address of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def other() -> Iterator[str]:
    """Yield the address of a server that answers, but not as Ray does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def closed() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("closed", "connection refused"),
        ("silent", r"has not answered for 0\.5 s"),
        ("other", "is no Ray"),
    ],
)
def test_nobody_there(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    """Closed, slow and wrong: each in a sentence, within the sum of the limits."""
    address = request.getfixturevalue(kind)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=f"cannot join Ray at {address}: .*{text}") as error:
        join(address)
    assert "\n" not in error.value.message
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("address", ["nonsense", "host:port", ":6379", "http://host:80", "a:99999"])
def test_what_is_no_address(address: str) -> None:
    """A typo is told before anybody is asked, with what an address looks like."""
    with pytest.raises(ConfigError, match=r"not an address; give one like 10\.0\.0\.1:6379"):
        join(address)


@pytest.fixture
def refusing() -> Iterator[str]:
    """Yield the address of a server that refuses each call, as a GCS with a token does."""

    class Refuse(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            def refuse(_: bytes, context: Any) -> bytes:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
                raise AssertionError  # abort raises

            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Refuse(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_a_ray_that_wants_a_token(
    refusing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The way out is the variable, or the token; which of them, Ray's log did not say."""
    with pytest.raises(ClusterError, match=r"asks for a token.* set RAY_AUTH_MODE=token"):
        join(refusing)
    monkeypatch.setattr(joining, "asks_for_token", lambda: True)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 64)
    with pytest.raises(ClusterError, match="refuses the token from RAY_AUTH_TOKEN"):
        join(refusing)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setattr(joining, "auth_token_source", lambda: None)
    with pytest.raises(ClusterError, match="there is no token here; put the cluster's"):
        join(refusing)


def test_a_ray_of_this_machine_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`ray start` leaves its address behind, and --address auto went there."""
    current = tmp_path / "ray_current_cluster"
    current.write_text("127.0.0.1:1\n")
    monkeypatch.setattr(joining, "_CURRENT", str(current))
    assert joining.running_here() is None
    with pytest.raises(ClusterError, match="no Ray was found on this machine"):
        join("auto")


def test_any_error_of_ray_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, silent: str, tmp_path: Path
) -> None:
    """Ray raises plain Exceptions, e.g. when a node is too slow to start: a traceback."""
    import ray

    from deployments.cli.serving.cluster import Cluster
    from deployments.config.load import parse_config

    def slow(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.setattr(ray, "init", slow)
    monkeypatch.setattr(joining, "_ask", lambda _: None)
    monkeypatch.setattr("deployments.cli.serving.cluster.adopt_orphans", lambda: None)
    monkeypatch.setattr("deployments.cli.serving.cluster.set_for_children", lambda _: None)
    monkeypatch.setattr("deployments.cli.serving.cluster.make_auth_token", lambda: None)
    expected = (
        "The current node timed out during startup. This could happen because; "
        "`manta doctor` may tell more"
    )
    with pytest.raises(ClusterError, match=f"cannot join Ray at {silent}: {expected}"):
        join(silent)
    with pytest.raises(ClusterError, match=f"cannot start Ray: {expected}"):
        config = parse_config({"model": "some/model", "http": {"proxy": "serve"}}, {})
        Cluster("local").start(config, str(tmp_path))


def test_a_server_that_does_not_answer(silent: str) -> None:
    """`manta adapter` waited ten minutes for what takes no model."""
    began = time.monotonic()
    with pytest.raises(chat.ServerError, match="cannot be reached"):
        chat.ChatServer(silent).ask("GET", "/adapters", timeout=0.3)
    assert time.monotonic() - began < 3
    assert chat._CONNECT + 1 < 10 and chat._QUICK < 10


def test_status_finds_the_ray_of_a_server_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`manta status` beside `manta serve` said that there is no cluster: its Ray leaves no address
    where `ray start` does."""
    commands = {
        1: ["/lib/ray/raylet", "--raylet_socket_name=a", "--gcs-address=10.0.0.1:5000"],
        2: ["/lib/ray/gcs_server", "--gcs-address=10.0.0.1:6000"],
        3: ["grep", "raylet", "--gcs-address=10.0.0.1:7000"],
    }
    for pid, command in commands.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes("\0".join(command).encode())
    assert joining.rays_here(tmp_path) == ["10.0.0.1:5000"]

    joined: list[str] = []
    monkeypatch.setattr(status, "join", joined.append)
    monkeypatch.setattr(environment, "auth_token_source", lambda: "here")
    monkeypatch.setattr(status, "Cluster", lambda _: SimpleNamespace(own=True, address=None))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(status, "rays_here", lambda: ["10.0.0.1:5000"])
        status._join(None)
        assert joined == ["10.0.0.1:5000"] and os.environ.pop("RAY_AUTH_MODE") == "token"
    for there, words in (([], "no Ray cluster"), (["a:1", "b:2"], "--address of one: a:1, b:2")):
        monkeypatch.setattr(status, "rays_here", lambda there=there: there)
        with pytest.raises(ClusterError, match=words):
            status._join(None)


def test_status_may_send_the_token() -> None:
    """Bug: `manta status` imports Ray, which then ignores that RAY_AUTH_MODE is set."""
    program = "import deployments.cli.status, sys; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
