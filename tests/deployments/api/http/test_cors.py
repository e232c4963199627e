"""Requests of web pages of other origins, by configuration."""

import hashlib
from asyncio import run
from collections.abc import Iterable

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.config.load import parse_config
from engine.errors import ConfigError
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import FakeBackend

PAGE = b"https://chat.example.com"
KEYS = frozenset({hashlib.sha256(b"secret").digest()})
ASK = (b"access-control-request-method", b"POST")
NAMES = (b"access-control-request-headers", b"authorization,content-type,x-stainless-os")


def client_for(*origins: str, keys: frozenset[bytes] = KEYS) -> Client:
    options = ApiOptions(cors_origins=frozenset(origins), api_keys=keys)
    return Client(build_asgi(FakeBackend(), options))


def ask(client: Client, method: str, path: str, *headers: tuple[bytes, bytes]) -> Reply:
    return run(client.request(method, path, b"", headers))


def named(reply: Reply, *names: str) -> Iterable[str | None]:
    return [reply.header(f"access-control-{name}") for name in names]


def test_a_page_may_ask(backend: FakeBackend) -> None:
    """No page in a browser could use the service: the preflight was 405, whatever was set."""
    client = client_for(PAGE.decode())
    reply = ask(client, "OPTIONS", "/v1/chat/completions", (b"origin", PAGE), ASK, NAMES)
    assert reply.status == 200 and reply.body == b""  # without a key: browsers send none with it
    assert list(named(reply, "allow-origin", "allow-headers", "allow-methods")) == [
        PAGE.decode(),
        NAMES[1].decode(),
        "GET, HEAD, POST, DELETE",
    ]
    bearer = (b"authorization", b"Bearer secret")
    reply = ask(client, "GET", "/v1/models", (b"origin", PAGE), bearer)
    assert reply.status == 200 and reply.header("vary") == "origin"
    assert list(named(reply, "allow-origin")) == [PAGE.decode()]
    assert "x-request-id" in (reply.header("access-control-expose-headers") or "")
    refused = ask(client, "GET", "/v1/models", (b"origin", PAGE))
    assert refused.status == 401  # and the page can read why
    assert list(named(refused, "allow-origin")) == [PAGE.decode()]


def test_other_pages_may_not() -> None:
    """An origin that only looks like one of those named; or a cache that gives one page's answer to
    another."""
    client = client_for(PAGE.decode(), keys=frozenset())
    for origin in (b"https://evil.example.com", PAGE + b".evil.com", b"null", b"http" + PAGE[5:]):
        reply = ask(client, "OPTIONS", "/v1/models", (b"origin", origin), ASK)
        assert reply.status == 403 and "http.cors_origins" in reply.json()["error"]["message"]
        assert reply.json()["error"]["code"] == "origin_not_allowed"
        assert list(named(reply, "allow-origin")) == [None]
        reply = ask(client, "GET", "/v1/models", (b"origin", origin))
        assert (reply.status, reply.header("vary")) == (200, "origin")
        assert list(named(reply, "allow-origin")) == [None]
    twice = ask(client, "OPTIONS", "/v1/models", (b"origin", PAGE), (b"origin", PAGE), ASK)
    assert twice.status == 403
    odd = (b"access-control-request-headers", b"a\r\nset-cookie: b")
    reply = ask(client, "OPTIONS", "/v1/models", (b"origin", PAGE), ASK, odd)
    assert list(named(reply, "allow-headers")) == ["authorization"]


def test_any_page_and_none(client: Client) -> None:
    """`*` that lets pages in only where no key is asked for; an OPTIONS that is no preflight."""
    reply = ask(
        client_for("*"), "OPTIONS", "/v1/models", (b"origin", b"http://localhost:3000"), ASK
    )
    assert reply.status == 200 and list(named(reply, "allow-origin")) == ["*"]
    assert reply.header("vary") is None
    assert ask(client_for("*", keys=frozenset()), "OPTIONS", "/v1/models").status == 405
    reply = ask(client, "OPTIONS", "/v1/models", (b"origin", PAGE), ASK)
    assert reply.status == 405 and list(named(reply, "allow-origin")) == [None]


def test_origins_are_checked_before_anything_starts() -> None:
    """A trailing slash, with which no browser ever names an origin: silently nobody gets in."""
    fine = [
        "https://chat.example.com",
        "http://localhost:3000",
        "http://[::1]:80",
        "tauri://a",
        "*",
    ]
    assert parse_config({"http": {"cors_origins": fine}}, {}).http.cors_origins == fine
    for wrong in ("https://chat.example.com/", "chat.example.com", "https://*.example.com", ""):
        with pytest.raises(ConfigError, match="cors_origins"):
            parse_config({"http": {"cors_origins": [wrong]}}, {})
