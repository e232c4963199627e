"""The API before a back end that answers at once, without Ray."""

import gc

import pytest

from deployments.api.app import build_asgi
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import FakeBackend


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """As a router's is once it has started. A collection of all that other tests have left takes a
    thread longer than a chat template may, wherever it begins."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def client(backend: FakeBackend) -> Client:
    return Client(build_asgi(backend))
