"""Streams that wait for their first token: a sign of life, and what becomes of error statuses."""

import asyncio
import socket
import time
from asyncio import run
from typing import Any

import openai
import pytest

from deployments.api.app import Api, build_asgi
from deployments.api.options import ApiOptions
from deployments.api.stream import merge
from deployments.backend import Timing
from engine.errors import MantaError, Overloaded
from engine.messages import Delta
from tests.deployments.api.asgi import CHAT, Client, Reply
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import FakeBackend, FakeGeneration

MESSAGES: Any = [{"role": "user", "content": "hello"}]
TICK = 0.05  # seconds between signs of life
LONG = 0.3  # until the first token


@pytest.fixture
def app(backend: FakeBackend) -> Api:
    backend.first_pause = LONG
    return build_asgi(backend, ApiOptions(keepalive_s=TICK))


@pytest.fixture
def unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request be placed at a replica."""
    monkeypatch.setattr(FakeGeneration, "timing", lambda self: Timing())


def without_comments(reply: Reply) -> list[Any]:
    reply.body = reply.body.replace(merge.COMMENT, b"")
    return reply.events()


def test_a_long_prompt_is_not_silence(app: Api) -> None:
    """Not a byte came before the first token, 7 s for 1,500 tokens and over 60 s for 6,000 on a
    busy machine: proxies with a limit of 60 s cut the connection."""
    body = b'{"model":"tiny","prompt":"hello","stream":true,"temperature":0}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    came: list[tuple[float, bytes]] = []
    with serve(app) as port, socket.create_connection(("127.0.0.1", port), 10) as client:
        began = time.monotonic()
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not came or b"[DONE]" not in came[-1][1]:
            came.append((time.monotonic() - began, client.recv(1 << 16)))
    (seconds, first), early = came[0], [data for at, data in came if b"data:" not in data]
    assert first.startswith(b"HTTP/1.1 200") and b"text/event-stream" in first
    assert seconds < LONG * 0.7
    assert b"".join(early).count(b": waiting for the first token\n\n") >= 3
    after = b"".join(data for _, data in came).partition(b"data:")[2]
    assert b": waiting" not in after


@pytest.mark.parametrize("chat", [True, False])
def test_the_text_is_the_same(app: Api, backend: FakeBackend, chat: bool) -> None:
    """A sign of life between the events of a token, or one that counts as an event."""
    ask = Client(app).chat if chat else Client(app).completion
    waited = run(ask(stream=True, n=2))
    assert waited.body.startswith(merge.COMMENT)
    backend.first_pause = 0
    at_once = run(ask(stream=True, n=2))
    assert merge.COMMENT not in at_once.body
    texts = [
        [event["choices"] for event in events if event != "[DONE]"]
        for events in (without_comments(waited), at_once.events())
    ]
    assert texts[0] == texts[1]
    backend.first_pause = LONG
    whole = run(ask())
    assert whole.json()["usage"]["completion_tokens"] > 0  # no comment in front of its JSON


def test_by_configuration(backend: FakeBackend) -> None:
    """0 is none, not one after the other."""
    backend.first_pause = 0.1
    reply = run(Client(build_asgi(backend, ApiOptions(keepalive_s=0))).chat(stream=True))
    assert reply.status == 200 and merge.COMMENT not in reply.body


def test_what_no_replica_was_given_keeps_its_status(
    app: Api, backend: FakeBackend, unplaced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head sent while a request only waits: no_replica, overloaded and deadline_exceeded would be
    200, and neither clients nor gateways would try again."""

    async def late(self: FakeGeneration) -> Any:
        await asyncio.sleep(LONG)
        self._end()
        raise Overloaded("no replica became ready", code="no_replica", retry_after=5)

    monkeypatch.setattr(FakeGeneration, "next", late)
    reply = run(Client(app).chat(stream=True))
    assert (reply.status, reply.header("retry-after")) == (503, "5")
    assert reply.json()["error"]["code"] == "no_replica"
    # But not for ever: whoever lets requests wait for minutes has proxies in front, too.
    monkeypatch.setattr(merge, "HOLD_SECONDS", 2 * TICK)
    reply = run(Client(app).chat(stream=True))
    assert reply.status == 200
    assert without_comments(reply)[-1]["error"]["code"] == "no_replica"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_what_the_engine_refuses_has_its_status(backend: FakeBackend, path: str) -> None:
    """Bug: a stream that an engine refused was a 200, and said so in an event."""
    error = "image_not_shown: the prompt has 1 placeholders of images without an image"
    backend.script = [Delta(0, [], finish="error", error=error)]
    body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 4}
    if path == "/v1/completions":
        body["prompt"] = "hello"
    elif path == "/v1/responses":
        body = {"model": "tiny", "stream": True, "input": "hello"}
    else:
        body["messages"] = MESSAGES
    reply = run(Client(build_asgi(backend)).post(path, body))
    assert reply.status == 400, reply.body
    assert "without an image" in str(reply.json()["error"])


def test_an_error_after_the_head_is_the_clients_exception(app: Api, backend: FakeBackend) -> None:
    """What fails once the head is out: openai's client raises APIError with our code, and does not
    ask again by itself, as it does for a status."""
    error = MantaError("the request's deadline has passed", code="deadline_exceeded")

    class Late(FakeGeneration):
        async def next(self) -> Any:
            await super().next()
            self._end()
            raise error

    backend.generate = lambda request: Late(backend, request)  # type: ignore[method-assign]
    with serve(app) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="none", max_retries=2, timeout=20) as client,
            pytest.raises(openai.APIError) as late,
        ):
            for _ in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
                pass
    assert late.value.code == "deadline_exceeded"
    assert "deadline has passed" in late.value.message
    assert not isinstance(late.value, openai.APIStatusError)
    assert not backend.live


@pytest.mark.parametrize("when", [TICK / 2, 3.5 * TICK])
def test_hang_up_while_it_waits(app: Api, backend: FakeBackend, when: float) -> None:
    """A task that waits on for a token that nobody will read."""

    async def work() -> None:
        backend.first_pause = 30
        hang_up, reply = asyncio.Event(), Reply()
        ask = Client(app).post(
            "/v1/chat/completions", {**CHAT, "stream": True}, hang_up=hang_up, reply=reply
        )
        task = asyncio.create_task(ask)
        await asyncio.sleep(when)
        hang_up.set()
        await task
        assert bool(reply.sends) == (when > TICK)
        assert not backend.live and app.in_flight == 0 and len(backend.aborts) == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(work())
