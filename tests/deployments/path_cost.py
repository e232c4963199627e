"""Measures the CPU time of a streamed chunk on its way from the engine to the client's socket.

    python -m tests.deployments.path_cost --streams 256 --seconds 6

Processes, sockets, uvicorn and the channel are real, as behind HAProxy; the engine is fake. Figures
are microseconds of CPU per chunk for each process on the path. The router's is also a ratio to a
null path in the same run: uvicorn with an application that sends ready bytes. The engine side is
the replica server and the engine process without `core`, the time of the fake engine itself. CPU
time is measured instead of wall time, because client, routers and engine share the cores. It still
depends on shared caches, and differs by up to a quarter between two runs of one commit. `calls`
does not: the numbers of Python and C function calls per chunk, in a router and a replica server.

`stream scale` and `scale` are the throughput of two routers as a multiple of one router's. Routers
share only the replica, so it is 2 x (cost with one) / (cost with two), each with as many streams.
`stream scale` is for chunks at steps of 20 ms; `tokens a chunk` is 1.0 unless a late router merged
chunks. `scale` is for requests to an engine that answers at once with one token: requests per CPU
second of a router with a core to itself, alone, and while a second router, which shares the core of
all other processes, has the same load. Two cores cannot show twice the throughput by the clock:
each router needs a core, and the other processes a third.
"""

import argparse
import asyncio
import cProfile
import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEP = 0.02  # seconds per step, as of a small model on a GPU
TOKENS = 4000  # tokens of a stream, so many that none ends during a measurement
SHORT = 1  # tokens of an answer that comes at once, so that a late chunk cannot hold more
MODEL = "fake:vocab_size=250,max_model_len=8192"


# -- the processes


async def _serve(app: Any) -> int:
    """Serve an application with uvicorn, with Ray Serve's settings of it, and return the port."""
    import socket

    import uvicorn

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    config = uvicorn.Config(app, log_config=None, log_level=None, access_log=False, lifespan="off")
    task = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listener]))
    task.add_done_callback(lambda done: sys.exit(0))
    return int(listener.getsockname()[1])


async def _replica(step: float) -> dict[str, Any]:
    from deployments.replica.server import ReplicaServer
    from deployments.replica.watchdog import StallLimits
    from deployments.transport.channel import ChannelLimits
    from engine.config.engine_config import EngineConfig

    replica_server = ReplicaServer(ChannelLimits(), StallLimits())
    config = EngineConfig(model=f"{MODEL},step_seconds={step}")
    await replica_server.start(config, "127.0.0.1")
    return {"engine_pid": replica_server.engine_pid, **replica_server.published()}


