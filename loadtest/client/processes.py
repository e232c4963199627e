"""The client processes of a run, as their parent sees them: on this machine, or Ray's nodes."""

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
from loadtest.client.load import Progress
from loadtest.client.process import Finished, Go, Message, Order, Ready, Report, Waiting
from loadtest.errors import RunError

_READY_TIMEOUT_S = 300.0


class Link(Protocol):
    """The way to a client process (process.py). offset: what its clock shows more than ours.
    where: a machine that is not ours; and how well its clock is known."""

    offset: float
    where: str

    async def start(self, order: Order) -> None: ...

    def write(self, line: bytes) -> None: ...

    async def readline(self) -> bytes:
        """b"" when there are no more."""
        ...

    def stop(self) -> None:
        """Let it hang up and write what it has."""
        ...

    async def end(self) -> None:
        """It is gone when this returns."""
        ...

    async def file(self, name: str) -> Path | None:
        """What it has written, `records` or `kept`; None if it has not. After its last line."""
        ...


class LocalProcess:
    """A Link to a process on this machine. folder: for its files."""

    offset = 0.0
    where = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, order: Order) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        order.results = str(self._folder)
        parent = str(Path(loadtest.__file__).parents[1])
        path = os.pathsep.join(filter(None, (parent, os.environ.get("PYTHONPATH"))))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "loadtest.client.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is ours to hand on
            limit=2**26,
        )
        self.write(msgspec.json.encode(order) + b"\n")

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
    """One client process. over: it has finished, or died."""

    def __init__(self, link: Link, order: Order) -> None:
        self.link = link
        self.progress = Progress()
        self.finished: Finished | None = None
        self.waiting = False
        self.over = False
        self._order = order
        self._decode = msgspec.json.Decoder(Message).decode

    async def start(self) -> None:
        """Start it and wait until it has its part of the plan. Raises RunError."""
        async with asyncio.timeout(_READY_TIMEOUT_S):
            await self.link.start(self._order)
            if not isinstance(await self._message(), Ready):
                raise RunError("a client process did not start; its message is above")

    def go(self, at: float) -> None:
        """at: on our clock."""
        self.link.write(msgspec.json.encode(Go(at + self.link.offset)) + b"\n")

    async def _message(self) -> Message | None:
        line = await self.link.readline()
        return self._decode(line) if line.strip() else None

    async def listen(self, show: Callable[[], None], meet: Callable[[], None]) -> None:
        """Until it has finished, or died."""
        while (message := await self._message()) is not None:
            if isinstance(message, Report):
                self.progress = message.progress
                show()
            elif isinstance(message, Waiting):
                self.waiting = True
                meet()
            elif isinstance(message, Finished):
                self.finished = message
        self.over = True
        meet()
