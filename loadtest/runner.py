"""A run from start to summary: asks the server for its model, starts the client processes, gathers
their records. Used by the command line, by searches and by tests."""

import asyncio
import contextlib
import os
import platform
import signal
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import loadtest
from loadtest.client import Progress
from loadtest.errors import RunError, ScenarioError
from loadtest.measure import summarise
from loadtest.plan import PhasePlan, lay_out
from loadtest.records import FaultMark, RequestRecord, RunInfo, Summary, read_records
from loadtest.scenario import AtOnce, Scenario, Target, parse, read_key
from loadtest.wire import Address, Pool, clock, request_head
from loadtest.worker import Finished, Go, Message, Order, Ready, Report, Waiting

_START_S = 0.3  # from "go" to time 0, so that every process is there in time
_MEET_S = 0.05
_READY_TIMEOUT_S = 300.0


class Clock:
    """The run's time, for what happens beside the load. mark(): a line in the summary's faults."""

    def __init__(self, origin: float) -> None:
        self.origin = origin
        self.marks: list[FaultMark] = []

    def now(self) -> float:
        """Seconds since the run's start."""
        return clock() - self.origin

    def mark(self, what: str, t: float | None = None) -> None:
        self.marks.append(FaultMark(round(self.now() if t is None else t, 6), what))


@dataclass(frozen=True, kw_only=True)
class Options:
    """procs: client processes. verify: a reference file. keep: write one instead.

    beside: runs along with the load and is cancelled at its end, e.g. to kill replicas.
    on_progress: gets every process's Progress four times a second, and the plans' totals once.
    stop: set it to end early; the summary then says so.
    """

    procs: int = 1
    verify: Path | None = None
    keep: Path | None = None
    beside: Callable[[Clock], Awaitable[None]] | None = None
    on_progress: Callable[[Sequence[Progress]], None] | None = None
    stop: asyncio.Event | None = None


@dataclass(frozen=True)
class Result:
    """records: in the order of intended times."""

    summary: Summary
    records: list[RequestRecord] = field(repr=False)
    interrupted: bool = False


@dataclass(frozen=True)
class Task:
    """A checked scenario and where it came from. overrides: dotted keys over the file's values."""

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
        """Raises ScenarioError."""
        return parse(self.text, self.name, self.folder, self.overrides)


def run(task: Task, options: Options | None = None) -> Result:
    """The whole run; blocks. Raises ScenarioError before any request, RunError."""
    return asyncio.run(run_async(task, options))


async def run_async(task: Task, options: Options | None = None) -> Result:
    """As run(), in the caller's loop."""
    options = options or Options()
    scenario = task.scenario()
    plans = lay_out(scenario, scenario.target.model or "")  # a bad plan, before any request
    model = scenario.target.model or await first_model(scenario.target)
    stop = options.stop or asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="manta-loadtest-") as folder:
        crew = [
            _Worker(task, scenario, model, options, number, Path(folder))
            for number in range(options.procs)
        ]
        try:
            await asyncio.gather(*(worker.start() for worker in crew))
            began = Clock(clock() + _START_S)
            started_at = datetime.fromtimestamp(time.time() + _START_S, UTC)
            for worker in crew:
                worker.go(began.origin)
            await _until_done(crew, options, began, stop)
        finally:
            await asyncio.gather(*(worker.end() for worker in crew))
        records = sorted(
            (record for worker in crew for record in read_records(worker.records)),
            key=lambda record: (record.intended_s, record.index),
        )
        if options.keep is not None:
            parts = [w.kept.read_bytes() for w in crew if w.kept.exists()]
            _write(options.keep, b"".join(parts))
    info = _info(task, scenario, model, options.procs, started_at)
    return Result(
        _summary(scenario, plans, records, info, crew, began, stop), records, stop.is_set()
    )


def _summary(
    scenario: Scenario,
    plans: list[PhasePlan],
    records: list[RequestRecord],
    info: RunInfo,
    crew: "list[_Worker]",
    began: Clock,
    stop: asyncio.Event,
) -> Summary:
    known = [plan.seconds for plan in plans if not plan.phase.warmup]
    sending = None if stop.is_set() or None in known else sum(s for s in known if s is not None)
    # Sessions go on after their phase; then the time of sending is not the phases'.
    if any(visit.thinks for plan in plans for visit in plan.visits):
        sending = None
    ended = [worker.finished for worker in crew if worker.finished is not None]
    return summarise(
        records,
        info,
        slo=scenario.slo.limits(),
        sending_s=sending,
        no_service_after=scenario.no_service_after,
        unsent=sum(done.unsent for done in ended),
        cpu_share=max((done.cpu_share for done in ended), default=0.0),
        at_once=frozenset(p.phase.name for p in plans if isinstance(p.phase.arrivals, AtOnce)),
        faults=began.marks,
        reasons=["a client process died"] if len(ended) < len(crew) else [],
    )


