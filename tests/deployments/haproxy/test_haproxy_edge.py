"""What the HTTP edge refuses, bounds and survives: the real HAProxy with Serve's real template."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.ports import listeners, why_not_bindable
from deployments.haproxy import environment
from deployments.haproxy.settings import EdgeSettings
from tests.deployments.haproxy.edge import (
    ROOT,
    Edge,
    free_port,
    launcher,
    request,
    running,
    served,
    wait_listening,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def router() -> AsyncIterator[int]:
    """Yield the port of a server that answers each request with the bytes it has received."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for _ in range(20 if b"/stream" in head else 1):
                writer.write(b"%x\r\n%s\r\n" % (len(head), head))
                await writer.drain()
                if b"/stream" in head:
                    await asyncio.sleep(0.1)
            writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


def error(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the error object of an answer. Asserts that it is nothing else."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer
    return int(head.split()[1]), json.loads(body)["error"]


async def test_statistics_and_admin_socket_are_nobody_elses(router: int) -> None:
    """Bug: HAProxy's statistics and metrics on all interfaces without a key, and an admin socket
    that every user of the machine may write to."""
    with running(EdgeSettings(), [router]) as edge:
        sockets = set()
        for entry in Path(f"/proc/{edge.haproxy}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                sockets.add(os.readlink(entry))
        own = [listener for listener in listeners() if f"socket:[{listener.inode}]" in sockets]
        assert len(own) == 3
        assert {listener.address for listener in own} == {"127.0.0.1"}
        assert stat.S_IMODE((edge.folder / "admin.sock").stat().st_mode) == 0o600
        assert stat.S_IMODE(edge.folder.stat().st_mode) == 0o700


async def test_only_the_service_itself_is_on_all_interfaces(router: int) -> None:
    """Bug: http.host 0.0.0.0 opens the routers' ports or the statistics too."""
    with running(EdgeSettings(host="0.0.0.0"), [router]) as edge:
        text = (edge.folder / "haproxy.cfg").read_text()
        binds = [line.split()[1] for line in text.splitlines() if line.strip().startswith("bind")]
        assert sorted(bind.split(":")[0] for bind in binds) == ["*", "127.0.0.1", "127.0.0.1"]
        assert b"200 OK" in await edge.get()


@pytest.mark.parametrize(
    ("host", "reached"),
    [("::", {"127.0.0.1", "::1"}), ("::1", {"::1"}), ("0.0.0.0", {"127.0.0.1"})],
)
async def test_the_edge_listens_where_http_host_says(
    host: str, reached: set[str], router: int
) -> None:
    """Bug: `http.host: "::"` listened on IPv4 alone, where nobody had asked for it; ::1 nowhere."""
    if "::1" in reached and why_not_bindable("::1", free_port()):
        pytest.skip("this machine has no IPv6")
    with running(EdgeSettings(host=host), [router], at=min(reached)) as edge:
        for address in ("127.0.0.1", "::1"):
            if address in reached:
                assert b"200 OK" in await edge.get(at=address)
            else:
                with pytest.raises(OSError):
                    await edge.get(at=address)


async def test_slow_heads_and_bodies_end(router: int) -> None:
    """Bug: heads that come byte by byte stayed open for 100 s and bodies for 80 s, because only
    silence was bounded."""

    async def drip(edge: Edge, first: bytes) -> tuple[float, bytes]:
        reader, writer = await edge.connect()
        began = time.monotonic()
        writer.write(first)
        answer = asyncio.ensure_future(reader.read())
        while not answer.done() and time.monotonic() < began + 10:
            writer.write(b"x")
            await asyncio.wait([answer], timeout=0.2)
        writer.close()
        return time.monotonic() - began, await answer

    with running(EdgeSettings(request_seconds=1), [router]) as edge:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n"
        took, answer = await drip(edge, head + b"x-")
        assert 0.9 < took < 4 and answer.startswith(b"HTTP/1.1 408 ")
        took, answer = await drip(edge, head + b"\r\n")
        status, error_body = error(answer)
        assert 0.9 < took < 4 and (status, error_body["code"]) == (408, "request_timeout")


async def test_5000_slow_clients_hold_nobody_up(router: int) -> None:
    """Bug: 4,300 sockets with an unfinished head took all of HAProxy's places, and nobody else was
    served as long as they stayed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12000:
        pytest.skip("so many open files are not allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 12000), hard))
    slow: list[asyncio.StreamWriter] = []
    try:
        with running(EdgeSettings(), [router]) as edge:
            for source in ("127.0.0.2", "127.0.0.3"):
                for _ in range(25):
                    results = await asyncio.gather(*(edge.connect(source) for _ in range(100)))
                    slow += [writer for _, writer in results]
            for writer in slow:
                writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nx-")
            times = []
            for _ in range(20):
                for writer in slow[:500]:
                    writer.write(b"y")
                began = time.monotonic()
                assert b"200 OK" in await edge.get()
                times.append(time.monotonic() - began)
            print(f"beside {len(slow)} slow clients: median {sorted(times)[10] * 1000:.1f} ms")
            assert len(slow) == 5000 and sorted(times)[10] < 0.05
            for writer in slow:
                writer.transport.abort()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_connections_from_one_address_are_bounded(router: int) -> None:
    """Bug: one client may take all places; or is cut off without a word at the first one above its
    bound; or others pay for it."""
    settings = EdgeSettings(connections_per_address=16)
    with running(settings, [router]) as edge:
        held = [await edge.connect("127.0.0.2") for _ in range(16)]
        await asyncio.sleep(0.2)  # HAProxy's threads take them in turns
        answer = await edge.get(source="127.0.0.2")
        status, error_body = error(answer)
        assert (status, error_body["code"]) == (429, "too_many_connections")
        assert b"\r\nretry-after: 1\r\n" in answer and b"\r\nx-request-id: " in answer
        assert b"200 OK" in await edge.get("/-/healthz", "127.0.0.2")
        with contextlib.suppress(ConnectionError):  # beyond an eighth there is no place for words
            for _ in range(8):
                held.append(await edge.connect("127.0.0.2"))
            assert await held[-1][0].read() == b""
        assert b"200 OK" in await edge.get(source="127.0.0.3")
        for _, writer in held:
            writer.close()
        await asyncio.sleep(0.2)
        assert b"200 OK" in await edge.get(source="127.0.0.2")
    with running(EdgeSettings(connections_per_address=0, connections=64), [router]) as edge:
        held = [await edge.connect("127.0.0.2") for _ in range(50)]
        assert b"200 OK" in await edge.get(source="127.0.0.2"), "0: a proxy in front"
        held += [await edge.connect("127.0.0.2") for _ in range(12)]
        answer = await edge.get()
        status, error_body = error(answer)
        assert (status, error_body["code"]) == (503, "overloaded"), "at the end of its places"
        assert b"\r\nretry-after: 1\r\n" in answer
        for _, writer in held:
            writer.close()


async def test_the_limit_of_open_files_counts(router: int) -> None:
    """Bug: HAProxy does not start, or stops accepting, where fewer files may be open than its
    connections need."""
    with running(EdgeSettings(), [router], open_files=512) as edge:
        assert "maxconn 102" in (edge.folder / "haproxy.cfg").read_text()
        held = [await edge.connect(f"127.0.0.{2 + n % 4}") for n in range(98)]
        assert error(await edge.get())[0] == 503
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", (400, "invalid_http")),
        (b"GET / HTTP/3.7\r\nHost: a\r\nConnection: close\r\n\r\n", (400, "invalid_http")),
        (b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", (404, "not_found")),
    ],
    ids=["no Host", "version", "OPTIONS *"],
)
async def test_what_the_edge_refuses_itself(
    router: int, data: bytes, expected: tuple[int, str]
) -> None:
    """Bug: HTML or plain text where every error is said to be an error object; HTTP/1.1 without
    Host, and HTTP/3.7, were served."""
    with running(EdgeSettings(), [router]) as edge:
        status, error_body = error(await edge.raw(data))
        assert (status, error_body["code"]) == expected


async def test_a_path_of_ours_is_there_soon_while_no_router_is_known() -> None:
    """Bug: an edge that came back answered 404 for every path until Serve had told it of a router,
    and clients take that for the end; a 503 with Retry-After they try again."""
    with running(EdgeSettings(prefix="/base"), []) as edge:
        answer = await edge.get("/base/v1/models")
        status, error_body = error(answer)
        assert (status, error_body["code"]) == (503, "overloaded")
        assert b"retry-after: 1" in answer.lower()
        status, error_body = error(await edge.get("/elsewhere"))
        assert (status, error_body["code"]) == (404, "not_found")
    with running(EdgeSettings(prefix="/"), []) as edge:
        assert error(await edge.get("/v1/models"))[0] == 503


@pytest.mark.parametrize("path", ["/" + "y" * 20000, "/"], ids=["URL", "headers"])
async def test_long_heads_reach_the_routers(router: int, path: str) -> None:
    """Bug: a URL or a head of more than 16 kB, or more than 101 headers, got a page of HTML from
    HAProxy; routers refuse them with an error object."""
    headers = "".join(f"x-{n}: {'z' * 64}\r\n" for n in range(400))
    with running(EdgeSettings(), [router]) as edge:
        assert b"200 OK" in await edge.raw(request(path, headers))


async def test_routers_that_are_gone_are_503(router: int) -> None:
    """Bug: 500 in plain text where no router can be reached, or one ends before it answers."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with running(EdgeSettings(), [free_port()]) as edge:
        status, error_body = error(await edge.get())
        assert (status, error_body["code"]) == (503, "overloaded")
    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    with running(EdgeSettings(), [server.sockets[0].getsockname()[1]]) as edge:
        answer = await edge.get()
        assert error(answer)[0] == 503 and b"\r\nretry-after: 1\r\n" in answer
    server.close()


async def test_another_router_gets_a_request_that_has_no_answer_yet() -> None:
    """Bug: without the body in HAProxy's buffer a request ends with the router that had it."""
    seen = []

    async def first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(65536)
        if data.startswith(b"POST"):
            seen.append(data)
        if not data.startswith(b"POST") or len(seen) > 1:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(first, "127.0.0.1", 0)
    body = b"b" * 12000
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 12000\r\n\r\n"
    with running(EdgeSettings(), [server.sockets[0].getsockname()[1]]) as edge:
        reader, writer = await edge.connect()
        writer.write(head + body[:1])
        await asyncio.sleep(0.2)
        assert not seen, "routers get it when it is whole"
        writer.write(body[1:])
        assert b" 200 OK" in await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert [len(data.partition(b"\r\n\r\n")[2]) for data in seen] == [12000, 12000]
    server.close()


async def test_a_large_body_is_judged_by_its_length(router: int) -> None:
    """Bug: nothing was answered until 16 KiB of the body had come, so that a client that waits for
    leave to send, or for a 413, waited in vain."""
    head = request("/", "Content-Length: 9000000\r\nExpect: 100-continue\r\n")
    with running(EdgeSettings(), [router]) as edge:
        reader, writer = await edge.connect()
        writer.write(head.replace(b"GET", b"POST", 1))
        assert b" 200 OK" in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


async def test_an_orphan_lets_its_streams_end_and_ends(router: int) -> None:
    """Bug: HAProxy outlived what had started it, listened on, and sent requests to whoever got its
    routers' ports next."""
    with tempfile.TemporaryDirectory(prefix="h") as name:
        folder, port = Path(name), free_port()
        served(folder, port, [router])
        command, environment = launcher(folder, EdgeSettings())
        parent = subprocess.Popen(
            [sys.executable, "-m", "tests.deployments.haproxy.edge", *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
        )
        assert parent.stdout
        pid = int(parent.stdout.readline())
        wait_listening(parent, port, Path(os.devnull))
        edge = Edge(port, folder, parent)
        stream = asyncio.ensure_future(edge.get("/stream"))
        await asyncio.sleep(0.5)
        assert os.getpgid(pid) == pid, "the raylet kills the group of an actor that died"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        await asyncio.sleep(0.2)
        with pytest.raises(ConnectionRefusedError):
            await edge.connect()
        answer = await stream
        assert answer.endswith(b"\r\n0\r\n\r\n") and answer.count(b"GET /stream") == 20
        for _ in range(50):
            if not Path(f"/proc/{pid}").exists():
                break
            await asyncio.sleep(0.1)
        else:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("it is still there")


def test_its_own_ports_are_free_and_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy could not bind at its start, seconds after the choice: the same port twice, the
    server's own, or one that the system had given to a connection meanwhile."""
    with socket.create_server(("", 0)) as used:
        port = used.getsockname()[1]
        monkeypatch.setattr(environment, "_PORTS", range(port, port + 12))
        ports = environment._free_ports(3, without={port + 1, None})
    assert len(set(ports)) == 3 and not {port, port + 1} & set(ports)
