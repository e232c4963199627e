"""Fixtures of tests of the HTTP API: an ASGI application on a FakeBackend, and its client."""

import gc

import pytest

from deployments.api.app import build_asgi
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import FakeBackend


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Exempt objects of earlier tests from garbage collection, as a router does after its start.

    A collection of all these objects takes longer than the time limit of a chat template.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def client(backend: FakeBackend) -> Client:
    return Client(build_asgi(backend))
