"""Requests behind Serve's own proxy. Behind haproxy: tests/faults/test_edge.py."""

from pathlib import Path

import pytest

from deployments.app import assemble
from deployments.config.load import parse_config
from tests.deployments.haproxy.either_edge import by_handle, check_clients
from tests.deployments.on_ray.serve_cluster import Cluster, fake_engine, tiny_model

pytestmark = [pytest.mark.serve, pytest.mark.slow]


def test_clients_get_what_they_get_behind_haproxy(shared_cluster: Cluster, tmp_path: Path) -> None:
    """Bugs where there is no haproxy: an error of its own, an id that is told twice."""
    from ray import serve

    config = parse_config(
        {
            "model": str(tiny_model(tmp_path / "tiny")),
            "app_name": "edge",
            "pools": {"cpu": {"replicas": 2, "num_cpus": 0.4}},
            "router": {"replicas": 2},
            "http": {"proxy": "serve"},
            "limits": {"drain_seconds": 1.0},
        },
        {},
    )
    try:
        serve.run(assemble(config, fake_engine), name="edge", route_prefix="/")
        choices = check_clients(shared_cluster, "tiny")
        same, pieces = by_handle(serve.get_app_handle("edge"), "tiny")
        assert same == choices and pieces > 20
    finally:
        serve.delete("edge")
