"""A client process of a run. runner.py starts it and exchanges JSON lines with it over pipes.

    stdin   ClientAssignment, then StartSignal with time 0 of the run. At end of file the process
            stops.
    stdout  ClientReady, then ProgressReport lines, then ClientFinished. AtBarrier requests the next
            StartSignal, which is sent once all processes have requested it: so all processes begin
            a phase together even if the previous phase ended with its answers

Records are written to a file. Clients are processes rather than threads, so that neither the
terminal's table nor another client can delay a send.
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

from loadtest.client.load import ClientProgress, LoadClient
from loadtest.measure.records import RequestRecord
from loadtest.measure.verify import ReceivedAnswer, Reference, read_references, reference_of
from loadtest.scenario.parse import parse
from loadtest.scenario.requests import RequestSpec
from loadtest.scenario.schedule import lay_out

_REPORT_S = 0.25
_FLUSH_BYTES = 2**20


class ClientAssignment(msgspec.Struct, kw_only=True):
    """The order to a client process: its scenario, and the folder for its results.

    scenario: the scenario's text. folder: base of its relative paths.
    results: folder to write to; its file `records` has a RequestRecord per line.
    references: file to compare answers with.
    proxies: see LoadClient.
    keep: whether to write the answers to the file `kept`.
    worker, procs: number of this process, and the number of processes.
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
    proxies: list[int] = []


class StartSignal(msgspec.Struct):
    """The signal to start a phase. at: its start by the client's monotonic clock."""

    at: float


class ClientReady(msgspec.Struct, tag="ready"):
    requests: int


class AtBarrier(msgspec.Struct, tag="waiting"):
    pass


class ProgressReport(msgspec.Struct, tag="progress"):
    progress: ClientProgress


class ClientFinished(msgspec.Struct, tag="finished"):
    cpu_share: float
    unsent: int


Message = ClientReady | AtBarrier | ProgressReport | ClientFinished


def _say(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


class _Records:
    """The writer of a RequestRecord per line, which buffers lines into large writes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._buffer = bytearray()
        self._encode = msgspec.json.Encoder().encode

    def write_record(self, record: RequestRecord) -> None:
        self._buffer += self._encode(record)
        self._buffer += b"\n"
        if len(self._buffer) > _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        self._file.write(self._buffer)
        self._buffer.clear()


async def _work(assignment: ClientAssignment) -> None:
    scenario = parse(assignment.scenario, "scenario", Path(assignment.folder), assignment.overrides)
    plans = [
        plan.share(assignment.worker, assignment.procs)
        for plan in lay_out(scenario, assignment.model)
    ]
    references = read_references(Path(assignment.references)) if assignment.references else None
    records = _Records(Path(assignment.results, "records"))
    by_key: dict[str, Reference] = {}

    def keep(spec: RequestSpec, record: RequestRecord, answer: ReceivedAnswer) -> None:
        if record.ok:
            by_key[spec.key()] = reference_of(spec.key(), record, answer)

    starts: asyncio.Queue[float] = asyncio.Queue()

    async def barrier() -> float:
        _say(AtBarrier())
        return await starts.get()

    client = LoadClient(
        scenario.target,
        records.write_record,
        references=references,
        keep=keep if assignment.keep else None,
        barrier=barrier if assignment.procs > 1 else None,
        proxies=assignment.proxies,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, client.stop)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    _say(ClientReady(sum(plan.total or 0 for plan in plans)))
    go = msgspec.json.decode(await lines.readline() or b"null", type=StartSignal | None)
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
    if assignment.keep:
        encode = msgspec.json.encode
        data = b"".join(encode(reference) + b"\n" for reference in by_key.values())
        Path(assignment.results, "kept").write_bytes(data)
    _say(ProgressReport(client.progress))
    planned = sum(plan.total or 0 for plan in plans)
    sent = sum(client.progress.sent.values())
    _say(ClientFinished(client.cpu_share, max(0, planned - sent)))


async def _report(client: LoadClient) -> None:
    while True:
        await asyncio.sleep(_REPORT_S)
        _say(ProgressReport(client.progress))
        client.progress.ttft.clear()
        client.progress.late.clear()


async def _listen(
    lines: asyncio.StreamReader, starts: asyncio.Queue[float], client: LoadClient
) -> None:
    while line := await lines.readline():
        starts.put_nowait(msgspec.json.decode(line, type=StartSignal).at)
    client.stop()


def main() -> None:
    """Read the assignment from stdin and run it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # one connection per request in flight
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assignment = msgspec.json.decode(_first_line(), type=ClientAssignment)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        asyncio.run(_work(assignment))


def _first_line() -> bytes:
    """Read a line from stdin unbuffered, as the event loop reads the rest."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (piece := os.read(0, 1)):
            break
        line += piece
    return bytes(line)


if __name__ == "__main__":
    main()
