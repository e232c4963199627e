"""Random values in every field of every route: an answer of a known shape, never a 500."""

import asyncio
import hashlib
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.api.app import build_asgi
from deployments.api.fields.generation import CHAT as CHAT_FIELDS
from deployments.api.fields.generation import COMPLETION as COMPLETION_FIELDS
from deployments.api.fields.others import DETOKENIZE, TOKENIZE
from deployments.api.options import ApiOptions
from deployments.api.page.routes import PAGE
from deployments.api.routes import EXACT
from tests.deployments.api.asgi import CHAT, COMPLETION, Client
from tests.deployments.fake_backend import FakeBackend

EDGES = [-1, 0, -0.0, 1, 1.5, 255, 256, 511, 512, 513, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30]
# What other languages' JSON libraries write, too: integers that no float holds, or Python does not
# print; fractions near nothing and everything.
EDGES += [10**308, 10**309, -(10**309), 10**400, -(10**4000), 5e-324, 1e-300, -1e-300, 1.7e308]
DEEP = [json.loads("[" * depth + "]" * depth) for depth in (30, 31, 40, 900)]
IN_A_STRING = ["[" * 600 + "]" * 600, '{"a":' * 600 + "1" + "}" * 600, '{"a": 1e999}', '{"a": NaN}']
SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from(EDGES)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=[]), max_size=8)  # halves of surrogate pairs, too
    | st.sampled_from(DEEP)
    | st.sampled_from(IN_A_STRING)
    | st.sampled_from(["tiny", "none", "auto", "user", "text", "function", "required"])
)
KEYS = st.text(max_size=4) | st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "function",
        "name",
        "tool_calls",
        "tool_call_id",
        "id",
        "schema",
        "json_schema",
        "regex",
        "json",
        "include_usage",
        "parameters",
        "$ref",
        "enum",
        "arguments",
        "0",
        "5",
        "512",
        "enable_thinking",
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
ROUTES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/chat/completions", CHAT, sorted(CHAT_FIELDS.known)),
    ("/v1/completions", COMPLETION, sorted(COMPLETION_FIELDS.known)),
    ("/tokenize", {"prompt": "a"}, sorted(TOKENIZE.known)),
    ("/detokenize", {"tokens": [5]}, sorted(DETOKENIZE.known)),
    ("/v1/adapters", {"name": "a", "path": "b"}, ["name", "path"]),
]
# A message with a value somewhere in it, which is seldom found by chance.
IN_A_MESSAGE = st.sampled_from(
    [
        lambda v: {"role": "user", "content": v},
        lambda v: {"role": "user", "content": [{"type": "text", "text": v}]},
        lambda v: {"role": "assistant", "content": "a", "reasoning_content": v, "name": v},
        lambda v: {"role": "assistant", "tool_calls": v},
        lambda v: {"role": "assistant", "tool_calls": [v]},
        lambda v: {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": v}}],
        },
        lambda v: {"role": v, "content": "a"},
        lambda v: v,
    ]
)
# Codes of what is wrong with the body itself, which is no field's doing.
OF_THE_BODY = {"invalid_json", "invalid_encoding", "json_too_deep", "json_too_large"}


@given(st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_value_in_any_field(data: st.DataObject) -> None:
    """A type that a check did not think of: an exception, and in the worst case a value that
    reaches the device. Integers of 309 digits and tool arguments of 500 brackets were 500s. And a
    400 that does not say which field it is about.
    """
    path, fields, names = data.draw(st.sampled_from(ROUTES))
    changes = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    if "messages" in names and data.draw(st.booleans()):
        changes["messages"] = [data.draw(IN_A_MESSAGE)(data.draw(VALUES))]
    dropped = data.draw(st.sets(st.sampled_from(sorted(fields)), max_size=1))
    sent = {name: value for name, value in {**fields, **changes}.items() if name not in dropped}
    backend = FakeBackend()
    app = build_asgi(backend)
    reply = asyncio.run(Client(app).request("POST", path, json.dumps(sent).encode()))
    if reply.status != 200:
        assert reply.status in (400, 403, 404), reply.body
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 800
        if error["code"] not in OF_THE_BODY:
            root = re.split(r"[.\[#]", error["param"])[0]
            assert root in {*changes, *fields}, error
    for request in backend.requests:
        assert all(type(t) is int and 0 <= t < 512 for t in request.token_ids)
        assert len(request.token_ids) + (request.params.max_tokens or 1) <= 256
        assert -(2**63) <= request.seed < 2**63
    assert not backend.live and app.in_flight == 0


@given(st.binary(max_size=64) | st.text(alphabet='{}[]",:\\u0123truefalsn', max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_body(body: bytes | str) -> None:
    """A body that the JSON layer does not expect."""
    raw = body.encode() if isinstance(body, str) else body
    reply = asyncio.run(Client(build_asgi(FakeBackend())).request("POST", "/tokenize", raw))
    assert reply.status == 400 and reply.json()["error"]["code"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "FOO"])
def test_every_route_needs_a_key(method: str) -> None:
    """A route added without authentication: all are closed but those that tell nothing."""
    keys = frozenset({hashlib.sha256(b"secret").digest()})
    client = Client(build_asgi(FakeBackend(), ApiOptions(api_keys=keys)))
    for path in [*EXACT, "/v1/models/tiny", "/", "/nothing", "/health/", "//health", "/Health"]:
        reply = asyncio.run(client.request(method, path))
        expected = {401}
        if path in ("/", "/health", "/health_generate", "/ping", "/ready"):
            expected = {200, 405}
        elif path == PAGE:  # off here; its own scripts ask for the key
            expected = {404, 405}
        assert reply.status in expected, path
