"""The CPU cost of one streamed chunk in the API, in microseconds and as a ratio to a path that only
awaits and sends. The budget for everything in the router is 25 us a chunk."""

import asyncio
import json
import time
from typing import Any

import pytest

from deployments.api.app import build_asgi
from engine.batch import TokenLogprobs
from engine.messages import Delta
from tests.deployments.api.asgi import CHAT, scope_of
from tests.deployments.fake_backend import FakeBackend

CHUNKS = 4000


class Ready:
    """A generation whose next token is always there: each `next` takes a turn of the loop."""

    def __init__(self, deltas: list[Delta]) -> None:
        self._items = iter([[(0, delta)] for delta in deltas])

    async def next(self) -> list[tuple[int, Delta]]:
        await asyncio.sleep(0)
        return next(self._items, [])

    def abort(self, choice: int | None = None) -> None:
        pass


class Source(FakeBackend):
    def __init__(self, size: int) -> None:
        super().__init__()
        words = self.tokenizer("tiny").encode('the answer "is"\nthe number of words ')
        tokens = (words * (CHUNKS // len(words) + 1))[:CHUNKS]
        self.ready_made = [
            Delta(0, tokens[i : i + size], finish="length" if i + size >= CHUNKS else "")
            for i in range(0, CHUNKS, size)
        ]

    def generate(self, request: Any) -> Any:
        return Ready(self.ready_made)


async def through_the_app(source: Source, fields: dict[str, Any], ids: bool = False) -> float:
    """Return the CPU seconds a chunk of a stream through the API. ids: whether events have ids."""
    app, sends = build_asgi(source), 0
    body = json.dumps({**CHAT, "stream": True, **fields}).encode()
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    forever = asyncio.Event()

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await forever.wait()

    async def send(message: Any) -> None:
        nonlocal sends
        sends += 1

    headers = [(b"content-type", b"application/json")]
    if ids:
        headers.append((b"x-event-ids", b"1"))
    scope = scope_of("POST", "/v1/chat/completions", headers)
    began = time.process_time()
    await app(scope, receive, send)
    spent = time.process_time() - began
    assert sends >= len(source.ready_made)
    return spent / len(source.ready_made)


async def null_path(source: Source) -> float:
    """Return the CPU seconds a chunk of the same turns and sends without the API."""
    event = b'data: {"id":"chatcmpl-0"}\n\n'

    async def send(message: Any) -> None:
        pass

    generation = Ready(source.ready_made)
    began = time.process_time()
    while await generation.next():
        await send({"type": "http.response.body", "body": event, "more_body": True})
    return (time.process_time() - began) / len(source.ready_made)


@pytest.mark.timed
@pytest.mark.parametrize(
    ("name", "fields", "size", "limit"),
    [
        ("plain", {}, 1, 3.5),
        ("with event ids", {}, 1, 4.5),
        ("with a stop string", {"stop": ["zzz"]}, 1, 6.0),
        ("four tokens a chunk", {}, 4, 3.5),
        ("logprobs, top 5", {"logprobs": True, "top_logprobs": 5}, 1, 9.0),
    ],
)
def test_cost_of_a_chunk(
    name: str, fields: dict[str, Any], size: int, limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line added to the hot path that doubles it. Measured: see the printed line."""
    source = Source(size)
    if "logprobs" in fields:
        for delta in source.ready_made:
            top = list(range(40, 45))
            delta.logprobs = [
                TokenLogprobs(t, -1.0, 1, top, [-1.0] * 5, 9.0) for t in delta.token_ids
            ]
    pairs = []
    for _ in range(5):
        null = asyncio.run(null_path(source))
        pairs.append((asyncio.run(through_the_app(source, fields, "ids" in name)), null))
    chunk, null = min(c for c, _ in pairs), min(n for _, n in pairs)
    with capsys.disabled():
        print(f"\n{name}: {chunk * 1e6:.1f} us a chunk, null {null * 1e6:.1f}, {chunk / null:.1f}x")
    assert chunk / null < limit
