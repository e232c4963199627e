"""Requests behind Serve's own proxy. Behind haproxy: tests/faults/test_edge.py."""

import pytest

from tests.deployments.haproxy.either_edge import by_handle, check_clients
from tests.deployments.on_ray.serve_cluster import Cluster

pytestmark = [pytest.mark.serve, pytest.mark.slow]


def test_clients_get_what_they_get_behind_haproxy(shared_fleet: Cluster) -> None:
    """Bugs where there is no haproxy: an error of its own, an id that is told twice."""
    from ray import serve

    choices = check_clients(shared_fleet, "tiny")
    same, pieces = by_handle(serve.get_app_handle("manta"), "tiny")
    assert same == choices and pieces > 20
