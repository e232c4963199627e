"""A real fleet of GPU and CPU replicas on one machine, against the simulator's prediction.

A pool `gpu` and a pool `cpu`, both of 0 to 2 replicas, serve one model name on their own Ray
cluster. The load tester replays a day's trace, compressed to some minutes, through HTTP: a diurnal
curve with bursts.

    python -m bench.fleet --rate 150 --gpu-set max_num_seqs=8       # a GPU and 16 cores
    python -m bench.fleet --gpu-device cpu --minutes 1 --rate 3     # to try it without a GPU

Ray Serve's router (`two-choices`) is left out: requests reach engines over Manta's own channels,
and no option chooses another policy. Texts are compared with those of the quiet fleet before the
load. A replica costs money from the decision to start it until its end. `manta plan --trace`
predicts the trace with step costs and start times fitted to the runs. The prediction does not
include --kills, which kills a replica of each pool and a router. All processes of a configuration
are ended after it, or when its time is over.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.fleet.predict import cost, predict
from bench.fleet.server import MAXIMUM, POOLS, Watch, configuration, kills
from bench.fleet.trace import SHAPES, scenario, trace_of
from bench.report.result_file import Line, print_ratios, ratio_row, versions
from bench.versus.engine import engine_fields
from bench.versus.harness import Harness, Piece, lines_of

_AROUND_S = 420  # seconds of a configuration besides the load: starts, reference texts, emptying
_EMPTY_S = 90  # seconds for the pools to become empty


def run_here(args: argparse.Namespace, name: str, folder: Path) -> Line:
    """Serve a configuration in this process's Ray, replay the day, and return the result line."""
    from rich.console import Console

    from bench.scale_out import Server
    from loadtest.reference_answers import make
    from loadtest.runner import RunOptions, Task, run_async
    from loadtest.scenario.schedule import lay_out

    config, seconds = configuration(args, name), 60.0 * args.minutes
    trace, references = (
        trace_of(seconds, args.rate, args.seed, args.shape),
        folder / "references.jsonl",
    )
    with Server(lambda _: config) as server, Watch(POOLS[name]) as watch:
        task = Task(scenario(server.url, trace, args.seed, folder / "trace.jsonl"), "fleet")
        make(task.scenario(), lay_out(task.scenario(), "m"), references, Console(stderr=True))
        watch.until_empty(_EMPTY_S)
        began = time.monotonic()
        beside = kills(server.url, POOLS[name], seconds) if args.kills else None
        result = asyncio.run(run_async(task, RunOptions(verify=references, beside=beside)))
        emptied = watch.until_empty(_EMPTY_S)
    summary = result.summary
    pools = config["pools"].items()
    whole = [r for r in result.records if r.ok and r.output_tokens == r.output_tokens_expected]
    replica_s = {pool: watch.replica_seconds(pool, began) for pool in POOLS[name]}
    texts = Counter(f"{(r.replica or '').partition('/')[0]}: {r.verified}" for r in whole)
    return {
        "requests": len(trace),
        "answered": len(whole),
        "lost": len(trace) - len(whole),
        "errors": {**summary.errors, **summary.error_codes},
        "identical": sum(r.verified == "ok" for r in whole),
        "texts": texts,
        "ttft_p50_s": round(summary.ttft.p50, 4),
        "ttft_p99_s": round(summary.ttft.p99, 4),
        "replica_s": replica_s,
        "cost": cost(replica_s, config),
        "emptied": emptied,
        "counts": {pool: watch.steps(pool, began) for pool in POOLS[name]},
        "kills": [[mark.t, mark.what] for mark in summary.faults],
        "measured": {pool: watch.measured(pool, own["engine"]) for pool, own in pools},
        "config": config,
    }


