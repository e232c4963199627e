"""/v1/responses: whole and streamed, with OpenAI's own client, cut and gone on, kept and not."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.api.output.chat_output import TextReader
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.api.output.test_tools import (
    CITY,
    CLOSER,
    HARD,
    PARIS,
    backend_with,
    code_of,
    written,
)
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL, FakeBackend

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": CITY,
    "strict": False,
}
NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": None}
SPACE = {"type": "namespace", "name": "clock", "description": "Time.", "tools": [NOW]}
PATCH = {"type": "custom", "name": "patch", "description": "Apply a patch."}
TOOLS: Any = [WEATHER, SPACE, {"type": "web_search"}, PATCH]
BODY: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 2000}
SECRET = b"s" * 32
TEXT = 'a\n"\\ 😀 </tool_call>'

# Fields that Open Responses requires of an answer, null where there is nothing to say.
REQUIRED = """
id object created_at completed_at status incomplete_details model previous_response_id
instructions output error tools tool_choice truncation parallel_tool_calls text top_p
presence_penalty frequency_penalty top_logprobs temperature reasoning user usage
max_output_tokens max_tool_calls store background service_tier metadata
safety_identifier prompt_cache_key
"""

# id, fields, what the model writes, items as (type, what is in it), status
CASES: list[tuple[str, dict[str, Any], str, list[tuple[str, Any]], str]] = [
    ("text", {"tools": None}, "hello there", [("message", "hello there")], "completed"),
    ("nothing", {"tools": None}, "", [("message", "")], "completed"),
    ("one call", {}, written(("weather", HARD)), [("weather", HARD)], "completed"),
    (
        "thoughts, text, two calls",
        {},
        "<think>\nhm\n</think>\n\nSo:\n" + written(("weather", CLOSER), ("clock__now", {})),
        [("reasoning", "hm"), ("message", "So:"), ("weather", CLOSER), ("now", {})],
        "completed",
    ),
    ("a text for a tool", {}, written(("patch", {"input": TEXT})), [("patch", TEXT)], "completed"),
    (
        "cut in arguments",
        {"max_output_tokens": 60},
        written(("weather", HARD)),
        [("weather", None)],
        "incomplete",
    ),
    (
        "never closed thoughts",
        {"reasoning": {"effort": "high", "summary": "auto"}, "tools": None},
        "hm",
        [("reasoning", "hm")],
        "completed",
    ),
]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeBackend, openai.OpenAI]]:
    backend = backend_with(TEMPLATES["hermes"])
    with serve(build_asgi(backend)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            yield backend, client


def found(item: Any) -> tuple[str, Any]:
    if item.type == "message":
        return "message", "".join(part.text for part in item.content)
    if item.type == "reasoning":
        return "reasoning", item.content[0].text
    if item.type == "custom_tool_call":
        return item.name, item.input
    whole = item.status == "completed"
    return item.name, json.loads(item.arguments) if whole else None


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_table(served: tuple[FakeBackend, openai.OpenAI], case: Any, streamed: bool) -> None:
    """A piece that is lost or told twice; a list in the client's hands that an event does not fit
    into, at which it raises."""
    backend, client = served
    _, fields, text, items, status = case
    backend.script = text
    sent = {"tools": TOOLS, **BODY, **fields}
    sent = {name: value for name, value in sent.items() if value is not None}
    if streamed:
        with client.responses.stream(**sent) as stream:
            for _ in stream:
                pass
            answer: Any = stream._state._completed_response  # the helper wants "completed"
            if answer is None:
                answer = list(client.responses.create(**sent, stream=True))[-1].response
    else:
        answer = client.responses.create(**sent)
    assert [found(item) for item in answer.output] == items
    assert answer.status == status and not set(REQUIRED.split()) - answer.to_dict().keys()
    ids = [item.id for item in answer.output]
    assert len(set(ids)) == len(ids)
    assert answer.usage.total_tokens > answer.usage.input_tokens > 0


def client_of(backend: FakeBackend, **options: Any) -> Client:
    return Client(build_asgi(backend, ApiOptions(event_secret=SECRET, **options)))


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


def test_the_order_of_events() -> None:
    """An order at which official clients raise."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = "<think>\nhm\n</think>\n\nSo:\n" + written(("weather", PARIS))
    reply = asyncio.run(
        client_of(backend).post("/v1/responses", {**BODY, "tools": TOOLS, "stream": True})
    )
    payloads = [data for _, data in events(reply)]
    assert [data["sequence_number"] for data in payloads] == list(range(len(payloads)))
    names = []
    for data in payloads:
        name = data["type"].removeprefix("response.")
        if not names or names[-1] != name:
            names.append(name)
    ends = ["content_part.done", "output_item.done"]
    begins = ["output_item.added", "content_part.added"]
    assert names == [
        *("created", "in_progress"),
        *(*begins, "reasoning_text.delta", "reasoning_text.done", *ends),
        *(*begins, "output_text.delta", "output_text.done", *ends),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert payloads[-1]["response"]["output"][2]["arguments"] == json.dumps(PARIS)
    assert reply.header("x-ignored-fields") == "tools[2]"


@pytest.mark.parametrize("kept", [True, False])
def test_a_cut_stream_goes_on(kept: bool) -> None:
    """Cut after each event in turn: what comes then is not what would have come, or comes twice.
    kept: a replica still has the tokens; else they are made again."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = "<think>\nhm\n</think>\n\nSo:\n" + written(
        ("weather", HARD), ("patch", {"input": TEXT})
    )
    client = client_of(backend)
    body = {**BODY, "tools": TOOLS, "stream": True}

    async def ask(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, Any]]:
        sent = (b"content-type", b"application/json"), *headers
        reply = await client.post("/v1/responses", body, headers=sent)
        assert reply.status == 200, reply.body
        return events(reply)

    whole = asyncio.run(ask((b"x-event-ids", b"1")))
    whole[-1][1]["response"]["completed_at"] = None
    past = dict(backend.kept)
    assert len(whole) > 30 and all(id for id, _ in whole)
    for place in range(len(whole) - 1):
        backend.kept = dict(past) if kept else {}
        rest = asyncio.run(ask((b"last-event-id", whole[place][0])))
        rest[-1][1]["response"]["completed_at"] = None
        assert [data for _, data in rest] == [data for _, data in whole[place + 1 :]], place


def test_history() -> None:
    """Items of one turn that become several messages; a kind of item that ends the session; a tool
    result that does not find its call."""
    backend = backend_with(TEMPLATES["hermes"])
    client = client_of(backend)
    call = {"type": "function_call", "call_id": "c1", "name": "now", "namespace": "clock"}
    items = [
        {"role": "developer", "content": "Be short."},
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "So."}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "What time?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {**call, "arguments": "{}", "id": "fc_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "ghost_snapshot", "data": {}},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "9"}],
        },
    ]
    body = {**BODY, "input": items, "tools": TOOLS, "instructions": "Help."}
    reply = asyncio.run(client.post("/v1/responses", body))
    assert reply.status == 200, reply.body
    assert reply.header("x-ignored-fields") == "tools[2], input[7]"
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    assert "system\nHelp.\n\nBe short.\n\nSo.<|im_end|>" in prompt
    calls = written(("clock__now", {})) + written(("patch", {"input": "x"}))
    turn = f"assistant\n<think>\nhm\n</think>\nI{calls}"
    assert turn + "<|im_end|>\n<|im_start|>tool\ndone<|im_end|>\n<|im_start|>tool\n9" in prompt
    items[-1]["call_id"] = "c3"
    refusal = code_of(asyncio.run(client.post("/v1/responses", body)))
    assert refusal == (400, "invalid_tool_call_id", "input[9].call_id")


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({"input": None}, "missing_field", "input"),
        ({"input": [1]}, "invalid_type", "input[0]"),
        ({"input": [{"role": "x", "content": "a"}]}, "invalid_value", "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "modality_not_supported",
            "input[0].content[0].type",
        ),
        ({"input": "a " * 30_000}, "context_length_exceeded", "input"),
        ({"max_output_tokens": 10**6}, "context_length_exceeded", "max_output_tokens"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "invalid_value", "tools[0].name"),
        (
            {"tools": [{**SPACE, "tools": [{**NOW, "strict": 1}]}]},
            "invalid_type",
            "tools[0].tools[0].strict",
        ),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]},
            "invalid_value",
            "tools[0].format.syntax",
        ),
        (
            {"tools": [{**NOW, "strict": True, "parameters": {"not": {}}}]},
            "unsupported_schema",
            "tools[0].parameters#/not",
        ),
        ({"tool_choice": {"type": "file_search"}}, "not_supported", "tool_choice"),
        ({"text": {"format": {"type": "x"}}}, "not_supported", "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
            "invalid_value",
            "text.format.name",
        ),
        ({"reasoning": {"effort": "x"}}, "invalid_value", "reasoning.effort"),
        ({"background": True}, "not_supported", "background"),
        ({"conversation": "c"}, "not_supported", "conversation"),
        ({"prompt": {"id": "p"}}, "not_supported", "prompt"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata"),
        ({"truncation": "x"}, "invalid_value", "truncation"),
    ],
)
def test_refused(fields: dict[str, Any], code: str, param: str) -> None:
    """An error about the chat that a request became, whose fields its client does not know."""
    client = client_of(backend_with(TEMPLATES["hermes"]))
    reply = asyncio.run(client.post("/v1/responses", {**BODY, **fields}))
    assert code_of(reply) == (400, code, param), reply.body
    message = reply.json()["error"]["message"]  # of the context in words that libraries know
    assert "messages" not in message or message.startswith("This model")


def test_what_has_no_effect_is_named() -> None:
    """Fields that clients always send, refused or dropped without a word."""
    client = client_of(backend_with(TEMPLATES["hermes"]))
    body = {
        **BODY,
        "store": True,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low"},
        "user": "me",
        "metadata": {"a": "b"},
    }
    reply = asyncio.run(client.post("/v1/responses", body))
    assert set((reply.header("x-ignored-fields") or "").split(", ")) == {
        *("store", "truncation", "include.web_search_call.action.sources", "prompt_cache_key"),
        *("client_metadata", "text.verbosity", "user"),
    }
    answer = reply.json()
    assert (answer["store"], answer["user"], answer["metadata"]) == (False, "me", {"a": "b"})
    strict = client_of(backend_with(TEMPLATES["hermes"]), strict=True)
    refusal = code_of(asyncio.run(strict.post("/v1/responses", {**BODY, "inputs": 1})))
    assert refusal == (400, "unknown_field", "inputs")


def test_formats_and_logprobs() -> None:
    """A format that does not reach the grammar; log-probabilities that are nowhere."""
    backend = backend_with(TEMPLATES["hermes"])
    client = client_of(backend)
    backend.script = '{"a": 1}'
    format = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    body = {**BODY, "text": {"format": format}, "top_logprobs": 2}
    answer = asyncio.run(client.post("/v1/responses", body)).json()
    assert backend.requests[-1].params.structured is not None
    part = answer["output"][0]["content"][0]
    assert part["text"] == '{"a": 1}' and len(part["logprobs"]) == len(part["text"])
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    deltas = [
        data["logprobs"]
        for _, data in events(asyncio.run(client.post("/v1/responses", {**body, "stream": True})))
        if data["type"] == "response.output_text.delta"
    ]
    assert [entry for entries in deltas for entry in entries] == part["logprobs"]


def test_tokens_are_counted() -> None:
    """A count that is not that of the request itself: clients cut their history by it."""
    backend = backend_with(TEMPLATES["hermes"])
    client = client_of(backend)
    body = {"model": MODEL, "input": "hello", "tools": TOOLS, "instructions": "Be short."}
    counted = asyncio.run(client.post("/v1/responses/input_tokens", body)).json()
    usage = asyncio.run(client.post("/v1/responses", body)).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


def test_kept_answers() -> None:
    """An answer that another key can read or ask after; a turn that forgets what was said before;
    memory that grows for ever."""
    backend = backend_with(TEMPLATES["hermes"])
    keys = frozenset(hashlib.sha256(name).digest() for name in (b"alice", b"bob"))
    client = client_of(backend, api_keys=keys, store_bytes=20_000)

    def ask(method: str, path: str, body: Any = None, key: bytes = b"alice") -> Reply:
        headers = ((b"content-type", b"application/json"), (b"authorization", b"Bearer " + key))
        data = b"" if body is None else json.dumps(body).encode()
        return asyncio.run(client.request(method, f"/v1/responses{path}", data, headers))

    backend.script = written(("weather", PARIS))
    first = ask("POST", "", {**BODY, "tools": TOOLS}).json()
    assert first["store"] is True
    path = f"/{first['id']}"
    assert ask("GET", path).json() == first
    (asked,) = ask("GET", f"{path}/input_items").json()["data"]
    assert asked["content"] == [{"type": "input_text", "text": "hello"}]
    backend.script = "sunny"
    result = {
        "type": "function_call_output",
        "call_id": first["output"][0]["call_id"],
        "output": "x",
    }
    follow = {**BODY, "tools": TOOLS, "input": [result], "previous_response_id": first["id"]}
    second = ask("POST", "", {**follow, "stream": True})
    assert events(second)[-1][1]["response"]["previous_response_id"] == first["id"]
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    assert "user\nhello" in prompt and written(("weather", PARIS)) in prompt and "tool\nx" in prompt
    missing = ask("GET", path.replace("resp_", "resp_0"))
    foreign = ask("GET", path, key=b"bob")
    assert code_of(missing) == code_of(foreign) == (404, "response_not_found", None)
    assert code_of(ask("DELETE", path, key=b"bob")) == code_of(foreign)
    assert code_of(ask("POST", f"{path}/cancel", key=b"bob")) == code_of(foreign)
    assert ask("POST", "", follow, key=b"bob").status == 404
    assert ask("POST", f"{path}/cancel").status == 400
    assert ask("DELETE", path).json()["deleted"] is True
    assert code_of(ask("GET", path)) == code_of(foreign)
    unkept = ask("POST", "", {**BODY, "store": False}).json()
    assert ask("GET", f"/{unkept['id']}").status == 404
    ids = [ask("POST", "", BODY).json()["id"] for _ in range(30)]
    there = [ask("GET", f"/{id}").status for id in ids]
    assert there[-1] == 200 and there[0] == 404
    assert ask("PUT", f"/{ids[-1]}").status == 405 and ask("GET", "/a/b").status == 404


def test_a_text_in_pieces() -> None:
    """An escape that is cut in two, and half a character."""
    for text in (
        TEXT,
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
        '\\"',
        "",
    ):
        for ascii_ in (True, False):
            whole = json.dumps({"input": text}, ensure_ascii=ascii_)
            for size in (1, 2, 3, 100):
                reader = TextReader()
                pieces = [reader.feed(whole[i : i + size]) for i in range(0, len(whole), size)]
                assert "".join(pieces) == text
