"""Measures the CPU time that a refused request costs each process of the cluster.

    python -m tests.faults.refusals

The whole server runs behind HAProxy, with fake engines. Long streams fill all rows, so each further
request is refused. The CPU time of every process of the cluster is measured in alternating periods
of equal length with and without refused requests. CPU time depends less on other work on the
machine than wall time. Each request opens a connection, as in `tests.faults.flood`; with --keep one
connection sends all requests.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.deployments.on_ray.live import Live, live_server
from tests.deployments.on_ray.serve_cluster import tiny_model
from tests.deployments.path_cost import cpu_seconds
from tests.faults.abuse.report import BODY, PATH, Report
from tests.faults.clients import ask, post

ROWS = 2  # rows of each of the two replicas
LONG = {**BODY, "max_tokens": 8000}  # a stream that outlasts the measurement
ROLES = ("haproxy", "router", "replica", "engine", "rest")


def processes(live: Live) -> dict[int, str]:
    """Return pid -> role of each process of the cluster."""
    replicas = live.replica_stats()
    roles = dict.fromkeys(live.router_states(), "router")
    roles |= dict.fromkeys(replicas, "replica")
    roles |= {stats["engine_pid"]: "engine" for stats in replicas.values()}
    children: dict[int, list[int]] = {}
    names = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                name, rest = (entry / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            except OSError:
                continue
            children.setdefault(int(rest.split()[1]), []).append(int(entry.name))
            names[int(entry.name)] = name
    pids = [live.process.pid]
    for pid in pids:
        pids += children.get(pid, ())
    for pid in pids:
        roles.setdefault(pid, "haproxy" if names.get(pid) == "haproxy" else "rest")
    return roles


def spent(roles: dict[int, str]) -> Counter[str]:
    """Return the CPU seconds of each role so far."""
    seconds: Counter[str] = Counter()
    for pid, role in roles.items():
        try:
            seconds[role] += cpu_seconds(pid)
        except OSError:
            continue  # it has ended
    return seconds


async def refused(port: int, count: int, rate: float, keep: bool) -> Counter[int]:
    """Send `count` requests at a mean rate, and return HTTP status -> number of answers."""
    body = {**BODY, "max_tokens": 32, "stream": True}
    request = post(PATH, body)
    if keep:
        request = request.replace(b"Connection: close\r\n", b"")
    statuses: Counter[int] = Counter()
    dice = random.Random(7)
    streams: Any = None

    async def send() -> None:
        nonlocal streams
        reader, writer = streams or await asyncio.open_connection("127.0.0.1", port)
        if keep:
            streams = reader, writer
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split()[1])
        statuses[status] += 1
        if status != 200:
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        if status == 200 or not keep:
            streams = None
            writer.close()

    due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            due += dice.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if keep:
                await send()
            else:
                group.create_task(send())
    return statuses


async def hold_rows(port: int) -> None:
    """Send long streams until one is refused, so that all rows and places in queues are taken."""
    while True:
        await ask(port, LONG)
        await asyncio.sleep(2.0)


async def measure(live: Live, report: Report, options: argparse.Namespace) -> None:
    holders = [asyncio.create_task(hold_rows(live.port)) for _ in range(12 * ROWS)]
    await asyncio.sleep(5.0)
    roles = await asyncio.to_thread(processes, live)
    costs: dict[str, list[float]] = {role: [] for role in ROLES}
    for number in range(options.rounds):
        began, before = time.monotonic(), spent(roles)
        statuses = await refused(live.port, options.requests, options.rate, options.keep)
        seconds, after = time.monotonic() - began, spent(roles)
        assert statuses[200] < 0.02 * options.requests, f"requests were let in: {statuses}"
        await asyncio.sleep(seconds)
        idle = spent(roles)
        line: dict[str, Any] = {"round": number, "seconds": round(seconds, 2)}
        line["refused"] = statuses[429] + statuses[503]
        for role in ROLES:
            cpu = (after[role] - before[role]) - (idle[role] - after[role])
            costs[role].append(1e6 * cpu / statuses.total())
            line[role] = round(costs[role][-1], 1)
        print(line, file=sys.stderr)
        report.lines.append(line)
    for role in ROLES:
        middle = sorted(costs[role])[options.rounds // 2]
        # Differences below zero are noise, which only the single measurements show.
        report.add_row(f"refusals/{role}", max(0.0, middle), "us of CPU a request")
    for holder in holders:
        holder.cancel()


def main() -> int:
    parser = argparse.ArgumentParser("tests.faults.refusals", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=600, help="of each round")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="one connection for all requests")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster is stopped
    report = Report()
    with tempfile.TemporaryDirectory(prefix="manta-refusals-") as name:
        model = tiny_model(Path(name) / "tiny", positions=8192)
        with live_server(model, fake=True, engine={"max_num_seqs": ROWS}) as live:
            asyncio.run(measure(live, report, options))
    config = {name: value for name, value in vars(options).items() if name != "out"}
    return report.finish(options.out, "faults-refusals", **config, routers=2, replicas=2)


if __name__ == "__main__":
    sys.exit(main())
