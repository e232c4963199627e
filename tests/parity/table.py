"""`python -m tests.parity.table`: every architecture against transformers, or its nearest relative
there, on tiny random checkpoints in float32: the largest difference of the logits, relative to the
largest of them, whole, in chunks, in a batch, from the prefix cache, after preemption and with an
adapter. With `--device cuda` our side runs on the GPU, and once more in bfloat16."""

import argparse
import json
import math
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.report.result_file import write
from tests.parity.test_architectures import ALL, BOUND, differences, divergences, with_adapter

BOUNDS = {"cpu": BOUND, "cuda": 1e-4}  # a GPU sums in another order than the oracle's CPU


def measured(name: str, device: str) -> dict[str, Any]:
    """Return an architecture's row of the table: its figures, or the reason if it fails."""
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        row: dict[str, Any] = {"case": name}
        try:
            errors = differences(ALL[name], Path(folder), device)
            config = json.loads((Path(folder) / "config.json").read_text())
            (row["architecture"],) = config["architectures"]
            if device == "cpu":
                errors["adapter"] = with_adapter(Path(folder))
            else:
                row |= divergences(ALL[name], Path(folder), device)
        except Exception as error:
            return row | {"why": f"{type(error).__name__}: {error}"[:600]}
    return row | {"ours": max(errors.values()), **errors}


def main() -> int:
    """Print the table; return 1 if an architecture is beyond the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="of architectures whose name has this")
    parser.add_argument("--device", choices=BOUNDS, default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    bound = BOUNDS[args.device]
    rows: list[dict[str, Any]] = []
    names = [name for name in ALL if args.only in name]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(partial(measured, device=args.device), names):
            rows.append(row)
            more = row.get("why") or " ".join(
                f"{value:.1e}" for key, value in row.items() if key.startswith("KL")
            )
            architecture = row.get("architecture", "")
            figure = f"{row['ours']:.1e}" if "ours" in row else "none"
            print(f"{row['case']:<24} {architecture:<36} {figure} {more}", flush=True)
    wrong = [row["case"] for row in rows if row.get("ours", math.inf) >= bound]
    print(f"{len(rows)} checkpoints, {len(wrong)} beyond {bound}: {', '.join(wrong) or 'none'}")
    if args.out is not None:
        settings = {"bound": bound, "dtype": "float32", "peer": "transformers"}
        suffix = "" if args.device == "cpu" else f"-{args.device}"
        write(args.out, f"parity{suffix}", {"ours": settings}, rows, rows)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
