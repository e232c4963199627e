"""Answers against the types of OpenAI's newest client, every required field of which is read."""

import asyncio
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import types
from openai.types import chat, responses
from pydantic import TypeAdapter

from deployments.api.app import build_asgi
from deployments.api.batch_folder import BatchFolder, BatchSettings
from deployments.api.options import ApiOptions
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.test_tools import CITY, PARIS, TOOLS, backend_with, written
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.api.pooling.test_embeddings import POOLING
from tests.deployments.api.test_batches import begin, lines, look
from tests.deployments.fake_backend import MODEL, FakeBackend

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
ASK = {"model": MODEL, "input": "hello", "max_output_tokens": 200}
SCHEMA = {"type": "json_schema", "name": "city", "schema": CITY}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY}
PATCH = {"type": "custom", "name": "patch"}
SCRIPTS = ["hello", "<think>\nHm.\n</think>\n\nSo:\n" + written(("weather", PARIS)), "<think>\nHm"]
ROUTES: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("/v1/chat/completions", CHAT, chat.ChatCompletion, chat.ChatCompletionChunk),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": TOOLS, "logprobs": True, "top_logprobs": 2},
        chat.ChatCompletion,
        chat.ChatCompletionChunk,
    ),
    (
        "/v1/completions",
        {"model": MODEL, "prompt": "x", "logprobs": 2, "max_tokens": 20},
        types.Completion,
        Any,  # its type forbids the null before the end that OpenAI itself sends
    ),
    ("/v1/responses", ASK, responses.Response, responses.ResponseStreamEvent),
    (
        "/v1/responses",
        {**ASK, "tools": [WEATHER, PATCH], "top_logprobs": 2},
        responses.Response,
        responses.ResponseStreamEvent,
    ),
    (
        "/v1/responses",
        {**ASK, "text": {"format": {**SCHEMA, "description": None}}, "instructions": "Be short."},
        responses.Response,
        responses.ResponseStreamEvent,
    ),
]


adapter = functools.cache(TypeAdapter)  # one for all events takes as long to build as all tests


def check(kind: Any, value: Any) -> None:
    """Assert that a value has the required fields of a type of OpenAI's client, and of their
    types."""
    adapter(kind).validate_python(value)


@pytest.mark.parametrize("script", SCRIPTS, ids=["text", "calls", "thoughts"])
@pytest.mark.parametrize("case", ROUTES, ids=lambda case: case[0])
def test_generations(case: Any, script: str) -> None:
    """A field that a typed client reads and that is not there: an AttributeError in its program."""
    path, body, whole, event = case
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = script
    client = Client(build_asgi(backend, ApiOptions(store_bytes=10**6)))

    async def through() -> None:
        reply = await client.post(path, body)
        assert reply.status == 200, reply.body
        check(whole, reply.json())
        streamed = await client.post(path, {**body, "stream": True})
        for line in streamed.body.decode().split("\n"):
            if line.startswith("data: {"):
                check(event, json.loads(line[6:]))
        if path == "/v1/responses":
            answer = reply.json()
            assert answer["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
            assert answer["text"]["format"].get("description", "") is not None
            listed = await client.request("GET", f"{path}/{answer['id']}/input_items")
            check(responses.ResponseItemList, listed.json())
            follow = {**body, "previous_response_id": answer["id"]}
            listed = await client.request(
                "GET", f"{path}/{(await client.post(path, follow)).json()['id']}/input_items"
            )
            check(responses.ResponseItemList, listed.json())

    asyncio.run(through())


def test_items_of_every_form_are_listed_in_parts() -> None:
    """`for part in item.content: part.text` over letters of a text."""
    client = Client(build_asgi(backend_with(TEMPLATES["hermes"]), ApiOptions(store_bytes=10**6)))
    call = {"call_id": "c", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "hello", "type": None},
        {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": "So:"},
        {"type": "function_call", **call},
        {"type": "function_call_output", "call_id": "c", "output": "sun"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]

    async def through() -> None:
        id = (await client.post("/v1/responses", {**ASK, "input": items})).json()["id"]
        listed = (await client.request("GET", f"/v1/responses/{id}/input_items")).json()
        check(responses.ResponseItemList, listed)
        assert [entry["type"] for entry in listed["data"][::-1]] == [
            *("message", "message", "reasoning", "message"),
            *("function_call", "function_call_output", "message"),
        ]
        for item in listed["data"]:
            assert all(isinstance(part["text"], str) for part in item.get("content", ()))

    asyncio.run(through())


def test_lists_files_and_batches(tmp_path: Path) -> None:
    """The same of what is not generated."""
    folder = BatchFolder(BatchSettings(str(tmp_path)))
    client = Client(build_asgi(FakeBackend(), ApiOptions(batches=folder)))

    async def through() -> None:
        batch = await begin(client, lines(2))
        check(types.Batch, batch)
        check(
            types.Batch, (await client.request("POST", f"/v1/batches/{batch['id']}/cancel")).json()
        )
        check(types.Batch, (await look(client, "/v1/batches"))["data"][0])
        file = await look(client, f"/v1/files/{batch['input_file_id']}")
        check(types.FileObject, file)
        gone = await client.request("GET", "/v1/models")
        check(list[types.Model], gone.json()["data"])

    asyncio.run(through())


def test_embeddings() -> None:
    """The same of vectors."""
    backend = FakeBackend()
    backend.cards = {MODEL: replace(backend.cards[MODEL], pooling=POOLING)}
    reply = asyncio.run(
        Client(build_asgi(backend)).post("/v1/embeddings", {"model": MODEL, "input": "x"})
    )
    assert reply.status == 200, reply.body
    check(types.CreateEmbeddingResponse, reply.json())
