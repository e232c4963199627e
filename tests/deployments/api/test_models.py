"""/v1/models where there are several: who may change them, and what is told of it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from engine.errors import ConfigError, InvalidRequest
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import MODEL, FakeBackend

KEY, ADMIN = b"a-key", b"an-admin-key"


class Changes:
    """A fake of ModelChanges that records its calls, with one model that does not start."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.started = False

    def status(self, model: str) -> str:
        return "ready" if self.started else "starting"

    async def trouble(self, model: str) -> dict[str, str]:
        return {"status": "failed", "message": f"{model}: ConfigError: no such file: /secret"}

    async def put_model(self, name: str, section: Mapping[str, Any]) -> None:
        if "replcas" in section:
            raise ConfigError("replcas: unknown key", param="replcas")
        self.asked.append((name, dict(section)))

    async def remove(self, name: str) -> None:
        if name != MODEL:
            raise InvalidRequest("no model is called that", code="model_not_found")
        self.asked.append(name)


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def ask(
    options: ApiOptions, method: str, path: str, key: bytes = b"", **body: Any
) -> tuple[int, Any]:
    headers = [(b"content-type", b"application/json")]
    headers += [(b"authorization", b"Bearer " + key)] if key else []
    client = Client(build_asgi(FakeBackend(), options))
    reply: Reply = await client.request(
        method, path, json.dumps(body).encode() if body else b"", headers
    )
    return reply.status, reply.json()


@pytest.mark.parametrize(
    ("fields", "key", "status", "said"),
    [
        ({"several": False}, b"", 403, "serves one model"),
        ({}, b"", 403, "it is not set"),  # nobody's keys: anybody could load the machine full
        ({"admins": True}, b"", 401, "API key"),
        ({"admins": True, "users": True}, KEY, 403, "admin_keys_file"),
        ({"users": True}, KEY, 403, "admin_keys_file"),
    ],
)
async def test_who_may_not_change_models(
    fields: dict[str, bool], key: bytes, status: int, said: str
) -> None:
    """A client without any right that has the server load a model, or takes one away."""
    changes = Changes()
    options = ApiOptions(
        models=changes if fields.get("several", True) else None,
        api_keys=frozenset({digest(KEY)} if fields.get("users") else ()),
        admin_keys=frozenset({digest(ADMIN)} if fields.get("admins") else ()),
    )
    for method, path in (("POST", "/v1/models"), ("DELETE", f"/v1/models/{MODEL}")):
        answered, body = await ask(options, method, path, key, name="x")
        assert answered == status and said in body["error"]["message"]
    assert not changes.asked
    assert (await ask(options, "GET", "/v1/models", key))[0] == 200


async def test_an_admin_changes_models() -> None:
    """A misspelt key that is dropped without a word; a section that comes with the name in it."""
    changes = Changes()
    options = ApiOptions(models=changes, admin_keys=frozenset({digest(ADMIN)}))
    status, body = await ask(
        options, "POST", "/v1/models", ADMIN, name="x", model="/m", replicas=2, revision=None
    )
    assert (status, body) == (200, {"id": "x", "object": "model", "status": "starting"})
    status, body = await ask(options, "POST", "/v1/models", ADMIN, name="x", replcas=2)
    assert (status, body["error"]["param"]) == (400, "replcas")
    status, body = await ask(options, "POST", "/v1/models", ADMIN, model="/m")
    assert (status, body["error"]["code"]) == (400, "missing_field")
    assert (await ask(options, "DELETE", f"/v1/models/{MODEL}", ADMIN))[1]["deleted"] is True
    assert (await ask(options, "DELETE", "/v1/models/other", ADMIN))[0] == 404
    assert changes.asked == [("x", {"model": "/m", "replicas": 2}), MODEL]


async def test_why_a_model_does_not_start_is_for_admins() -> None:
    """Paths of the machine in what everybody may read; an operator who waits for ever."""
    changes = Changes()
    options = ApiOptions(models=changes, admin_keys=frozenset({digest(ADMIN)}))
    path = f"/v1/models/{MODEL}"
    everyone = (await ask(options, "GET", path))[1]
    assert everyone["status"] == "starting" and "message" not in everyone
    admin = (await ask(options, "GET", path, ADMIN))[1]
    assert admin["status"] == "failed" and "/secret" in admin["message"]
    changes.started = True
    assert (await ask(options, "GET", path, ADMIN))[1]["status"] == "ready"
