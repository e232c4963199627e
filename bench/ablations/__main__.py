"""The seeds' workloads inside Manta, each with one feature switched off; claimed and reached ratio.

    python -m bench.ablations --out bench/results
    python -m bench.ablations W6 W12 --simulated

"simulated" rows run Manta's own core, scheduler and block manager on a device that only keeps the
time of a step (bench/ablations/simulated.py says how it is reckoned); "measured" rows run on one
core of this machine, by processor time.

W4   ShareGPT at 200 requests/s                   W13  text beside the loop, or in it
W5   tokens and the exact peak against slots      W14  8-bit and 16-bit weights
W6   lengths that differ widely                   W15  ragged and filled prompts
W7   fused and unfused                            W16  requests in a given memory
W12  continuous and static batches                W20  adapters in one step, or one a step
"""

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

from bench.ablations import measured, simulated
from bench.ablations.rows import Row, table
from bench.report.result_file import commit


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.ablations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    every = sorted({*simulated.WORKLOADS, *measured.WORKLOADS}, key=lambda name: int(name[1:]))
    parser.add_argument("workloads", nargs="*", metavar="W", help=f"of {', '.join(every)}")
    parser.add_argument("--simulated", action="store_true", help="these only")
    parser.add_argument("--measured", action="store_true", help="these only")
    parser.add_argument("--model", type=Path, help="folder; default: the default model")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    parser.add_argument("--rounds", type=int, default=2, help="of what is measured")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    chosen = args.workloads or every
    if unknown := set(chosen) - set(every):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    rows: list[Row] = []

    def add(new: list[Row]) -> None:
        for row in new:
            print(json.dumps(row.line()), flush=True)
        rows.extend(new)

    for name in chosen:
        if name in simulated.WORKLOADS and not args.measured:
            add(simulated.WORKLOADS[name](args.scale))
        if name in measured.WORKLOADS and not args.simulated:
            add(measured.WORKLOADS[name](_folder(args), args.scale, args.rounds))
    if args.out:
        rows = write(args.out, rows, {"scale": args.scale, "rounds": args.rounds})
    print(table(rows))


def _folder(args: argparse.Namespace) -> Path:
    if args.model is None:
        from deployments.checkpoints.resolve import resolve_model

        args.model = resolve_model("default")
    return Path(args.model)


def write(out: Path, rows: list[Row], options: dict[str, Any]) -> list[Row]:
    """Write the result files. Rows of other workloads that ran on the same day stay, so that some
    can be run again; returns all of them."""
    today = datetime.date.today().isoformat()
    stem = out / f"seeds-{today}"
    path = stem.with_suffix(".json")
    if path.exists():
        new = {_kind(row) for row in rows}
        kept = [Row(**line) for line in json.loads(path.read_text())["rows"]]
        rows = [row for row in kept if _kind(row) not in new] + rows
    rows = sorted(rows, key=lambda row: (int(row.case.split()[0][1:]), row.how != "simulated"))
    document = {
        "commit": commit(),
        "date": today,
        "device": f"one of {os.cpu_count()} CPU cores; simulated: A100-80G",
        "config": {"ours": options, "peers": {"feature off": "the same otherwise"}},
        "rows": [row.line() for row in rows],
    }
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    lines = [json.dumps(row.line()) + "\n" for row in rows]
    stem.with_suffix(".jsonl").write_text("".join(lines))
    return rows


def _kind(row: Row) -> tuple[str, str]:
    return row.case.split()[0], row.how


if __name__ == "__main__":
    main()
