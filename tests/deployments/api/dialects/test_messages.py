"""/v1/messages: whole and streamed, cut and gone on, counted, and refused in its own words."""

import asyncio
import hashlib
import json
import re
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.api.output.test_tools import CITY, CLOSER, HARD, PARIS, backend_with, written
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.fake_backend import MODEL, FakeBackend

WEATHER: dict[str, Any] = {"name": "weather", "description": "Of a city.", "input_schema": CITY}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
TOOLS: Any = [WEATHER, NOW, {"type": "web_search_20250305", "name": "web_search"}]
USER: Any = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 2000}
JSON = (b"content-type", b"application/json")

# id, fields, what the model writes, blocks as (type, what is in it), stop_reason, stop_sequence
CASES: list[tuple[str, dict[str, Any], str, list[tuple[str, Any]], str, str | None]] = [
    ("text", {"tools": None}, "hello there", [("text", "hello there")], "end_turn", None),
    ("one call", {}, written(("weather", HARD)), [("weather", HARD)], "tool_use", None),
    (
        "thoughts, text, two calls",
        {},
        "<think>\nhm\n</think>\n\nSo:\n" + written(("weather", CLOSER), ("now", {})),
        [("thinking", "hm"), ("text", "So:"), ("weather", CLOSER), ("now", {})],
        "tool_use",
        None,
    ),
    (
        "a named tool",
        {"tool_choice": {"type": "tool", "name": "now"}},
        written(("now", {})),
        [("now", {})],
        "tool_use",
        None,
    ),
    ("cut", {"max_tokens": 60}, written(("weather", HARD)), [], "max_tokens", None),
    (
        "a stop sequence",
        {"tools": None, "stop_sequences": ["there"]},
        "hello there",
        [("text", "hello ")],
        "stop_sequence",
        "there",
    ),
    (
        "thinking on",
        {"tools": None, "thinking": {"type": "enabled"}},
        "hm</think>yes",
        [("thinking", "hm"), ("text", "yes")],
        "end_turn",
        None,
    ),
    (
        "thinking off",
        {"tools": None, "thinking": {"type": "disabled"}},
        "yes",
        [("text", "yes")],
        "end_turn",
        None,
    ),
]


def client_of(backend: FakeBackend, **options: Any) -> Client:
    return Client(build_asgi(backend, ApiOptions(event_secret=b"s" * 32, **options)))


def events(reply: Reply) -> list[tuple[bytes, Any]]:
    """Return (id, data) of each event of a stream."""
    parsed = []
    for block in reply.body.split(b"\n\n"):
        fields = dict(line.split(b": ", 1) for line in block.splitlines() if b": " in line)
        if b"data" in fields:
            data = json.loads(fields[b"data"])
            assert fields[b"event"].decode() == data["type"]
            parsed.append((fields.get(b"id", b""), data))
    return parsed


def put_together(told: list[Any]) -> dict[str, Any]:
    """Return the message that Anthropic's clients make of a stream's events."""
    message: dict[str, Any] = told[0]["message"]
    assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop"
    open_: dict[str, Any] | None = None
    for data in told[1:-1]:
        kind = data["type"]
        if kind == "content_block_start":
            assert open_ is None and data["index"] == len(message["content"])
            open_, pieces = data["content_block"], ""
            message["content"].append(open_)
        elif kind == "content_block_delta":
            assert open_ is not None and data["index"] == len(message["content"]) - 1
            delta = data["delta"]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                pieces += delta["partial_json"]
            else:
                open_[name] += delta[name]
        elif kind == "content_block_stop":
            assert open_ is not None
            if open_["type"] == "tool_use":
                try:
                    open_["input"] = json.loads(pieces or "{}")
                except ValueError:  # it was cut
                    message["content"].pop()
            open_ = None
        else:
            message |= {**data["delta"], "usage": data["usage"]}
    return message


def found(block: Any) -> tuple[str, Any]:
    kind = block["type"]
    return (block["name"], block["input"]) if kind == "tool_use" else (kind, block[kind])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_table(case: Any, streamed: bool) -> None:
    """A piece that is lost or told twice; two blocks that are open at a time; an end that clients
    take for another."""
    backend = backend_with(TEMPLATES["hermes"])
    _, fields, backend.script, blocks, reason, stop = case
    sent = {"tools": TOOLS, **BODY, **fields, "stream": streamed}
    sent = {name: value for name, value in sent.items() if value is not None}
    reply = asyncio.run(client_of(backend).post("/v1/messages", sent))
    assert reply.status == 200, reply.body
    message = put_together([d for _, d in events(reply)]) if streamed else reply.json()
    assert [found(block) for block in message["content"]] == blocks
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] == 3 and usage["output_tokens"] > 0
    assert reply.header("x-ignored-fields") == ("tools[2]" if "tools" in sent else None)


