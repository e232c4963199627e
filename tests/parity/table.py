"""`python -m tests.parity.table`: every architecture against transformers, or its nearest relative
there, on tiny random checkpoints in float32: the largest difference of the logits, relative to the
largest of them, whole, in chunks, in a batch, from the prefix cache, after preemption and with an
adapter."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.report.result_file import write
from tests.parity.test_architectures import ALL, BOUND, differences, with_adapter


def main() -> int:
    """1 if an architecture is beyond the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="of architectures whose name has this")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, case in ALL.items():
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = differences(case, Path(folder))
            found["adapter"] = with_adapter(Path(folder))
            config = json.loads((Path(folder) / "config.json").read_text())
        (architecture,) = config["architectures"]
        row = {"case": name, "architecture": architecture, "ours": max(found.values()), **found}
        rows.append(row)
        print(f"{name:<24} {architecture:<36} {row['ours']:.1e}", flush=True)
    wrong = [row["case"] for row in rows if row["ours"] >= BOUND]
    print(f"{len(rows)} checkpoints, {len(wrong)} beyond {BOUND}: {', '.join(wrong) or 'none'}")
    if args.out is not None:
        settings = {"bound": BOUND, "dtype": "float32", "peer": "transformers"}
        write(args.out, "parity", {"ours": settings}, rows, rows)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
