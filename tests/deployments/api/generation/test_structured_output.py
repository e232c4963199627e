"""Structured output at the API: which fields say it, what reaches the engine, what is refused."""

import asyncio
import json
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.api.output import grammars
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.api.output.test_tools import MODEL, backend_with
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.fake_backend import FakeBackend

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
PATH = "response_format.json_schema"


def run(work: Any) -> Any:
    return asyncio.run(work)


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    inner = {"name": "s", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


TAG = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}


def structural_tag(structures: list[Any], triggers: list[str]) -> dict[str, Any]:
    inner = {"type": "structural_tag", "structures": structures, "triggers": triggers}
    return {"response_format": inner}


def code_of(reply: Reply) -> tuple[int, str, str | None]:
    error = reply.json()["error"]
    return reply.status, error["code"], error["param"]


@pytest.mark.parametrize(
    "fields, kind, text",
    [
        (json_schema(SCHEMA), "json_schema", SCHEMA),
        (json_schema(SCHEMA, strict=True), "json_schema", SCHEMA),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "gbnf", 'root ::= "a"'),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_regex": "a|b"}, "regex", "a|b"),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
        ({"guided_grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"regex": "a"}, "regex", "a"),
        ({"ebnf": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"grammar": "", "json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
def test_forms(
    backend: FakeBackend, client: Client, fields: dict[str, Any], kind: str, text: Any, chat: bool
) -> None:
    """A form that one route takes and the other drops: an answer that is not limited at all."""
    reply = run(client.chat(**fields) if chat else client.completion(**fields))
    assert reply.status == 200, reply.body
    grammar = backend.requests[-1].params.structured
    assert grammar is not None and grammar.kind == kind
    value = grammar.text if isinstance(text, str) else json.loads(grammar.text)
    assert value == text
    assert reply.header("x-ignored-fields") is None


def test_text_is_not_limited(backend: FakeBackend, client: Client) -> None:
    """A plain chat that pays for a grammar."""
    for fields in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}):
        assert run(client.chat(**fields)).status == 200
        assert backend.requests[-1].params.structured is None


@pytest.mark.parametrize(
    "fields, code, param",
    [
        (json_schema({"not": {}}, strict=True), "unsupported_schema", f"{PATH}.schema#/not"),
        (
            json_schema({"properties": {"a": {"items": {"uniqueItems": True}}}}, strict=True),
            "unsupported_schema",
            f"{PATH}.schema#/properties/a/items/uniqueItems",
        ),
        (
            json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}, strict=True),
            "unsupported_schema",
            f"{PATH}.schema#/oneOf",
        ),
        (
            json_schema({"pattern": "a(?=b)"}, strict=True),
            "unsupported_schema",
            f"{PATH}.schema#/pattern",
        ),
        (json_schema({"enum": []}), "unsatisfiable_schema", f"{PATH}.schema"),
        (json_schema(False), "unsatisfiable_schema", f"{PATH}.schema"),
        (json_schema({"$ref": "#/$defs/none"}), "unsupported_schema", f"{PATH}.schema#/$ref"),
        (json_schema([1]), "invalid_type", f"{PATH}.schema"),
        (json_schema(SCHEMA, name="a b"), "invalid_value", f"{PATH}.name"),
        (json_schema(SCHEMA, name=None), "missing_field", f"{PATH}.name"),
        (json_schema(SCHEMA, strict="yes"), "invalid_type", f"{PATH}.strict"),
        (json_schema(None), "missing_field", f"{PATH}.schema"),
        ({"response_format": {"type": "xml"}}, "not_supported", "response_format.type"),
        ({"response_format": "json"}, "invalid_type", "response_format"),
        ({"structured_outputs": {}}, "missing_field", "structured_outputs"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "conflicting_fields",
            "structured_outputs",
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "invalid_type",
            "structured_outputs.structural_tag.triggers",
        ),
        (
            {"structured_outputs": {"structural_tag": "{"}},
            "invalid_json",
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"structural_tag": {"format": {"type": "any_text"}}}},
            "not_supported",
            "structured_outputs.structural_tag.format",
        ),
        (structural_tag([], ["<"]), "invalid_value", "response_format.structures"),
        (structural_tag([TAG], []), "invalid_value", "response_format.triggers"),
        (structural_tag([TAG], [""]), "invalid_type", "response_format.triggers"),
        (structural_tag([TAG], ["<x"]), "invalid_value", "response_format.structures[0].begin"),
        (structural_tag([{}], ["<"]), "invalid_type", "response_format.structures[0].begin"),
        (
            structural_tag([{**TAG, "end": 1}], ["<"]),
            "invalid_type",
            "response_format.structures[0].end",
        ),
        (
            structural_tag([{**TAG, "schema": {"enum": []}}], ["<"]),
            "unsatisfiable_schema",
            "response_format.structures[0].schema",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "conflicting_fields", "guided_choice"),
        ({"guided_regex": "(("}, "invalid_grammar", "guided_regex"),
        ({"guided_regex": "  "}, "invalid_value", "guided_regex"),
        ({"guided_regex": "a" * 300_000}, "grammar_too_large", "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "invalid_grammar", "guided_grammar"),
        ({"guided_grammar": "root ::= ("}, "invalid_grammar", "guided_grammar"),
        ({"grammar": "root ::= other"}, "invalid_grammar", "grammar"),
        ({"grammar": {"a": 1}}, "invalid_type", "grammar"),
        ({"json_schema": []}, "invalid_type", "json_schema"),
        ({"json_schema": SCHEMA, "grammar": 'root ::= "a"'}, "conflicting_fields", "json_schema"),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"guided_choice": [1]}, "invalid_type", "guided_choice"),
        ({"guided_json": "{"}, "invalid_json", "guided_json"),
        ({"structured_outputs": {"json": 1}}, "invalid_type", "structured_outputs.json"),
    ],
)
def test_refused_before_anything_is_sent(
    backend: FakeBackend, client: Client, fields: dict[str, Any], code: str, param: str
) -> None:
    """An error of the engine's after the stream has begun, or one that names no field."""
    assert code_of(run(client.chat(**fields))) == (400, code, param)
    assert not backend.requests


