"""cases.yaml, each through the whole application. After each case an ordinary request must get its
ordinary answer, and nothing may be left running.
"""

import asyncio
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from deployments.api.app import Api, build_asgi
from deployments.api.options import ApiOptions
from tests.deployments.api.asgi import CHAT, COMPLETION, Client, Reply, scope_of
from tests.deployments.fake_backend import FakeBackend

ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", COMPLETION),
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": "hello"}),
    "detokenize": ("/detokenize", {"model": "tiny", "tokens": [5]}),
}
OPTIONS = {
    None: ApiOptions(),
    "bos": ApiOptions(),
    "strict": ApiOptions(strict=True),
    "keys": ApiOptions(api_keys=frozenset({hashlib.sha256(b"secret").digest()})),
}
LEAKS = re.compile(r"/home|/usr|/tmp|-packages|0x[0-9a-f]{6}|Traceback|File \"|\.py\b|object at")
BODIES = {
    "deep_lists": b"[" * 10_000 + b"]" * 10_000,
    "deep_objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "lists_33": b'{"a":' + b"[" * 33 + b"]" * 33 + b"}",
    "utf16": json.dumps(CHAT).encode("utf-16"),
    "utf16_bare": json.dumps(CHAT).encode("utf-16-le"),
    "latin1": '{"model": "tiné"}'.encode("latin-1"),
    "bom": b"\xef\xbb\xbf" + json.dumps(CHAT).encode(),
    "five_mib": b'{"a":"' + b"a" * (5 << 20) + b'"}',
    "long_grammar": json.dumps(
        CHAT | {"guided_grammar": "\n".join(f"r{i} ::= r{i + 1}" for i in range(3000)) + "x ::= r0"}
    ).encode(),
    "false_properties": json.dumps(
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "schema": {
                        "properties": {f"name{i}": False for i in range(9000)},
                        "required": [f"name{i}" for i in range(9000)],
                    },
                },
            }
        }
    ).encode(),
    "long_integer": b'{"model": "tiny", "prompt": [1, 2, 3, ' + b"1" * 5000 + b"]}",
}


