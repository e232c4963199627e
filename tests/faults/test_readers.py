"""Clients that do not read, or do not send; real sockets, the router's whole path from
uvicorn to the channel, in one process."""

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import time
from collections.abc import AsyncIterator

import pytest
import uvicorn

from deployments.api.app import Api, build_asgi
from deployments.api.http.uvicorn_hooks import HttpProtocol
from deployments.api.options import ApiOptions
from deployments.router.inflight import UNREAD_BYTES
from deployments.router.models.model_settings import DispatchLimits
from engine.errors import MantaError
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import FAST, Fleet, read, until

BODY = {"model": "m", "prompt": "the answer", "ignore_eos": True, "stream": True}


class Hurried(HttpProtocol):
    """An HttpProtocol with time limits of half a second instead of half a minute."""

    head_seconds = 0.5
    reader_seconds = 0.5


class Crowded(HttpProtocol):
    """An HttpProtocol with a time limit short for a test, but long enough for a thousand
    connections."""

    head_seconds = 4.0


@contextlib.asynccontextmanager
async def serving(
    fleet: Fleet, protocol: type[HttpProtocol] = HttpProtocol
) -> AsyncIterator[tuple[int, Api]]:
    """Serve the fleet's router; yield its port and its application.

    The kernel's buffers are small, so that a client that does not read is noticed soon. A body has
    as much time as a head.
    """
    app = build_asgi(fleet.dispatcher, ApiOptions(body_timeout_s=protocol.head_seconds))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", http=protocol, lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield listener.getsockname()[1], app
    finally:
        server.should_exit = server.force_exit = True
        await task


def fleet_of_one(**more) -> Fleet:
    limits = DispatchLimits(channel=FAST, **more)
    return Fleet(
        1, limits=limits, options="vocab_size=250,max_model_len=30000", tokenizer=tiny_tokenizer()
    )


