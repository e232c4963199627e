"""A client that goes away: everything its request holds is given back at once."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from deployments.api.app import Api, build_asgi
from deployments.api.options import ApiOptions
from tests.deployments.api.asgi import CHAT, COMPLETION, Client, Reply, scope_of
from tests.deployments.fake_backend import FakeBackend


@pytest.fixture
def app(backend: FakeBackend) -> Api:
    return build_asgi(backend)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.001)


async def nothing_left(app: Api, backend: FakeBackend) -> None:
    """Assert that no generation, no count and no other task is left."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not backend.live and app.in_flight == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before the first token", "after it"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_hang_up(app: Api, backend: FakeBackend, stream: bool, when: str, prompts: int) -> None:
    """KV held, and tokens made, for a client that has gone."""

    async def work() -> None:
        early = when == "before the first token"
        backend.first_pause = 30 if early else 0
        backend.pause = 30
        hang_up = asyncio.Event()
        body = {**COMPLETION, "prompt": ["a"] * prompts, "n": 2, "stream": stream}
        reply = Reply()
        task = asyncio.create_task(
            Client(app).post("/v1/completions", body, hang_up=hang_up, reply=reply)
        )
        await until(lambda: len(backend.live) == prompts)
        await until(lambda: early or not stream or bool(reply.sends))
        began = time.monotonic()
        hang_up.set()
        await task
        assert [g.aborted_at is not None for g in backend.aborts] == [True] * prompts
        assert max(g.aborted_at or 0 for g in backend.aborts) - began < 0.05
        assert reply.status == (200 if stream and not early else 0)
        await nothing_left(app, backend)

    asyncio.run(work())


def test_send_fails(app: Api, backend: FakeBackend) -> None:
    """A server that tells of a lost client by raising from send."""

    async def work() -> None:
        backend.pause = 30
        client = Client(app)
        reply = await client.post("/v1/chat/completions", {**CHAT, "stream": True}, send_fails=True)
        assert reply.status == 200 and reply.sends == []
        assert len(backend.aborts) == 1
        await nothing_left(app, backend)

    asyncio.run(work())


def test_cancelled_by_the_server(app: Api, backend: FakeBackend) -> None:
    """Serve's proxy cancels the handler instead: which must stay one, and free as well."""

    async def work() -> None:
        backend.first_pause = 30
        task = asyncio.create_task(Client(app).post("/v1/chat/completions", CHAT))
        await until(lambda: len(backend.live) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await nothing_left(app, backend)

    asyncio.run(work())


def test_hang_up_during_the_body(app: Api, backend: FakeBackend) -> None:
    """Half a body: nothing to answer, nothing to run."""

    async def work() -> None:
        sent: list[Any] = []
        parts = [{"type": "http.request", "body": b'{"mod', "more_body": True}]

        async def receive() -> dict[str, Any]:
            return parts.pop() if parts else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = scope_of("POST", "/v1/chat/completions", [(b"content-type", b"application/json")])
        await app(scope, receive, send)
        assert sent == []
        await nothing_left(app, backend)

    asyncio.run(work())


def test_a_body_that_never_ends(backend: FakeBackend) -> None:
    """Slow senders must not hold a place for ever."""
    app = build_asgi(backend, ApiOptions(body_timeout_s=0.05))

    async def work() -> None:
        reply = Reply()

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(30)
            raise AssertionError

        async def send(message: Any) -> None:
            reply.status = message.get("status", reply.status)
            reply.body += message.get("body", b"")

        scope = scope_of("POST", "/v1/chat/completions", [(b"content-type", b"application/json")])
        await app(scope, receive, send)
        assert reply.status == 408 and reply.json()["error"]["code"] == "request_timeout"
        await nothing_left(app, backend)

    asyncio.run(work())


def test_many_random_hang_ups(app: Api, backend: FakeBackend) -> None:
    """A leak that shows only in some interleaving of token, end and hang-up."""
    order = random.Random(7)

    async def hang_up_once() -> None:
        hang_up = asyncio.Event()
        body = {**COMPLETION, "prompt": ["a"] * order.randint(1, 2), "stream": order.random() < 0.5}
        task = asyncio.create_task(Client(app).post("/v1/completions", body, hang_up=hang_up))
        await asyncio.sleep(order.random() * 0.03)
        hang_up.set()
        await task

    async def work() -> None:
        backend.pause = 0.001
        for _ in range(10):
            await asyncio.gather(*(hang_up_once() for _ in range(30)))
        await nothing_left(app, backend)

    asyncio.run(work())
