"""Reinforcement learning with an engine alone, without Ray: weight updates, and exactness.

    python -m bench.rl --cases same-device --out bench/results      # one GPU, or CPUs
    python -m bench.rl --cases broadcast --out bench/results        # two GPUs, or CPUs
    python -m bench.rl --cases mismatch throughput --out bench/results

Weights are random; their dimensions are those of --model, a Llama. Each case ends within about
--seconds.

- `same-device`: a second process shares its weights by CUDA IPC (on CPUs by shared memory) while
  --streams requests run. `ours` is the longest gap between two tokens of any stream around an
  update, `peer` the target. `without` is the longest gap in the seconds before the update.
- `broadcast`: as `same-device`, but by NCCL from the second GPU (on CPUs by gloo).
- `mismatch`: the largest difference of log-probabilities from a Scorer's, in deterministic mode.
- `throughput`: output tokens/s in deterministic mode against default mode, in turns.

`bench.rl.updates` has the call sequences of an update. `wrong` is the number of tokens whose
reported weight version is not the version that produced them.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.report.result_file import Line, RawLines, print_ratios, ratio_row, versions
from bench.rl import exact, updates
from bench.versus.engine import engine_fields
from engine.library.llm import make_config

MODEL = Path(__file__).parents[1] / "models" / "llama-8b"
WANTED = {"same-device": 1.0, "broadcast": 1.5}  # target of the pause of streams, in seconds
CASES = (*WANTED, "mismatch", "throughput")


def rows_of(lines: list[Line]) -> list[Line]:
    """Return the table's rows of all lines."""
    rows: list[Line] = []
    for case, wanted in WANTED.items():
        of_case = [line for line in lines if line["case"] == case]
        for way in ("first", *updates.WAYS):
            mine = [line for line in of_case if line["way"] == way]
            if not mine:
                continue
            parts = ("update_s", "take_s", "finish_s", "replace_s")
            rows.append(
                ratio_row(f"{case}/{way}", max(line["gap_s"] for line in mine), wanted, "s")
                | {"without": max(line["gap_without_s"] for line in mine)}
                | {part: round(median(line[part] for line in mine), 3) for part in parts}
                | {"updates": len(mine)}
                | {key: sum(line[key] for line in mine) for key in ("tokens", "wrong")}
            )
    for line in lines:
        if line["case"] == "mismatch":
            row = ratio_row(f"mismatch/{line['logprobs']}", line["largest"], 0.0, "nat")
            rows.append(row | {"tokens": line["tokens"]})
    rates = {
        side: [line["tok_s"] for line in lines if line.get("side") == side]
        for side in ("deterministic", "default")
    }
    if all(rates.values()):
        best = {side: max(values) for side, values in rates.items()}
        rows.append(ratio_row("throughput", best["deterministic"], best["default"], "tok/s"))
    return rows


def run_case(case: str, fields: dict[str, Any], args: argparse.Namespace) -> list[Line]:
    """Run a case; return its raw lines."""
    cpu = fields.get("device") == "cpu"
    if case in WANTED:
        second = "cuda:1" if case == "broadcast" else "cuda:0"
        measured = asyncio.run(
            updates.measure(
                make_config(args.model, fields),
                broadcast=case == "broadcast",
                trainer_device="cpu" if cpu else second,
                streams=args.streams,
                tokens=args.tokens,
                seconds=args.seconds,
                most=args.updates,
                ways=tuple(args.ways),
            )
        )
    elif case == "mismatch":
        measured = exact.mismatch(
            args.model, fields, args.requests, min(64, args.tokens), args.seconds
        )
    else:
        measured = exact.throughput(
            args.model, fields, args.streams, min(256, args.tokens), 3, args.seconds
        )
    return [{"case": case, **line} for line in measured]


def others(cases: Sequence[str], lines: list[Line]) -> list[Line]:
    """Return the lines of cases that are not in `cases`, which runs now."""
    return [line for line in lines if line["case"] not in cases]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--ways", nargs="+", choices=updates.WAYS, default=updates.WAYS)
    parser.add_argument("--model", default=str(MODEL), help="folder of a Llama's config.json")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=768, help="most tokens of an answer")
    parser.add_argument("--requests", type=int, default=32, help="rollouts that are scored")
    parser.add_argument("--updates", type=int, default=3, help="of each way")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a case")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the engine")
    parser.add_argument("--resume", action="store_true", help="keep today's lines of other cases")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args(arguments)
    fields: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": args.tokens + max(updates.PROMPT, min(256, args.tokens)),
        "max_num_seqs": args.streams,
        "kv_cache_bytes": 36 << 30,
        **engine_fields(args.set),
    }
    lines: list[Line] = []
    raw = None
    if args.out:
        raw = RawLines(args.out, "rl", partial(others, args.cases) if args.resume else None)
        lines += raw.all
    for case in args.cases:
        for line in run_case(case, fields, args):
            if raw is None:
                print(json.dumps(line), flush=True)
            else:
                raw.keep(line)
            lines.append(line)
    rows = rows_of(lines)
    print_ratios(rows)
    if raw is not None:
        config = {
            "model": Path(args.model).name,
            "ours": fields,
            "peers": {"wanted": WANTED},
            "streams": args.streams,
            "tokens": args.tokens,
            "versions": versions(),
        }
        raw.finish(config, rows)


if __name__ == "__main__":
    main()
