"""The live test of adapters, and a result file of what it saw: requests, answers, changes, loads.

python -m tests.deployments.on_ray.adapters_live --out bench/results
"""

import argparse
import sys
import time
from pathlib import Path

from bench.gpu_checks import CheckPart, rows_of, run
from bench.report.result_file import write
from tests.deployments.on_ray.test_adapters_live import ADAPTERS, CLIENTS, ENGINE

FILE = Path(__file__).with_name("test_adapters_live.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    parser.add_argument("--seconds", type=float, default=1800, help="for all of it")
    args = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.report.pytest_lines"]
    part = CheckPart("adapters-live", [*command, "-m", "long", str(FILE)])
    lines = run(part, time.monotonic() + args.seconds, "")
    config = {"engine": ENGINE, "adapters": ADAPTERS, "clients": CLIENTS, "replicas": 2}
    rows = rows_of(lines)
    write(args.out, "adapters-live", {"ours": config}, rows, lines)
    for row in rows:
        print(row)
    sys.exit(lines[-1]["outcome"] != "passed")


if __name__ == "__main__":
    main()