async def _until_done(
    crew: "list[_Worker]", options: Options, began: Clock, stop: asyncio.Event
) -> None:
    def show() -> None:
        if options.on_progress is not None:
            options.on_progress([worker.progress for worker in crew])

    def meet() -> None:
        """Everyone who still runs waits for the next phase: they begin it together."""
        running = [worker for worker in crew if not worker.over]
        if all(worker.waiting for worker in running):
            start = clock() + _MEET_S
            for worker in running:
                worker.waiting = False
                worker.go(start)

    waits = [asyncio.create_task(worker.listen(show, meet)) for worker in crew]
    stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    beside = None
    if options.beside is not None:
        beside = asyncio.ensure_future(options.beside(began))
    try:
        everyone: asyncio.Future[Any] = asyncio.gather(*waits)
        await asyncio.wait([everyone, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not everyone.done():
            for worker in crew:
                worker.stop()
        await everyone
        if beside is not None and beside.done():
            await beside  # its failure is the run's
    finally:
        stopped.cancel()
        if beside is not None and not beside.done():
            beside.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beside


class _Worker:
    """One client process as its parent sees it."""

    def __init__(
        self,
        task: Task,
        scenario: Scenario,
        model: str,
        options: Options,
        number: int,
        folder: Path,
    ) -> None:
        self.records = folder / f"records-{number}.jsonl"
        self.kept = folder / f"kept-{number}.jsonl"
        self.progress = Progress()
        self.finished: Finished | None = None
        self.waiting = False
        self.over = False
        self._order = Order(
            scenario=task.text,
            folder=str(task.folder.absolute()),
            overrides=task.overrides,
            model=model,
            worker=number,
            procs=options.procs,
            records=str(self.records),
            references=str(options.verify.absolute()) if options.verify else None,
            keep=str(self.kept) if options.keep else None,
        )
        self._process: asyncio.subprocess.Process | None = None
        self._decode = msgspec.json.Decoder(Message).decode

    async def start(self) -> None:
        """Start it and wait until it has its part of the plan. Raises RunError."""
        self.records.touch()
        parent = str(Path(loadtest.__file__).parents[1])
        path = os.pathsep.join(filter(None, (parent, os.environ.get("PYTHONPATH"))))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "loadtest.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is ours to hand on
            limit=2**26,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._order) + b"\n")
        async with asyncio.timeout(_READY_TIMEOUT_S):
            if not isinstance(await self._message(), Ready):
                raise RunError("a client process did not start; its message is above")

    def go(self, at: float) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Go(at)) + b"\n")

    async def _message(self) -> Message | None:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
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

    def stop(self) -> None:
        """Let it hang up and write what it has."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        """It is gone when this returns."""
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


class _Body:
    """An answer taken whole, for questions before the load."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.error: str | None = None
        self.over = asyncio.Event()

    def on_head(self, status: int, headers: dict[bytes, bytes], now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data

    def on_end(self, now: float) -> None:
        self.over.set()

    def on_lost(self, error: str, now: float) -> None:
        self.error = error
        self.over.set()


async def get(target: Target, path: str) -> tuple[int, bytes]:
    """(status, body) from the first URL. Raises RunError with the address tried."""
    url = target.urls[0]
    address = Address.of(url)
    pool = Pool(address)
    headers = {"accept": "application/json"}
    if target.key_file is not None:
        headers["authorization"] = f"Bearer {read_key(target.key_file)}"
    answer = _Body()
    try:
        connection = await pool.connect(target.connect_timeout)
    except ssl.SSLError as error:
        raise RunError(f"{url}: TLS failed: {error.reason or error}") from None
    except TimeoutError:
        raise RunError(f"{url}: no connection within {target.connect_timeout:g} s") from None
    except socket.gaierror as error:
        raise RunError(f"{url}: {error.strerror}") from None
    except OSError as error:
        told = os.strerror(error.errno) if error.errno else str(error)
        raise RunError(f"{url}: {told}") from None
    try:
        head = request_head(address, "GET", path, headers | target.headers)
        connection.send(head + b"\r\n", answer)
        async with asyncio.timeout(target.connect_timeout):
            await answer.over.wait()
    except TimeoutError:
        raise RunError(f"{url}: no answer within {target.connect_timeout:g} s") from None
    finally:
        connection.abandon()
    if answer.error is not None:
        raise RunError(f"{url}: {answer.error}")
    return answer.status, answer.body


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


async def first_model(target: Target) -> str:
    """The first model that the server names. Raises RunError."""
    status, body = await get(target, "/v1/models")
    where = f"{target.urls[0]}/v1/models"
    if status != 200:
        raise RunError(f"{where}: status {status}; name the model with --model")
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RunError(f"{where}: no list of models; name the model with --model") from None
    if not cards:
        raise RunError(f"{where}: an empty list of models")
    return cards[0].id


def _info(task: Task, scenario: Scenario, model: str, procs: int, started_at: datetime) -> RunInfo:
    versions = {"python": platform.python_version()}
    for name in ("manta-serve", "msgspec", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return RunInfo(
        name=scenario.name or Path(task.name).stem,
        scenario=task.text,
        seed=scenario.seed,
        url=", ".join(scenario.target.urls),
        model=model,
        client_host=f"{socket.gethostname()}, {os.cpu_count()} CPUs, {platform.platform()}",
        started_at=started_at.isoformat(timespec="milliseconds"),
        procs=procs,
        gpus=scenario.target.gpus,
        versions=versions,
    )


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