def test_what_is_not_enforced_is_named(backend: FakeBackend, client: Client) -> None:
    """A schema that is not strict and is followed in part, without a word."""
    schema = {
        "properties": {"a": {"not": {"type": "null"}}, "b": {"format": "int32"}},
        "oneOf": [{"minProperties": 1}, {"required": ["a"]}],
    }
    reply = run(client.chat(**json_schema(schema, description="d")))
    assert reply.status == 200, reply.body
    named = (reply.header("x-ignored-fields") or "").split(",")
    names = {name.strip() for name in named}
    assert f"{PATH}.description" in names
    assert f"{PATH}.schema#/properties/a/not" in names
    assert f"{PATH}.schema#/properties/b/format" in names
    assert f"{PATH}.schema#/oneOf" in names
    assert any(name.endswith("/0/minProperties") for name in names)
    grammar = backend.requests[-1].params.structured
    assert grammar is not None and "not" not in json.loads(grammar.text)["properties"]["a"]


# Of other dialects than the compiler's, and what it takes of none.
UNSUPPORTED = [
    *(r"^(?!a)b", r"a\Z", r"a{,3}", r"(a)\1", r"\bfoo\b", r"(?m)^a$", r"[[]", r"{", r"[a-\d]"),
    *(r"(?<n>a)(?P=n)", r"\cA", r"(?>a)", r"(?<=a)b"),
]


def sent_to(route: str, schema: Any) -> tuple[str, dict[str, Any], str]:
    """Return a path, a body with a schema that is not strict, and the client's name of the
    schema."""
    tool = {"name": "f", "parameters": schema}
    message = {"messages": [{"role": "user", "content": "hi"}]}
    v1 = f"/v1/{route.partition(' ')[0]}"
    inner = {"name": "s", "schema": schema}
    return {
        "chat/completions": (v1, {**message, **json_schema(schema)}, f"{PATH}.schema"),
        "completions": (v1, {"prompt": "hi", **json_schema(schema)}, f"{PATH}.schema"),
        "responses": (
            v1,
            {"input": "hi", "text": {"format": {"type": "json_schema", **inner}}},
            "text.format.schema",
        ),
        "messages": (
            v1,
            {
                **message,
                "max_tokens": 9,
                "output_config": {"format": {"type": "json_schema", "schema": schema}},
            },
            "output_config.format.schema",
        ),
        "api/chat": ("/api/chat", {**message, "stream": False, "format": schema}, "format"),
        "api/generate": (
            "/api/generate",
            {"prompt": "hi", "stream": False, "format": schema},
            "format",
        ),
        "chat/completions tools": (
            v1,
            {**message, "tools": [{"type": "function", "function": tool}]},
            "tools[0].function.parameters",
        ),
        "responses tools": (
            v1,
            {"input": "hi", "tools": [{"type": "function", **tool}]},
            "tools[0].parameters",
        ),
        "messages tools": (
            v1,
            {
                **message,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": schema}],
            },
            "tools[0].input_schema",
        ),
        "api/chat tools": (
            "/api/chat",
            {**message, "stream": False, "tools": [{"type": "function", "function": tool}]},
            "tools[0].function.parameters",
        ),
    }[route]


