"""The owner of a request, and its deadline."""

import asyncio
import hashlib
import json
import time

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.backend import GenerationRequest
from engine.errors import Overloaded
from tests.deployments.api.asgi import COMPLETION, Client, Reply
from tests.deployments.fake_backend import FakeBackend

KEYS = frozenset(hashlib.sha256(key).digest() for key in (b"one", b"two"))


def asked(options: ApiOptions, *headers: tuple[bytes, bytes], **fields) -> GenerationRequest:
    """Return the request that the backend gets."""
    backend = FakeBackend()
    client = Client(build_asgi(backend, options))
    body = json.dumps({**COMPLETION, **fields}).encode()
    kind = (b"content-type", b"application/json")
    reply = asyncio.run(client.request("POST", "/v1/completions", body, (kind, *headers)))
    assert reply.status == 200, reply.body
    return backend.requests[0]


def test_requests_take_turns_by_what_the_operator_chose():
    """Turns by something that the caller can choose although keys are there; or one queue for all
    although a gateway says who is who."""
    first, second = (
        asked(ApiOptions(api_keys=KEYS), (b"authorization", b"Bearer " + key), user="same").key
        for key in (b"one", b"two")
    )
    assert first != second and first and b"one" not in bytes.fromhex(first)
    assert asked(ApiOptions(), (b"authorization", b"Bearer x"), user="a").key == ""
    by_user = ApiOptions(share_by="user")
    assert asked(by_user, user="a").key != asked(by_user, user="b").key != ""
    assert asked(by_user).key == ""
    by_tenant = ApiOptions(share_by="x-tenant")
    tenants = [asked(by_tenant, (b"x-tenant", name), user="a").key for name in (b"t", b"u", b"t")]
    assert tenants[0] == tenants[2] != tenants[1]


@pytest.mark.parametrize(
    ("header", "field", "default", "expected"),
    [
        (None, None, None, None),
        (None, None, 9.0, 9.0),
        (b"2.5", None, 9.0, 2.5),
        (None, 20, 9.0, 20.0),
        (b"7", 3, 9.0, 3.0),
        (b"2", 3, None, 2.0),
    ],
)
def test_the_deadline_is_the_sooner_of_header_and_field_else_the_default(
    header, field, default, expected
):
    """A deadline that is read and then lost; or a default that shortens what was asked for."""
    headers = () if header is None else ((b"x-deadline-seconds", header),)
    began = time.monotonic()
    request = asked(ApiOptions(deadline_s=default), *headers, deadline_seconds=field)
    if expected is None:
        assert request.deadline is None
    else:
        assert request.deadline is not None
        assert 0 <= request.deadline - began - expected < 1.0


def test_a_session_is_of_its_key():
    """Bugs: a session's header is not read; a client learns where another one's session is."""
    named, again, other, none = (
        asked(ApiOptions(api_keys=KEYS), (b"authorization", b"Bearer " + key), *headers).session
        for key, headers in (
            (b"one", [(b"x-session-id", b"chat-1")]),
            (b"one", [(b"x-session-id", b" chat-1 ")]),
            (b"two", [(b"x-session-id", b"chat-1")]),
            (b"one", []),
        )
    )
    assert len(named) == 8 and named == again != other and none == b""


def test_a_refusal_comes_before_the_work_and_says_when():
    """Tokenising for those who are refused: at ten times the load nothing else would be done."""
    backend = FakeBackend()
    backend.tokenizer = lambda model: pytest.fail("it was tokenised")  # type: ignore
    for code, status in (("overloaded", 503), ("rate_limit_exceeded", 429)):
        backend.refuse = Overloaded("too much", code=code, retry_after=3.2)
        reply: Reply = asyncio.run(Client(build_asgi(backend)).completion())
        assert (reply.status, reply.header("retry-after")) == (status, "4")
        assert reply.json()["error"]["code"] == code
