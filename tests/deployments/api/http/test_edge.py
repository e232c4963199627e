"""Around the application: what Serve's own layers refuse has the error object too."""

import asyncio
from typing import Any

import pytest
import uvicorn
from ray.serve._private import http_util
from starlette.applications import Starlette

from deployments.api.app import build_asgi
from deployments.api.http.uvicorn_hooks import EdgeMiddleware, JsonRefusals, install
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import FakeBackend


def answering(status: int, content_type: bytes | None, body: bytes = b"replica abc is gone") -> Any:
    """An application behind Serve's own middleware, in two pieces, as Serve's proxy answers."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [] if content_type is None else [(b"content-type", content_type)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return EdgeMiddleware(http_util.RequestIdMiddleware(app))


def get(app: Any, path: str = "/x", *headers: tuple[bytes, bytes]) -> Reply:
    reply = asyncio.run(Client(app).request("GET", path, headers=headers))
    reply.headers = [(name.lower(), value) for name, value in reply.headers]
    return reply


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (404, "not_found"),
        (408, "deadline_exceeded"),
        (418, "invalid_request"),
        (500, "internal_error"),
        (503, "overloaded"),
    ],
)
@pytest.mark.parametrize("content_type", [None, b"text/plain; charset=utf-8"])
def test_refusals_of_serve(status: int, code: str, content_type: bytes | None) -> None:
    """Serve tells of back-pressure, of a time-out and of an unknown path in plain text, which names
    its parts and which no client of the API can read."""
    reply = get(answering(status, content_type), "/x", (b"x-request-id", b"mine"))
    assert (reply.status, reply.json()["error"]["code"]) == (status, code)
    assert reply.header("content-type") == "application/json"
    assert reply.header("content-length") == str(len(reply.body))
    assert reply.header("x-request-id") == "mine"
    assert (reply.header("retry-after") is not None) == (status == 503)
    assert reply.header("x-should-retry") == ("false" if status == 408 else None)
    assert b"abc" not in reply.body


def test_what_stays_as_it_is() -> None:
    """Answers of the application, of other applications of the cluster, and of Serve's own routes,
    which HAProxy reads."""
    assert get(answering(200, b"text/plain", b"manta_up 1")).body == b"manta_up 1"
    assert get(answering(400, b"application/json", b"{}")).body == b"{}"
    assert get(answering(404, b"text/html", b"<p>")).body == b"<p>"
    assert get(answering(503, b"text/plain", b"DRAINING"), "/-/healthz").body == b"DRAINING"


def test_an_exception_has_the_error_object() -> None:
    """Serve decodes header names as UTF-8 and lets the exception go: uvicorn's plain 500."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "secret")

    reply = get(EdgeMiddleware(app))
    assert (reply.status, reply.json()["error"]["code"]) == (500, "internal_error")
    assert (reply.header("x-request-id") or "").startswith("req-") and b"secret" not in reply.body


def test_a_log_line_of_an_exception_is_short(caplog: pytest.LogCaptureFixture) -> None:
    """A recursion that had gone too deep wrote 183 KB into the log, once for each such request."""

    def deeper(value: Any, depth: int = 0) -> Any:
        return [shallower(value, depth)] if depth % 2 else deeper(value, depth + 1)

    def shallower(value: Any, depth: int) -> Any:
        return deeper(value, depth + 1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            deeper("")
        except RecursionError as error:
            raise ValueError("x" * 1_000_000) from error

    class Recursive(FakeBackend):
        def admit(self, key: str, model: str) -> None:
            deeper("")

    assert get(EdgeMiddleware(app)).status == 500
    reply = asyncio.run(Client(build_asgi(Recursive())).chat())
    assert reply.status == 500
    lines = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert len(lines) == 2 and all(1000 < len(line) < 7000 for line in lines)
    assert "ValueError" in lines[0] and "RecursionError" in lines[1]
    assert not any(record.exc_info for record in caplog.records)


def test_an_exception_in_mid_answer_goes_on() -> None:
    """A second head inside a body; or a short body that looks whole."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError

    with pytest.raises(RuntimeError):
        get(EdgeMiddleware(app))


def test_serve_and_uvicorn_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of Ray or uvicorn that builds its HTTP server in another way: then the refusals of
    the parser are plain text again, and nothing else would tell."""
    monkeypatch.setattr(
        http_util,
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
        "deployments.api.http.uvicorn_hooks:install",
    )
    protocols = uvicorn.config.HTTP_PROTOCOLS
    monkeypatch.setitem(protocols, "auto", protocols["auto"])  # put back afterwards
    options = http_util.configure_http_middlewares(http_util.HTTPOptions())
    assert [middleware.cls for middleware in options.middlewares] == [EdgeMiddleware]
    app = http_util._apply_middlewares(Starlette(), options.middlewares)
    assert isinstance(app, EdgeMiddleware), "outside of Serve's own middleware"
    config = uvicorn.Config(app)  # with Serve's choice of parser: uvicorn's default
    config.load()
    protocol: Any = config.http_protocol_class
    assert issubclass(protocol, JsonRefusals)
    assert "send_400_response" in vars(protocol.__mro__[2]), "uvicorn calls it something else now"
    assert len(install()) == 1, "each process may call it more than once"
