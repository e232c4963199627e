"""One client process of a run. Started by runner.py; talks JSON lines over its pipes.

    stdin   Order, then Go with the time 0 of the run; its end means: hang up, go
    stdout  Ready, then Report lines, then Finished; Waiting asks for the next Go, which comes when
            every process has asked: where a phase's end hangs on answers, they begin the next
            one together

Records go to a file. Processes instead of threads: the terminal's table, or another client, must
not be able to hold up a send.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from loadtest.client.load import Client, Progress
from loadtest.measure.records import RequestRecord
from loadtest.measure.verify import Answer, Reference, read_references, reference_of
from loadtest.scenario.parse import parse
from loadtest.scenario.requests import Job
from loadtest.scenario.schedule import lay_out

_REPORT_S = 0.25
_FLUSH_BYTES = 2**20


class Order(msgspec.Struct, kw_only=True):
    """What to run. scenario: its text; folder: for its paths. results: folder to write into, where
    `records` has a RequestRecord a line.

    references: compare with this file. relays: see Client. keep: write the answers too, to `kept`.
    """

    scenario: str
    folder: str
    overrides: dict[str, Any] = {}
    model: str
    worker: int
    procs: int
    results: str = ""
    references: str | None = None
    keep: bool = False
    relays: list[int] = []


class Go(msgspec.Struct):
    """at: a time on the monotonic clock."""

    at: float


class Ready(msgspec.Struct, tag="ready"):
    requests: int


class Waiting(msgspec.Struct, tag="waiting"):
    pass


class Report(msgspec.Struct, tag="progress"):
    progress: Progress


class Finished(msgspec.Struct, tag="finished"):
    cpu_share: float
    unsent: int


Message = Ready | Waiting | Report | Finished


def _say(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


class _Records:
    """The records' file, written in large pieces."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._buffer = bytearray()
        self._encode = msgspec.json.Encoder().encode

    def add(self, record: RequestRecord) -> None:
        self._buffer += self._encode(record)
        self._buffer += b"\n"
        if len(self._buffer) > _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        self._file.write(self._buffer)
        self._buffer.clear()


async def _work(order: Order) -> None:
    scenario = parse(order.scenario, "scenario", Path(order.folder), order.overrides)
    plans = [plan.share(order.worker, order.procs) for plan in lay_out(scenario, order.model)]
    references = read_references(Path(order.references)) if order.references else None
    records = _Records(Path(order.results, "records"))
    kept: dict[str, Reference] = {}

    def keep(job: Job, record: RequestRecord, answer: Answer) -> None:
        if record.ok:
            kept[job.key()] = reference_of(job.key(), record, answer)

    starts: asyncio.Queue[float] = asyncio.Queue()

    async def barrier() -> float:
        _say(Waiting())
        return await starts.get()

    client = Client(
        scenario.target,
        records.add,
        references=references,
        keep=keep if order.keep else None,
        barrier=barrier if order.procs > 1 else None,
        relays=order.relays,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, client.stop)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    _say(Ready(sum(plan.total or 0 for plan in plans)))
    go = msgspec.json.decode(await lines.readline() or b"null", type=Go | None)
    if go is None:
        return
    watch = [
        asyncio.create_task(_report(client)),
        asyncio.create_task(_listen(lines, starts, client)),
    ]
    try:
        await client.run(plans, go.at)
    finally:
        for task in watch:
            task.cancel()
        records.flush()
    if order.keep:
        encode = msgspec.json.encode
        data = b"".join(encode(reference) + b"\n" for reference in kept.values())
        Path(order.results, "kept").write_bytes(data)
    _say(Report(client.progress))
    planned = sum(plan.total or 0 for plan in plans)
    sent = sum(client.progress.sent.values())
    _say(Finished(client.cpu_share, max(0, planned - sent)))


async def _report(client: Client) -> None:
    while True:
        await asyncio.sleep(_REPORT_S)
        _say(Report(client.progress))
        client.progress.ttft.clear()
        client.progress.late.clear()


async def _listen(
    lines: asyncio.StreamReader, starts: asyncio.Queue[float], client: Client
) -> None:
    while line := await lines.readline():
        starts.put_nowait(msgspec.json.decode(line, type=Go).at)
    client.stop()


def main() -> None:
    """Reads the order and runs it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # a connection for each request under way
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    order = msgspec.json.decode(_first_line(), type=Order)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        asyncio.run(_work(order))


def _first_line() -> bytes:
    """Without a buffer: what follows is the event loop's to read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (piece := os.read(0, 1)):
            break
        line += piece
    return bytes(line)


if __name__ == "__main__":
    main()
