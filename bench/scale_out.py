"""The throughput of one, two and four replicas, and the time until a new replica answers.

The engine replicas run behind one server's routers. Rows compare throughput with the multiple of
one replica's throughput, and the time from a scaling decision to the new replica's first answer
with the target.

    python -m bench.scale_out --model FOLDER --name llama-8b --replicas 1 2 4 --out bench/results

It needs as many GPUs as replicas; --cpu tries it without GPUs. FOLDER is as for bench.versus.http,
and `manta loadtest` sends the load. The server runs throughout. Each step deploys a higher count,
as `serve deploy` does, while single requests arrive. The new replica's first answer is timed from
the scaling decision. Then the first requests of the `dialogue` workload are sent, with the same
number of streams per replica. Each request is sent once per replica, each time with a different
prompt.

Later requests of the workload are not sent, because their lengths are by chance a few per cent
longer or shorter, and throughput depends on lengths. Dividing by the mean length does not correct
this, because the end of a run depends on the longest request. Prompts differ, so that no router
prefers a replica for equal prompts. Each client process gets the same lengths as a client process
of a single replica.

Each line is saved immediately, with its time `at_s` in the run. --resume continues from the day's
lines in --out with the missing counts, for environments that limit a command's duration.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, RawLines, print_ratios, ratio_row, versions
from bench.versus.engine import MAX_MODEL_LEN, MAX_NUM_SEQS, MEMORY_FRACTION
from bench.versus.http import LOAD_S, READY_S, closed, load

ROUTERS = 4  # routers per replica of the largest measured fleet
FIRST_ANSWER_S = 15.0  # target in seconds
SCALES = 0.95


def configuration(args: argparse.Namespace, replicas: int) -> dict[str, Any]:
    """Return the server's configuration in the form of manta.yaml."""
    engine: dict[str, Any] = {"load_format": "dummy", "prefix_caching": False}
    if args.cpu:
        engine |= {"max_model_len": 2048, "max_num_seqs": args.streams, "num_blocks": 1024}
        pool = {"cpu": {"replicas": replicas, "num_cpus": 1, "engine": {"num_threads": 1}}}
    else:
        engine |= {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
        engine |= {"max_num_seqs": MAX_NUM_SEQS, "memory_fraction": MEMORY_FRACTION}
        pool = {"gpu": {"replicas": replicas}}
    return {
        "model": args.model,
        "served_name": "m",
        "engine": engine,
        "pools": pool,
        "limits": {"queue_seconds": LOAD_S},
        "router": {"replicas": 2 if args.cpu else ROUTERS * max(args.replicas)},
        "http": {"port": args.port},
    }


class Server:
    """A server in this process's own Ray cluster, which starts with `replicas` replicas.

    configure: returns the configuration, in the form of manta.yaml, for a number of replicas.
    """

    def __init__(self, configure: Callable[[int], dict[str, Any]], replicas: int = 1) -> None:
        from deployments.cli.serving.cluster import Cluster
        from deployments.config.load import parse_config

        self.configure = configure
        self.replicas = replicas
        self.url = f"http://127.0.0.1:{configure(replicas)['http']['port']}"
        self._parse = parse_config
        self._cluster = Cluster("local")

    def __enter__(self) -> "Server":
        from deployments.app import proxy

        config = self._parse(self.configure(self.replicas))
        self.edge = proxy(config)
        try:
            self._cluster.start(config)
            self.deploy(self.replicas)
            limit = time.monotonic() + READY_S
            while self._get("/ready") is None:
                if time.monotonic() > limit:
                    raise SystemExit(f"not ready within {READY_S} s")
                time.sleep(0.1)
        except BaseException:
            self._cluster.close(config.app_name)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close("manta")

    def deploy(self, replicas: int) -> None:
        from deployments.app import deploy, serve_config

        deploy(serve_config(self.configure(replicas)))

    def answered(self) -> dict[str, float]:
        """Return {replica: output tokens}, from the metrics of one router."""
        text = self._get("/metrics") or ""
        lines = {}
        for line in text.splitlines():
            if line.startswith("manta_engine_generation_tokens_total{"):
                name = line.split('replica="')[1].split('"')[0]
                lines[name] = float(line.rsplit(" ", 1)[1])
        return lines

    def ask(self) -> None:
        """Request one token with a unique prompt."""
        body = {"model": "m", "prompt": [time.monotonic_ns() % 9973 + 16] * 8, "max_tokens": 1}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return None


def grow(server: Server, have: int, replicas: int) -> dict[str, Any]:
    """Deploy more replicas, and time each new replica's first answer from the decision, in
    seconds.
    """
    # After a start a router may not yet know all replicas. A replica that appears in its metrics
    # later would count as new, although it has answered before.
    old: set[str] = set()
    limit = time.monotonic() + READY_S
    while len(old := old | server.answered().keys()) < have:
        if time.monotonic() > limit:
            raise SystemExit(f"of {have} replicas {len(old)} are in /metrics after {READY_S} s")
        time.sleep(0.05)
    stop, failed = threading.Event(), list[str]()

    def client() -> None:
        while not stop.wait(0.02):
            try:
                server.ask()
            except (urllib.error.URLError, OSError) as error:
                failed.append(str(error))

    clients = [threading.Thread(target=client) for _ in range(4)]
    for process in clients:
        process.start()
    times: dict[str, float] = {}
    began = time.monotonic()
    try:
        server.deploy(replicas)
        while len(times) < replicas - have and time.monotonic() < began + READY_S:
            time.sleep(0.05)
            for name, tokens in server.answered().items():
                if tokens and name not in old:
                    times.setdefault(name, round(time.monotonic() - began, 2))
    finally:
        stop.set()
        for process in clients:
            process.join()
    return {"label": "grow", "to": replicas, "first_answers_s": [*times.values()], "failed": failed}


def measure(args: argparse.Namespace, url: str, replicas: int, share: float = 1.0) -> Line:
    """Run the load and return its result line. share: the share of the requests to send."""
    clients = min(args.streams, 1 if args.cpu else 8)
    line = load(
        url,
        f"{replicas} replicas",
        "dialogue",
        arrivals=closed(args.streams * replicas),
        count=max(1, int(args.count * share)),
        clients=clients * replicas,
        copies=replicas,
    )
    return {**line, "replicas": replicas}


def missing(counts: list[int], lines: list[Line]) -> list[int]:
    """Return the replica counts whose throughput is not yet among the lines, in order."""
    done = {line["replicas"] for line in lines if "out_tok_s" in line}
    return [count for count in counts if count not in done]


def whole(lines: list[Line]) -> list[Line]:
    """Return the lines without those of a scale-up whose throughput was not measured.

    Such a scale-up is repeated.
    """
    done = {line["replicas"] for line in lines if "out_tok_s" in line}
    return [line for line in lines if line["label"] != "grow" or line["to"] in done]


def rows_of(name: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute rows <name>/<replicas>: tokens/s against the number of replicas times one replica's.

    Further rows have the longest time to a first answer against the target.
    """
    rows: list[dict[str, Any]] = []

    def add_row(case: str, ours: float, peer: float, unit: str) -> None:
        rows.append(ratio_row(case, ours, peer, unit))

    rates = {line["replicas"]: line["out_tok_s"] for line in lines if "out_tok_s" in line}
    for replicas, rate in rates.items():
        if replicas > 1 and 1 in rates:
            add_row(f"{name}/{replicas}", rate, round(replicas * rates[1], 1), "tok/s")
    for line in lines:
        if line["label"] == "grow" and line["first_answers_s"]:
            case = f"{name}/{line['to']}/first_answer"
            add_row(case, max(line["first_answers_s"]), FIRST_ANSWER_S, "s")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder with config.json and a tokenizer")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, default=128, help="at once, for each replica")
    parser.add_argument("--count", type=int, default=256, help="requests for each replica")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--cpu", action="store_true", help="a pool of CPU replicas, one core each")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    args.replicas.sort()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    raw = RawLines(args.out, f"scale-out-{args.name}", whole if args.resume else None)
    began = time.monotonic()

    def keep(line: Line) -> None:
        raw.keep({**line, "at_s": round(time.monotonic() - began, 1)})

    if counts := missing(args.replicas, raw.all):
        # Start with the next smaller count, so that the scale-up can be timed.
        have = max((count for count in args.replicas if count < counts[0]), default=counts[0])
        with tempfile.TemporaryDirectory(prefix="so") as folder:
            os.environ["TMPDIR"] = folder  # a short path, because haproxy puts sockets in it
            with Server(partial(configuration, args), have) as server:
                keep({"label": "start", "replicas_at_start": have, "edge": server.edge})
                for replicas in counts:
                    if replicas > have:
                        keep(grow(server, have, replicas))
                        have = replicas
                    warm = measure(args, server.url, replicas, 0.25)
                    keep({"label": "warm", "failed": warm["failed"]})
                    keep(measure(args, server.url, replicas))
    rows = rows_of(args.name, raw.all)
    config = {
        "ours": {**configuration(args, max(args.replicas)), "model": args.name},
        "peers": {"so many times one replica": {}},
        "load": f"dialogue, by manta loadtest: {args.streams} streams and {args.count} requests a "
        "replica, of the same lengths for each",
        "versions": versions("transformers", "ray"),
    }
    raw.finish(config, rows, _device(args.cpu))
    print_ratios(rows)
    scaled = all(
        row["ratio"] >= SCALES if row["unit"] == "tok/s" else row["ratio"] <= 1 for row in rows
    )
    return int(not scaled or any(line.get("failed") for line in raw.all))


def _device(cpu: bool) -> str:
    if cpu:
        return f"{os.cpu_count()} CPU cores"
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


if __name__ == "__main__":
    sys.exit(main())
