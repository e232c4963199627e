"""/openapi.json: it has every route, says what the checks do, and holds under what it allows."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deployments.api.app import build_asgi
from deployments.api.fields import anthropic, generation, ollama, others, pooled, responses
from deployments.api.fields.schema import NEVER, Body, Schema
from deployments.api.openapi.document import document
from deployments.api.options import ApiOptions
from deployments.api.routes import ROUTES
from engine.pooling import Pooling
from tests.deployments.api.asgi import CHAT, COMPLETION, Client
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend

POOLINGS = {
    "/v1/embeddings": Pooling("mean", (None,), {"query": "query: "}, matryoshka=True),
    "/api/embed": Pooling("mean", (None,), matryoshka=True),
    "/api/embeddings": Pooling("mean", (None,)),
    "/v1/rerank": Pooling("cls", labels=("relevance",)),
    "/rerank": Pooling("cls", labels=("relevance",)),
    "/pooling": Pooling("mean", (None,), {"query": "query: "}, matryoshka=True),
    "/v2/embed": Pooling("mean", (None,), matryoshka=True),
    "/embed": Pooling("mean", (None,), {"query": "query: "}, matryoshka=True),
    "/predict": Pooling("cls", labels=tuple(f"kind {i}" for i in range(VECTOR))),
    "/v1/score": Pooling("cls", labels=("relevance",)),
    "/v1/classify": Pooling("cls", labels=tuple(f"kind {i}" for i in range(VECTOR))),
}
TURN = [{"role": "user", "content": "hello"}]
FEW = {"max_tokens": 2}
BASES: dict[str, tuple[Body, dict[str, Any]]] = {
    "/v1/chat/completions": (generation.CHAT, {**CHAT, **FEW}),
    "/v1/completions": (generation.COMPLETION, {**COMPLETION, **FEW}),
    "/v1/responses": (responses.RESPONSES, {"model": MODEL, "input": "hello"}),
    "/v1/messages": (anthropic.MESSAGES, {"model": MODEL, "messages": TURN, **FEW}),
    "/v1/embeddings": (pooled.EMBEDDINGS, {"model": MODEL, "input": "hello"}),
    "/v1/rerank": (pooled.RERANK, {"model": MODEL, "query": "a", "documents": ["b"]}),
    "/rerank": (pooled.RERANK_TEXTS, {"model": MODEL, "query": "a", "texts": ["b"]}),
    "/pooling": (pooled.POOLING, {"model": MODEL, "input": "hello"}),
    "/v2/embed": (pooled.COHERE_EMBED, {"model": MODEL, "texts": ["hello"]}),
    "/embed": (pooled.TEI_EMBED, {"inputs": "hello"}),
    "/predict": (pooled.TEI_PREDICT, {"inputs": "hello"}),
    "/v1/score": (pooled.SCORE, {"model": MODEL, "text_1": "a", "text_2": "b"}),
    "/v1/classify": (pooled.CLASSIFY, {"model": MODEL, "input": "hello"}),
    "/chat": (others.LITEQWEN_CHAT, {"query": "hello", "gen_kwargs": {"max_new_tokens": 2}}),
    "/api/chat": (ollama.CHAT, {"model": MODEL, "messages": TURN, "options": {"num_predict": 2}}),
    "/infill": (others.INFILL, {"model": MODEL, "input_prefix": "a", "input_suffix": "b"}),
    "/api/generate": (
        ollama.GENERATE,
        {"model": MODEL, "prompt": "hello", "options": {"num_predict": 2}},
    ),
    "/api/embed": (ollama.EMBED, {"model": MODEL, "input": "hello"}),
    "/api/embeddings": (ollama.EMBEDDINGS, {"model": MODEL, "prompt": "hello"}),
    "/api/show": (ollama.SHOW, {"model": MODEL}),
    "/api/pull": (ollama.PULL, {"model": MODEL}),
    "/tokenize": (others.TOKENIZE, {"messages": TURN}),
    "/detokenize": (others.DETOKENIZE, {"tokens": [5]}),
}
# What a field needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "prompt": {"messages": None},
    "min_tokens": {"max_tokens": 2**31 - 1},
    "max_tokens": {"echo": True},
    "input": {"instructions": "Be brief."},
    "messages": {"input": None},
    **{key: {"text_1": None} for key in ("queries", "data_1")},
    **{key: {"text_2": None, "texts": None} for key in ("documents", "items", "data_2")},
    "inputs": {"texts": None},
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 5, 1.5, -3.5, 2**31, 2**63, 1000000.5),
    *("", "x", "hello", " ", "a" * 2000, "auto", "none", "low", "text"),
    *([], [1], [5, 6], ["x"], ["x", ""], [[5]], [[]], [None], [{}], [True], [-1], ["a"] * 5),
    *({}, {"a": 1}, {"5": 1}, {"5": 101}, {"x": 1}, {"type": "text"}, {"type": "nothing"}),
    *({"type": "json_object"}, {"json_object": True}, {"regex": "a"}, {"include_usage": 1}),
    *({"text": "x"}, {"text": 5}, [{"text": "x"}], {"type": []}, {"format": 1}, {"effort": "x"}),
    *(TURN, [{"role": "user"}], [{"role": "x", "content": "a"}], [{"role": "user", "content": 1}]),
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "tool", "content": "a"}],
    [{"type": "function", "function": {"name": "look"}}],
    [{"type": "function", "function": {"name": "look", "parameters": {"type": "string"}}}],
    [{"type": "custom", "custom": {"name": "look"}}],
    [{"type": "custom", "custom": {"name": "look", "format": {"type": "x"}}}],
    [{"type": "function", "function": {"name": "a name"}}],
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
]
FEW_VALUES: list[Any] = [None, "x", {}, [1], 2**63]
# These depend on more than the field: the other fields, the model, what the engine can.
SEMANTIC = frozenset(
    {
        *("conflicting_fields", "context_length_exceeded", "token_out_of_range"),
        *("suffix_not_supported", "model_not_found", "invalid_model_name", "tools_not_supported"),
        *("structured_not_supported", "grammar_too_complex", "unsupported_schema"),
        *(
            "invalid_json",
            "invalid_grammar",
            "unsatisfiable_schema",
            "response_not_found",
            "too_many_prompts",
        ),
        *("invalid_tool_call_id", "generation_not_supported", "embeddings_not_supported"),
        "modality_not_supported",
    }
)
# Valid by themselves: best_of has to equal n, a call that is required needs tools, and there is
# either prompt or messages.
# What is left of these is the model's own affair.
OF_THE_MODEL = (
    *("truncate_prompt_tokens", "prompt_name", "dimensions", "output_dimension", "task"),
    *("prompt_name", "continue_final_message"),
)
TOGETHER = (
    *(("best_of", count) for count in range(2, 129)),
    ("tool_choice", "required"),
    *((name, None) for name in ("prompt", "input", "texts", "text_1", "text_2")),
    ("documents", None),
)


def backend_for(path: str) -> FakeBackend:
    backend = FakeBackend(bos=True)
    card = backend.cards[MODEL]
    if path in POOLINGS:
        card = replace(card, pooling=POOLINGS[path], vector_size=VECTOR)
    backend.cards[MODEL] = card
    return backend


def values_of(schema: Schema) -> Iterator[Any]:
    """Yield values just inside and just outside of a schema's bounds, in addition to VALUES."""
    for part in schema.get("anyOf", [schema]):
        for name in ("minimum", "maximum", "exclusiveMinimum"):
            if name in part:
                yield from (part[name] - 1, part[name], part[name] + 1)
        yield from (value for value in part.get("enum", ()) if value not in (None, False, 0))
        if "maxItems" in part and part["maxItems"] < 200:
            for value in ("x", 5):
                yield from ([value] * count for count in (part["maxItems"], part["maxItems"] + 1))