@pytest.mark.parametrize("kept", [True, False])
def test_a_cut_stream_goes_on(kept: bool) -> None:
    """Cut after each event in turn: what comes then is not what would have come, or comes twice.
    kept: a replica still has the tokens; else they are made again."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = "<think>\nhm\n</think>\n\nSo:\n" + written(("weather", PARIS), ("now", {}))
    client = client_of(backend)
    body = {**BODY, "tools": TOOLS, "stream": True}

    async def ask(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, Any]]:
        reply = await client.post("/v1/messages", body, headers=(JSON, *headers))
        assert reply.status == 200, reply.body
        return events(reply)

    whole = asyncio.run(ask((b"x-event-ids", b"1")))
    past = dict(backend.kept)
    assert len(whole) > 30 and all(id for id, _ in whole)
    for place in range(len(whole) - 1):
        backend.kept = dict(past) if kept else {}
        rest = asyncio.run(ask((b"last-event-id", whole[place][0])))
        assert [data for _, data in rest] == [data for _, data in whole[place + 1 :]], place


HISTORY: Any = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "t1", "name": "now", "input": {}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": PARIS},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t2", "content": "sunny"},
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "text", "text": "9"}],
            },
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cch=1a2b3;"},
    {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "Be kind."},
]


def test_history_and_count() -> None:
    """Blocks that come in another order, or not at all; a hash at the front of the prompt, which
    then is in no cache; a count that is not the request's own; a `cache_control` of the whole
    body that was dropped without a word."""
    backend = backend_with(TEMPLATES["hermes"])
    client = client_of(backend)
    body = {**BODY, "messages": HISTORY, "system": SYSTEM, "tools": TOOLS}
    body["cache_control"] = {"type": "ephemeral"}
    reply = asyncio.run(client.post("/v1/messages", body))
    assert reply.status == 200, reply.body
    ignored = "cache_control, tools[2], messages[1].content[1]"
    assert reply.header("x-ignored-fields") == ignored
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    assert "system\nBe short.\n\nBe kind.<|im_end|>" in prompt and "billing" not in prompt
    calls = written(("now", {})) + written(("weather", PARIS))
    assert f"assistant\n<think>\nhm\n</think>\nI look{calls}<|im_end|>" in prompt
    results = ("tool\nsunny", "tool\n9", "user\nAnd?", "assistant\n")
    assert prompt.endswith("<|im_end|>\n<|im_start|>".join(results))
    usage = reply.json()["usage"]
    del body["max_tokens"]
    counted = asyncio.run(client.post("/v1/messages/count_tokens", body)).json()
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (
        counted == {"input_tokens": total} == {"input_tokens": len(backend.requests[-1].token_ids)}
    )


HINT = {"cache_control": {"type": "ephemeral"}}
TOLD = {"type": "text", "text": "sunny", **HINT}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [TOLD, TOLD]}], **HINT},
        {"messages": [{"role": "system", "content": [TOLD]}, *USER]},
        {"system": SYSTEM},
        {"tools": [{**TOOLS[0], **HINT}]},
        {"messages": [*HISTORY[:2], {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "9", **HINT}]}]},
        {"messages": [*HISTORY[:2], {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [TOLD]}]}]},
    ],
)  # fmt: skip
def test_a_hint_inside_of_blocks_is_named(fields: dict[str, Any]) -> None:
    """Bug: a `cache_control` of a block, of `system` or of a tool was dropped without a word."""
    reply = asyncio.run(
        client_of(backend_with(TEMPLATES["hermes"])).post("/v1/messages", {**BODY, **fields})
    )
    assert reply.status == 200, reply.body
    ignored = (reply.header("x-ignored-fields") or "").split(", ")
    assert ignored.count("cache_control") == 1


def test_an_answer_that_is_begun_goes_on() -> None:
    """A new turn after the beginning that the client gave."""
    backend = backend_with(TEMPLATES["hermes"])
    messages = [*USER, {"role": "assistant", "content": "The answer is"}]
    reply = asyncio.run(client_of(backend).post("/v1/messages", {**BODY, "messages": messages}))
    assert reply.status == 200, reply.body
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    assert prompt.endswith("assistant\nThe answer is")


def test_a_schema_of_the_output() -> None:
    """A format that does not reach the grammar."""
    backend = backend_with(TEMPLATES["hermes"])
    format = {"type": "json_schema", "schema": {"type": "object"}}
    body = {**BODY, "output_config": {"format": format, "effort": "low"}}
    assert asyncio.run(client_of(backend).post("/v1/messages", body)).status == 200
    assert backend.requests[-1].params.structured is not None


@pytest.mark.parametrize(
    "fields, kind, param",
    [
        ({"max_tokens": None}, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 10**6}, "invalid_request_error", "max_tokens"),
        ({"messages": None}, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "invalid_request_error",
            "messages[0].role",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "tool_result"}]}]},
            "invalid_request_error",
            "messages[1].content[0].tool_use_id",
        ),
        ({"stop_sequences": [1]}, "invalid_request_error", "stop_sequences"),
        (
            {"tools": [{"type": "x", "name": "y"}, {**NOW, "name": "a b"}]},
            "invalid_request_error",
            "tools[1].name",
        ),
        (
            {"tools": [{**NOW, "strict": True, "input_schema": {"not": {}}}]},
            "invalid_request_error",
            "tools[0].input_schema#/not",
        ),
        ({"tool_choice": {"type": "x"}}, "invalid_request_error", "tool_choice.type"),
        ({"thinking": {"type": "x"}}, "invalid_request_error", "thinking.type"),
        ({"mcp_servers": [{}]}, "invalid_request_error", "mcp_servers"),
        ({"model": "none"}, "not_found_error", "model"),
    ],
)
def test_refused(fields: dict[str, Any], kind: str, param: str) -> None:
    """An error in a shape that Anthropic's clients do not read, or about another field."""
    body = {name: value for name, value in {**BODY, **fields}.items() if value is not None}
    reply = asyncio.run(client_of(backend_with(TEMPLATES["hermes"])).post("/v1/messages", body))
    answer = reply.json()
    assert reply.status >= 400 and answer["type"] == "error"
    assert (answer["error"]["type"], answer["error"]["param"]) == (kind, param), answer


