"""What an API key separates: turns, requests, cached prefixes, rights."""

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.caller import KeyRule
from deployments.api.options import ApiOptions
from deployments.backend import GenerationRequest
from deployments.routing.prefix_index import STRIDE
from engine.errors import Overloaded
from engine.pooling import Pooling
from tests.deployments.api.asgi import COMPLETION, Client, Reply
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend
from tests.deployments.router.fleet import Fleet, read

ONE, TWO, ROOT = (hashlib.sha256(key).digest() for key in (b"one", b"two", b"root"))
OPTIONS = ApiOptions(api_keys=frozenset({ONE, TWO}), admin_keys=frozenset({ROOT}))
SPELLINGS = (
    b"Bearer one",
    b"bearer one",
    b"BEARER one",
    b"bEaReR  one",
    b"Bearer    one  ",
    b"Bearer \tone",
)


def post(
    header: bytes | None = None, options: ApiOptions = OPTIONS, **fields: Any
) -> tuple[Reply, FakeBackend]:
    backend = FakeBackend()
    headers = [(b"content-type", b"application/json")]
    headers += [(b"authorization", header)] if header is not None else []
    body = json.dumps({**COMPLETION, **fields}).encode()
    client = Client(build_asgi(backend, options))
    return asyncio.run(client.request("POST", "/v1/completions", body, headers)), backend


def asked(
    header: bytes | None = None, options: ApiOptions = OPTIONS, **fields: Any
) -> GenerationRequest:
    reply, backend = post(header, options, **fields)
    assert reply.status == 200, reply.body
    return backend.requests[0]


def test_one_key_is_one_tenant_however_its_header_is_spelt() -> None:
    """Bug: turns were by the header's bytes, so six spellings of a key had six turns, and who
    varied them took another key's share in an overload."""
    requests = [asked(spelling) for spelling in SPELLINGS]
    assert len({(request.key, request.owner, request.cache_salt) for request in requests}) == 1
    other = asked(b"Bearer two")
    mine = requests[0]
    assert other.key != mine.key and other.owner != mine.owner
    assert other.cache_salt != mine.cache_salt


def test_a_header_of_the_gateway_is_one_tenant_however_it_is_spaced() -> None:
    """The same by share_by: a header."""
    by_tenant = ApiOptions(share_by="x-tenant")
    keys = set()
    for value in (b"t", b" t", b"t  "):
        backend = FakeBackend()
        headers = [(b"content-type", b"application/json"), (b"x-tenant", value)]
        client = Client(build_asgi(backend, by_tenant))
        asyncio.run(
            client.request("POST", "/v1/completions", json.dumps(COMPLETION).encode(), headers)
        )
        keys.add(backend.requests[0].key)
    assert len(keys) == 1


def test_cached_prefixes_are_a_keys_own() -> None:
    """Bug: all keys shared the prefix cache, so the time to the first token told one key what
    another had asked; and a salt that names another key's root would get there again."""
    mine, other = asked(b"Bearer one"), asked(b"Bearer two")
    assert mine.cache_salt != other.cache_salt
    salted = asked(b"Bearer one", cache_salt="s")
    assert salted.cache_salt not in (
        mine.cache_salt,
        asked(b"Bearer two", cache_salt="s").cache_salt,
    )
    for forged in (mine.cache_salt, mine.cache_salt.rstrip("/"), f"/{mine.cache_salt}"):
        assert asked(b"Bearer two", cache_salt=forged).cache_salt != mine.cache_salt
    shared = ApiOptions(api_keys=frozenset({ONE, TWO}), share_prefixes=True)
    assert asked(b"Bearer one", shared).cache_salt == asked(b"Bearer two", shared).cache_salt == ""
    assert asked(b"Bearer one", shared, cache_salt="s").cache_salt == "s"
    assert asked(None, ApiOptions()).cache_salt == ""


def test_routing_looks_for_a_prefix_under_its_key() -> None:
    """Requests that go to a replica for a prefix which is another key's there, and not to the one
    that has their own."""

    prompt = [5] * (8 * STRIDE + 1)
    headers = (b"Bearer one", b"Bearer two", b"bearer  one", b"BEARER two")
    requests = [replace(asked(header), model="m", token_ids=prompt) for header in headers]

    async def case() -> None:
        async with Fleet(3) as fleet:

            async def reason(request: GenerationRequest) -> str:
                before = dict(fleet.dispatcher.metrics.routed.values)
                await read(fleet.dispatcher.generate(request))
                after = fleet.dispatcher.metrics.routed.values
                (labels,) = (key for key, count in after.items() if count != before.get(key))
                return labels[0]

            reasons = [await reason(request) for request in requests]
            assert reasons == ["owner", "owner", "prefix", "prefix"]

    asyncio.run(case())


@pytest.mark.parametrize(
    ("header", "priority", "status"),
    [
        (b"Bearer one", 3, 200),
        (b"Bearer one", 0, 200),
        (b"Bearer one", -1, 403),
        (b"Bearer one", -(2**31), 403),
        (b"Bearer two", -4, 200),
        (b"Bearer two", -5, 403),
        (b"Bearer root", -(2**31), 200),
    ],
)
def test_priority_above_the_usual_is_a_right_of_the_key(
    header: bytes, priority: int, status: int
) -> None:
    """Bug: any key went before all others in an overload by asking for it."""
    options = ApiOptions(
        OPTIONS.strict, OPTIONS.api_keys, OPTIONS.admin_keys, {TWO: KeyRule(priority=-4)}
    )
    reply, backend = post(header, options, priority=priority)
    assert reply.status == status, reply.body
    if status == 403:
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("permission_denied", "priority")
        assert not backend.requests
    else:
        assert backend.requests[0].priority == priority


_CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        ("/v1/chat/completions", {**_CHAT, "max_tokens": 2}),
        ("/v1/messages", {**_CHAT, "model": MODEL, "max_tokens": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
        ("/api/chat", {**_CHAT, "model": MODEL, "stream": False}),
        ("/api/generate", {"prompt": "hello", "model": MODEL, "stream": False}),
        ("/chat", {"query": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
    ],
)
def test_priority_is_that_of_the_check_before_the_text_is_tokenised(
    path: str, body: dict[str, Any]
) -> None:
    """Bug: in an overload all requests were checked as ones of priority 0 first, so urgent ones
    were refused."""
    backend = FakeBackend()
    if path == "/v1/embeddings":
        card = replace(backend.cards[MODEL], pooling=Pooling("mean"), vector_size=VECTOR)
        backend.cards[MODEL] = card
    client = Client(build_asgi(backend, ApiOptions()))
    replies = [asyncio.run(client.post(path, {**body, "priority": 5})) for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 200], replies[0].body
    assert backend.admitted == [request.priority for request in backend.requests] == [5, 5]
    backend.refuse, backend.refuses_from = Overloaded("too much work is waiting"), 0
    priorities = {-1: 200, 0: 503}
    for priority, status in priorities.items():
        reply = asyncio.run(client.post(path, {**body, "priority": priority}))
        assert reply.status == status, reply.body
    assert backend.admitted[2:] == [*priorities]


def test_without_keys_everybody_may_set_any_priority() -> None:
    """A service on loopback, or a handle inside the cluster, that refuses what it always took."""
    assert asked(None, ApiOptions(), priority=-16).priority == -16
