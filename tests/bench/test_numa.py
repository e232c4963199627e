"""The bench of NUMA nodes: its rows, and what it says where there is one node."""

import sys

import pytest

from bench.cpu import numa
from engine.parallel.nodes import Node


def test_rows_compare_bound_with_unbound() -> None:
    """Bug: a ratio upside down, or of two layouts where one is meant."""
    speeds = {
        ("replicas", "bind"): 300.0,
        ("replicas", "none"): 200.0,
        ("ranks", "bind"): 150.0,
        ("ranks", "none"): 120.0,
    }
    ratios = {row["case"]: row["ratio"] for row in numa.rows_of(speeds, 2)}
    assert ratios == {"replicas/2": 1.5, "ranks/2": 1.25, "replicas-or-ranks/2": 2.0}


def test_one_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: figures of two nodes from a machine that has one."""
    monkeypatch.setattr(numa, "read_nodes", lambda: [Node(0, (0, 1))])
    monkeypatch.setattr(sys, "argv", ["bench.cpu.numa"])
    with pytest.raises(SystemExit, match=r"this one has 1 \(node 0, cores 0-1\)"):
        numa.main()
