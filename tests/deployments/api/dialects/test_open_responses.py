"""/v1/responses as Open Responses specifies it: the cases of its acceptance suite, whole and
streamed, every object and event held against its schemas (openresponses-types)."""

import asyncio
import json
from typing import Any

import openresponses_types as types
import pytest
from pydantic import BaseModel

from tests.deployments.api.asgi import Client
from tests.deployments.api.dialects.test_responses import client_of, events
from tests.deployments.api.output.test_tools import PARIS, backend_with, code_of, written
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.fake_backend import MODEL

# type -> the schema of such an event
EVENTS: dict[str, type[BaseModel]] = {}
for event_type in vars(types).values():
    if isinstance(event_type, type) and event_type.__name__.endswith("StreamingEvent"):
        (name,) = event_type.model_fields["type"].annotation
        EVENTS[name.value] = event_type
# OpenAI's clients know the events of raw reasoning by the names of OpenAI's own document.
NAMES = {f"response.reasoning_text.{end}": f"response.reasoning.{end}" for end in ("delta", "done")}

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City and state."}},
        "required": ["location"],
    },
}
PLACE = {"location": "San Francisco, CA"}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg=="


def user(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content}


ASK = user("What is the weather in San Francisco?")
HELLO = [user("Say hello in three words.")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLED = [
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
]
NAMED = {"type": "function", "name": "get_weather"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}

# id, fields, what the model writes, types of the items, status. The first five are the suite's.
CASES: list[tuple[str, dict[str, Any], str, list[str], str]] = [
    ("basic", {"input": HELLO}, "hello there you", ["message"], "completed"),
    ("count", {"input": [user("Count to 5.")]}, "1, 2, 3, 4, 5", ["message"], "completed"),
    (
        "system",
        {"input": [{**user("You are a pirate."), "role": "system"}, user("Say hello.")]},
        "ahoy",
        ["message"],
        "completed",
    ),
    (
        "tool",
        {"input": [ASK], "tools": [WEATHER]},
        written(("get_weather", PLACE)),
        ["function_call"],
        "completed",
    ),
    (
        "turns",
        {
            "input": [
                user("My name is Alice."),
                {"type": "message", "role": "assistant", "content": "Hello Alice!"},
                user("What is my name?"),
            ]
        },
        "Alice",
        ["message"],
        "completed",
    ),
    (
        "tool's result",
        {"input": [ASK, *CALLED], "tools": [WEATHER]},
        "sunny",
        ["message"],
        "completed",
    ),
    (
        "thoughts, text, calls",
        {"input": [ASK], "tools": [WEATHER], "reasoning": {"effort": "high"}},
        "hm</think>\n\nSo:\n" + written(("get_weather", PLACE), ("get_weather", PARIS)),
        ["reasoning", "message", "function_call", "function_call"],
        "completed",
    ),
    (
        "named",
        {"input": [ASK], "tools": [WEATHER], "tool_choice": NAMED},
        written(("get_weather", PLACE)),
        ["function_call"],
        "completed",
    ),
    (
        "allowed",
        {"input": [ASK], "tools": [WEATHER], "tool_choice": ALLOWED, "max_tool_calls": 3},
        written(("get_weather", PLACE)),
        ["function_call"],
        "completed",
    ),
    (
        "schema",
        {
            "input": HELLO,
            "text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}},
            "top_logprobs": 2,
        },
        '{"city": "Oslo"}',
        ["message"],
        "completed",
    ),
    (
        "cut",
        {"input": HELLO, "max_output_tokens": 3, "metadata": {"a": "b"}, "store": False},
        "hello there you",
        ["message"],
        "incomplete",
    ),
    (
        "cut in arguments",
        {"input": [ASK], "tools": [WEATHER], "max_output_tokens": 60},
        written(("get_weather", PLACE)),
        ["function_call"],
        "incomplete",
    ),
]


def checked(schema: type[BaseModel], value: Any) -> Any:
    # Of a format's schema the specification says no type, of which its generator makes null.
    seen = json.loads(json.dumps(value))
    response = seen.get("response", seen)
    if "usage" in response and response["text"]["format"]["type"] == "json_schema":
        assert response["text"]["format"].pop("schema") == SCHEMA
        response["text"]["format"]["schema"] = None
    schema.model_validate_json(json.dumps(seen), strict=True)
    return value


def streamed(client: Client, body: dict[str, Any]) -> Any:
    """Return the last response of a stream, after a check of each event."""
    reply = asyncio.run(client.post("/v1/responses", {**body, "stream": True}))
    assert reply.status == 200, reply.body
    for _, event in events(reply):
        name = NAMES.get(event["type"], event["type"])
        last = checked(EVENTS[name], {**event, "type": name})
    return last["response"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_case(case: Any, stream: bool) -> None:
    """An object without a field that generated clients need, or with another type in it."""
    _, fields, text, items, status = case
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = text
    client = client_of(backend)
    body = {"model": MODEL, **fields}
    if stream:
        answer = streamed(client, body)
    else:
        reply = asyncio.run(client.post("/v1/responses", body))
        assert reply.status == 200, reply.body
        answer = reply.json()
    checked(types.ResponseResource, answer)
    assert [item["type"] for item in answer["output"]] == items
    assert answer["status"] == status


def test_images_are_refused() -> None:
    """The suite's one case that does not apply: a model that reads text guesses at a picture."""
    client = client_of(backend_with(TEMPLATES["hermes"]))
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image"}]
    parts[1]["image_url"] = PIXEL
    reply = asyncio.run(client.post("/v1/responses", {"model": MODEL, "input": [user(parts)]}))
    assert code_of(reply) == (400, "modality_not_supported", "input[0].content[1].type")
