"""The head of a cluster, as cluster.yaml starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(300)]


def test_requests_go_on_without_a_head_and_it_comes_back(tmp_path: Path) -> None:
    """Bug: a head that begins anew, so that what served is stopped or nobody knows it any more; a
    token that the second head does not take; nodes that give up while it is away."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.deployments.head_restart", "--out", str(out)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, log = process.communicate(timeout=270)
    finally:
        process.terminate()  # it ends its cluster
        process.wait(60)
    assert out.exists(), log[-4000:]
    report = json.loads(out.read_text())
    print(report)
    assert report["asked"] > 10 and not report["failed"], report
    assert report["status"] == "RUNNING" and not report["ended"], report
