"""The parent process's connections to the client processes of a run, on this machine or on the
nodes of a Ray cluster.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

import loadtest
from loadtest.client.load import ClientProgress
from loadtest.client.process import (
    AtBarrier,
    ClientAssignment,
    ClientFinished,
    ClientReady,
    Message,
    ProgressReport,
    StartSignal,
)
from loadtest.errors import RunError

_READY_TIMEOUT_S = 300.0


class ProcessConnection(Protocol):
    """The connection to a client process (process.py).

    offset: seconds by which the client's clock is ahead of this process's clock.
    where: name of the client's machine, and the error of its clock offset; "" for this machine.
    """

    offset: float
    where: str

    async def start(self, assignment: ClientAssignment) -> None: ...

    def write(self, line: bytes) -> None: ...

    async def readline(self) -> bytes:
        """Read the next line; b"" at the end."""
        ...

    def stop(self) -> None:
        """Ask the client process to close its connections and write its records."""
        ...

    async def end(self) -> None:
        """End the client process, and return when it has ended."""
        ...

    async def file(self, name: str) -> Path | None:
        """Return the path of the client process's file `records` or `kept`; None if it has written
        none.

        Call it only after the last line was read.
        """
        ...


class LocalProcess:
    """A ProcessConnection to a process on this machine. folder: that of the process's files."""

    offset = 0.0
    where = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, assignment: ClientAssignment) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        assignment.results = str(self._folder)
        parent = str(Path(loadtest.__file__).parents[1])
        path = os.pathsep.join(filter(None, (parent, os.environ.get("PYTHONPATH"))))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "loadtest.client.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            # so that Ctrl-C reaches only this process, which then stops the client
            start_new_session=True,
            limit=2**26,
        )
        self.write(msgspec.json.encode(assignment) + b"\n")

    def write(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line)

    async def readline(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        return await self._process.stdout.readline()

    def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def file(self, name: str) -> Path | None:
        path = self._folder / name
        return path if path.exists() else None


class Worker:
    """A client process and its state. over: whether it has finished or died."""

    def __init__(self, connection: ProcessConnection, assignment: ClientAssignment) -> None:
        self.connection = connection
        self.progress = ClientProgress()
        self.finished: ClientFinished | None = None
        self.waiting = False
        self.over = False
        self._assignment = assignment
        self._decode = msgspec.json.Decoder(Message).decode

    async def start(self) -> None:
        """Start the process, and wait until it has planned its share of the load. Raises
        RunError."""
        async with asyncio.timeout(_READY_TIMEOUT_S):
            await self.connection.start(self._assignment)
            if not isinstance(await self._message(), ClientReady):
                raise RunError("a client process did not start; its message is above")

    def go(self, at: float) -> None:
        """Send the start signal. at: a time of this process's clock."""
        self.connection.write(msgspec.json.encode(StartSignal(at + self.connection.offset)) + b"\n")

    async def _message(self) -> Message | None:
        line = await self.connection.readline()
        return self._decode(line) if line.strip() else None

    async def listen(self, show: Callable[[], None], meet: Callable[[], None]) -> None:
        """Read the process's messages until it has finished or died.

        show: called after each progress report. meet: called when the process waits at a barrier,
        has finished or died.
        """
        while (message := await self._message()) is not None:
            if isinstance(message, ProgressReport):
                self.progress = message.progress
                show()
            elif isinstance(message, AtBarrier):
                self.waiting = True
                meet()
            elif isinstance(message, ClientFinished):
                self.finished = message
        self.over = True
        meet()
