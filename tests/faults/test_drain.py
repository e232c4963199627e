"""Scale-downs, updates and a node's notice, a few of each; the long run is `python -m
tests.faults.drain`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(420)]


def test_scale_downs_updates_and_a_notice(tmp_path: Path) -> None:
    """Bug: a replica that stops cuts what it streams, or an update sends requests to nobody, or
    lets one model go on with another's answer, or a node's deadline comes before the hand-over."""
    out = tmp_path / "drain"
    command = [sys.executable, "-m", "tests.faults.drain", "--scale-downs", "4", "--updates", "2"]
    process = subprocess.Popen(
        [*command, "--out", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, log = process.communicate(timeout=360)
    finally:
        process.terminate()  # it ends its cluster
        process.wait(60)
    print(output)
    assert process.returncode == 0, output + log[-4000:]
    report = json.loads(out.with_suffix(".json").read_text())
    events = {"scale-down": 4, "configuration update": 1, "model update": 1, "notice": 1}
    assert report["events"] == events and report["requests"] > 100
    assert report["failed"] == report["different"] == 0 and not report["left_behind"]
    assert report["longest_gap_s"] < 2.0
