r"""Manta on several GPUs of one machine against vLLM, and against Manta on one GPU, alternating.

One command makes the whole table.

    python -m bench.versus.parallel --model LLAMA70B LLAMA8B bench/models/qwen3-30b-a3b \
        --name llama-70b llama-8b qwen3-30b-a3b --ranks 2 --runs 3 --out bench/results

It needs --ranks GPUs of one kind, whose memory holds the largest model, and vLLM in this
interpreter's environment (--no-vllm: without it). A model is a folder with a config.json; weights
are random. Cases:

    all-reduce/64k         an all-reduce in a CUDA graph, microseconds: ours, and NCCL's
    sum-norm/64k           with the residual and norm after it, fused or separate
    llama-8b-tp2/single    output tokens/s: ours, and vLLM's with the same tensor parallelism
    llama-8b-tp2/ready     seconds
    llama-8b-pp2/uniform   output tokens/s: with pipeline stages, and on one GPU

ratio is ours divided by theirs. Each run has its own process, and the best of each side counts.
--resume continues from the day's lines in --out with the missing runs.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, print_ratios, ratio_row, versions
from bench.versus.engine import best, run_side
from bench.versus.harness import Harness, Piece, lines_of

PAIRED = ["single", "uniform"]  # workloads for tensor parallelism
STAGED = ["uniform"]  # workloads for pipeline parallelism, which is faster only with many streams
SUMS = (None, None, "sums")  # the piece that measures all-reduces, without a model
STAGED_MODELS = ("llama-8b",)  # models for pipeline parallelism, which must also fit on one GPU


def sides_of(label: str, ranks: int, vllm: bool) -> list[tuple[str, str, list[str], list[str]]]:
    """Return (name, side, changes, workloads) of each run of a model."""
    sides = [("tp", "manta", [f"tensor_parallel={ranks}"], PAIRED)]
    if vllm:
        sides.append(("tp-vllm", "vllm", [f"tensor_parallel_size={ranks}"], PAIRED))
    if label in STAGED_MODELS:
        sides.append(("pp", "manta", [f"pipeline_parallel={ranks}"], STAGED))
        sides.append(("one", "manta", [], STAGED))
    return sides


def measure(args: argparse.Namespace) -> None:
    wanted = {
        (label, run, name): (folder, *fields)
        for label, folder in zip(args.name, args.model, strict=True)
        for run in range(args.runs)
        for name, *fields in sides_of(label, args.ranks, args.vllm)
    }

    def finished(piece: Piece, lines: list[Line]) -> bool:
        if piece == SUMS:
            return any("crossings" in line for line in lines)
        workloads = wanted[piece][3] if piece in wanted else ()
        return {line.get("workload") for line in lines} >= set(workloads)

    def run_piece(piece: Piece) -> Iterator[Line]:
        if piece == SUMS:
            command = [sys.executable, "-m", "bench.kernels.sums", "--ranks", str(args.ranks)]
            return lines_of(command)
        folder, side, change, workloads = wanted[piece]
        return run_side(side, folder, workloads, change, None)

    fields = ("model", "run", "way")
    harness = Harness(args.out, "versus-parallel", fields, finished, args.resume)
    harness.run([SUMS, *wanted], run_piece)
    raw = harness.raw
    rows = rows_of(raw.all, args.ranks)
    config = {"ranks": args.ranks, "runs": args.runs, "versions": versions("vllm")}
    raw.finish(config, rows)
    print_ratios(rows)


def rows_of(lines: list[Line], ranks: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(case: str, ours: float, peer: float, unit: str) -> None:
        rows.append(ratio_row(case, ours, peer, unit))

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
