"""Compressed request bodies: gzip and deflate, within the limits of plain ones."""

import asyncio
import gzip
import json
import time
import tracemalloc
import zlib
from asyncio import run

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from tests.deployments.api.asgi import COMPLETION, Client, Reply
from tests.deployments.fake_backend import FakeBackend

LIMIT = 2**20


@pytest.fixture
def client(backend: FakeBackend) -> Client:
    return Client(build_asgi(backend, ApiOptions(max_body_bytes=LIMIT)))


async def send(client: Client, body: bytes | list[bytes], encoding: bytes = b"gzip") -> Reply:
    headers = ((b"content-type", b"application/json"), (b"content-encoding", encoding))
    return await client.request("POST", "/v1/completions", body, headers)


def code(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.json()["error"]["code"]


@pytest.mark.parametrize("size", [1, 20_000, LIMIT - 500])
def test_compressed_bodies_are_read(client: Client, backend: FakeBackend, size: int) -> None:
    """415 for every client that compresses what it sends, as some do from some size on."""
    prompt = [[75, 76, 77]]
    plain = json.dumps({**COMPLETION, "prompt": prompt, "user": "x" * size}).encode()[:LIMIT]
    if size > LIMIT // 2:
        plain = json.dumps({**COMPLETION, "prompt": prompt}).encode().ljust(LIMIT)
    packed = gzip.compress(plain)
    for body, encoding in (
        (packed, b"gzip"),
        ([packed[:7], b"", packed[7:]], b" GZIP"),
        (zlib.compress(plain), b"deflate"),
        (plain, b"identity"),
    ):
        reply = run(send(client, body, encoding))
        assert reply.status == 200, reply.body
    assert [request.token_ids for request in backend.requests] == [[75, 76, 77]] * 4


def test_a_bomb_is_refused_early_and_off_the_loop(client: Client) -> None:
    """950 MiB of zeros in 1 MB: unpacked before its size is looked at, or on the event loop."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    first, again = (
        packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    # A full flush makes blocks that do not depend on what stands before.
    bomb = first + again * 950
    assert len(bomb) < LIMIT

    async def work() -> tuple[Reply, float]:
        loop, worst = asyncio.get_running_loop(), 0.0
        task = asyncio.create_task(send(client, bomb))
        while not task.done():
            before = loop.time()
            await asyncio.sleep(0)
            worst = max(worst, loop.time() - before)
        return task.result(), worst

    tracemalloc.start()
    began = time.thread_time()
    reply, worst = run(work())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code(reply) == (413, "body_too_large")
    assert peak < 4 * LIMIT
    assert time.thread_time() - began < 1.0 and worst < 0.5, worst


def test_what_is_not_one_whole_stream_is_refused(client: Client) -> None:
    """Half a body that is read as a whole one; or something behind it that a filter did not see."""
    plain = json.dumps(COMPLETION).encode()
    packed = gzip.compress(plain)
    for body in (packed[:-1], packed[:20], packed + b"x", packed * 2, b"", plain, bytes(100)):
        assert code(run(send(client, body))) == (400, "invalid_encoding"), body[:30]
    long = gzip.compress(plain.ljust(200_000))
    assert code(run(send(client, long[:-9]))) == (400, "invalid_encoding")
    for encoding in (b"br", b"zstd", b"gzip, deflate", b"compress"):
        reply = run(send(client, packed, encoding))
        assert code(reply) == (415, "unsupported_media_type")
        assert "gzip, deflate" in reply.json()["error"]["message"]
    too_large = gzip.compress(plain.ljust(LIMIT + 1))
    assert code(run(send(client, too_large))) == (413, "body_too_large")