@pytest.mark.parametrize("path", BASES)
def test_the_schemas_say_what_the_checks_do(path: str) -> None:
    """Bug: a bound, a type or a name in the document that is not the check's: a generated client
    refuses what would be answered, or sends what never is."""
    body, base = BASES[path]
    backend = backend_for(path)
    client = Client(build_asgi(backend))
    documented = document(ROUTES, ApiOptions())["paths"][path]["post"]["requestBody"]
    whole = Draft202012Validator(documented["content"]["application/json"]["schema"])
    wrong, tried = [], 0

    async def probe(name: str, value: Any) -> None:
        nonlocal tried
        asked = {**base, **BESIDE.get(name, {}), name: value}
        valid = whole.is_valid(asked)
        reply = await client.request("POST", path, json.dumps(asked).encode())
        assert reply.status < 500, (asked, reply.body)
        answer = {} if reply.status == 200 else json.loads(reply.body.split(b"\n\n")[0])
        error = answer if isinstance(answer.get("error"), str) else answer.get("error", {})
        param = str(error.get("param") or "")
        refused = reply.status == 400 and re.split(r"[.\[#]", param)[0] == name
        if refused and error["code"] in SEMANTIC:
            return
        tried += 1
        if valid and (name in OF_THE_MODEL or (name, value) in TOGETHER):
            return
        if valid == refused:
            wrong.append((name, value, "schema allows" if valid else "schema refuses", error))

    async def probes() -> None:
        names = {**body.taken, **body.refused, **{key: {} for key in body.ignored}}
        for name, schema in names.items():
            # What is always refused, or read by nothing, is so whatever its value.
            fixed = schema is NEVER or name in body.ignored
            for value in (*(FEW_VALUES if fixed else VALUES), *values_of(schema)):
                await probe(name, value)

    asyncio.run(probes())
    assert not wrong, "\n".join(map(str, wrong[:40])) + f"\n{len(wrong)} of {tried}"
    assert tried > 60 or path.startswith("/detok")


