"""The bench of NUMA nodes: its rows, its command on two emulated nodes, and what it says where
there is one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cpu import numa
from engine.parallel.nodes import Node
from tests.engine.conftest import real_cores
from tests.engine.process.test_emulated_nodes import ROOT, emulate

__all__ = ["real_cores"]  # a fixture


def test_rows_compare_bound_with_unbound() -> None:
    """Bug: a ratio upside down, or of two layouts where one is meant."""
    speeds = {
        ("one", "bind"): 100.0,
        ("replicas", "bind"): 300.0,
        ("replicas", "none"): 200.0,
        ("ranks", "bind"): 150.0,
        ("ranks", "none"): 120.0,
    }
    ratios = {row["case"]: row["ratio"] for row in numa.rows_of(speeds, 2)}
    assert ratios == {
        "nodes/2": 1.5,
        "replicas/2": 1.5,
        "ranks/2": 1.25,
        "replicas-or-ranks/2": 2.0,
    }


def test_one_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: figures of two nodes from a machine that has one."""
    monkeypatch.setattr(numa, "read_nodes", lambda: [Node(0, (0, 1))])
    monkeypatch.setattr(sys, "argv", ["bench.cpu.numa"])
    with pytest.raises(SystemExit, match=r"this one has 1 \(node 0, cores 0-1\)"):
        numa.main()


@pytest.mark.nightly  # engines on emulated nodes: tests/engine/process/test_emulated_nodes.py
@pytest.mark.usefixtures("real_cores")
def test_the_command_on_two_nodes(tmp_path: Path) -> None:
    """Bugs: a side that does not start on two nodes; a bound replica on no node of its own; figures
    that are not in the file."""
    environment = emulate(tmp_path)
    command = [sys.executable, "-m", "bench.cpu.numa", "--model", str(tmp_path / "model")]
    command += ["--requests", "2", "--tokens", "8", "--rounds", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (table,) = (tmp_path / "out").glob("numa-*.json")
    document = json.loads(table.read_text())
    speeds = {
        (line["layout"], line["numa"]): line["tokens_s"]
        for line in map(json.loads, table.with_suffix(".jsonl").read_text().splitlines())
    }
    assert speeds.keys() == {*numa.SIDES} and min(speeds.values()) > 0
    assert document["rows"] == numa.rows_of(speeds, 2)
    assert f"nodes/2 {document['rows'][0]['ratio']:>24}" in done.stdout
    asked = [json.loads(line) for line in (tmp_path / "memory").read_text().splitlines()]
    assert sorted(node for _, _, node in asked) == [0, 0, 0, 1, 1], "one, two replicas, two ranks"