ROUTES = [
    *("chat/completions", "completions", "responses", "messages", "api/chat", "api/generate"),
    *(f"{path} tools" for path in ("chat/completions", "responses", "messages", "api/chat")),
]


@pytest.mark.parametrize("route", ROUTES)
def test_patterns_that_cannot_be_enforced_are_named(route: str) -> None:
    """A schema that is not strict, refused for a pattern of another dialect; one of several that
    is left out without a word; one that is left out though it can be enforced."""
    backend = backend_with(TEMPLATES["hermes"])
    client = Client(build_asgi(backend))
    patterns = {f"p{i}": {"type": "string", "pattern": p} for i, p in enumerate(UNSUPPORTED)}
    supported = {"type": "string", "pattern": "^[a-c]+$"}
    schema = {"type": "object", "properties": {"kept": supported, **patterns}, "required": ["kept"]}
    path, body, where = sent_to(route, schema)
    reply = run(client.post(path, {"model": MODEL, **body}))
    assert reply.status == 200, reply.body
    named = {name.strip() for name in (reply.header("x-ignored-fields") or "").split(",")}
    assert named >= {f"{where}#/properties/{name}/pattern" for name in patterns}, named
    assert not any("kept" in name for name in named)
    grammar = backend.requests[-1].params.structured
    assert grammar is not None and json.dumps(supported["pattern"]) in grammar.text
    assert "(?!" not in grammar.text


@pytest.mark.parametrize("pattern", ["(", "[a", "*a", "a)"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_broken_pattern_is_refused(client: Client, pattern: str, strict: bool) -> None:
    """A mistake that its author never learns of."""
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    reply = run(client.chat(**json_schema(schema, strict=strict)))
    at = f"{PATH}.schema#/properties/a/pattern"
    assert code_of(reply) == (400, "unsupported_schema", at)


def test_a_strict_pattern_is_enforced_or_refused(client: Client) -> None:
    """One that is left out where the caller relies on it."""
    for pattern in UNSUPPORTED:
        schema = {"properties": {"a": {"type": "string", "pattern": pattern}}}
        reply = run(client.chat(**json_schema(schema, strict=True)))
        at = f"{PATH}.schema#/properties/a/pattern"
        assert code_of(reply) == (400, "unsupported_schema", at)


def test_grammars_that_would_end_the_process(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    """A router that one request kills, by a stack that overflows, or whose threads are taken for
    minutes by a compilation that nothing can stop."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(6000)}
    deep = {"$ref": "#/$defs/d0", "$defs": {**chain, "d6000": {"type": "null"}}}
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(9000))
    monkeypatch.setattr(grammars, "SECONDS", 1.0)
    for fields, where in (
        ({"guided_json": deep}, "guided_json"),
        ({"guided_grammar": f'start: r0\n{rules}\nr9000: "a"'}, "guided_grammar"),
        ({"guided_regex": "a?" * 60_000}, "guided_regex"),
    ):
        reply = run(client.chat(**fields))
        assert code_of(reply) == (400, "grammar_too_complex", where)
        assert run(client.chat(guided_regex=f"{where}|b")).status == 200, "and goes on"


def test_one_that_waits_too_long(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    """A request that waits for others' grammars for ever."""
    monkeypatch.setattr(grammars, "QUEUE_SECONDS", 0.0)
    assert code_of(run(client.chat(guided_regex="waits")))[:2] == (503, "overloaded")


def test_strict_http_takes_the_fields(backend: FakeBackend) -> None:
    """Fields that are taken, but not known."""
    client = Client(build_asgi(backend, ApiOptions(strict=True)))
    others = {"structured_outputs": {"regex": "a"}}, {"ebnf": 'start: "a"'}
    for fields in (json_schema(SCHEMA), *others):
        assert run(client.chat(**fields)).status == 200
