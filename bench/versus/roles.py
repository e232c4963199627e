"""Separate prefill and decode replicas, against replicas that do both, on two GPUs.

    python -m bench.versus.roles --model FOLDER --name llama-8b --out bench/results

FOLDER has config.json and a tokenizer; weights are random. `manta serve` runs twice. The side
`together` has two replicas; the side `apart` has a pool with `role: prefill` and one with `role:
decode`, of one replica each. `manta loadtest` sends the load: prompts of `--tokens-in` tokens
without repetition, answers of `--tokens-out` tokens, at constant rates (`--rates`, requests/s),
then in a closed loop of `--streams`.

Rows compare `apart` with `together`: tokens/s, the p99 of times between chunks, and the median time
to first token. At a constant rate, tokens/s equal those of the load if the servers keep up.
"""

import argparse
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, print_ratios, ratio_row, versions
from bench.versus.harness import Harness, Piece
from bench.versus.http import URL, closed, load, server

SIDES = ("together", "apart")
CONFIG = """\
model: {model}
served_name: m
engine:
  load_format: dummy
  dtype: {dtype}
  device: {device}
  max_model_len: {max_model_len}
  max_num_seqs: 256
limits:
  queue_seconds: 120
http:
  port: {port}
"""
POOLS = {
    "together": "replicas: 2\n",
    "apart": "pools:\n"
    "  prompts: {{role: prefill, replicas: 1}}\n"
    "  answers: {{role: decode, replicas: 1}}\n",
}
FIGURES = {"out_tok_s": "tok/s", "itl_ms_p99": "ms", "ttft_ms_p50": "ms"}


def loads(args: argparse.Namespace) -> dict[str, tuple[dict[str, Any], int]]:
    """Return {name of a load: (its arrivals, its number of requests)}."""
    named: dict[str, tuple[dict[str, Any], int]] = {}
    for rate in args.rates:
        named[f"{rate:g}/s"] = ({"kind": "constant", "rate": rate}, math.ceil(rate * args.period))
    for streams in args.streams:
        named[f"{streams} streams"] = (closed(streams), args.times * streams)
    return named


def run_side(args: argparse.Namespace, side: str) -> Generator[Line, None, None]:
    """Start a side's server; yield its configuration, and a line for each load."""
    config = CONFIG + POOLS[side]
    work = {
        "name": "tokens",
        "input": args.tokens_in,
        "output": args.tokens_out,
        "sampling": {"temperature": 0},
    }
    values = {
        "device": args.device,
        "dtype": args.dtype,
        "max_model_len": args.tokens_in + args.tokens_out + 64,
    }
    with server("manta", args.model, "", config, values) as ready:
        yield {"config": {"yaml": config, "ready_s": ready, **values}}
        load(URL, side, work, arrivals=closed(4), count=8, clients=1)
        # Each load has its own seed, so that no prompt is cached from an earlier load.
        for seed, (name, (arrivals, count)) in enumerate(loads(args).items(), 1):
            line = load(URL, side, work, arrivals=arrivals, count=count, clients=4, seed=seed)
            if line["failed"] or line["ok"] != count:
                raise SystemExit(
                    f"{side}, {name}: of {count} requests {line['ok']} got all their tokens and "
                    f"{line['failed']} failed: {line['error']}"
                )
            yield {**line, "load": name}


def rows_of(label: str, lines: list[Line], names: list[str]) -> list[Line]:
    """Compute rows <label>/<load>/<figure>, which compare `apart` with `together`."""
    by_load = {(line["side"], line["load"]): line for line in lines if "load" in line}
    return [
        ratio_row(
            f"{label}/{name}/{figure}",
            by_load["apart", name][figure],
            by_load["together", name][figure],
            unit,
        )
        for name in names
        for figure, unit in FIGURES.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder with config.json and a tokenizer")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--tokens-in", type=int, default=8192)
    parser.add_argument("--tokens-out", type=int, default=256)
    parser.add_argument("--rates", type=float, nargs="*", default=[2.0])
    parser.add_argument("--period", type=float, default=20.0, help="seconds of each rate")
    parser.add_argument("--streams", type=int, nargs="*", default=[32])
    parser.add_argument("--times", type=int, default=4, help="requests of each stream")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    names = list(loads(args))

    def finished(piece: Piece, lines: list[Line]) -> bool:
        return {line.get("load") for line in lines} >= set(names)

    harness = Harness(args.out, "versus-roles", ("side",), finished, args.resume)
    configs = harness.run_sides(SIDES, lambda piece: run_side(args, piece[0]))
    rows = rows_of(args.name, harness.lines, names)
    about = {"ours": configs["apart"], "peer": configs["together"], "versions": versions("ray")}
    harness.raw.finish(about, rows)
    print_ratios(rows)


if __name__ == "__main__":
    main()