async def _router(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run a router of one or several models; return its port and pid. models: name -> published
    data of the model's replica."""
    from deployments.api.app import build_asgi
    from deployments.api.options import ApiOptions
    from deployments.backend import ModelCard
    from deployments.observe.metrics import render
    from deployments.router.dispatcher import Dispatcher
    from deployments.router.live_view import ApplicationView
    from deployments.router.models.model_settings import DispatchLimits
    from deployments.router.models.models_backend import ModelsBackend
    from tests.deployments.fake_backend import tiny_tokenizer

    front = ModelsBackend("router", several=len(models) > 1)
    for name, replica in models.items():
        card = ModelCard(name, 8192, 250, (2,), 0)
        dispatcher = Dispatcher(card, tiny_tokenizer(), DispatchLimits(), "router")
        front.set_dispatcher(name, dispatcher, 0.0)
        dispatcher.set_replicas({"r0": replica})
        while not dispatcher.ready():
            await asyncio.sleep(0.01)

    async def metrics() -> str:
        return render(front.metric_families(), front.only)

    async def others() -> list[dict[str, Any]]:
        return []  # Ray would ask them, and there is none here

    live = ApplicationView(front.live, others).routers
    options = ApiOptions(metrics=metrics, page=True, live=live)
    return {"port": await _serve(build_asgi(front, options))}


async def _null() -> dict[str, Any]:
    """Run the null path, and return its port and pid: an application that sends the same number of
    bytes at the same pace, to all streams in one turn of the event loop."""
    turn = asyncio.get_running_loop().create_future()
    event = b'data: {"id":"chatcmpl-000000000000000000000000","choices":[{"delta":"x"}]}\n\n' * 2

    async def tick() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(STEP)
            turn.set_result(None)
            turn = asyncio.get_running_loop().create_future()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await turn
            await send({"type": "http.response.body", "body": event, "more_body": True})

    _background.append(asyncio.create_task(tick()))
    return {"port": await _serve(app)}


_background: list[Any] = []
_children: dict[int, subprocess.Popen[bytes]] = {}  # by pid
COUNT = "count\n"  # a parent's message to a child: start, or stop, counting function calls
ROLES = {"replica": _replica, "router": _router, "null": _null}


async def _play(role: str, argument: str) -> None:
    facts = await ROLES[role](*([json.loads(argument)] if argument else []))  # type: ignore[operator]
    print(json.dumps(facts), flush=True)
    counter = cProfile.Profile()
    while await asyncio.to_thread(sys.stdin.readline) == COUNT:  # else the parent is gone
        counter.enable()
        await asyncio.to_thread(sys.stdin.readline)
        counter.disable()
        print(sum(entry.callcount for entry in counter.getstats()), flush=True)
        counter.clear()


@contextmanager
def process(role: str, argument: Any = None) -> Iterator[dict[str, Any]]:
    """Run one of ROLES in a separate process; yield the data that it reports, and its pid."""
    command = [sys.executable, "-m", "tests.deployments.path_cost", "--role", role]
    if argument is not None:
        command += ["--argument", json.dumps(argument)]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin and child.stdout
    try:
        line = child.stdout.readline()
        assert line, f"{role} did not start"
        _children[child.pid] = child
        yield {**json.loads(line), "pid": child.pid}
    finally:
        _children.pop(child.pid, None)
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def count_calls(pids: Sequence[int]) -> None:
    """Start counting the function calls of these processes, or stop if they are counting."""
    for pid in pids:
        pipe = _children[pid].stdin
        assert pipe
        pipe.write(COUNT.encode())
        pipe.flush()


def calls_counted(pid: int) -> int:
    """Return the number of function calls of a process during its last count."""
    pipe = _children[pid].stdout
    assert pipe
    return int(pipe.readline())


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, to the nanosecond."""
    total = sum(
        int((task / "schedstat").read_text().split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir()
    )
    return total / 1e9


# -- the client


class _Stream(asyncio.Protocol):
    """A client of one stream. again: whether to send the request again after each answer."""

    def __init__(self, request: bytes, again: bool) -> None:
        self.chunks = self.answers = 0
        self._request, self._again = request, again

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.chunks += data.count(b"data: {")
        if self._again and data.endswith(b"0\r\n\r\n"):
            self.answers += 1
            self.transport.write(self._request)


@dataclass
class Spent:
    """The cost of a load.

    cpu: CPU seconds of each process. tokens: tokens that routers have handed out.
    calls: function calls of each process that counts them.
    """

    cpu: list[float]
    seconds: float
    chunks: int
    answers: int
    tokens: float
    calls: list[int]


def _tokens(ports: list[int]) -> float:
    total = 0.0
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("manta_generation_tokens_total"):
                    total += float(line.rsplit(" ", 1)[1])
    return total


async def spend(
    ports: list[int],
    streams: int,
    seconds: float,
    pids: list[int],
    tokens: int = TOKENS,
    routers: bool = True,
    counting: Sequence[int] = (),
    models: Sequence[str] = ("m",),
) -> Spent:
    """Run streams for some seconds, and return their cost.

    tokens: tokens of a stream; short ones are asked for again and again.
    counting: pids that count their function calls meanwhile, which triples their CPU time.
    models: models that are asked in turn.
    """
    bodies = [
        {
            "model": model,
            "messages": [{"role": "user", "content": "the answer"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        for model in models
    ]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    texts = [json.dumps(body).encode() for body in bodies]
    requests = itertools.cycle([head % len(text) + text for text in texts])
    loop = asyncio.get_running_loop()
    again = tokens < TOKENS
    open_ = [
        (await loop.create_connection(lambda: _Stream(next(requests), again), "127.0.0.1", port))[1]
        for number in range(streams)
        for port in [ports[number % len(ports)]]
    ]
    began = time.monotonic()
    while not all(stream.chunks > 3 for stream in open_):  # of one answer or of several
        assert time.monotonic() < began + 20, "not all streams have begun"
        await asyncio.sleep(0.05)

    async def now() -> list[float]:
        tokens_out = await asyncio.to_thread(_tokens, ports) if routers else 0.0
        chunks, answers = (sum(getattr(s, name) for s in open_) for name in ("chunks", "answers"))
        return [time.monotonic(), chunks, answers, tokens_out, *map(cpu_seconds, pids)]

    before = await now()
    count_calls(counting)
    await asyncio.sleep(seconds)
    count_calls(counting)
    took, chunks, answers, afters, *cpu = (
        after - was for after, was in zip(await now(), before, strict=True)
    )
    for stream in open_:
        stream.transport.abort()
    calls = [await asyncio.to_thread(calls_counted, pid) for pid in counting]
    return Spent(cpu, took, int(chunks), int(answers), afters, calls)


@contextmanager
def pinned(routers: list[int], others: list[int]) -> Iterator[None]:
    """Give the routers one core, and the remaining cores to `others` and this process."""
    cores = os.sched_getaffinity(0)
    first = {min(cores)}

    def pin(pid: int, to: set[int]) -> None:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):  # a thread that has ended
                os.sched_setaffinity(int(task.name), to)

    for pid in routers:
        pin(pid, first)
    for pid in (*others, os.getpid()):
        pin(pid, cores - first or cores)
    try:
        yield
    finally:
        for pid in (*routers, *others, os.getpid()):
            pin(pid, cores)


def core_cost(streams: int, steps: int = 200) -> float:
    """Return the CPU seconds per chunk of the fake engine itself, which do not count as part of the
    path."""
    from engine.config.engine_config import EngineConfig
    from engine.messages import EngineRequest
    from engine.process import fake
    from engine.sampling_params import SamplingParams

    core, _ = fake.build(EngineConfig(model=MODEL))
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for number in range(streams):
        core.add_request(EngineRequest(number, [5] * 20, 20, params, seed=0))
    core.step()
    began = time.thread_time()
    for _ in range(steps):
        core.step()
    return (time.thread_time() - began) / (steps * streams)


def measure(
    streams: int,
    seconds: float,
    rounds: int,
    good: Callable[[dict[str, float]], bool] = lambda _: False,
) -> dict[str, float]:
    """Return microseconds of CPU a chunk by process, and ratios, from the best of `rounds` rounds.

    `ratio` and `engine ratio` are relative to the null path. `stream scale` and `calls` are
    explained above. Other work on the machine only adds to the times, so measuring ends early,
    after two rounds or more, when the result is `good`.
    """
    best: dict[str, float] = {}
    result: dict[str, float] = {}
    with ExitStack() as stack:
        replica = stack.enter_context(process("replica", STEP))
        routers = [stack.enter_context(process("router", {"m": replica})) for _ in range(2)]
        null = stack.enter_context(process("null"))

        def run(ports: list[int], pids: list[int], count: int = streams, **more: Any) -> Spent:
            spent = asyncio.run(spend(ports, count, seconds, pids, **more))
            time.sleep(0.3)  # until the aborted streams have ended
            return spent

        ends = [routers[0]["pid"], replica["pid"]]
        counted = run([routers[0]["port"]], ends, counting=ends)
        calls = [count / counted.chunks for count in counted.calls]
        for number in range(rounds):
            nothing = run([null["port"]], [null["pid"]], routers=False)
            pids = [routers[0]["pid"], replica["pid"], replica["engine_pid"]]
            alone = run([routers[0]["port"]], pids)
            router, replica_server, engine = (cpu / alone.chunks for cpu in alone.cpu)
            ports, pids = [r["port"] for r in routers], [r["pid"] for r in routers]
            two = run(ports, pids, 2 * streams)
            fields = {
                # The null path's chunk is one send of two events.
                "null": 2 * nothing.cpu[0] / nothing.chunks,
                "router": router,
                "router, of two": sum(two.cpu) / two.chunks,
                "replica server": replica_server,
                "engine process": engine,
                "core": core_cost(streams),
            }
            late = max(spent.tokens / spent.chunks for spent in (alone, two))
            for name, cost in fields.items():
                best[name] = min(best.get(name, 1.0), cost)
            engine_side = best["replica server"] + best["engine process"] - best["core"]
            fewest = min(late, result.get("tokens a chunk", late))
            result = {name: round(cost * 1e6, 1) for name, cost in best.items()}
            result["engine side"] = round(engine_side * 1e6, 1)
            result["ratio"] = round(best["router"] / best["null"], 2)
            result["engine ratio"] = round(engine_side / best["null"], 2)
            result["stream scale"] = round(2 * best["router"] / best["router, of two"], 2)
            result["tokens a chunk"] = round(fewest, 2)
            of_router, of_replica = (round(count, 2) for count in calls)
            result |= {"router's calls": of_router, "replica's calls": of_replica}
            if number and good(result):
                break
    return result


def carried(
    streams: int,
    seconds: float,
    rounds: int,
    good: Callable[[dict[str, float]], bool] = lambda _: False,
) -> dict[str, float]:
    """Return the requests per CPU second of a router that has a core to itself.

    `alone`: while no other router works. `beside one`: while another router has as many
    connections. `scale`: twice the second divided by the first. `busy`: the share of its core that
    it used. The best of `rounds` rounds counts.
    """
    best = [0.0, 0.0]
    result: dict[str, float] = {}
    with ExitStack() as stack:
        replica = stack.enter_context(process("replica", 0.0))
        first, second = (stack.enter_context(process("router", {"m": replica})) for _ in range(2))
        others = [replica["pid"], replica["engine_pid"], second["pid"]]
        stack.enter_context(pinned([first["pid"]], others))

        async def beside(loaded: list[dict[str, Any]]) -> Spent:
            """Return the cost of the first router, while all of these have the same load."""
            work = [
                spend([router["port"]], streams, seconds, [router["pid"]], SHORT)
                for router in loaded
            ]
            return (await asyncio.gather(*work))[0]

        for number in range(rounds):
            collected = []
            for count in (1, 2):
                collected.append(asyncio.run(beside([first, second][:count])))
                best[count - 1] = max(best[count - 1], collected[-1].answers / collected[-1].cpu[0])
                time.sleep(0.3)
            result = {"scale": round(2 * best[1] / best[0], 2)}
            result |= {"alone": round(best[0]), "beside one": round(best[1])}
            for name, spent in zip(("", ", beside one"), collected, strict=True):
                result["busy" + name] = round(spent.cpu[0] / spent.seconds, 2)
            if number and good(result):
                break
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of a streamed chunk, by process.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--argument", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        import uvloop

        uvloop.install()
        asyncio.run(_play(options.role, options.argument))
        return
    costs = measure(options.streams, options.seconds, options.rounds)
    for name, value in costs.items():
        bare = name.endswith(("ratio", "scale", "chunk", "calls"))
        print(f"{name:17} {value:6}{'' if bare else ' us of CPU a chunk'}")
    for name, value in carried(32, options.seconds, options.rounds).items():
        print(f"{name:17} {value:6}{' us of CPU' if name.startswith('router') else ''}")


if __name__ == "__main__":
    main()
