"""F19, F20 and F22 in full: clients that leave, clients that do not read, and far too many of them.

    python -m tests.faults.abuse

Real sockets, haproxy, two routers and two replicas whose engines count instead of thinking. First
10,000 connections that break at random moments; then 100 readers that take a byte a second, beside
8 streams whose gaps are compared with those alone and beside 100 readers that take all; then, where
16 requests run at once, a minute of ten times the load, from two keys with two priorities each.

Memory, tasks, threads, open files, blocks and entries are counted before and after. Writes
loadtest/results/faults-abuse-<date>.json (the figures, with their bounds) and .jsonl (what came of
each request of the overload; memory over the disconnects; the readers). Exit status 1 if a figure
is out of its bounds.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.result_file import write
from tests.deployments.live import NAME, Live, grown, holdings, live_server, quiet, resident_mib
from tests.deployments.serve_cluster import tiny_model
from tests.faults.clients import Said, ask, post

RESULTS = Path(__file__).parents[2] / "loadtest" / "results"
PATH = "/v1/completions"
BODY = {"model": NAME, "prompt": "the answer to this question", "ignore_eos": True}
STEP = 0.02  # seconds, of the engines
TTFT = 2.0  # seconds, as promised: scaling.ttft
WAIT = 8.0  # the same in an overload: twice limits.queue_seconds


@dataclass
class Report:
    """rows: figures, as in a result file; each may have a bound. lines: what they come from."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: str, value: float, unit: str, **bound: float) -> None:
        """bound: `most` or `least`."""
        self.rows.append({"case": case, "value": round(value, 4), "unit": unit, **bound})

    def value(self, case: str) -> float:
        return next(row["value"] for row in self.rows if row["case"] == case)

    def wrong(self) -> list[str]:
        return [
            f"{row['case']}: {row['value']} {row['unit']}"
            for row in self.rows
            if row["value"] > row.get("most", float("inf")) or row["value"] < row.get("least", 0)
        ]


async def ended(live: Live, seconds: float = 30.0) -> float:
    """Wait until nothing is in flight; how long it took."""
    began = time.monotonic()
    while not await asyncio.to_thread(quiet, live):
        assert time.monotonic() < began + seconds, "something is held"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def resident(live: Live) -> dict[str, float]:
    """MiB of each process."""
    pids = {f"router {pid}": pid for pid in live.router_states()}
    for pid, stats in live.replica_stats().items():
        pids |= {f"replica {pid}": pid, f"engine of {pid}": stats["engine_pid"]}
    return {name: resident_mib(pid) for name, pid in pids.items()}


def counted(live: Live, name: str) -> float:
    """A metric without labels, of all routers."""
    return sum(float(state["metrics"][name]) for state in live.router_states().values())


@asynccontextmanager
async def leaves_nothing(
    live: Live, report: Report, case: str, at_once: int
) -> AsyncIterator[None]:
    """Count before and after."""
    await ended(live)
    await asyncio.to_thread(live.find_routers)
    before, mib = await asyncio.to_thread(holdings, live), await asyncio.to_thread(resident, live)
    yield
    report.add(f"{case}/quiet after", await ended(live), "s")
    more = await asyncio.to_thread(grown, live, before, at_once)
    for what in more:
        print(f"{case}: left behind: {what}", file=sys.stderr)
    report.add(f"{case}/kinds of things left behind", len(more), "", most=0)
    after = await asyncio.to_thread(resident, live)
    growth = max(after[name] - mib[name] for name in mib)
    most = 20 if case == "F19" else 64  # what streams had in buffers leaves gaps in the heap
    report.add(f"{case}/growth of a process at most", growth, "MiB", most=most)


# -- F19: clients that leave


