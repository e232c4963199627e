"""The head of a cluster, as cluster.yaml starts it."""

from pathlib import Path

import pytest

from tests.deployments.on_ray.fake_nodes import report_of

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(300)]


def test_requests_go_on_without_a_head_and_it_comes_back(tmp_path: Path) -> None:
    """Bug: a head that begins anew, so that what served is stopped or nobody knows it any more; a
    token that the second head does not take; nodes that give up while it is away."""
    report = report_of("tests.deployments.on_ray.head_restart", tmp_path / "report.json", 270)
    print(report)
    assert report["asked"] > 10 and not report["failed"], report
    assert report["status"] == "RUNNING" and not report["ended"], report
