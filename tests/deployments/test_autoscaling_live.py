"""Ray's autoscaler, Serve and the scaling policy together, with nodes that come and go."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(420)]


def test_nodes_and_replicas_follow_the_load(tmp_path: Path) -> None:
    """Bug: what is right in the simulator and does nothing in Serve: metrics under other names, a
    pool given up while it starts, a GPU asked for what a CPU can do, requests refused or lost while
    one pool takes over from the other."""
    report = _run(tmp_path / "report.json")
    assert not report["error"] and not report["failed"], report
    pools = [(one["gpu"], one["cpu"]) for one in report["seen"]]
    assert (0, 1) in pools and (3, 0) in pools  # the CPU alone; three GPUs without it
    assert (1, 0) in pools[pools.index((3, 0)) :] and (0, 0) in pools[pools.index((3, 0)) :]
    assert [one["gpu_nodes"] for one in report["seen"] if one["gpu"]], report
    assert report["phases"]["wake"]["requests"] == 1
    for phase, told in report["phases"].items():
        print(phase, told)


def _run(out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.deployments.autoscaling_live", "--out", str(out)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, log = process.communicate(timeout=360)
    finally:
        process.terminate()  # it ends its cluster
        process.wait(60)
    assert out.exists(), log[-4000:]
    return dict(json.loads(out.read_text()))