async def disconnects(live: Live, report: Report, count: int, at_once: int, header: str) -> None:
    """Connections that end before the body, before the head of the answer, in mid-stream or at the
    end, with a FIN or a reset."""
    order = random.Random(19)
    moments: Counter[str] = Counter()

    async def leave() -> None:
        body = {**BODY, "max_tokens": 20, "n": order.choice([1, 1, 2])}
        body["stream"] = order.random() < 0.7
        data = post(PATH, body, header)
        moment = "before the body"
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(order.random() * 30 * STEP):
                if order.random() < 0.1:
                    writer.write(data[: -order.randrange(1, 60)])
                    await asyncio.sleep(1)
                writer.write(data)
                moment = "before the answer"
                await reader.readuntil(b"\r\n\r\n")
                moment = "in the answer"
                await reader.read(-1)
                moment = "at its end"
        moments[moment] += 1
        if order.random() < 0.5:  # a reset: what is unsent is thrown away
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def crowd(count: int) -> None:
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                await leave()

        await asyncio.gather(*(client() for _ in range(at_once)))

    await crowd(max(count // 10, 2 * at_once))  # lazy imports, buffers, haproxy's connections
    moments.clear()
    async with leaves_nothing(live, report, "F19", at_once):
        for part in range(10):
            await crowd(count // 10)
            mib = await asyncio.to_thread(resident, live)
            line = {
                "kind": "disconnects",
                "count": (part + 1) * count // 10,
                "moments": {**moments},
            }
            report.lines.append({**line, "mib": {k: round(v, 1) for k, v in mib.items()}})
        await ended(live)
    report.add("F19/disconnects", sum(moments.values()), "", least=count)
    for moment, times in moments.items():
        report.add(f"F19/{moment}", times, "")


async def freed(live: Live, report: Report, count: int, header: str) -> None:
    """So many long streams break at once: how long their rows and blocks are held."""
    data = post(PATH, {**BODY, "max_tokens": 200, "stream": True}, header)
    pairs = [await asyncio.open_connection("127.0.0.1", live.port) for _ in range(count)]
    for reader, writer in pairs:
        writer.write(data)
        await reader.readuntil(b"\n\n")
    for _, writer in pairs:
        writer.transport.abort()
    report.add("F19/all blocks free after", await ended(live), "s", most=1.0)


# -- F20: readers that do not read


class Gaps:
    """Streams that are read as they come, and the pauses in them."""

    def __init__(self, live: Live, count: int, header: str) -> None:
        self._live, self._count, self._header = live, count, header

    async def during(self, seconds: float) -> list[float]:
        """Sorted, seconds."""
        end = time.monotonic() + seconds
        found: list[float] = []
        tokens = min(100, int(seconds / STEP))
        body = post(PATH, {**BODY, "max_tokens": tokens, "stream": True}, self._header)

        async def reader() -> None:
            while time.monotonic() < end:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._live.port)
                writer.write(body)
                times: list[float] = []
                while not (line := await reader.readline()).startswith(b"data: [DONE]"):
                    assert line, "a stream was cut"
                    if line.startswith(b"data: "):
                        times.append(time.monotonic())
                writer.close()
                # What came with one another is one arrival.
                found.extend(b - a for a, b in itertools.pairwise(times) if b - a > 1e-4)

        await asyncio.gather(*(reader() for _ in range(self._count)))
        return sorted(found)


def p(values: Sequence[float], share: float) -> float:
    """Of a sorted list."""
    return values[min(len(values) - 1, int(share * len(values)))]


async def slow_readers(
    live: Live, report: Report, count: int, seconds: float, header: str, *, streams: int = 8
) -> None:
    """Gaps of some streams alone, beside readers that take all that comes, and beside as many that
    take a byte a second: while what they leave piles up, and then."""
    gaps = Gaps(live, streams, header)
    # Log-probabilities, so that it is soon more than sockets hold.
    body = post(PATH, {**BODY, "max_tokens": 6000, "stream": True, "logprobs": 5}, header)
    loop = asyncio.get_running_loop()

    async def read(number: int, wait: float, amount: int) -> None:
        """Half of them by haproxy, half as they would by another edge."""
        ports = [*live.routers.values(), *[live.port] * len(live.routers)]
        with socket.socket() as sock:
            sock.setblocking(False)
            if wait:
                # As over a network; on loopback a segment is 64 KiB and buffers hold twenty.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
            with suppress(ConnectionError):
                await loop.sock_connect(sock, ("127.0.0.1", ports[number % len(ports)]))
                await loop.sock_sendall(sock, body)
                while await loop.sock_recv(sock, amount):
                    await asyncio.sleep(wait)

    async def held() -> float:
        states = await asyncio.to_thread(live.router_states)
        return sum(state["held"]["http"] for state in states.values())

    async def watch(began: float, over: asyncio.Event) -> None:
        while not over.is_set():
            mib = await asyncio.to_thread(resident, live)
            line = {"kind": "slow readers", "at_s": round(time.monotonic() - began, 1)}
            line |= {"streams": await held(), "mib": {k: round(v, 1) for k, v in mib.items()}}
            report.lines.append(line)
            await asyncio.sleep(1)

    async def beside(wait: float, amount: int, times: int) -> list[list[float]]:
        tasks = [asyncio.create_task(read(number, wait, amount)) for number in range(count)]
        try:
            return [await gaps.during(seconds) for _ in range(times)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async with leaves_nothing(live, report, "F20", count + streams):
        paused = await asyncio.to_thread(counted, live, "paused")
        alone = await gaps.during(seconds)
        (quick,) = await beside(0, 65536, 1)
        await ended(live)
        over = asyncio.Event()
        watcher = asyncio.create_task(watch(time.monotonic(), over))
        first, then = await beside(1.0, 1, 2)
        over.set()
        await watcher
        again = await gaps.during(seconds)
        paused = await asyncio.to_thread(counted, live, "paused") - paused
    for name, values in (
        ("alone", alone),
        ("beside quick readers", quick),
        ("beside slow readers, at first", first),
        ("beside slow readers, then", then),
        ("alone again", again),
    ):
        report.add(f"F20/gap p50 {name}", 1e3 * p(values, 0.5), "ms")
        report.add(f"F20/gap p99 {name}", 1e3 * p(values, 0.99), "ms")
        report.add(f"F20/longest gap {name}", 1e3 * values[-1], "ms")
    report.add(
        "F20/p99 beside slow readers, of beside quick ones", p(first, 0.99) / p(quick, 0.99), "x"
    )
    report.add("F20/p99 then, of alone", p(then, 0.99) / p(alone, 0.99), "x")
    watched = [line for line in report.lines if line["kind"] == "slow readers"]
    report.add("F20/slow readers", count, "")
    report.add("F20/streams at once at most", max(line["streams"] for line in watched), "")
    report.add("F20/times that one paused", paused, "")
    last = [line["at_s"] for line in watched if line["streams"] > streams]
    report.add(
        "F20/last slow reader cut off after", max(last, default=0.0), "s", most=1.95 * seconds
    )


# -- F22: too many


@dataclass
class Asked:
    """One request. at, seconds: when it came, and until all of its answer was there."""

    at: float
    key: int
    priority: int
    said: Said
    seconds: float

    @property
    def first(self) -> float:
        """Seconds to the first event."""
        return self.said.first - self.at

    @property
    def good(self) -> bool:
        """Whole, and if it was urgent in time."""
        in_time = self.priority or self.first <= WAIT
        return bool(self.said.status == 200 and not self.said.error and in_time)

    @property
    def code(self) -> str:
        """Of a refusal."""
        _, _, body = self.said.error.partition(": ")
        return str(json.loads(body)["error"]["code"])

    def line(self, phase: str, began: float) -> dict[str, Any]:
        line: dict[str, Any] = {"kind": phase, "at_s": round(self.at - began, 2)}
        line |= {"key": self.key, "priority": self.priority, "status": self.said.status}
        line |= {"s": round(self.seconds, 4)}
        if self.said.status == 200:
            return line | {"first_s": round(self.first, 3)}
        return line | {"retry_after": self.said.headers.get("retry-after")}


SENT = (0.8, 0.2)  # by each key
PRIORITIES = (0, 2)  # half of it each; the higher number is the less urgent


async def overload(
    live: Live, report: Report, rows: int, seconds: float, headers: Sequence[str]
) -> None:
    """rows: that run at once, of all replicas. headers: one that says whose a request is, each.

    The load goes on from phase to phase, whatever comes of it. Answers are counted by the step of
    the engines, because clients, routers and engines share cores, which a busy machine shares with
    others."""
    order = random.Random(22)
    output = 80  # tokens
    capacity = rows / (output * STEP)  # requests a second, if steps took no longer
    asked: dict[str, list[Asked]] = {}
    windows: dict[str, tuple[float, float, int]] = {}  # from, to, steps

    async def one(phase: str) -> None:
        key = order.random() >= SENT[0]
        priority = order.choice(PRIORITIES)
        body = {**BODY, "max_tokens": output, "priority": priority}
        at = time.monotonic()
        said = await ask(live.port, body, header=headers[key])
        item = Asked(at, int(key), priority, said, time.monotonic() - at)
        asked.setdefault(phase, []).append(item)

    async def steps() -> tuple[float, int]:
        stats = await asyncio.to_thread(live.replica_stats)
        return time.monotonic(), sum(item["step"] for item in stats.values())

    async def window(phase: str, seconds: float) -> None:
        await asyncio.sleep(0.25 * seconds)  # until its queue is what it will be
        began, before = await steps()
        seen = [(began, before)]
        while seen[-1][0] < began + 0.7 * seconds:
            await asyncio.sleep(STEP)
            seen.append(await steps())
        # Answers end in rounds, and of two seconds and a half one may hold one round or two.
        a_round = output * len(live.replica_stats())
        whole = (seen[-1][1] - before) // a_round * a_round
        end, after = next(item for item in seen if item[1] >= before + whole)
        windows[phase] = (began, end, after - before)

    phases = (
        ("learn", 1.5, max(2.0, seconds / 10)),  # how quick the engines are
        ("1.5 times", 1.5, max(5.0, seconds / 3)),
        ("10 times", 10.0, seconds),
        ("after", 0.5, 6.0),
    )
    async with leaves_nothing(live, report, "F22", 20 * rows):
        began = due = time.monotonic()
        end: dict[str, float] = {}
        async with asyncio.TaskGroup() as group:
            for phase, times, lasts in phases:
                end[phase] = due + lasts
                group.create_task(window(phase, lasts))
                while due < end[phase]:
                    group.create_task(one(phase))
                    due += order.expovariate(times * capacity)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                if phase == "10 times":
                    largest = max((await asyncio.to_thread(resident, live)).values())
    for phase, items in asked.items():
        report.lines += [item.line(phase, began) for item in items]

    everything = [item for items in asked.values() for item in items]

    def good(phase: str) -> float:
        """Answers a step."""
        since, until, count = windows[phase]
        return sum(item.good and since <= item.at + item.seconds < until for item in everything) / (
            count
        )

    flood = asked["10 times"]
    refused = [item for item in flood if item.said.status in (429, 503)]
    served = [item for item in flood if item.said.status == 200]
    lost = [item.said.error for item in flood if item.said.status not in (200, 429, 503)]
    for error, times in Counter(lost).items():
        print(f"F22: {times} times: {error}", file=sys.stderr)
    late = sorted(item.seconds for item in refused)
    waits = [int(item.said.headers.get("retry-after") or 0) for item in refused]
    codes = Counter(item.code for item in refused)
    assert set(codes) <= {"overloaded", "rate_limit_exceeded"}, codes
    report.add("F22/requests", len(flood), "")
    report.add("F22/refused", len(refused) / len(flood), "share", least=0.7)
    report.add("F22/neither an answer nor a refusal", len(lost), "", most=0)
    for code, times in codes.items():
        report.add(f"F22/{code}", times, "")
    report.add("F22/refused after, p50", 1e3 * p(late, 0.5), "ms")
    report.add("F22/refused after, p99", 1e3 * p(late, 0.99), "ms", most=50)
    report.add("F22/Retry-After, least", min(waits), "s", least=1)
    report.add("F22/Retry-After, different ones", len(set(waits)), "", least=2)
    report.add("F22/broken answers", sum(bool(item.said.error) for item in served), "", most=0)
    ratio = good("10 times") / good("1.5 times")
    report.add("F22/good answers a step, of those at 1.5 times", ratio, "x", least=0.9)
    of_all = good("10 times") / (rows / output / len(live.replica_stats()))
    report.add("F22/good answers a step, of all that fit", of_all, "x")
    let_in = []
    for number, priority in enumerate(PRIORITIES):
        mine = [item for item in flood if item.priority == priority]
        first = sorted(item.first for item in mine if item.said.status == 200)
        let_in.append(len(first) / len(mine))
        report.add(f"F22/priority {priority}, let in", let_in[-1], "share")
        if not first:
            continue  # refused to the last, as the less urgent may be
        report.add(f"F22/priority {priority}, first token p50", p(first, 0.5), "s")
        bound = {} if number else {"most": WAIT}
        report.add(f"F22/priority {priority}, first token p99", p(first, 0.99), "s", **bound)
    ratio = let_in[0] / max(let_in[1], 1e-3)
    report.add("F22/let in, urgent of others", ratio, "x", least=1.0)
    share = sum(item.key for item in served) / len(served)
    report.add("F22/served, share of the key that sends a fifth", share, "share", least=0.35)
    slow = [item for item in asked["after"] if item.said.status != 200 or item.first > TTFT]
    back = max((item.at for item in slow), default=end["10 times"]) - end["10 times"]
    report.add("F22/as usual after", back, "s", most=5)
    report.add("F22/largest process at its end", largest, "MiB")


# -- all of it

ROWS = 64  # of an engine, for what leaves and what does not read
FEW = 8  # for the overload: what two cores' clients can flood


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disconnects", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=100)
    parser.add_argument("--reader-seconds", type=float, default=25.0, help="of each of five parts")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster is stopped
    report = Report()
    with tempfile.TemporaryDirectory(prefix="manta-abuse-") as name:
        model = tiny_model(Path(name) / "tiny", positions=8192)
        keys = Path(name) / "keys"
        keys.write_text("one\ntwo\n")
        keys.chmod(0o600)
        headers = ["Authorization: Bearer one", "Authorization: Bearer two"]
        http = {"proxy": "haproxy", "api_keys_file": str(keys)}

        async def patience(live: Live) -> None:
            await disconnects(live, report, options.disconnects, 100, headers[0])
            await freed(live, report, 40, headers[0])
            await slow_readers(live, report, options.readers, options.reader_seconds, headers[0])

        with live_server(model, fake=True, http=http, engine={"max_num_seqs": ROWS}) as live:
            asyncio.run(patience(live))
        with live_server(model, fake=True, http=http, engine={"max_num_seqs": FEW}) as live:
            asyncio.run(overload(live, report, 2 * FEW, options.overload_seconds, headers))
    wrong = report.wrong()
    config = {
        "routers": 2,
        "replicas": 2,
        "engine": f"counts, {STEP} s a step, {ROWS} rows, {FEW} for F22",
        "edge": "haproxy",
        "reader_seconds": options.reader_seconds,
        "overload_seconds": options.overload_seconds,
        "load_average": round(os.getloadavg()[1], 1),
        "verdict": wrong,
    }
    write(options.out, "faults-abuse", config, report.rows, report.lines)
    for row in report.rows:
        print(f"{row['case']:52} {row['value']:10} {row['unit']}")
    print("; ".join(wrong) or "as it must be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
