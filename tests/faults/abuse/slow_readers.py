"""Readers that do not read, and the streams beside them."""

import asyncio
import itertools
import socket
import time
from contextlib import suppress

from tests.deployments.on_ray.live import Live
from tests.faults.abuse.report import (
    BODY,
    PATH,
    STEP,
    Report,
    ended,
    leaves_nothing,
    percentile,
    resident,
)
from tests.faults.clients import post


class Gaps:
    """A set of streams that are read at once, and the pauses in them."""

    def __init__(self, live: Live, count: int, header: str) -> None:
        self._live, self._count, self._header = live, count, header

    async def during(self, seconds: float) -> list[float]:
        """Read streams for some seconds, and return the sorted pauses in seconds."""
        end = time.monotonic() + seconds
        collected: list[float] = []
        tokens = min(100, int(seconds / STEP))
        body = post(PATH, {**BODY, "max_tokens": tokens, "stream": True}, self._header)

        async def reader() -> None:
            while time.monotonic() < end:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._live.port)
                writer.write(body)
                times: list[float] = []
                while not (line := await reader.readline()).startswith(b"data: [DONE]"):
                    assert line, "a stream was cut"
                    if line.startswith(b"data: "):
                        times.append(time.monotonic())
                writer.close()
                # What came with one another is one arrival.
                collected.extend(b - a for a, b in itertools.pairwise(times) if b - a > 1e-4)

        await asyncio.gather(*(reader() for _ in range(self._count)))
        return sorted(collected)


async def slow_readers(
    live: Live, report: Report, count: int, seconds: float, header: str, *, streams: int = 8
) -> None:
    """Report the pauses of some streams beside readers of several kinds.

    They are measured alone, beside readers that take all that comes, and beside as many that take a
    byte a second: while unread data piles up, and after that.
    """
    gaps = Gaps(live, streams, header)
    # Log-probabilities, so that it is soon more than sockets hold.
    body = post(PATH, {**BODY, "max_tokens": 6000, "stream": True, "logprobs": 5}, header)
    loop = asyncio.get_running_loop()

    async def read(number: int, wait: float, amount: int) -> None:
        """Read a stream slowly: half of the readers through haproxy, half directly from a
        router."""
        ports = [*live.routers.values(), *[live.port] * len(live.routers)]
        with socket.socket() as sock:
            sock.setblocking(False)
            if wait:
                # As over a network; on loopback a segment is 64 KiB and buffers hold twenty.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
            with suppress(ConnectionError):
                await loop.sock_connect(sock, ("127.0.0.1", ports[number % len(ports)]))
                await loop.sock_sendall(sock, body)
                while await loop.sock_recv(sock, amount):
                    await asyncio.sleep(wait)

    async def held() -> float:
        states = await asyncio.to_thread(live.router_states)
        return sum(state["held"]["http"] for state in states.values())

    async def watch(began: float, over: asyncio.Event) -> None:
        while not over.is_set():
            mib = await asyncio.to_thread(resident, live)
            line = {"kind": "slow readers", "at_s": round(time.monotonic() - began, 1)}
            line |= {"streams": await held(), "mib": {k: round(v, 1) for k, v in mib.items()}}
            report.lines.append(line)
            await asyncio.sleep(1)

    async def beside(wait: float, amount: int, times: int) -> list[list[float]]:
        tasks = [asyncio.create_task(read(number, wait, amount)) for number in range(count)]
        try:
            return [await gaps.during(seconds) for _ in range(times)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async with leaves_nothing(live, report, "slow readers", count + streams):
        paused = await asyncio.to_thread(counted, live, "paused")
        alone = await gaps.during(seconds)
        (quick,) = await beside(0, 65536, 1)
        await ended(live)
        over = asyncio.Event()
        watcher = asyncio.create_task(watch(time.monotonic(), over))
        first, then = await beside(1.0, 1, 2)
        over.set()
        await watcher
        again = await gaps.during(seconds)
        paused = await asyncio.to_thread(counted, live, "paused") - paused
    for name, values in (
        ("alone", alone),
        ("beside quick readers", quick),
        ("beside slow readers, at first", first),
        ("beside slow readers, then", then),
        ("alone again", again),
    ):
        report.add_row(f"slow readers/gap p50 {name}", 1e3 * percentile(values, 0.5), "ms")
        report.add_row(f"slow readers/gap p99 {name}", 1e3 * percentile(values, 0.99), "ms")
        report.add_row(f"slow readers/longest gap {name}", 1e3 * values[-1], "ms")
    report.add_row(
        "slow readers/p99 beside slow readers, of beside quick ones",
        percentile(first, 0.99) / percentile(quick, 0.99),
        "x",
    )
    report.add_row(
        "slow readers/p99 then, of alone", percentile(then, 0.99) / percentile(alone, 0.99), "x"
    )
    watched = [line for line in report.lines if line["kind"] == "slow readers"]
    report.add_row("slow readers/slow readers", count, "")
    report.add_row(
        "slow readers/streams at once at most", max(line["streams"] for line in watched), ""
    )
    report.add_row("slow readers/times that one paused", paused, "")
    last = [line["at_s"] for line in watched if line["streams"] > streams]
    report.add_row(
        "slow readers/last slow reader cut off after",
        max(last, default=0.0),
        "s",
        # in a short one nobody is cut off: that takes 30 s without 4 KiB
        **({"most": 1.95 * seconds} if seconds > 30 else {}),
    )


def counted(live: Live, name: str) -> float:
    """Return the value of a metric without labels, summed over all routers."""
    return sum(float(state["metrics"][name]) for state in live.router_states().values())
