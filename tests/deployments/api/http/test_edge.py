"""Around the application: what Serve's own layers refuse has the error object too."""

import asyncio
import hashlib
import json
from typing import Any

import pytest
import uvicorn
from ray.serve._private import http_util
from starlette.applications import Starlette

from deployments.api.app import build_asgi
from deployments.api.caller import KeyRule
from deployments.api.http import uvicorn_hooks
from deployments.api.http.uvicorn_hooks import EdgeMiddleware, JsonRefusals, install
from deployments.api.options import ApiOptions
from engine.errors import Overloaded
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import MODEL, FakeBackend


def answering(status: int, content_type: bytes | None, body: bytes = b"replica abc is gone") -> Any:
    """Return an application behind Serve's own middleware that answers in two pieces, as Serve
    does."""

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
        def admit(self, key: str, priority: int, model: str) -> None:
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


def test_a_refusal_before_serves_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: under overload each refusal passes through all of Serve's layers, whose CPU time is
    taken from engines; or a refusal without them differs, or meets requests that may come in."""
    monkeypatch.setattr(uvicorn_hooks, "_refuse_early", None)
    backend, seen, counted = FakeBackend(), [], []
    digest = hashlib.sha256(b"secret").digest()
    options = ApiOptions(
        api_keys=frozenset({digest}), observe=lambda route, status, _: counted.append(status)
    )
    api = build_asgi(backend, options)

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await api(scope, receive, send)

    edge, pause = EdgeMiddleware(serve), 0.0  # seconds until a part of a body is there

    async def paused(scope: Any, receive: Any, send: Any) -> None:
        async def receive_later() -> Any:
            await asyncio.sleep(pause)
            return await receive()

        await edge(scope, receive_later, send)

    client = Client(paused)

    def ask(
        *more: tuple[bytes, bytes],
        path: str = "/v1/completions",
        size: int = 0,
        cut: int = 0,
        body: bytes = b"",
        **fields: Any,
    ) -> Reply:
        whole = {"model": MODEL, "prompt": "hi", "max_tokens": 2, **fields}
        body = (body or json.dumps(whole).encode()).ljust(size)
        headers = dict([(b"authorization", b"Bearer secret"), (b"x-request-id", b"mine"), *more])
        headers |= {b"content-type": b"application/json", b"content-length": b"%d" % len(body)}
        parts = [body[:cut], body[cut:]] if cut else body
        return asyncio.run(client.request("POST", path, parts, list(headers.items())))

    uvicorn_hooks.refuse_early(api.refuse_early)
    assert ask().status == 200 and len(seen) == 1, "nothing was refused yet"
    backend.refuse = Overloaded("too much work is waiting", retry_after=3)
    through = ask()
    assert (through.status, len(seen)) == (503, 2)
    early = ask()
    assert (early.status, len(seen)) == (503, 2), "it went through Serve"
    assert (early.body, sorted(early.headers)) == (through.body, sorted(through.headers))
    assert early.header("retry-after") == "3" and early.header("x-request-id") == "mine"
    assert ask(path="/v1/messages").json()["type"] == "error", "in its dialect's form"
    assert len(seen) == 2
    assert counted == [200, 503, 503, 503], "refusals are missing in the metrics"
    assert ask((b"authorization", b"Bearer other")).status == 401
    assert ask(size=20_000).status == 503, "its body has to be read"
    assert ask((b"x-deadline-seconds", b"soon")).status == 400
    assert ask(path="/v1/embeddings").status != 200
    assert len(seen) == 6
    backend.refuses_from = 1
    assert ask().status == 200 and len(seen) == 7, "what was read of its body is passed on"
    assert ask(priority=1).status == 503 and len(seen) == 7, "of low priority"
    backend.refuses_from = -1
    assert ask(priority=-2).status == 403 and len(seen) == 8, "its key may not"
    api.change_options(rules={digest: KeyRule(priority=-2)})
    assert ask(priority=-1).status == 503 and len(seen) == 8
    assert ask(priority=-2).status == 200 and len(seen) == 9, "urgent requests may come in"
    assert ask(priority="low").status == 400 and len(seen) == 10
    assert ask(cut=9).status == 503 and len(seen) == 11, "of the body only a part is there"
    pause = 0.15
    assert ask().status == 503 and len(seen) == 12, "none of the body is there"
    pause, deep = 0.0, b'{"x": %b' % (b"[" * 9000)
    assert ask(body=deep).status == 400 and len(seen) == 13
    backend.refuse = None
    assert ask().status == 200 and len(seen) == 14
    backend.refuse = Overloaded("too much work is waiting")
    api.change_options(share_by="user")
    assert ask().status == 503 and len(seen) == 15, "the body has the user"
