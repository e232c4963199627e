"""Ray's autoscaler, Serve and the scaling policy together, with nodes that come and go."""

from pathlib import Path

import pytest

from tests.deployments.on_ray.fake_nodes import report_of

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(420)]


def test_nodes_and_replicas_follow_the_load(tmp_path: Path) -> None:
    """Bug: what is right in the simulator and does nothing in Serve: metrics under other names, a
    pool given up while it starts, a GPU asked for what a CPU can do, requests refused or lost while
    one pool takes over from the other. A killed controller that comes back without the policy,
    or without the routers' and engines' reports."""
    report = report_of("tests.deployments.on_ray.autoscaling_live", tmp_path / "report.json", 360)
    assert not report["error"] and not report["failed"], report
    pools = [(item["gpu"], item["cpu"]) for item in report["seen"]]
    assert (0, 1) in pools and (3, 0) in pools  # the CPU alone; three GPUs without it
    assert (1, 0) in pools[pools.index((3, 0)) :] and (0, 0) in pools[pools.index((3, 0)) :]
    assert [item["gpu_nodes"] for item in report["seen"] if item["gpu"]], report
    assert report["phases"]["wake"]["requests"] == 1
    took = report["controller"]["first_gpu_after_s"]
    print(f"{took} s after the controller was killed the first GPU was asked for")
    assert took is not None and took <= 30
    for phase, entry in report["phases"].items():
        print(phase, entry)
