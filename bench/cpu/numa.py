"""Engines bound to a machine's NUMA nodes against the same engines unbound, alternating.

    python -m bench.cpu.numa --out bench/results

A machine with one node is refused, as the sides would be equal. Each side decodes the same
requests, and its best round counts. Cases:

    nodes/N       one replica with a rank on each of N nodes, against one replica on one node
    replicas/N    N replicas, one per node, against N unbound replicas (tokens/s)
    ranks/N       one replica with a rank on each of N nodes, against N unbound ranks
    replicas-or-ranks/N   bound replicas against bound ranks
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.report.result_file import last_result, write
from engine.parallel.nodes import read_nodes

LAYOUTS = ("replicas", "ranks")
SIDES = (("one", "bind"), *((layout, numa) for layout in LAYOUTS for numa in ("bind", "none")))
PROMPT = 64


def side(model: str, layout: str, numa: str, nodes: int, requests: int, tokens: int) -> float:
    """Return the output tokens per second of all replicas together, in this process.

    layout: "one" (a replica of one rank), or one of LAYOUTS.
    """
    from deployments.checkpoints.resolve import resolve_model
    from engine import LLM, SamplingParams

    folder = str(resolve_model(model))
    replicas = nodes if layout == "replicas" else 1
    options: dict[str, Any] = {"device": "cpu", "numa": numa, "max_model_len": PROMPT + tokens + 1}
    if layout == "ranks":
        options["tensor_parallel"] = nodes
    elif layout == "replicas" and numa == "none":
        # use as many threads as a bound replica has
        options["num_threads"] = min(len(node.cores) for node in read_nodes())
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    with contextlib.ExitStack() as ends:
        llms = [ends.enter_context(LLM(folder, **options)) for _ in range(replicas)]
        share = -(-requests // replicas)
        prompts = [[5 + (7 * at + number) % 900 for at in range(PROMPT)] for number in range(share)]

        def work(llm: LLM) -> None:
            llm.generate(prompts, params)

        best = float("inf")
        for _ in range(3):
            threads = [threading.Thread(target=work, args=(llm,)) for llm in llms]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            best = min(best, time.perf_counter() - began)
    return replicas * share * tokens / best


def rows_of(speeds: dict[tuple[str, str], float], nodes: int) -> list[dict[str, Any]]:
    """Return the table's rows. speeds: (layout, `numa`) -> tokens/s."""

    def row(case: str, ours: float, peer: float) -> dict[str, Any]:
        figures = {"ours": round(ours, 1), "peer": round(peer, 1), "ratio": round(ours / peer, 3)}
        return {"case": f"{case}/{nodes}", **figures, "unit": "tok/s"}

    rows = [row("nodes", speeds["ranks", "bind"], speeds["one", "bind"])]
    rows += [row(name, speeds[name, "bind"], speeds[name, "none"]) for name in LAYOUTS]
    return [*rows, row("replicas-or-ranks", speeds["replicas", "bind"], speeds["ranks", "bind"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="output of a request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    nodes = read_nodes()
    if args.side:
        layout, numa = args.side
        speed = side(args.model, layout, numa, len(nodes), args.requests, args.tokens)
        print(f"RESULT {speed}", flush=True)
        return
    if len(nodes) < 2:
        raise SystemExit(
            f"error: bench.cpu.numa compares nodes of a machine, and this one has {len(nodes)} "
            f"({nodes[0]}); take a machine with two sockets, or give this container both nodes"
        )
    speeds: dict[tuple[str, str], float] = {}
    lines = []
    for turn in range(args.rounds):
        for layout, numa in SIDES:
            command = [sys.executable, "-m", "bench.cpu.numa", "--side", layout, numa]
            command += ["--model", args.model, "--requests", str(args.requests)]
            command += ["--tokens", str(args.tokens)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ)
            speed = last_result(done)
            if speed is None:
                raise SystemExit(f"error: {layout} with numa {numa} failed")
            speeds[layout, numa] = max(speeds.get((layout, numa), 0.0), speed)
            lines.append({"turn": turn, "layout": layout, "numa": numa, "tokens_s": speed})
            print(json.dumps(lines[-1]), flush=True)
    rows = rows_of(speeds, len(nodes))
    for row in rows:
        print(f"{row['case']:<24} {row['ratio']:>7}")
    if args.out:
        config = {"model": args.model, "nodes": [str(node) for node in nodes]}
        write(args.out, "numa", config, rows, lines)


if __name__ == "__main__":
    main()
