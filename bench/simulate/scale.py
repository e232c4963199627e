"""Scale: the cost of routers with a thousand replicas, whose engines are simulated.

Routers, replica servers and channels are the service's code. Some cases run over real sockets in
several processes, to measure memory and CPU time. The others run in virtual time in one process,
with more routers than this machine has cores.
"""

import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from random import Random
from typing import Any
from unittest import mock

from bench.simulate.costs import best
from bench.simulate.fleet.engine import SimEngine
from bench.simulate.fleet.speeds import GPU
from bench.simulate.routing import RoutingRow
from deployments.backend import GenerationRequest, ModelCard
from deployments.replica.server import ReplicaServer
from deployments.replica.watchdog import StallLimits
from deployments.router.admission.fair_queue import AdmissionLimits
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.replicas.replica_client import ReplicaClient
from deployments.routing.decision import RoutingDecision, RoutingRequest
from deployments.routing.prefix_index import PrefixIndex, hash_prefix
from deployments.routing.route import route
from deployments.simulation import virtual_time
from deployments.simulation.service import Service
from deployments.simulation.speed import Speed
from deployments.transport.channel import ChannelLimits, FromReplica
from engine.config.engine_config import EngineConfig
from engine.errors import Overloaded
from engine.sampling_params import SamplingParams
from loadtest.measure.figures import sample_at

DECISION_US, MEMORY_MB = 100.0, 200.0  # limits of a decision's time and of a router's memory
PROMPT = 512  # tokens of a request
# Requests/s per replica in virtual time, and output tokens of a request: on average one stream runs
# per replica.
BUSY, OUTPUT = 5.0, 40
# Steps take half a second, so that two cores can run a thousand simulated engines.
SLOW_STEPS = replace(GPU, base=0.5, max_num_seqs=32)
# Timeouts are long, because the machine is busy while everything starts.
_PATIENT = ChannelLimits(handshake=60.0, heartbeat=1.0, timeout=60.0)
PAIRS = 2**19 - 1  # (prefix, replica) pairs of a full index of prefixes
_SHORT = 4  # output tokens of a request with SLOW_STEPS
_HOSTS = 2  # processes that run the replicas


@dataclass
class RouterFigures:
    """The costs and memory of one router in a run.

    connected_s: seconds from the list of replicas until all were connected.
    decisions_us: for each request the CPU microseconds of admission and of the choice of replica.
    requests_us: for each request the CPU microseconds until it is sent.
    ages_s: for each request the age of the chosen replica's stats.
    frames: frames received in `seconds`.
    cpu_s: CPU time of the process in `seconds`.
    memory_mb: growth of the process's memory due to replicas and requests.
    index_mb: further growth due to a full index of prefixes.
    first_s: seconds to the first token of each answered request.
    refused: number of refused requests.
    """

    connected_s: float = 0.0
    decisions_us: list[float] = field(default_factory=list)
    requests_us: list[float] = field(default_factory=list)
    ages_s: list[float] = field(default_factory=list)
    frames: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    memory_mb: float = 0.0
    index_mb: float = 0.0
    first_s: list[float] = field(default_factory=list)
    refused: int = 0


@contextmanager
def counted_frames() -> Iterator[Callable[[], int]]:
    """Count the messages that this process's routers receive from replicas within the context.

    Yields a function that returns the count.
    """
    receive, count = ReplicaClient.receive, 0

    def counting(client: ReplicaClient, message: FromReplica) -> None:
        nonlocal count
        count += 1
        receive(client, message)

    with mock.patch.object(ReplicaClient, "receive", counting):
        yield lambda: count


def decide(
    dispatcher: Dispatcher, request: GenerationRequest, wanted: RoutingRequest, now: float
) -> RoutingDecision | None:
    """Compute a router's decision for a request, admission and replica, without sending it."""
    dispatcher.queue.admit(request.key, request.priority)
    room = dispatcher.queue.check(request)
    return route(wanted, dispatcher.replicas.fleet, dispatcher.random, now, with_room=room)


async def ask(
    dispatcher: Dispatcher, prompt: list[int], output: int, figures: RouterFigures
) -> None:
    """Send a request and read its answer; record the decision's cost and the tokens' times."""
    loop = asyncio.get_running_loop()
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    request = GenerationRequest("q", "m", prompt, params, seed=1)
    wanted = RoutingRequest(len(prompt), output, prefix_hashes=hash_prefix(prompt))
    asked = loop.time()
    try:
        began = time.thread_time()
        decide(dispatcher, request, wanted, asked)
        decided = time.thread_time()
        inflight = dispatcher.generate(request)
    except Overloaded:
        figures.refused += 1
        return
    figures.decisions_us.append(1e6 * (decided - began))
    figures.requests_us.append(1e6 * (time.thread_time() - decided))
    if inflight.replicas:
        state = dispatcher.replicas[inflight.replicas[0]].state
        figures.ages_s.append(asked - state.seen)
    answered = False
    while await inflight.next():
        if not answered:
            answered = True
            figures.first_s.append(loop.time() - asked)


