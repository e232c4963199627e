"""Manta on several GPUs of one machine against vLLM there, and against itself on one: the whole
table in one command, in turns.

    python -m bench.versus.parallel --model LLAMA70B LLAMA8B bench/models/qwen3-30b-a3b \
        --name llama-70b llama-8b qwen3-30b-a3b --ranks 2 --runs 3 --out bench/results

It needs as many GPUs of one kind as --ranks, whose memory holds the largest model, and vLLM in this
interpreter's environment (--no-vllm: without it). A model is a folder with a config.json; weights
are random. Cases:

    all-reduce/64k         a sum in a graph, microseconds: ours, and NCCL's in the same run
    sum-norm/64k           with the residual and the norm behind it, in one kernel or as many
    llama-8b-tp2/single    output tokens/s: ours, and vLLM's at the same tensor parallelism
    llama-8b-tp2/ready     seconds
    llama-8b-pp2/uniform   output tokens/s: in stages, and on one GPU

ratio is ours by theirs. Each run is a process of its own, and the best of each side counts.
--resume takes up the day's lines in --out and does only the runs that are missing.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, RawLines, print_ratios, versions
from bench.versus.engine import best, lines_of, run_side

PAIRED = ["single", "uniform"]  # workloads of tensor parallelism
STAGED = ["uniform"]  # of a pipeline, whose gain is in many streams
STAGED_MODELS = ("llama-8b",)  # what fits on one GPU too


def sides_of(label: str, ranks: int, vllm: bool) -> list[tuple[str, str, list[str], list[str]]]:
    """Names of the runs of a model, and of each: side, change, workloads."""
    sides = [("tp", "manta", [f"tensor_parallel={ranks}"], PAIRED)]
    if vllm:
        sides.append(("tp-vllm", "vllm", [f"tensor_parallel_size={ranks}"], PAIRED))
    if label in STAGED_MODELS:
        sides.append(("pp", "manta", [f"pipeline_parallel={ranks}"], STAGED))
        sides.append(("one", "manta", [], STAGED))
    return sides


def measure(args: argparse.Namespace) -> None:
    wanted = {
        (label, run, name): (folder, *rest)
        for label, folder in zip(args.name, args.model, strict=True)
        for run in range(args.runs)
        for name, *rest in sides_of(label, args.ranks, args.vllm)
    }

    def whole(lines: list[Line]) -> list[Line]:
        done: dict[Any, set[str]] = {}
        for line in lines:
            key = line.get("model"), line.get("run"), line["way"]
            done.setdefault(key, set()).add(line.get("workload", ""))
        cut_off = {key for key in wanted if not done.get(key, set()) >= set(wanted[key][3])}
        summed = any("crossings" in line for line in lines)
        return [
            line
            for line in lines
            if (line.get("model"), line.get("run"), line["way"]) not in cut_off
            and (line["way"] != "sums" or summed)
        ]

    raw = RawLines(args.out, "versus-parallel", whole if args.resume else None)
    if not any(line["way"] == "sums" for line in raw.all):
        command = [sys.executable, "-m", "bench.kernels.sums", "--ranks", str(args.ranks)]
        for line in lines_of(command):
            raw.keep({"way": "sums", **line})
    there = {(line.get("model"), line.get("run"), line["way"]) for line in raw.all}
    for (label, run, name), (folder, side, change, workloads) in wanted.items():
        if (label, run, name) not in there:
            for line in run_side(side, folder, workloads, change, None):
                raw.keep({"model": label, "run": run, "way": name, **line})
    rows = rows_of(raw.all, args.ranks)
    config = {"ranks": args.ranks, "runs": args.runs, "versions": versions("vllm")}
    raw.finish(config, rows)
    print_ratios(rows)


def rows_of(lines: list[Line], ranks: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(case: str, ours: float, peer: float, unit: str) -> None:
        ratio = round(ours / peer, 3)
        rows.append({"case": case, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio})

    for line in (line for line in lines if "bytes" in line):
        size = f"{line['bytes'] >> 10}k"
        if "nccl" in line and "one_shot" in line:
            row(f"all-reduce/{size}", min(line["one_shot"], line["two_shot"]), line["nccl"], "us")
        if "nccl_apart" in line and "with_norm" in line:
            row(f"sum-norm/{size}", line["with_norm"], line["nccl_apart"], "us")
    for label in dict.fromkeys(line["model"] for line in lines if "model" in line):
        by_way: dict[str, list[Line]] = {}
        for line in lines:
            if line.get("model") == label:
                by_way.setdefault(line["way"], []).append({**line, "side": line["way"]})
        for ours, peer, case, names in (
            ("tp", "tp-vllm", f"{label}-tp{ranks}", PAIRED),
            ("pp", "one", f"{label}-pp{ranks}", STAGED),
        ):
            if ours not in by_way or peer not in by_way:
                continue
            both = by_way[ours] + by_way[peer]
            for name in names:
                row(f"{case}/{name}", best(both, ours, name), best(both, peer, name), "tok/s")
            ready = [
                min(line["ready_s"] for line in by_way[way] if "ready_s" in line)
                for way in (ours, peer)
            ]
            row(f"{case}/ready", *ready, "s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="several GPUs: the table of docs/parallel.md")
    parser.add_argument("--model", nargs="+", required=True, help="folders with config.json")
    parser.add_argument("--name", nargs="+", required=True, help="a label of the cases for each")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3, help="alternating runs of each side")
    parser.add_argument("--no-vllm", dest="vllm", action="store_false")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    args = parser.parse_args()
    if len(args.name) != len(args.model):
        parser.error(f"--name: {len(args.name)} labels for {len(args.model)} models")
    measure(args)


if __name__ == "__main__":
    main()
