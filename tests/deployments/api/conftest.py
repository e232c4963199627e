"""The API before a back end that answers at once, without Ray."""

import gc

import pytest

from deployments.api.app import build_asgi
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import FakeBackend


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Exempt what other tests have left from garbage collection, as a router does after its start.

    Collecting all of it takes a thread longer than a chat template may take.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def client(backend: FakeBackend) -> Client:
    return Client(build_asgi(backend))
