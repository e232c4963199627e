"""The API before a back end that answers at once, without Ray."""

import pytest

from deployments.api.app import build_asgi
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import FakeBackend


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def client(backend: FakeBackend) -> Client:
    return Client(build_asgi(backend))