@pytest.mark.parametrize("path", BASES)
def test_strict_takes_what_the_document_lists(path: str) -> None:
    """Bug: a field without effect, such as `keep_alive` of /api/embed, that the document allows and
    `http.strict` calls unknown."""
    body, base = BASES[path]
    client = Client(build_asgi(backend_for(path), ApiOptions(strict=True)))
    sent = {**base, **dict.fromkeys(body.ignored, "x")}
    reply = asyncio.run(client.request("POST", path, json.dumps(sent).encode()))
    assert "unknown_field" not in reply.body.decode()
    if reply.status == 200:
        names = (reply.header("x-ignored-fields") or "").split(", ")
        assert "..." in names or body.ignored <= {*names}


def test_every_route_is_in_the_document() -> None:
    """Bug: a route that no generated client can call; one that is told of, and gone."""
    backend = FakeBackend()
    client = Client(build_asgi(backend, ApiOptions(strict=True)))
    described = asyncio.run(client.request("GET", "/openapi.json")).json()
    assert described["openapi"] == "3.1.0" and len(described["paths"]) == len(ROUTES) > 30
    for route in ROUTES:
        path = re.sub(r"\{\w+\}", "some-id", route.path)
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
            reply = asyncio.run(client.request(method, path))
            here = method.lower() in described["paths"][route.path]
            assert here == (reply.status != 405), (method, route.path)
    body = described["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"][
        "application/json"
    ]
    assert body["schema"]["additionalProperties"] is False, "strict refuses what it does not know"


def test_the_document_is_valid() -> None:
    """Bug: a schema that no validator takes, such as a bound that is a string."""
    validate = pytest.importorskip(
        "openapi_spec_validator", reason="pip install -e .[dev] has openapi-spec-validator"
    ).validate
    keys = frozenset({hashlib.sha256(b"key").digest()})
    for options in (ApiOptions(), ApiOptions(strict=True, api_keys=keys)):
        validate(json.loads(json.dumps(document(ROUTES, options, "/models"))))


def test_the_page_runs_nothing() -> None:
    """Bug: a page that loads a script of somebody else's host, or a style that its own policy
    forbids."""
    client = Client(build_asgi(FakeBackend()))
    reply = asyncio.run(client.request("GET", "/docs"))
    text = reply.body.decode()
    assert reply.status == 200 and (reply.header("content-type") or "").startswith("text/html")
    policy = reply.header("content-security-policy") or ""
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    style = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    assert "<script" not in text and "//" not in text and " style=" not in text
    for route in ROUTES:
        assert f"<code>{route.path}</code>" in text
    for name in (*generation.CHAT.known, *anthropic.MESSAGES.known):
        assert f"<code>{name}</code>" in text
