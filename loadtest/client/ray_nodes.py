"""Client processes on the nodes of a Ray cluster, for loads that one machine cannot make.

Each client is a Ray actor beside a process of its own, the same process as on one machine. It gets
its share of the same plan, and its records come back whole, so percentiles are of all requests and
not of averages. The records' times are on their node's clock. The difference of that clock to ours
is measured at the start, from the quickest of some questions, and taken off by a common time 0.
Every latency is measured on one clock; only comparisons of requests of different nodes have that
error.

Ray brings the package and the scenario's files along. msgspec, pydantic, numpy and ruamel.yaml must
be installed on the nodes. Of loadtest/ this module alone imports ray.
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
    """The actor: a LocalProcess on its node, and that node's clock."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="manta-loadtest-")
        self._process = LocalProcess(Path(self._folder.name, "results"))

    async def who(self) -> tuple[str, str]:
        """(the kernel that runs here, the machine's name): one kernel has one clock."""
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
        """The next piece of a file; empty at its end, None without one."""
        path = await self._process.file(name)
        if path is None:
            return None
        with path.open("rb") as file:
            file.seek(start)
            return file.read(_PIECE_BYTES)


class RayProcess:
    """A ProcessConnection to a Host. folder: for copies of its files."""

    def __init__(self, host: Any, folder: Path, files: dict[str, Path]) -> None:
        self._host, self._folder, self._files = host, folder, files
        self.offset = 0.0
        self.where = ""

    async def meet(self) -> None:
        """Learn where it is and what its clock shows. Raises RunError."""
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
            return b""  # as of a process that died
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
            return None  # the node is lost, and its records with it
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
    """Ray itself tries for minutes. Raises ScenarioError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise ScenarioError(f"no Ray cluster at {address}: {error.strerror or error}") from None


def files_of(scenario: Scenario) -> Iterator[tuple[str, Path]]:
    """(dotted key, path) of every file that a scenario names and a client reads."""
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
    """(what the other clock shows more than ours, how far off that may be), in seconds, from the
    question that was answered the quickest."""
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
