"""`add-model/itl_p99`: inter-token times of one model while another model is added to the server.

`manta serve` runs one model, to which streams are always open. A round measures the gaps between
the streams' chunks for some seconds, then again while a model is added over HTTP until it is ready,
and removes the model. `ours` is the second p99, `peer` the first. Failed streams are counted and
must be 0. A round takes half a minute.

All processes of the streams (engine, routers, HAProxy, client) are pinned to half of the cores, Ray
and the added model to the other half. On shared cores a start would take time from every other
process, whatever the server does. Both threads of a core are in the same half. With fewer than four
cores nothing is pinned, because one core is too few for the streams.

`longest` lists the longest gaps while the model was added: seconds since the request, and
milliseconds. MANTA_TEST_MODEL is the default model's file, for machines that cannot download it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.report.result_file import Line

STREAMS = 4
BEFORE_S = 10.0
READY_S = 180.0
KEY = "key-of-the-measurement-0123456789"
MODEL = {
    "model": os.environ.get("MANTA_TEST_MODEL", "default"),
    "pools": {"cpu": {"num_cpus": 0.5}},
    "engine": {"max_num_seqs": 8},
}


class Streams:
    """Threads that stream answers of model `one` until they are stopped.

    gaps: (time, seconds) of each gap between two chunks of a stream. failed: errors."""

    def __init__(self, port: int) -> None:
        self.gaps: list[tuple[float, float]] = []
        self.failed: list[str] = []
        self._port = port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._one()
            except (OSError, ValueError) as error:
                self.failed.append(repr(error))
                time.sleep(0.5)

    def _one(self) -> None:
        body = {"model": "one", "prompt": "The sea", "max_tokens": 1000, "ignore_eos": True}
        last, ended = 0.0, False
        with _ask(self._port, "POST", "/v1/completions", {**body, "stream": True}) as answer:
            for line in answer:
                if self._stop.is_set():
                    return
                if line.startswith(b"data: {"):
                    if b'"error"' in line and "error" in json.loads(line[6:]):
                        raise ValueError(line.decode())
                    now = time.monotonic()
                    if last:
                        self.gaps.append((now, now - last))
                    last = now
                ended |= line.startswith(b"data: [DONE]")
        if not ended:
            raise ValueError("the stream was cut")

    def p99(self, began: float, ended: float) -> tuple[float, int]:
        """Return the p99 of the gaps in milliseconds, and the number of gaps."""
        gaps = sorted(gap for when, gap in list(self.gaps) if began < when <= ended)
        if not gaps:
            raise SystemExit(f"no token came in {ended - began:.0f} s: {self.failed[-3:]}")
        return round(gaps[int(0.99 * len(gaps))] * 1e3, 2), len(gaps)

    def longest(self, began: float, ended: float) -> list[list[float]]:
        """Return (seconds since began, milliseconds) of the five longest gaps."""
        gaps = sorted((gap, when) for when, gap in list(self.gaps) if began < when <= ended)
        return [[round(when - began, 2), round(gap * 1e3, 1)] for gap, when in gaps[-5:]]

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)


def _ask(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers, method=method)
    return urllib.request.urlopen(request, timeout=60)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, int]]:
    """Run `manta serve` with one model, to which others can be added; yield its port and pid."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = folder / "admins"
    keys.touch(0o600)
    keys.write_text(KEY + "\n")
    config = {
        "models": {"one": MODEL},
        "router": {"replicas": 1},
        "http": {"port": port, "admin_keys_file": str(keys)},
    }
    path = folder / "manta.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "deployments.cli.main", "serve", str(path)]
    process = subprocess.Popen(
        [*command, "--address", "local"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        output, began = "", time.monotonic()
        while "Serving" not in output:
            line = process.stdout.readline()
            if not line or time.monotonic() - began > READY_S:
                raise SystemExit(f"the server did not start:\n{output}")
            output += line
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield port, process.pid
    finally:
        for _ in range(2):  # a second SIGTERM ends the server's wait for streams
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


# Parts of command lines by which the streams' processes are recognised: actors of engines and
# routers; HAProxy and the actor that restarts it; Serve's proxy if there is no HAProxy.
_STREAM = (b"ray::servereplica", b"haproxy", b"ray::proxyactor")


def _half(cores: list[int]) -> set[int]:
    """Return the logical cores of half of the physical cores."""
    whole: dict[str, list[int]] = {}
    for core in cores:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        whole.setdefault(path.read_text() if path.exists() else str(core), []).append(core)
    first = list(whole.values())[: len(whole) // 2]
    return {core for threads in first for core in threads}


def _pin(server: int) -> int:
    """Pin the streams' processes to half of the cores, the server's other processes to the rest.

    Processes that the server starts later inherit the other half. Returns the number of cores in a
    half, or 0 if nothing was pinned.
    """
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    half = _half(sorted(os.sched_getaffinity(0)))
    others = os.sched_getaffinity(0) - half
    if len(half) < 2:
        return 0

    def pin(pid: int, streams: bool) -> None:
        with suppress(OSError):  # the process has ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().lower()
            streams |= any(name in command for name in _STREAM)
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), half if streams else others)
        for child in children.get(pid, ()):
            pin(child, streams)

    pin(server, False)
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), half)
    return len(half)


def _wait(port: int, status: str | None) -> None:
    """Wait until the added model has this status; None: until it is removed."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            with _ask(port, "GET", "/v1/models/two") as answer:
                model_status = json.load(answer)["status"]
        except urllib.error.HTTPError as error:
            model_status = None if error.code == 404 else str(error)
        if model_status == status:
            return
        time.sleep(0.2)
    raise SystemExit(f"the added model is not {status or 'gone'} after {READY_S:.0f} s")


def lines(rounds: int) -> Iterator[Line]:
    """Yield a line for each round."""
    with tempfile.TemporaryDirectory(prefix="op") as text, serving(Path(text)) as (port, server):
        pinned = _pin(server)
        streams = Streams(port)
        time.sleep(BEFORE_S / 2)
        for _ in range(rounds):
            failed, began = len(streams.failed), time.monotonic()
            time.sleep(BEFORE_S)
            before, count = streams.p99(began, time.monotonic())
            began = time.monotonic()
            _ask(port, "POST", "/v1/models", {"name": "two", **MODEL}).close()
            _wait(port, "ready")
            ready = time.monotonic() - began
            ended = time.monotonic()
            adding, meanwhile = streams.p99(began, ended)
            _ask(port, "DELETE", "/v1/models/two").close()
            _wait(port, None)
            time.sleep(BEFORE_S / 2)
            yield {
                "case": "add-model/itl_p99",
                "before_ms": before,
                "adding_ms": adding,
                "gaps": [count, meanwhile],
                "ready_s": round(ready, 1),
                "longest": streams.longest(began, ended),
                "failed": len(streams.failed) - failed,
                "pinned": pinned,
            }
        streams.stop()


def rows(lines: list[Line]) -> list[Line]:
    ours, peer = (min(line[name] for line in lines) for name in ("adding_ms", "before_ms"))
    ratio = round(ours / peer, 3)
    failed = sum(line["failed"] for line in lines)
    return [
        {"case": "add-model/itl_p99", "ours": ours, "peer": peer, "unit": "ms", "ratio": ratio},
        {"case": "add-model/failed", "ours": failed, "peer": 0, "unit": "streams", "ratio": ""},
    ]
