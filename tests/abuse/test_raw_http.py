"""Bytes that no HTTP library would send, against uvicorn with our application on the loopback, in
the layers that Serve puts around it: broken HTTP never reaches the application, and has the error
object all the same.
"""

import json
import re
import socket
import time
from collections.abc import Iterator

import pytest
from ray.serve._private.http_util import RequestIdMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.api.app import build_asgi
from deployments.api.http.uvicorn_hooks import EdgeMiddleware, JsonRefusals
from deployments.api.options import ApiOptions
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import FakeBackend

BODY = b'{"model":"tiny","prompt":"a","max_tokens":2,"temperature":0}'
USUAL = b"Content-Length: %d" % len(BODY)


def post(*headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json"]
    return b"\r\n".join([*lines, *headers]) + b"\r\n\r\n"


def get(path: bytes = b"/v1/models", *headers: bytes) -> bytes:
    return b"\r\n".join([b"GET " + path + b" HTTP/1.1", *headers]) + b"\r\n\r\n"


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend()


PARSERS = {"httptools": HttpToolsProtocol, "h11": H11Protocol}  # Serve's where it is; the other


@pytest.fixture(scope="module", params=PARSERS)
def port(request: pytest.FixtureRequest, backend: FakeBackend) -> Iterator[int]:
    options = ApiOptions(body_timeout_s=0.3, max_body_bytes=1 << 20, tell_request_id=False)
    app = EdgeMiddleware(RequestIdMiddleware(build_asgi(backend, options)))
    protocol = type("Protocol", (JsonRefusals, PARSERS[request.param]), {})
    with serve(app, protocol) as port:
        yield port


def talk(port: int, data: bytes, wait: float = 5.0) -> tuple[bytes, bool]:
    """Send bytes, and return what comes back and whether the server closed the connection.

    It ends after the first whole answer. wait: seconds without a byte.
    """
    got, closed = b"", False
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.settimeout(wait)
        try:
            line.sendall(data)
            while True:
                piece = line.recv(65536)
                got += piece
                if not piece:
                    closed = True
                    break
                if got.endswith(b"}") and b"connection: close" not in got:
                    break
        except (ConnectionError, TimeoutError):
            closed = True
    return got, closed


CASES: dict[str, tuple[int, bytes, set[int]]] = {
    "length over the limit": (8, post(b"Content-Length: 99999999"), {413}),
    "Expect with a length over the limit": (
        79,
        post(b"Content-Length: 99999999", b"Expect: 100-continue"),
        {413},
    ),
    "chunks over the limit": (
        9,
        post(b"Transfer-Encoding: chunked") + (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 40,
        {413},
    ),
    "length below the body": (10, post(b"Content-Length: 5") + BODY, {400}),
    "length above the body": (10, post(b"Content-Length: 500") + BODY, {408}),
    "negative length": (10, post(b"Content-Length: -5") + BODY, {400}),
    "two lengths": (10, post(USUAL, b"Content-Length: 1") + BODY, {400}),
    "length and chunks": (
        11,
        post(USUAL, b"Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
        {400},
    ),
    "chunk of no size": (10, post(b"Transfer-Encoding: chunked") + b"zz\r\n", {400}),
    "header of 200 kB": (14, post(b"X: " + b"a" * 200_000, USUAL) + BODY, {431}),
    "header of 200 kB without end": (14, post(b"X: a")[:-4] + b"a" * 200_000, {431}),
    "1,000 headers": (14, post(*[b"X-%d: a" % i for i in range(1000)], USUAL) + BODY, {431}),
    "URL of 100 kB": (15, get(b"/" + b"a" * 100_000, b"Host: x"), {414, 431}),
    "URL of 200 kB without end": (15, b"GET /" + b"a" * 200_000, {414, 431}),
    "URL that is not ASCII": (15, get("/é".encode(), b"Host: x"), {400, 404}),
    "URL of 20 kB": (15, get(b"/v1/models?" + b"a" * 20_000, b"Host: x"), {414}),
    "method FOO": (17, b"FOO /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", {405, 501}),
    "method PURGE": (17, b"PURGE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", {405}),
    "encoded dots": (19, get(b"/%2e%2e/v1/models", b"Host: x"), {404}),
    "host with a path": (20, get(b"/v1/models", b"Host: x/v1?"), {400}),
    "empty host": (20, get(b"/v1/models", b"Host:"), {400}),
    "two hosts": (20, get(b"/v1/models", b"Host: a", b"Host: b"), {400}),
    "NUL in a header": (22, get(b"/v1/models", b"Host: a", b"Authorization: Bearer a\0b"), {400}),
    "request id that is not UTF-8": (
        24,
        get(b"/nothing", b"Host: a", b"X-Request-Id: \xff\xfe"),
        {404},
    ),
    "websocket": (
        80,
        get(
            b"/v1/chat/completions",
            b"Host: a",
            b"Connection: Upgrade",
            b"Upgrade: websocket",
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            b"Sec-WebSocket-Version: 13",
        ),
        {400, 405},
    ),
    "no HTTP": (3, b"\x00\x01\x02\r\n\r\n", {400}),
}


@pytest.mark.parametrize("name", CASES)
def test_case(port: int, backend: FakeBackend, name: str) -> None:
    """A refusal that is none of ours, a hang, or a connection left in doubt."""
    _, data, allowed = CASES[name]
    got, closed = talk(port, data)
    head, _, body = got.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    assert status in allowed, got[:200]
    assert b"\r\ncontent-type: application/json\r\n" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"]
    assert head.lower().count(b"\r\nx-request-id: ") == 1
    if status in (408, 413, 414, 431):
        assert closed, "what is left of the request would be read as the next one"
    assert usual(port) and not backend.live


def usual(port: int) -> bool:
    got, _ = talk(port, post(USUAL, b"Connection: close") + BODY)
    return got.startswith(b"HTTP/1.1 200") and b'"text":"the answer"' in got


def test_request_id_comes_back_once_and_clean(port: int) -> None:
    """Serve echoes whatever came, of any length; a folded header is the only way a line
    break could get here."""
    for sent, expected in (
        (b"mine-1", b"mine-1"),
        (b"a b\tc<d>", b"abcd"),
        (b"a" * 10_000, b"a" * 128),
        (b"one\r\nX-Request-Id: two", b"one"),
    ):
        got, _ = talk(port, get(b"/v1/models", b"Host: a", b"X-Request-Id: " + sent))
        ids = re.findall(rb"\r\nx-request-id: ([^\r]*)", got.lower())
        assert ids == [expected]
    got, _ = talk(port, get(b"/v1/models", b"Host: a", b"X-Request-Id: a\r\n set-cookie: b"))
    assert b"\r\nset-cookie" not in got.lower() and b"\r\n set-cookie" not in got.lower()


def test_refusal_does_not_stand_inside_an_answer(port: int, backend: FakeBackend) -> None:
    """A client that breaks its own connection in mid-stream must not read the refusal as text of
    the model."""
    body = b'{"model":"tiny","prompt":"a","max_tokens":200,"ignore_eos":true,"stream":true}'
    backend.pause = 0.002
    try:
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.settimeout(5)
            line.sendall(post(b"Content-Length: %d" % len(body)) + body)
            got = line.recv(65536)
            assert got.startswith(b"HTTP/1.1 200")
            line.sendall(b"\x00\x01\r\n\r\n")
            while piece := line.recv(65536):
                got += piece
    finally:
        backend.pause = 0.0
    answer, _, refusal = got.partition(b"HTTP/1.1 400")
    assert not refusal or answer.endswith(b"\r\n0\r\n\r\n"), "h11 waits for the answer's end"
    assert usual(port) and not backend.live


def test_keep_alive_after_errors_and_pipelining(port: int) -> None:
    """An error answered without reading all of its body must not poison the connection."""
    bad = b'{"model":"tiny","prompt":"a","max_tokens":-1}'
    requests = [
        (post(USUAL) + BODY, 200),
        (post(b"Content-Length: %d" % len(bad)) + bad, 400),
        (post(USUAL).replace(b"/v1/completions", b"/v1/nothing") + BODY, 404),
        (post(USUAL).replace(b"POST", b"DELETE") + BODY, 405),
        (post(USUAL) + BODY, 200),
    ]
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.settimeout(5)
        line.sendall(b"".join(data for data, _ in requests))
        got = b""
        while got.count(b"HTTP/1.1 ") < len(requests) or not got.endswith(b"}"):
            piece = line.recv(65536)
            assert piece, got
            got += piece
    statuses = [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [status for _, status in requests]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_hang_up_frees_at_once(port: int, backend: FakeBackend, stream: bool, how: str) -> None:
    """A client that leaves, over a real socket, before the first token and in mid-stream."""
    body = b'{"model":"tiny","prompt":"a","max_tokens":200,"ignore_eos":true,"stream":%b}' % (
        b"true" if stream else b"false"
    )
    for first, pause in ((10.0, 10.0), (0.0, 10.0), (0.0, 0.002)):
        backend.first_pause, backend.pause = first, pause
        try:
            line = socket.create_connection(("127.0.0.1", port))
            line.sendall(post(b"Content-Length: %d" % len(body)) + body)
            began = time.monotonic()
            while not backend.live:
                assert time.monotonic() - began < 5
                time.sleep(0.001)
            if stream and first == 0:
                assert line.recv(4096)
            if how == "reset":
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if how == "half-close":
                line.shutdown(socket.SHUT_WR)
            else:
                line.close()
            began = time.monotonic()
            while backend.live:
                assert time.monotonic() - began < 2
                time.sleep(0.001)
            assert time.monotonic() - began < 0.2
            line.close()
        finally:
            backend.first_pause = backend.pause = 0.0
    assert usual(port)
