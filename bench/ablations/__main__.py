"""The gain of each technique inside Manta: a workload runs with the technique on and off.

    python -m bench.ablations --out bench/results
    python -m bench.ablations admission continuous-batching --simulated

"simulated" rows run Manta's own core, scheduler and block manager with a device that only computes
the time of a step (see bench/ablations/simulated.py). "measured" rows run on one core of this
machine and count CPU time. `rows.TECHNIQUES` lists the techniques.
"""

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

from bench.ablations import measured, simulated
from bench.ablations.ablation_row import TECHNIQUES, AblationRow, table
from bench.report.result_file import commit


def main() -> None:
    listed = "\n".join(f"{name:24}{what}" for name, what in TECHNIQUES.items())
    parser = argparse.ArgumentParser(prog="bench.ablations", description=f"{__doc__}\n{listed}")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("techniques", nargs="*", metavar="TECHNIQUE", help="default: all")
    parser.add_argument("--simulated", action="store_true", help="these only")
    parser.add_argument("--measured", action="store_true", help="these only")
    parser.add_argument("--model", type=Path, help="folder; default: the default model")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    parser.add_argument("--rounds", type=int, default=2, help="of what is measured")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    chosen = args.techniques or list(TECHNIQUES)
    if unknown := set(chosen) - set(TECHNIQUES):
        names = ", ".join(sorted(unknown))
        parser.error(f"no technique {names}; there are {', '.join(TECHNIQUES)}")
    rows: list[AblationRow] = []

    def add_rows(new: list[AblationRow]) -> None:
        for row in new:
            print(json.dumps(row.line()), flush=True)
        rows.extend(new)

    for name in chosen:
        if name in simulated.WORKLOADS and not args.measured:
            add_rows(simulated.WORKLOADS[name](args.scale))
        if name in measured.WORKLOADS and not args.simulated:
            add_rows(measured.WORKLOADS[name](_folder(args), args.scale, args.rounds))
    if args.out:
        rows = write(args.out, rows, {"scale": args.scale, "rounds": args.rounds})
    print(table(rows))


def _folder(args: argparse.Namespace) -> Path:
    if args.model is None:
        from deployments.checkpoints.resolve import resolve_model

        args.model = resolve_model("default")
    return Path(args.model)


def write(out: Path, rows: list[AblationRow], options: dict[str, Any]) -> list[AblationRow]:
    """Write the result files, and return all rows.

    Rows of other techniques in the day's file are kept, so that single techniques can be run again.
    """
    today = datetime.date.today().isoformat()
    stem = out / f"ablations-{today}"
    path = stem.with_suffix(".json")
    if path.exists():
        new = {_kind(row) for row in rows}
        earlier = [AblationRow(**line) for line in json.loads(path.read_text())["rows"]]
        rows = [row for row in earlier if _kind(row) not in new] + rows
    order = list(TECHNIQUES)
    rows = sorted(rows, key=lambda row: (order.index(row.technique), row.how != "simulated"))
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


def _kind(row: AblationRow) -> tuple[str, str]:
    return row.technique, row.how


if __name__ == "__main__":
    main()
