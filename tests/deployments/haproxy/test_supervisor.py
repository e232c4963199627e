"""The death of HAProxy, of its supervisor and of both: the real HAProxy, and no Ray."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deployments.haproxy.settings import EdgeSettings
from deployments.haproxy.supervisor import NOTE, why_unsupervised
from tests.deployments.haproxy.edge import Edge, launcher, running, served

pytestmark = pytest.mark.timeout(60)
USUAL = ["-db", "-f", "haproxy.cfg", "-dR"]


@pytest.fixture
async def router() -> AsyncIterator[int]:
    """Yield the port of a server that sends ten chunks in a second to each request."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(10 if b"/stream" in head else 1):
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.1 if b"/stream" in head else 0)
            writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def settled(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)


async def back(edge: Edge) -> None:
    """Wait until the edge serves again."""
    deadline = time.monotonic() + 5  # 0.06 s on two quiet cores
    while True:
        with contextlib.suppress(ConnectionError):
            if b"200 OK" in await edge.get():
                return
        assert time.monotonic() < deadline, "HAProxy was not started again"
        await asyncio.sleep(0.01)


def ask(path: Path, command: str) -> str:
    """Return the reply to a command, as Serve's actor gets it."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(10)
        line.connect(str(path))
        line.sendall(f"{command}\n".encode())
        return b"".join(iter(lambda: line.recv(65536), b"")).decode()


def served_pid(edge: Edge) -> int:
    """Return the pid by which Serve recognises its HAProxy; 0 without an answer."""
    with contextlib.suppress(OSError):
        for line in ask(edge.folder / "admin.sock", "show info").splitlines():
            if line.startswith("Pid:"):
                return int(line.partition(":")[2])
    return 0


def free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def test_a_killed_haproxy_is_started_again(router: int) -> None:
    """Bug: connections were refused for 5.5 s, until Serve had noticed and replaced its actor; or
    Serve notices the new pid, and gives HAProxy no router from then on."""
    with running(EdgeSettings(), [router]) as edge:
        for number in (signal.SIGKILL, signal.SIGSEGV):
            dead = edge.haproxy
            await settled(lambda: served_pid(edge) == edge.process.pid)
            os.kill(dead, number)
            await back(edge)
            assert edge.haproxy != dead and served_pid(edge) == edge.process.pid
        assert "http-manta" in ask(edge.folder / "admin.sock", "show stat")
        errors = (edge.folder / "stderr").read_text()
        assert f"{NOTE}HAProxy {dead} ended with -11, it was started again" in errors


async def test_a_haproxy_that_dies_at_once_takes_no_core(router: int) -> None:
    """Bug: a start, and a line of the log, as often as the machine can."""
    with running(EdgeSettings(), [router]) as edge:
        began = time.monotonic()
        for _ in range(4):
            await settled(lambda: served_pid(edge))
            os.kill(edge.haproxy, signal.SIGKILL)
            await back(edge)
        assert time.monotonic() - began > 3 * 0.2


async def test_a_stop_is_a_stop(router: int) -> None:
    """Bug: a HAProxy that Serve has stopped comes back, or ends without its streams."""
    with running(EdgeSettings(), [router]) as edge:
        stream = asyncio.ensure_future(edge.get("/stream"))
        await asyncio.sleep(0.3)
        edge.process.send_signal(signal.SIGUSR1)
        assert (await stream).count(b"x\r\n") == 10
        await settled(lambda: edge.process.poll() is not None)
        assert edge.process.returncode == 0 and free(edge.port)
    with running(EdgeSettings(), [router]) as edge:
        edge.process.kill()  # what Serve's actor does when it shuts down
        await settled(lambda: free(edge.port))


async def test_a_reload_takes_the_ports_over(router: int) -> None:
    """Bug: a reload that refuses connections, or after which two HAProxys listen, or none is
    started again."""
    with running(EdgeSettings(), [router]) as edge:
        await settled(lambda: served_pid(edge) == edge.process.pid)
        stream = asyncio.ensure_future(edge.get("/stream"))
        await asyncio.sleep(0.2)
        refused = 0
        command, environment = launcher(edge.folder, EdgeSettings())
        served(edge.folder, edge.port, [router])
        command += ["-sf", str(edge.process.pid), "-x", str(edge.folder / "admin.sock")]
        with subprocess.Popen(command, env=environment, cwd="/") as process:
            new = Edge(edge.port, edge.folder, process)
            try:
                while served_pid(new) != process.pid:
                    try:
                        assert b"200 OK" in await edge.get()
                    except ConnectionRefusedError:
                        refused += 1
                    await asyncio.sleep(0.01)
                assert (await stream).count(b"x\r\n") == 10
                await settled(lambda: edge.process.poll() is not None)
                assert not refused and edge.process.returncode == 0
                os.kill(new.haproxy, signal.SIGKILL)
                await back(new)
                assert served_pid(new) == process.pid
            finally:
                process.kill()


async def test_serve_notices_what_cannot_be_started_again(router: int) -> None:
    """Bug: a supervisor without HAProxy that Serve takes for a healthy edge."""
    with running(EdgeSettings(), [router]) as edge:
        await settled(lambda: served_pid(edge) == edge.process.pid)
        edge.process.send_signal(signal.SIGSTOP)
        os.kill(edge.haproxy, signal.SIGKILL)
        await settled(lambda: free(edge.port))
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", edge.port))
            other.listen()
            edge.process.send_signal(signal.SIGCONT)
            await settled(lambda: edge.process.poll() is not None)
        assert edge.process.returncode and not served_pid(edge)
        errors = (edge.folder / "stderr").read_text()
        assert "it could not be started again" in errors


async def test_another_ray_gets_haproxy_itself(router: int) -> None:
    """Bug: a Ray that starts HAProxy in another way gets no edge at all, or one whose reloads
    fail, because it takes the supervisor for something else."""
    assert why_unsupervised(USUAL) == "", "this release of Ray is not known any more"
    with running(EdgeSettings(), [router], options=["-q"]) as edge:
        assert served_pid(edge) == edge.process.pid
        assert b"200 OK" in await edge.get()
        errors = (edge.folder / "stderr").read_text()
        assert f"{NOTE}a HAProxy that dies is missing for some seconds" in errors and "-q" in errors
