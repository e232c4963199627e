"""`page/viewer`: the router's CPU time for one viewer of the live view, which polls once a second.

A router has STREAMS in flight, more than a poll reports, and slow steps, so that polls are most of
its work. Windows with LOOKS polls a second alternate with windows without polls. The result is the
difference in CPU time of the best windows, since other work on the machine only adds time. It
includes HTTP and JSON, but not Ray's call between two routers.
"""

import asyncio
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

from bench.report.result_file import Line
from tests.deployments.path_cost import process, spend

STREAMS = 300
LOOKS = 20  # polls per second
SECONDS = 4.0
_STEP = 0.25  # seconds per step


async def _looks(port: int) -> None:
    """Poll the live view LOOKS times a second until cancelled."""
    due = time.monotonic()
    while True:
        await asyncio.to_thread(_look, port)
        due += 1 / LOOKS
        await asyncio.sleep(due - time.monotonic())


def _look(port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/live", timeout=10) as answer:
        assert answer.read().startswith(b'{"object":"live"')


async def _window(port: int, pid: int, seen: bool) -> Line:
    """Measure the router's CPU time in a window, in milliseconds per second.

    seen: whether a viewer polls the live page.
    """
    looking = asyncio.create_task(_looks(port)) if seen else None
    spent = await spend([port], STREAMS, SECONDS, [pid], routers=False)
    if looking is not None:
        looking.cancel()
    ms = round(spent.cpu[0] / spent.seconds * 1e3, 3)
    return {"case": "page/viewer", "looks": LOOKS if seen else 0, "ms": ms}


def lines(rounds: int) -> Iterator[Line]:
    """Yield two lines for each round."""
    with ExitStack() as stack:
        replica = stack.enter_context(process("replica", _STEP))
        router = stack.enter_context(process("router", {"m": replica}))
        for _ in range(rounds):
            for seen in (True, False):
                yield asyncio.run(_window(router["port"], router["pid"], seen))
                time.sleep(0.5)  # until the aborted streams have ended


def rows(lines: list[Line]) -> list[Line]:
    seen, alone = (
        min(line["ms"] for line in lines if bool(line["looks"]) is wanted)
        for wanted in (True, False)
    )
    share = round((seen - alone) / LOOKS / 10, 3)  # percent of a second
    return [{"case": "page/viewer", "ours": share, "peer": 1.0, "unit": "%", "ratio": share}]
