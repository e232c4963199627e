"""Runs a load test from start to summary: asks the server for its model, starts the client
processes, and collects their records. The command line, searches and tests use this module.
"""

import asyncio
import contextlib
import os
import platform
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loadtest.ask import first_model
from loadtest.chaos.network_fault import NetworkProxy, open_proxies
from loadtest.client.load import ClientProgress
from loadtest.client.process import ClientAssignment
from loadtest.client.processes import LocalProcess, ProcessConnection, Worker
from loadtest.errors import RunError, ScenarioError
from loadtest.http import clock
from loadtest.measure.figures import summarise
from loadtest.measure.records import FaultMark, RequestRecord, RunInfo, Summary, read_records
from loadtest.scenario.parse import parse
from loadtest.scenario.schedule import PhasePlan, lay_out
from loadtest.scenario.schema import AtOnce, Scenario

_START_S = 0.3  # seconds from the start signal to time 0, within which every process is ready
_MEET_S = 0.05
_FAR_S = 0.7  # additional seconds for starts and barriers over a network


class RunClock:
    """The clock of a run, used by faults during the load. mark() records a fault for the
    summary."""

    def __init__(self, origin: float, proxies: Sequence[NetworkProxy] = ()) -> None:
        """Set up the clock. origin: the run's start by the monotonic clock.

        proxies: the proxies between clients and servers, if any.
        """
        self.origin, self.proxies = origin, proxies
        self.marks: list[FaultMark] = []
        self.spoilt: list[str] = []  # reasons why the run is not as requested

    def now(self) -> float:
        """Return the seconds since the run's start."""
        return clock() - self.origin

    def mark(self, what: str, t: float | None = None) -> None:
        self.marks.append(FaultMark(round(self.now() if t is None else t, 6), what))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run.

    procs: number of client processes.
    ray: address of a Ray cluster, or "auto", on whose nodes the client processes are started.
    verify: a reference file to compare with. keep: a reference file to write instead.
    proxied: whether clients reach the servers through NetworkProxy, for network faults.
    beside: a coroutine that runs during the load and is cancelled at its end, e.g. to kill
    replicas.
    on_progress: called with the ClientProgress of all processes, four times a second.
    stop: set this event to end the run early; the summary then says so.
    """

    procs: int = 1
    ray: str | None = None
    verify: Path | None = None
    keep: Path | None = None
    proxied: bool = False
    beside: Callable[[RunClock], Awaitable[None]] | None = None
    on_progress: Callable[[Sequence[ClientProgress]], None] | None = None
    stop: asyncio.Event | None = None


@dataclass(frozen=True)
class RunResult:
    """The result of a run. records: in the order of intended times."""

    summary: Summary
    records: list[RequestRecord] = field(repr=False)
    interrupted: bool = False


@dataclass(frozen=True)
class Task:
    """A checked scenario and its source. overrides: values by dotted key that replace the
    file's.
    """

    text: str
    name: str = "scenario"
    folder: Path = Path()
    overrides: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, overrides: dict[str, Any] | None = None) -> "Task":
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise ScenarioError(f"{path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ScenarioError(f"{path}: not UTF-8 text") from None
        return cls(text, str(path), path.parent, overrides or {})

    def scenario(self) -> Scenario:
        """Parse the text into a Scenario. Raises ScenarioError."""
        return parse(self.text, self.name, self.folder, self.overrides)


def run(task: Task, options: RunOptions | None = None) -> RunResult:
    """Run a load test to its end, blocking. Raises ScenarioError before any request, and
    RunError.
    """
    return asyncio.run(run_async(task, options))


async def run_async(task: Task, options: RunOptions | None = None) -> RunResult:
    """Run a load test in the caller's event loop. Raises as run() does."""
    options = options or RunOptions()
    scenario = task.scenario()
    plans = lay_out(scenario, scenario.target.model or "")  # check the plan before any request
    model = scenario.target.model or await first_model(scenario.target)
    stop = options.stop or asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="manta-loadtest-") as folder:
        proxies, ports = await open_proxies(scenario.target.urls if options.proxied else ())
        connections = await _connections(scenario, options, Path(folder))
        workers = [
            Worker(connection, _assignment(task, model, options, number, ports))
            for number, connection in enumerate(connections)
        ]
        try:
            await asyncio.gather(*(worker.start() for worker in workers))
            ahead = _START_S + (_FAR_S if options.ray else 0)
            began = RunClock(clock() + ahead, proxies)
            started_at = datetime.fromtimestamp(time.time() + ahead, UTC)
            for worker in workers:
                worker.go(began.origin)
            await _until_done(workers, options, began, stop)
            paths = [await connection.file("records") for connection in connections]
            files = [await connection.file("kept") for connection in connections]
        finally:
            await asyncio.gather(*(connection.end() for connection in connections))
            for proxy in proxies:
                proxy.close()
        records = sorted(
            (record for path in paths if path is not None for record in read_records(path)),
            key=lambda record: (record.intended_s, record.index),
        )
        if options.keep is not None:
            _write(options.keep, b"".join(path.read_bytes() for path in files if path is not None))
    info = _info(task, scenario, model, connections, started_at)
    return RunResult(
        _summary(scenario, plans, records, info, workers, began, stop), records, stop.is_set()
    )