def run_bounded(args: argparse.Namespace, name: str) -> Iterator[Line]:
    """Run a configuration in its own process, and end all processes that remain after it."""
    from deployments.cli.serving.processes import kill, mark, marked, table, variable

    server, bound = mark(), 60 * args.minutes + _AROUND_S
    command = [sys.executable, "-m", "bench.fleet", *sys.argv[1:], "--here", name]
    # Use a short path, because Ray and haproxy create sockets in it.
    with tempfile.TemporaryDirectory(prefix="fl", ignore_cleanup_errors=True) as folder:
        # Otherwise Serve's threads would start another Ray once ours has ended.
        alone = {"RAY_ENABLE_AUTO_CONNECT": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        environment = {**os.environ, **variable(server), **alone, "TMPDIR": folder}
        try:
            yield from lines_of(command, None, environment, bound)
        finally:
            kill(lambda: [pid for pid, by in marked(table()).items() if by == server])


def rows_of(args: argparse.Namespace, lines: list[Line]) -> list[Line]:
    """Return the table's rows: measured against predicted, the mixed fleet against the others."""
    trace = trace_of(60.0 * args.minutes, args.rate, args.seed, args.shape)
    by_name = {line["configuration"]: line for line in lines}
    measured: dict[str, dict[str, float]] = {}
    for name in ("mixed", "cpu-only", "gpu-only"):  # later speeds replace earlier ones
        own = by_name.get(name, {}).get("measured", {})
        measured |= {pool: figures for pool, figures in own.items() if figures}
    rows: list[Line] = []

    def add_row(case: str, ours: float, peer: float, unit: str, **more: object) -> None:
        rows.append({**ratio_row(case, round(ours, 5), round(peer, 5), unit), **more})

    for name, line in by_name.items():
        add_row(f"{name}/answered", line["answered"], line["requests"], "req")
        add_row(f"{name}/identical", line["identical"], line["answered"], "req")
        if args.kills:
            add_row(f"{name}/kills", len(line["kills"]), len(POOLS[name]) + 1, "kills")
        for pool, counts in line["counts"].items():
            steps = [count for _, count in counts]
            add_row(f"{name}/most_{pool}", max(steps), MAXIMUM, "repl", steps=steps)
        if not all(pool in measured for pool in POOLS[name]):
            continue
        guess = predict(line["config"], measured, trace, _EMPTY_S)
        figures = [("ttft_p50_s", "s"), ("ttft_p99_s", "s"), ("cost", "price")]
        for key, unit in figures:
            error = round(100 * (guess[key] / (line[key] or 1) - 1), 1)
            add_row(f"{name}/predicted/{key}", guess[key], line[key], unit, error_percent=error)
        for pool, seconds in guess["replica_s"].items():
            add_row(f"{name}/predicted/{pool}_s", seconds, line["replica_s"][pool], "s")
        if name != "mixed" and "mixed" in by_name:
            for key, unit in figures:
                add_row(f"mixed/{key} against {name}", by_name["mixed"][key], line[key], unit)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.fleet", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="default")
    parser.add_argument("--minutes", type=float, default=4.0, help="length of the day")
    parser.add_argument("--rate", type=float, default=8.0, help="requests/s at the peak")
    parser.add_argument("--shape", choices=SHAPES, default="day", help="day: curve and bursts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=POOLS, default=list(POOLS))
    parser.add_argument("--gpu-device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu-set", nargs="*", default=[], metavar="KEY=VALUE", help="its engine")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="every engine")
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    parser.add_argument("--here", choices=POOLS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.gpu_set, args.set = engine_fields(args.gpu_set), engine_fields(args.set)
    if args.here:
        print(json.dumps(run_here(args, args.here, Path(tempfile.mkdtemp()))), flush=True)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that child processes are ended
    harness = Harness(args.out, "fleet", ("configuration",), resume=args.resume)
    pieces: list[Piece] = [(name,) for name in args.only]
    _, failed = harness.run(pieces, lambda piece: run_bounded(args, piece[0]), go_on=True)
    rows = rows_of(args, harness.raw.all)
    names = ("shape", "minutes", "rate", "seed", "kills")
    load = {name: getattr(args, name) for name in names}
    ours = {"model": args.model, "load": load, "gpu_device": args.gpu_device}
    peers = {"the simulator": {}, "two-choices": "left out: no option has another policy"}
    harness.raw.finish({"ours": ours, "peers": peers, "versions": versions("ray")}, rows)
    print_ratios(rows)
    return int(bool(failed) or any(line["lost"] for line in harness.raw.all))


if __name__ == "__main__":
    sys.exit(main())
