"""The head of a cluster, as cluster.yaml starts it."""

from pathlib import Path

import pytest

from tests.deployments.on_ray.fake_nodes import report_of

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "without",
    [
        "2",
        pytest.param("15", marks=pytest.mark.long),  # seconds: longer than Ray takes to miss a head
    ],
)
def test_requests_go_on_without_a_head_and_it_comes_back(tmp_path: Path, without: str) -> None:
    """Bug: a head that begins anew, so that what served is stopped or nobody knows it any more; a
    token that the second head does not take; nodes that give up while it is away."""
    out = tmp_path / "report.json"
    module = "tests.deployments.on_ray.head_restart"
    report = report_of(module, out, 270, "--without", without)
    print(report)
    assert report["asked"] >= 4 and not report["failed"], report
    assert report["status"] == "RUNNING" and not report["ended"], report
