"""Cohere's and Kimi's models: answers between marks, plans before calls, calls with numbers."""

import asyncio
import codecs
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from deployments.api.app import build_asgi
from deployments.api.output.detect import template_output
from deployments.api.output.output_format import FORMATS, WRAPPERS, Reasoning
from deployments.api.output.parser import OutputParser
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.test_parsers import merged
from tests.deployments.api.output.test_tools import (
    DEEP,
    FORM,
    HARD,
    PARIS,
    TOOLS,
    USER,
    allowed,
    backend_with,
)
from tests.deployments.api.output.tool_templates import COHERE, COHERE_MARKS, KIMI
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL, FakeBackend
from tests.engine.text.small_tokenizers import byte_level


def backend_of_cohere(controls: bool) -> FakeBackend:
    """Return a backend with Cohere's template.

    controls: whether Cohere's marks are control tokens; else they are ordinary text.
    """
    plain = byte_level().backend
    if controls:
        plain.add_special_tokens(list(COHERE_MARKS))
    names = {"eos_token": "<|im_end|>"}
    template = ChatTemplate({"default": COHERE}, names)
    backend = FakeBackend()
    backend._tokenizer = Tokenizer(plain, special_tokens=names, chat_template=template)
    size = backend._tokenizer.vocab_size + 7
    backend.cards = {MODEL: replace(backend.cards[MODEL], max_model_len=16_384, vocab_size=size)}
    return backend


def action(*calls: tuple[str, Any], first: int = 0) -> str:
    written = ",\n".join(
        f'    {{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": '
        f"{json.dumps(arguments, ensure_ascii=False)}}}"
        for i, (name, arguments) in enumerate(calls, first)
    )
    return f"<|START_ACTION|>[\n{written}\n]<|END_ACTION|>"


THOUGHT = "<|START_THINKING|>hm, {<|END_THINKING|>"


def response(text: str) -> str:
    return f"<|START_RESPONSE|>{text}<|END_RESPONSE|>"


# id, fields, what the model writes, content, reasoning, calls, finish_reason
CASES: list[tuple[str, dict[str, Any], str, str | None, str | None, list[Any], str]] = [
    ("plain", {"tools": None}, response("hello"), "hello", None, [], "stop"),
    ("thoughts", {"tools": None}, THOUGHT + response("hello"), "hello", "hm, {", [], "stop"),
    ("no call", {}, THOUGHT + response("no"), "no", "hm, {", [], "stop"),
    ("without marks", {}, "no", "no", None, [], "stop"),
    ("a call", {}, action(("now", {})), None, None, [("now", {})], "tool_calls"),
    (
        "two, later in a conversation",
        {},
        THOUGHT + action(("weather", HARD), ("now", {}), first=9),
        None,
        "hm, {",
        [("weather", HARD), ("now", {})],
        "tool_calls",
    ),
    (
        "a document",
        {"response_format": FORM, "tools": None},
        THOUGHT + response('{"days": 2}'),
        '{"days": 2}',
        "hm, {",
        [],
        "stop",
    ),
    (
        "a document beside tools",
        {"response_format": FORM},
        response('{"days": 2}'),
        '{"days": 2}',
        None,
        [],
        "stop",
    ),
]


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "texts"])
def served(request: Any) -> Iterator[tuple[FakeBackend, openai.OpenAI]]:
    backend = backend_of_cohere(request.param)
    with serve(build_asgi(backend)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            yield backend, client


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_answers_between_marks(
    served: tuple[FakeBackend, openai.OpenAI], case: Any, streamed: bool
) -> None:
    """Marks that come as content; an answer that the grammar of tools or a schema forbids."""
    backend, client = served
    _, fields, text, content, reasoning, calls, finish = case
    backend.script = text
    sent = {"model": MODEL, "messages": USER, "tools": TOOLS, **fields}
    sent = {name: value for name, value in sent.items() if value is not None}
    if streamed:
        with client.chat.completions.stream(**sent) as stream:
            answer = stream.get_final_completion()
    else:
        answer = client.chat.completions.create(**sent)
    assert allowed(backend, text)
    (choice,) = answer.choices
    message = choice.message
    assert (message.content or None, getattr(message, "reasoning_content", None)) == (
        content,
        reasoning,
    )
    parsed = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
    assert (parsed, choice.finish_reason) == (calls, finish)


@pytest.mark.parametrize(
    "text", [response("ß 😀"), action(("weather", HARD), ("now", {}), first=10)]
)
def test_cut_at_every_byte(text: str) -> None:
    """Other events where a chunk ends inside a mark, which begins as another one does, or inside a
    number."""
    format = next(known for known in FORMATS if known.name == "command-a")
    thoughts = Reasoning("<|START_THINKING|>", "<|END_THINKING|>")
    data = (THOUGHT + text).encode()

    def parser() -> OutputParser:
        return OutputParser(format, {}, thoughts, "may", WRAPPERS[0])

    whole = merged(parser(), [data.decode()])
    assert [e.kind for e in whole if e.kind != "arguments"] in (
        ["reasoning", "content"],
        ["reasoning", "call", "end", "call", "end"],
    )
    for cut in range(len(data) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")()
        pieces = [decoder.decode(data[:cut]), decoder.decode(data[cut:], final=True)]
        assert merged(parser(), pieces) == whole, data[:cut]


def conversation(id: str) -> list[dict[str, Any]]:
    """Return a chat with two calls and then another one, which has the id of an earlier call."""

    def call(id: str, name: str, arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"id": id, "type": "function", "function": function}

    first = [call(id, "weather", PARIS), call("other", "now", {})]
    results = [{"role": "tool", "tool_call_id": item["id"], "content": "5"} for item in first]
    return [
        *USER,
        {"role": "assistant", "content": "So:", "reasoning": "hm", "tool_calls": first},
        *reversed(results),
        {"role": "assistant", "content": None, "tool_calls": [call(id, "weather", DEEP)]},
        results[0],
    ]


def prompt_of(backend: FakeBackend, messages: Any) -> str:
    client = Client(build_asgi(backend))
    reply = asyncio.run(client.chat(tools=TOOLS, messages=messages))
    assert reply.status == 200, reply.body
    return backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)


def test_history_of_a_plan() -> None:
    """What was said before a call, which such a template shows as a plan or not at all."""
    backend = backend_of_cohere(True)
    known = template_output(backend._tokenizer)
    assert known.calls is not None and (known.calls.name, known.plan) == ("command-a", "tool_plan")
    prompt = prompt_of(backend, conversation("call_1"))
    first, second = action(("weather", PARIS), ("now", {})), action(("weather", DEEP), first=2)
    assert f"<|START_THINKING|>hm\nSo:<|END_THINKING|>{first}" in prompt
    assert f"<|START_THINKING|><|END_THINKING|>{second}" in prompt


def test_history_of_named_calls() -> None:
    """Ids of another server, which this template shows in place of the functions' names."""
    prompt = prompt_of(backend_with(KIMI), conversation("call_1"))
    begin, behind = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>"
    for name, arguments in (("weather:0", PARIS), ("now:1", {}), ("weather:2", DEEP)):
        assert f"{begin}{name}{behind}{json.dumps(arguments)}<|tool_call_end|>" in prompt
    positions = [
        prompt.index(f"Return of functions.{id}5") for id in ("now:1", "weather:0", "weather:2")
    ]
    assert positions == sorted(positions)
