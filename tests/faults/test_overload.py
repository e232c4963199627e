"""Clients that leave, and deadlines, through the whole router: HTTP application, tokenising,
admission, channel. The engines count, and all runs in one process, so that the test can look
inside. Over sockets: test_edge.py."""

import asyncio
import gc
import json
import os
import random
import time

import pytest

from deployments.api.app import build_asgi
from deployments.router.admission.fair_queue import AdmissionLimits
from deployments.router.models.model_settings import DispatchLimits
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import FAST, Fleet, until

ROWS, PACE, OUTPUT = 8, 0.02, 20


def fleet(count: int = 1, **more) -> Fleet:
    limits = DispatchLimits(channel=FAST, **more)
    return Fleet(
        count, limits=limits, options="vocab_size=250", rows=ROWS, tokenizer=tiny_tokenizer()
    )


BODY = {"model": "m", "prompt": "the answer to this question", "max_tokens": OUTPUT}
BODY |= {"ignore_eos": True, "stream": True}


async def test_a_deadline_ends_what_waits_and_what_streams():
    """A deadline that only the client keeps, while the engine goes on for nobody."""
    async with fleet(admission=AdmissionLimits(queue_seconds=10.0)) as server:
        server.engines["r0"].pace = PACE
        app = build_asgi(server.dispatcher)
        client = Client(app)
        short = ((b"content-type", b"application/json"), (b"x-deadline-seconds", b"0.001"))
        reply = await client.request("POST", "/v1/completions", json.dumps(BODY).encode(), short)
        assert (reply.status, reply.json()["error"]["code"]) == (408, "deadline_exceeded")
        long = {**BODY, "max_tokens": 2000, "deadline_seconds": 0.3}
        reply = await client.post("/v1/completions", long)
        assert reply.status == 200 and reply.events()[-1]["error"]["code"] == "deadline_exceeded"
        await until(lambda: server.load() == {"r0": 0})
        busy = [
            asyncio.create_task(client.post("/v1/completions", {**BODY, "max_tokens": 100}))
            for _ in range(2 * ROWS)
        ]
        await until(lambda: server.dispatcher.state().queued >= 4)
        waiting = await client.post("/v1/completions", {**BODY, "deadline_seconds": 0.2})
        assert waiting.json()["error"]["code"] == "deadline_exceeded"
        await asyncio.gather(*busy)


def memory() -> float:
    """Return the resident memory of this process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def holdings() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


@pytest.mark.slow
async def test_thousands_of_disconnects_leave_nothing():
    """One ticket, task, request in flight, booking or file handle for each client that leaves:
    while it waits, at the first token, in mid-stream, or just before the end."""
    dice = random.Random(9)
    async with fleet(2) as two:
        app = build_asgi(two.dispatcher)

        async def leave() -> None:
            hang_up = asyncio.Event()
            timer = asyncio.get_running_loop().call_later(dice.random() * 0.1, hang_up.set)
            body = {**BODY, "stream": dice.random() < 0.7, "n": dice.choice([1, 1, 2])}
            await Client(app).post("/v1/completions", body, hang_up=hang_up)
            timer.cancel()

        async def leave_often(count: int) -> None:
            for _ in range(count):
                await leave()

        async def crowd(count: int) -> None:
            await asyncio.gather(*(leave_often(count // 50) for _ in range(50)))
            await until(lambda: two.load() == {"r0": 0, "r1": 0})
            await until(lambda: not any(e.core.has_work() for e in two.engines.values()))
            gc.collect()

        await crowd(500)
        before, mib = holdings(), memory()
        began = time.monotonic()
        await crowd(3000)
        metrics = two.dispatcher.metrics
        print(
            f"{time.monotonic() - began:.1f} s, {memory() - mib:+.1f} MiB, "
            f"ended: {dict(metrics.finished.values)}, refused: {dict(metrics.failed.values)}"
        )
        assert two.dispatcher.held() == {"requests": 0, "waiting": 0, "choices": 0}
        assert app.in_flight == 0 and holdings() == before
        assert memory() - mib < 20
        queue = two.dispatcher.queue
        assert (queue.choices, queue.tokens, queue._queue.keys, queue._tickets) == (0, 0, 0, {})
        for client in two.dispatcher.replicas.values():
            state = client.state
            assert not state.held and not state._unbegun and not state.bookings
        for engine in two.engines.values():
            engine.core.check_integrity()
        assert metrics.finished.values[("abort",)] > 900