def test_errors_of_every_kind_have_its_shape() -> None:
    """A wrong path, method or key told in another dialect; a key that is taken from one header and
    not from the other; a prompt that is too long in words by which nobody compacts."""
    backend = backend_with(TEMPLATES["hermes"])
    keys = frozenset({hashlib.sha256(b"alice").digest()})
    client = client_of(backend, api_keys=keys)

    def ask(*headers: tuple[bytes, bytes], method: str = "POST", body: Any = BODY) -> Reply:
        data = json.dumps(body).encode()
        return asyncio.run(client.request(method, "/v1/messages", data, (JSON, *headers)))

    mine = (b"x-api-key", b"alice")
    assert ask(mine).status == ask((b"authorization", b"Bearer alice")).status == 200
    assert ask(mine, (b"authorization", b"Bearer bob")).status == 401
    assert ask(mine, mine).status == 401
    answer = ask().json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "authentication_error")
    assert ask(mine, method="GET").json()["type"] == "error"
    long = ask(mine, body={**BODY, "messages": [{"role": "user", "content": "a " * 30_000}]}).json()
    assert long["error"]["message"].startswith("prompt is too long")
    much = ask(mine, body={**BODY, "max_tokens": 32_000}).json()["error"]
    assert much["code"] == "context_length_exceeded" and "too long" not in much["message"]
    headers = ((b"content-type", b"application/json"), mine)
    missing = asyncio.run(client.request("POST", "/v1/messages/batches", b"{}", headers))
    assert (missing.status, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_what_has_no_effect_is_named() -> None:
    """Fields that clients always send, refused or dropped without a word."""
    client = client_of(backend_with(TEMPLATES["hermes"]))
    body = {**BODY, "service_tier": "auto", "metadata": {"user_id": "me"}, "unknown": 1}
    reply = asyncio.run(client.post("/v1/messages", body))
    assert set((reply.header("x-ignored-fields") or "").split(", ")) == {
        *("service_tier", "metadata.user_id", "unknown"),
    }


def test_ids_of_calls_are_of_the_dialect_and_come_back() -> None:
    """Ids that other servers' templates refuse: of this dialect, and of calls made elsewhere."""
    strict = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('nine letters') }}{% endif %}{% endfor %}{% endfor %}"
    )
    backend = backend_with(strict + TEMPLATES["mistral"])
    backend.script = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 1}}]'
    client = Client(build_asgi(backend))
    tools = [{"name": "weather", "input_schema": CITY}]
    user = {"role": "user", "content": "hello"}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": tools, "messages": [user]}

    async def through() -> None:
        answer = (await client.post("/v1/messages", body)).json()
        (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert re.fullmatch(r"toolu_[A-Za-z0-9]{24}", call["id"])
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sun"}
        turn = {"role": "assistant", "content": answer["content"]}
        history = [user, turn, {"role": "user", "content": [result]}]
        reply = await client.post("/v1/messages", {**body, "messages": history})
        assert reply.status == 200, reply.body

    asyncio.run(through())


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (
            {"tools": [{"name": "f", "input_schema": {"type": "nothing"}}]},
            ["tools[0].input_schema"],
        ),
        ({"stop_sequences": [1]}, ["stop_sequences"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, ["text"]),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, ["thinking.budget_tokens"]),
    ],
)
def test_a_message_names_fields_of_the_request(fields: dict[str, Any], names: list[str]) -> None:
    """`tools[0].function.parameters` and the like, which are fields of a chat."""
    client = Client(build_asgi(backend_with(TEMPLATES["hermes"])))
    user = {"role": "user", "content": "hello"}
    body = {"model": MODEL, "max_tokens": 9, "messages": [user], **fields}
    reply = asyncio.run(client.post("/v1/messages", body))
    error = reply.json()["error"]
    assert reply.status == 400
    for name in names:
        assert name in error["message"] and name in error["param"], error
    assert "function" not in error["message"] and "_token_budget" not in error["message"]