async def load(
    dispatcher: Dispatcher,
    rate: float,
    seconds: float,
    seed: int,
    figures: RouterFigures,
    output: int = OUTPUT,
) -> None:
    """Send Poisson arrivals to a router; prompts share prefixes, as in conversations."""
    loop, dice, tasks = asyncio.get_running_loop(), Random(seed), set[asyncio.Task[None]]()
    due = loop.time()
    end = due + seconds
    while (due := due + dice.expovariate(rate)) < end:
        await asyncio.sleep(due - loop.time())
        topic = dice.randrange(500)
        prompt = [topic] * (PROMPT // 2) + [dice.randrange(900) for _ in range(PROMPT // 2)]
        task = loop.create_task(ask(dispatcher, prompt, output, figures))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


# -- cases over real sockets, in several processes


def _memory_mb() -> float:
    """Return this process's memory in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def start_replica(speed: Speed, host: str) -> tuple[ReplicaServer, dict[str, Any]]:
    """Start a replica server with a simulated engine; return it with its published metadata."""

    def make(*callbacks: Any) -> SimEngine:
        return SimEngine(speed, *callbacks)

    server = ReplicaServer(_PATIENT, StallLimits(), make)
    await server.start(EngineConfig(model="simulated"), host)
    return server, server.published()


def _host(parent: Connection, count: int, speed: Speed) -> None:
    """Run `count` replicas in this process until the parent process ends the run."""

    async def hold() -> None:
        started = [await start_replica(speed, "127.0.0.1") for _ in range(count)]
        parent.send([published for _, published in started])
        await asyncio.to_thread(parent.recv)
        for server, _ in started:
            await server.stop()

    asyncio.run(hold())


def _router(
    parent: Connection,
    published: dict[str, Any],
    rate: float,
    seconds: float,
    number: int,
    pairs: int,
) -> None:
    """Run one router in this process, and send its figures to the parent process."""

    async def run() -> RouterFigures:
        figures = RouterFigures()
        gc.collect()
        before = _memory_mb()
        limits = DispatchLimits(channel=_PATIENT)
        card = ModelCard("m", 32768, 1000, (2,), 0)
        dispatcher = Dispatcher(card, None, limits, f"router-{number}")  # type: ignore[arg-type]
        began = time.monotonic()
        dispatcher.set_replicas(published)
        while len(dispatcher.state().replicas) < len(published):
            await asyncio.sleep(0.05)
        figures.connected_s = time.monotonic() - began
        parent.send("connected")
        await asyncio.to_thread(parent.recv)
        with counted_frames() as frames:
            began, cpu = time.monotonic(), time.process_time()
            await load(dispatcher, rate, seconds, number, figures, _SHORT)
            figures.seconds = time.monotonic() - began
            figures.cpu_s = time.process_time() - cpu
            figures.frames = frames()
        figures.memory_mb = _memory_mb() - before
        dice, index = Random(number), PrefixIndex()
        before = _memory_mb()
        while len(index) < pairs:
            index.add_prefix([dice.randbytes(8)], dice.randrange(len(published)))
        figures.index_mb = _memory_mb() - before
        dispatcher.close()
        return figures

    parent.send(asyncio.run(run()))


def over_sockets(
    replicas: int,
    routers: int,
    rate: float,
    seconds: float,
    *,
    pairs: int = PAIRS,
    speed: Speed = SLOW_STEPS,
) -> list[RouterFigures]:
    """Run routers and replicas in several processes, and return each router's figures.

    rate: requests/s of each router.
    pairs: pairs of prefix hash and holder in the index whose memory is measured.
    """
    context = multiprocessing.get_context("spawn")
    hosts = []
    published: dict[str, Any] = {}
    for number in range(_HOSTS):
        count = replicas // _HOSTS + (number < replicas % _HOSTS)
        ours, theirs = context.Pipe()
        process = context.Process(target=_host, args=(theirs, count, speed), daemon=True)
        process.start()
        hosts.append((process, ours))
    for number, (_, pipe) in enumerate(hosts):
        published |= {f"gpu/{number}-{i}": entry for i, entry in enumerate(pipe.recv())}
    clients = []
    for number in range(routers):
        ours, theirs = context.Pipe()
        arguments = (theirs, published, rate, seconds, number, pairs)
        process = context.Process(target=_router, args=arguments, daemon=True)
        process.start()
        clients.append((process, ours))
    for _, pipe in clients:
        pipe.recv()  # wait until the router is connected
    for _, pipe in clients:
        pipe.send("begin")
    figures: list[RouterFigures] = [pipe.recv() for _, pipe in clients]
    for _, pipe in hosts:
        pipe.send("over")
    for process, _ in (*clients, *hosts):
        process.join(20)
    return figures


# -- in virtual time


def in_virtual_time(
    replicas: int, routers: int, rate: float, seconds: float, speed: Speed = GPU
) -> RouterFigures:
    """Run all routers and replicas in one process; return the figures of all routers together.

    rate: requests/s of each router.
    """
    figures = RouterFigures()

    async def run() -> None:
        limits = DispatchLimits(admission=AdmissionLimits(), channel=_PATIENT)
        service = Service([speed] * replicas, routers, limits, SimEngine)
        await service.start()
        loop = asyncio.get_running_loop()
        with counted_frames() as frames:
            began = loop.time()
            work = [
                load(dispatcher, rate, seconds, number, figures)
                for number, dispatcher in enumerate(service.routers)
            ]
            await asyncio.gather(*work)
            figures.seconds = loop.time() - began
            figures.frames = frames()
        await service.stop()

    virtual_time.run(run())
    return figures


# -- rows


def _rows(
    case: str, figures: Sequence[RouterFigures], routers: int, real: bool
) -> list[RoutingRow]:
    decisions = [value for costs in figures for value in costs.decisions_us]
    requests = [value for costs in figures for value in costs.requests_us]
    ages = [value for costs in figures for value in costs.ages_s]
    first = [value for costs in figures for value in costs.first_s]
    seconds = max(costs.seconds for costs in figures)
    frames = sum(costs.frames for costs in figures) / routers / seconds
    median = sample_at(decisions, 0.5)
    rows = [
        _row(f"{case}/decision_p50", median, DECISION_US, "us", "wanted"),
        _row(f"{case}/decision_p99", sample_at(decisions, 0.99), 0.0, "us"),
        _row(f"{case}/request_p50", sample_at(requests, 0.5), 0.0, "us", "until it is sent"),
        _row(f"{case}/age_of_stats_p50", 1e3 * sample_at(ages, 0.5), 0.0, "ms"),
        _row(f"{case}/age_of_stats_p99", 1e3 * sample_at(ages, 0.99), 0.0, "ms"),
        _row(f"{case}/frames_to_a_router", frames, 0.0, "1/s"),
        _row(f"{case}/first_token_p99", sample_at(first, 0.99), 0.0, "s"),
    ]
    if real:
        memory = max(costs.memory_mb for costs in figures)
        index = max(costs.index_mb for costs in figures)
        cpu = sum(costs.cpu_s for costs in figures) / max(1, sum(costs.frames for costs in figures))
        rows += [
            _row(f"{case}/connected_after", max(costs.connected_s for costs in figures), 0.0, "s"),
            _row(f"{case}/cpu_a_frame", 1e6 * cpu, 0.0, "us", "requests included"),
            _row(f"{case}/memory", memory + index, MEMORY_MB, "MB", "with a full index; wanted"),
            _row(f"{case}/memory_of_the_index", index, 0.0, "MB", f"{PAIRS} pairs"),
        ]
    return rows


def _row(case: str, ours: float, wanted: float, unit: str, note: str = "") -> RoutingRow:
    ratio = round(ours / wanted, 3) if wanted else 0.0
    return RoutingRow(f"scale/{case}", round(ours, 2), wanted, unit, ratio, note)


def decision_us(replicas: int) -> float:
    """Return the CPU microseconds of a decision among connected replicas, the best of many."""

    async def measure() -> float:
        service = Service([GPU] * replicas, 1, DispatchLimits(channel=_PATIENT), SimEngine)
        await service.start()
        router, now = service.routers[0], asyncio.get_running_loop().time()
        prompt = list(range(PROMPT))
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        request = GenerationRequest("q", "m", prompt, params, seed=1)
        wanted = RoutingRequest(PROMPT, OUTPUT, prefix_hashes=hash_prefix(prompt))
        for number in range(replicas):
            router.replicas.fleet.index.add_prefix(wanted.prefix_hashes[: number % 8], number)
        took = best(lambda: decide(router, request, wanted, now))
        await service.stop()
        return took

    return virtual_time.run(measure())


def all_rows(quick: bool) -> tuple[list[RoutingRow], list[dict[str, Any]]]:
    """Measure the costs of routers with ten to a thousand replicas.

    Returns (rows of the table, a line for each run over sockets or in virtual time). Measured are
    the microseconds of a routing decision, then routers and replicas over real sockets, then in
    virtual time.

    quick: whether to make the largest fleets a tenth as large.
    """
    part = 10 if quick else 1
    rows: list[RoutingRow] = []
    lines: list[dict[str, Any]] = []
    for replicas in (10, 100, 1000 // part):
        took = decision_us(replicas)
        rows.append(_row(f"decision/{replicas}", took, DECISION_US, "us", "with admission; wanted"))
    for replicas, routers in ((100 // part, 2), (1000 // part, 2)):
        figures = over_sockets(replicas, routers, rate=20.0, seconds=10.0)
        case = f"sockets/{replicas}x{routers}"
        rows += _rows(case, figures, routers, real=True)
        lines += [{"case": case, **asdict(costs)} for costs in figures]
    for replicas, routers in ((100 // part, 10), (1000 // part, 10), (1000 // part, 100 // part)):
        rate = BUSY * replicas / routers
        single = in_virtual_time(replicas, routers, rate=rate, seconds=0.5)
        case = f"virtual/{replicas}x{routers}"
        rows += _rows(case, [single], routers, real=False)
        lines.append({"case": case, **asdict(single)})
    return rows, lines