async def connect(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a client with a small receive buffer that has sent this data."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    writer.write(data)
    return reader, writer


def request(**fields) -> bytes:
    body = json.dumps({**BODY, **fields}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )


async def said(reader: asyncio.StreamReader) -> str:
    """Return the text of a streamed answer. Asserts that it is whole."""
    await reader.readuntil(b"\r\n\r\n")
    data = b""
    while size := int(await reader.readline(), 16):
        data += (await reader.readexactly(size + 2))[:-2]
    *events, end, _ = data.split(b"\n\n")
    assert end == b"data: [DONE]"
    chunks = [json.loads(event[6:]) for event in events]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def gaps(port: int, count: int) -> list[float]:
    """Return the seconds between the arrivals of one stream's tokens."""
    reader, writer = await connect(port, request(max_tokens=count))
    times = []
    while b"[DONE]" not in await reader.readline():
        times.append(time.monotonic())
    writer.close()
    return [b - a for a, b in itertools.pairwise(times) if b - a > 1e-4]


def size(item: object) -> int:
    """Return the bytes of an object and all that it refers to, without small shared values."""
    if isinstance(item, (list, tuple)):
        return sys.getsizeof(item) + sum(map(size, item))
    fields = getattr(item, "__struct_fields__", ())
    own = 0 if isinstance(item, (str, int, type(None))) else sys.getsizeof(item)
    return own + sum(size(getattr(item, name)) for name in fields)


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_what_is_kept_for_nobody_is_bounded_and_the_engine_is_freed(logprobs):
    """A whole context of tokens and log-probabilities for each client that has gone to lunch, and a
    row of the batch with it."""
    async with fleet_of_one() as fleet:
        fleet.engines["r0"].pace = 0.0
        inflight = fleet.generate(max_tokens=25_000, n=2, logprobs=logprobs)
        await until(lambda: fleet.dispatcher.metrics.paused.values[()] == 1, 15)
        await until(lambda: fleet.load() == {"r0": 0})
        unread = size(inflight._items)
        print(f"{len(inflight._items)} deltas, {unread / 2**20:.2f} MiB")
        assert 0.2 * UNREAD_BYTES < unread <= UNREAD_BYTES
        assert fleet.dispatcher.held() == {"requests": 1, "waiting": 0, "choices": 0}
        before = len(inflight.choices[0].emitted)
        await inflight.next()
        again = asyncio.create_task(inflight.next())
        await until(lambda: fleet.load() == {"r0": 2})
        ((_, delta), *_) = await again
        assert before > 300 and delta.token_ids
        inflight.abort()


async def test_a_paused_stream_goes_on_with_the_same_text(monkeypatch):
    """Tokens lost or told twice where a stream paused; or, its old number in use, the whole
    connection to the replica closed."""
    monkeypatch.setattr("deployments.router.inflight.UNREAD_BYTES", 2**16)
    async with fleet_of_one() as fleet:
        fleet.engines["r0"].pace = 0.0
        inflight = fleet.generate(max_tokens=2000)
        tokens: list[int] = []
        for pause in range(3):
            paused = fleet.dispatcher.metrics.paused.values
            await until(lambda n=pause, p=paused: p[()] == n + 1, 15)
            tokens += [t for _, delta in await inflight.next() for t in delta.token_ids]
            tokens += [t for _, delta in await inflight.next() for t in delta.token_ids]
        tokens += (await read(inflight))[0]
        first = 32
        assert tokens == [first + p % (250 - first) for p in range(10, 2010)]
        assert fleet.dispatcher.metrics.channels.values[()] == 1
        assert fleet.dispatcher.held() == {"requests": 0, "waiting": 0, "choices": 0}


async def test_a_reader_that_does_not_come_back_is_ended_with_an_error(monkeypatch):
    """A paused stream, with what is kept for it, for as long as the client likes."""
    monkeypatch.setattr("deployments.router.inflight.READER_SECONDS", 0.3)
    async with fleet_of_one() as fleet:
        fleet.engines["r0"].pace = 0.0
        inflight = fleet.generate(max_tokens=25_000)
        await until(lambda: not fleet.dispatcher.requests, 15)
        assert await inflight.next()
        with pytest.raises(MantaError) as caught:
            await inflight.next()
        assert caught.value.code == "slow_reader"


async def test_slow_readers_do_not_touch_other_streams_and_are_cut_off():
    """One client that sleeps and everybody stalls; or its connection and its request, for ever."""
    async with fleet_of_one() as fleet, serving(fleet, Hurried) as (port, app):
        fleet.engines["r0"].pace = 0.005
        alone = sorted(await gaps(port, 200))
        slow = [await connect(port, request(max_tokens=4000)) for _ in range(30)]
        for reader, _ in slow:
            await reader.readexactly(20)  # and then no more
        beside = sorted(await gaps(port, 200))
        p99 = [values[int(0.99 * len(values))] for values in (alone, beside)]
        print(f"p99 between tokens: {1e3 * p99[0]:.1f} ms alone, {1e3 * p99[1]:.1f} beside 30")
        assert p99[1] < 3 * p99[0] + 0.03
        await until(lambda: app.in_flight == 0, 10)
        await until(lambda: fleet.load() == {"r0": 0})
        assert fleet.dispatcher.held() == {"requests": 0, "waiting": 0, "choices": 0}
        for _, writer in slow:
            writer.close()


async def test_a_reader_that_pauses_for_less_gets_the_whole_text():
    """A stream cut off because its client stopped to think."""
    async with fleet_of_one() as fleet, serving(fleet) as (port, _):
        fleet.engines["r0"].pace = 0.0
        reader, writer = await connect(port, request(max_tokens=3000))
        await asyncio.sleep(1.0)
        whole = await said(reader)
        reader, other = await connect(port, request(max_tokens=3000))
        assert await said(reader) == whole and len(whole) >= 3000
        writer.close()
        other.close()


SENDERS = {
    "head": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Ty",
    "body": request()[:-30],
    "nothing": b"",
}


SLOW = [pytest.param(what, marks=pytest.mark.slow) for what in ("body", "nothing")]


@pytest.mark.parametrize("what", ["head", *SLOW])
async def test_slow_senders_are_timed_out_and_hold_no_place(what):
    """Slowloris: a thousand connections that send a byte now and then, and nobody else gets in."""
    async with fleet_of_one(in_flight=8) as fleet, serving(fleet, Crowded) as (port, app):
        began = time.monotonic()
        slow = [await connect(port, SENDERS[what]) for _ in range(1000)]
        asked = time.monotonic()
        reader, writer = await connect(port, request(max_tokens=5))
        assert await said(reader)
        answered = time.monotonic()
        print(f"1,000 open after {asked - began:.2f} s, an answer {answered - asked:.3f} s later")
        assert answered < began + Crowded.head_seconds, "not beside all of them"
        assert app.in_flight == 0 and answered - asked < 2
        writer.close()
        for reader, writer in slow:
            answer = await asyncio.wait_for(reader.read(), 10)
            assert (b" 408 " in answer and b"request_timeout" in answer) or what == "nothing"
            writer.close()
        assert time.monotonic() - began > 0.9 * Crowded.head_seconds
        assert app.in_flight == 0 and not fleet.engines["r0"].core.has_work()
