"""All tests that need a GPU, and a result file that says what ran, how long, and what it measured.

    MANTA_TEST_MODEL=SmolLM2.gguf python -m loadtest.gpu_checks --out loadtest/results

From a checkout, on a machine with a CUDA device. What follows `--` goes to pytest. The exit code is
pytest's. MANTA_TEST_MODEL is for machines that cannot download the default model.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from loadtest.result_file import write

FOLDERS = ("tests/kernels", "tests/parity", "tests/engine")


def rows_of(report: Path) -> list[dict[str, Any]]:
    """One row a test of a junit report: outcome, seconds, and the properties that it recorded."""
    rows = []
    for test in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in test} & {"failure", "error", "skipped"}
        row: dict[str, Any] = {
            "case": f"{test.get('classname', '').removeprefix('tests.')}.{test.get('name')}",
            "outcome": min(outcomes, default="passed"),
            "seconds": round(float(test.get("time", 0)), 2),
        }
        rows.append(row | {p.get("name", ""): p.get("value") for p in test.iter("property")})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the result files")
    parser.add_argument("pytest", nargs="*", help="instead of the folders with such tests")
    args = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device here; every one of these tests would be skipped")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu", "-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *(args.pytest or FOLDERS)]
        code = subprocess.run(command, check=False).returncode
        rows = rows_of(report)
    outcomes = [row["outcome"] for row in rows]
    told = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    print(told)
    if args.out:
        counts = [{"case": outcome, "tests": count} for outcome, count in told.items()]
        write(args.out, "gpu-checks", {"ours": {"pytest": command[3:]}}, counts, rows)
    sys.exit(code)


if __name__ == "__main__":
    main()