async def _connections(
    scenario: Scenario, options: RunOptions, folder: Path
) -> Sequence[ProcessConnection]:
    """Return a connection to each client process; no process runs yet. Raises RunError."""
    folders = [folder / str(number) for number in range(options.procs)]
    if options.ray is None:
        return [LocalProcess(folder) for folder in folders]
    if options.proxied:
        raise ScenarioError("faults of the network need the clients on this machine, without --ray")
    from loadtest.client.ray_nodes import connect

    return await connect(options.ray, folders, scenario)


def _assignment(
    task: Task, model: str, options: RunOptions, number: int, proxies: list[int]
) -> ClientAssignment:
    return ClientAssignment(
        scenario=task.text,
        folder=str(task.folder.absolute()),
        overrides=task.overrides,
        model=model,
        worker=number,
        procs=options.procs,
        references=str(options.verify.absolute()) if options.verify else None,
        keep=options.keep is not None,
        proxies=proxies,
    )


def _summary(
    scenario: Scenario,
    plans: list[PhasePlan],
    records: list[RequestRecord],
    info: RunInfo,
    workers: list[Worker],
    began: RunClock,
    stop: asyncio.Event,
) -> Summary:
    known = [plan.seconds for plan in plans if not plan.phase.warmup]
    sending = None if stop.is_set() or None in known else sum(s for s in known if s is not None)
    # Sessions may last longer than their phase, so requests are sent after the phases, too.
    if any(visit.thinks for plan in plans for visit in plan.visits):
        sending = None
    ended = [worker.finished for worker in workers if worker.finished is not None]
    return summarise(
        records,
        info,
        slo=scenario.slo.limits(),
        sending_s=sending,
        no_service_after=scenario.no_service_after,
        unsent=sum(done.unsent for done in ended),
        cpu_share=max((done.cpu_share for done in ended), default=0.0),
        at_once=frozenset(p.phase.name for p in plans if isinstance(p.phase.arrivals, AtOnce)),
        faults=sorted(began.marks, key=lambda mark: mark.t),
        reasons=[*began.spoilt, *(["a client process died"] if len(ended) < len(workers) else [])],
    )


async def _until_done(
    workers: list[Worker], options: RunOptions, began: RunClock, stop: asyncio.Event
) -> None:
    def show() -> None:
        if options.on_progress is not None:
            options.on_progress([worker.progress for worker in workers])

    def meet() -> None:
        """Start the next phase in all workers, once all running workers wait for it."""
        running = [worker for worker in workers if not worker.over]
        if all(worker.waiting for worker in running):
            start = clock() + _MEET_S + (_FAR_S if options.ray else 0)
            for worker in running:
                worker.waiting = False
                worker.go(start)

    waits = [asyncio.create_task(worker.listen(show, meet)) for worker in workers]
    stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    beside = None
    if options.beside is not None:
        beside = asyncio.ensure_future(options.beside(began))
    try:
        everyone: asyncio.Future[Any] = asyncio.gather(*waits)
        await asyncio.wait([everyone, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not everyone.done():
            for worker in workers:
                worker.connection.stop()
        await everyone
        if beside is not None and beside.done():
            await beside  # its error becomes the run's error
    finally:
        stopped.cancel()
        if beside is not None and not beside.done():
            beside.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beside


def _info(
    task: Task,
    scenario: Scenario,
    model: str,
    connections: Sequence[ProcessConnection],
    started_at: datetime,
) -> RunInfo:
    versions = {"python": platform.python_version()}
    for name in ("manta-serve", "msgspec", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    if commit := _commit():
        versions["client commit"] = commit
    hosts = [f"{socket.gethostname()}, {os.cpu_count()} CPUs, {platform.platform()}"]
    hosts += [connection.where for connection in connections if connection.where]
    return RunInfo(
        name=scenario.name or Path(task.name).stem,
        scenario=task.text,
        seed=scenario.seed,
        url=", ".join(scenario.target.urls),
        model=model,
        client_host="; ".join(hosts),
        started_at=started_at.isoformat(timespec="milliseconds"),
        procs=len(connections),
        gpus=scenario.target.gpus,
        versions=versions,
        target=scenario.target.about,
    )


def _commit() -> str | None:
    """Return the load tester's commit if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
