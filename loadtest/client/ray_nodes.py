"""Client processes on the nodes of a Ray cluster, for loads that one machine cannot generate.

Each client is a Ray actor that starts the same client process as on one machine. The process gets
its share of the plan, and all records are collected, so percentiles are over all requests rather
than averages. Records have times of their node's clock, whose offset from this machine's clock is
measured at the start, from the fastest of several round trips, and subtracted. Each latency is
measured with a single clock; only comparisons between requests of different nodes have the offset's
error. Ray ships the package and the scenario's files. Nodes need msgspec, pydantic, numpy and
ruamel.yaml. This is the only module of loadtest/ that imports ray.
"""

import asyncio
import logging
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import loadtest
from loadtest.client.process import ClientAssignment
from loadtest.client.processes import LocalProcess
from loadtest.errors import RunError, ScenarioError
from loadtest.http import clock
from loadtest.scenario.schema import Scenario, Trace

_QUESTIONS = 20
_PLACE_TIMEOUT_S = 60.0
_PIECE_BYTES = 2**23


class Host:
    """A Ray actor with a LocalProcess on its node, which also reads that node's clock."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="manta-loadtest-")
        self._process = LocalProcess(Path(self._folder.name, "results"))

    async def who(self) -> tuple[str, str]:
        """Return (boot id of the kernel, machine's name). Hosts with the same boot id share a
        clock.
        """
        return _boot(), socket.gethostname()

    async def now(self) -> float:
        return clock()

    async def start(
        self, assignment: ClientAssignment, files: dict[str, bytes], references: bytes | None
    ) -> None:
        """Start the client. files: contents of the scenario's files, by dotted key."""
        for key, data in files.items():
            path = Path(self._folder.name, key)
            path.write_bytes(data)
            assignment.overrides[key] = str(path)
        if references is not None:
            path = Path(self._folder.name, "references")
            path.write_bytes(references)
            assignment.references = str(path)
        await self._process.start(assignment)

    async def write(self, line: bytes) -> None:
        self._process.write(line)

    async def readline(self) -> bytes:
        return await self._process.readline()

    async def stop(self) -> None:
        self._process.stop()

    async def end(self) -> None:
        await self._process.end()
        self._folder.cleanup()

    async def read(self, name: str, start: int) -> bytes | None:
        """Return the next piece of a file from `start` on; b"" at its end, None without a file."""
        path = await self._process.file(name)
        if path is None:
            return None
        with path.open("rb") as file:
            file.seek(start)
            return file.read(_PIECE_BYTES)


class RayProcess:
    """A ProcessConnection to a Host. folder: where copies of the client's files are written."""

    def __init__(self, host: Any, folder: Path, files: dict[str, Path]) -> None:
        self._host, self._folder, self._files = host, folder, files
        self.offset = 0.0
        self.where = ""

    async def meet(self) -> None:
        """Determine the host's machine and clock offset. Raises RunError."""
        import ray

        try:
            async with asyncio.timeout(_PLACE_TIMEOUT_S):
                boot, name = await self._host.who.remote()
        except TimeoutError:
            raise RunError(
                f"a client found no place in the Ray cluster within {_PLACE_TIMEOUT_S:g} s: each "
                "needs a free CPU"
            ) from None
        except ray.exceptions.RayError as error:
            raise RunError(f"a client does not start in the Ray cluster: {error}") from None
        self.where = name
        if boot != _boot():
            self.offset, known = await compare_clocks(self._host.now.remote)
            self.where = f"{name} (clock within {known * 1000:.1f} ms)"

    async def start(self, assignment: ClientAssignment) -> None:
        files = {key: path.read_bytes() for key, path in self._files.items()}
        references = Path(assignment.references).read_bytes() if assignment.references else None
        await self._host.start.remote(assignment, files, references)

    def write(self, line: bytes) -> None:
        self._host.write.remote(line)

    async def readline(self) -> bytes:
        import ray

        try:
            line: bytes = await self._host.readline.remote()
        except ray.exceptions.RayActorError:
            return b""  # b"" also stands for a process that died
        return line

    def stop(self) -> None:
        self._host.stop.remote()

    async def end(self) -> None:
        import ray

        try:
            await self._host.end.remote()
        except ray.exceptions.RayActorError:
            return
        ray.kill(self._host)

    async def file(self, name: str) -> Path | None:
        import ray

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / name
        try:
            with path.open("wb") as file:
                while piece := await self._host.read.remote(name, file.tell()):
                    file.write(piece)
        except ray.exceptions.RayActorError:
            return None  # the node and its records are lost
        return path if piece is not None else None


async def connect(address: str, folders: Sequence[Path], scenario: Scenario) -> list[RayProcess]:
    """Start a client for each folder, spread over the nodes. Raises ScenarioError, RunError."""
    try:
        import ray
    except ImportError:
        raise ScenarioError("--ray needs Ray: pip install ray") from None

    if not ray.is_initialized():
        _reach(address)
        package = Path(loadtest.__file__).parent
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"py_modules": [str(package)], "excludes": ["results"]},
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ScenarioError(f"no Ray cluster at {address}: {error}") from None
    spread = ray.remote(Host).options(num_cpus=1, scheduling_strategy="SPREAD")
    files = dict(files_of(scenario))
    clients = [RayProcess(spread.remote(), folder, files) for folder in folders]
    await asyncio.gather(*(client.meet() for client in clients))
    return clients


def _reach(address: str) -> None:
    """Check that the address accepts connections, since Ray itself would try for minutes. Raises
    ScenarioError.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise ScenarioError(f"no Ray cluster at {address}: {error.strerror or error}") from None


def files_of(scenario: Scenario) -> Iterator[tuple[str, Path]]:
    """Yield (dotted key, path) of each file that a scenario names and a client reads."""
    if scenario.target.key_file is not None:
        yield "target.key_file", scenario.target.key_file
    works = [("work", scenario.work)]
    for number, phase in enumerate(scenario.phases):
        if isinstance(phase.arrivals, Trace):
            yield f"phases.{number}.arrivals.file", phase.arrivals.file
        if phase.work is not None:
            works.append((f"phases.{number}.work", phase.work))
    for key, work in works:
        for number, tenant in enumerate(work.tenants):
            if tenant.key_file is not None:
                yield f"{key}.tenants.{number}.key_file", tenant.key_file


async def compare_clocks(ask: Any) -> tuple[float, float]:
    """Return (the other clock minus this clock, largest error), in seconds, from the fastest
    round trip.

    ask: returns an awaitable of the other clock's time.
    """
    offset, quickest = 0.0, float("inf")
    for _ in range(_QUESTIONS):
        before = clock()
        there = await ask()
        after = clock()
        if after - before < quickest:
            quickest = after - before
            offset = there - (before + after) / 2
    return offset, quickest / 2


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