def build(value: Any) -> Any:
    """Return a value of cases.yaml with its short forms of large values expanded."""
    if isinstance(value, list):
        return [build(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$repeat" in value:
        item, times = value["$repeat"]
        return build(item) * times
    if "$digits" in value:
        return int("7" * value["$digits"])
    if "$join" in value:
        return "".join(map(build, value["$join"]))
    if "$count" in value:
        return list(range(value["$count"]))
    if "$object" in value:
        return {str(i): value.get("value", 1) for i in range(value["$object"])}
    if "$deep" in value:
        schema: dict[str, Any] = {}
        for _ in range(value["$deep"]):
            schema = {"items": schema}
        return schema
    if "$tools" in value:
        names = [f"f{i}" for i in range(value["$tools"])]
        names += [build(value["name"])] if "name" in value else []
        return [{"type": "function", "function": {"name": name}} for name in names]
    return {key: build(item) for key, item in value.items()}


@cache
def load() -> list[Any]:
    text = Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8")
    out = []
    for case in YAML(typ="safe").load(text):
        many = [{"set": {**case.get("set", {}), case["field"]: v}, "param": case["field"]}
                for v in case.get("values", [])]  # fmt: skip
        many += [{"set": {name: 1}, "param": name} for name in case.get("each_field", [])]
        many += [{"set": {name: {"$digits": 310}}, "param": name}
                 for name in case.get("field_of_310_digits", [])]  # fmt: skip
        for i, extra in enumerate(many or [{}]):
            name = f"{case['row']}-{case['id']}" + (f"-{i}" if many else "")
            merged = {**case, **extra}
            if "param" in case or case.get("field") == "prompt":
                # A path below the field; prompts name the item at fault.
                merged["param"] = case.get("param")
            out.append(pytest.param(merged, id=name.replace(" ", "_")))
    return out


@cache
def application(kind: str | None) -> tuple[Api, FakeBackend]:
    backend = FakeBackend(bos=kind == "bos")
    return build_asgi(backend, OPTIONS[kind]), backend


async def usual(client: Client, kind: str | None) -> str:
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer secret")]
    reply = await client.post("/v1/chat/completions", CHAT, headers=headers)
    assert reply.status == 200, reply.body
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


async def perform(client: Client, case: dict[str, Any]) -> Reply:
    method, path, body, headers = prepare(case)
    size = max(1, len(body) // case.get("chunks", 1))
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    return await client.request(method, path, parts, headers)


def prepare(case: dict[str, Any]) -> tuple[str, str, bytes, list[tuple[bytes, bytes]]]:
    """Return the method, path, body and headers of a case's request."""
    route = case.get("route", "chat")
    if route in ROUTES:
        method, (path, fields) = "POST", ROUTES[route]
    else:
        method, path = route.replace("{long}", "/" + "a" * 100_000).split(" ")
        fields = {}
    body = BODIES[case["generate"]] if "generate" in case else None
    if "body" in case:
        body = case["body"].encode("utf-8")
    if body is None:
        changed = {**fields, **build(case.get("set", {}))}
        if "schema" in case:
            schema = {"name": "s", "schema": build(case["schema"])}
            changed["response_format"] = {"type": "json_schema", "json_schema": schema}
        body = json.dumps({k: v for k, v in changed.items() if k not in case.get("drop", [])})
        body = body.encode() if method == "POST" else b""
    headers = [(k.encode(), build(v).encode("latin-1")) for k, v in case.get("request_headers", [])]
    kind = case.get("content_type", "application/json")
    headers += [] if kind is None else [(b"content-type", kind.encode())]
    headers += [(b"x-h%d" % i, b"") for i in range(case.get("many_headers", 0))]
    if case.get("length"):
        headers.append((b"content-length", b"%d" % len(body)))
    path += "?" + build(case["query"]) if "query" in case else ""
    return method, path, body, headers


async def websocket(app: Api) -> Reply:
    reply = Reply()

    async def send(message: dict[str, Any]) -> None:
        reply.status = message.get("status", reply.status)
        reply.headers = [(k.decode(), v.decode()) for k, v in message.get("headers", [])] or (
            reply.headers
        )
        reply.body += message.get("body", b"")

    scope = scope_of("GET", "/v1/chat/completions", [])
    scope |= {"type": "websocket", "extensions": {"websocket.http.response": {}}}
    await app(scope, None, send)  # type: ignore[arg-type]
    return reply


@pytest.mark.parametrize("case", load())
def test_case(case: dict[str, Any]) -> None:
    """Every row guards against its own bug; together: a 500, an answer without the error object, a
    message that shows our insides, or a case that spoils the next request.
    """
    asyncio.run(run(case))


async def run(case: dict[str, Any]) -> None:
    kind = case.get("api")
    app, backend = application(kind)
    client = Client(app)
    before = await usual(client, kind)
    asked = len(backend.requests)
    reply = await websocket(app) if case.get("websocket") else await perform(client, case)
    assert reply.status == case["status"], reply.body[:500]
    assert reply.header("x-request-id")
    for name, value in case.get("headers", {}).items():
        assert reply.header(name) == build(value)
    if reply.status >= 300:
        assert len(backend.requests) == asked, "a refused request reached an engine"
        check_error(reply, case)
    if "ignored" in case:
        assert (reply.header("x-ignored-fields") or "").split(", ") == case["ignored"]
    if case.get("usual"):
        assert reply.json()["choices"][0]["message"]["content"] == before
    if "special_tokens" in case:
        ids = backend.requests[asked].token_ids
        assert sum(token < 3 for token in ids) == case["special_tokens"]
    assert not backend.live and app.in_flight == 0
    assert await usual(client, kind) == before


def check_error(reply: Reply, case: dict[str, Any]) -> None:
    assert reply.header("content-type") == "application/json"
    assert len(reply.body) < 2_000, "an error repeats the input"
    body = reply.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["type"].endswith("_error")
    assert not LEAKS.search(error["message"]), error["message"]
    assert re.fullmatch("[a-z_]+", error["code"])
    if "code" in case:
        assert error["code"] == case["code"], error
    if case.get("param") is not None:
        assert error["param"] == case["param"], error
    if case.get("field") == "prompt":
        assert error["param"].startswith("prompt"), error
    parts = case.get("message", [])
    for part in parts if isinstance(parts, list) else [parts]:
        assert part in error["message"], error


GENERATION = "tests/deployments/api/generation/test_generation.py"
ADAPTERS = "tests/abuse/test_adapters.py"
# Rows that need another door, or do not concern these routes.
ELSEWHERE = {
    23: "tests/deployments/cli/test_adapters_admin.py::test_admin_keys",
    28: f"{ADAPTERS}::test_broken_adapters_are_told",
    29: f"{ADAPTERS}::test_broken_adapters_are_told",
    30: f"{ADAPTERS}::test_broken_adapters_are_told",
    50: f"{GENERATION}::test_stop_string_across_tokens",
}
# Rows whose input is bytes, or needs an engine, beside what the data file has of them.
FURTHER = {
    **dict.fromkeys((8, 9, 10, 11, 14, 15, 17, 20, 22), "tests/abuse/test_raw_http.py::test_case"),
    17: "tests/deployments/api/test_routes.py::test_observe_has_a_fixed_set_of_routes",
    19: "tests/abuse/test_fuzz.py::test_every_route_needs_a_key",
    24: "tests/abuse/test_raw_http.py::test_request_id_comes_back_once_and_clean",
    49: f"{GENERATION}::test_stop_of_an_emoji",
    52: "tests/engine/text/test_sampling.py::test_bias_forces_and_forbids",
}


def test_every_row_is_covered() -> None:
    """A row of the table that nobody tests."""
    rows = {item.values[0]["row"] for item in load()}  # type: ignore[union-attr, index]
    assert set(range(1, 64)) - rows == set(ELSEWHERE)
    root = Path(__file__).parents[2]
    for where in [*ELSEWHERE.values(), *FURTHER.values()]:
        path, _, name = where.partition("::")
        assert not name or f"def {name}(" in (root / path).read_text(encoding="utf-8"), where
