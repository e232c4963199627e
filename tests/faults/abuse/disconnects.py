"""Clients that leave, at any moment and many at once."""

import asyncio
import random
import socket
import struct
from collections import Counter
from contextlib import suppress

from tests.deployments.on_ray.live import Live
from tests.faults.abuse.report import BODY, PATH, STEP, Report, ended, leaves_nothing, resident
from tests.faults.clients import post


async def disconnects(live: Live, report: Report, count: int, at_once: int, header: str) -> None:
    """Open connections that break at a random moment, with a FIN or a reset, and report the costs.

    Moments are before the body, before the head of the answer, in mid-stream, and at the end.
    """
    order = random.Random(19)
    moments: Counter[str] = Counter()

    async def leave() -> None:
        body = {**BODY, "max_tokens": 20, "n": order.choice([1, 1, 2])}
        body["stream"] = order.random() < 0.7
        data = post(PATH, body, header)
        moment = "before the body"
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        # An earlier haproxy, which lets its streams end, may close what it has not read.
        with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(order.random() * 30 * STEP):
                if order.random() < 0.1:
                    writer.write(data[: -order.randrange(1, 60)])
                    await asyncio.sleep(1)
                writer.write(data)
                moment = "before the answer"
                await reader.readuntil(b"\r\n\r\n")
                moment = "in the answer"
                await reader.read(-1)
                moment = "at its end"
        moments[moment] += 1
        if order.random() < 0.5:  # a reset: what is unsent is thrown away
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def crowd(count: int) -> None:
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                await leave()

        await asyncio.gather(*(client() for _ in range(at_once)))

    await crowd(max(count // 10, 2 * at_once))  # lazy imports, buffers, haproxy's connections
    moments.clear()
    async with leaves_nothing(live, report, "disconnects", at_once):
        for part in range(10):
            await crowd(count // 10)
            mib = await asyncio.to_thread(resident, live)
            line = {
                "kind": "disconnects",
                "count": (part + 1) * count // 10,
                "moments": {**moments},
            }
            report.lines.append({**line, "mib": {k: round(v, 1) for k, v in mib.items()}})
        await ended(live)
    report.add_row("disconnects/disconnects", sum(moments.values()), "", least=count)
    for moment, times in moments.items():
        report.add_row(f"disconnects/{moment}", times, "")


async def freed(live: Live, report: Report, count: int, header: str) -> None:
    """Break `count` long streams at once, and report how long their rows and blocks are held."""
    data = post(PATH, {**BODY, "max_tokens": 200, "stream": True}, header)
    pairs = [await asyncio.open_connection("127.0.0.1", live.port) for _ in range(count)]
    for reader, writer in pairs:
        writer.write(data)
        await reader.readuntil(b"\n\n")
    for _, writer in pairs:
        writer.transport.abort()
    report.add_row("disconnects/all blocks free after", await ended(live), "s", most=1.0)
