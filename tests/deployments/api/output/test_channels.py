"""Answers in channels, as gpt-oss writes them: over chat completions, Responses and Messages, and
what a random model writes under their grammar."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from deployments.api.app import build_asgi
from deployments.api.output.detect import template_output
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.test_tools import HARD, NAMED, PARIS, TOOLS, USER
from tests.deployments.api.output.tool_templates import HARMONY, HARMONY_MARKS
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL, FakeBackend
from tests.engine.text.small_tokenizers import byte_level
from tests.engine.text.test_structured import make_core, request, run, save_model

THOUGHT = "<|channel|>analysis<|message|>hm, {<|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>So:<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def harmony() -> Tokenizer:
    plain = byte_level().backend
    plain.add_special_tokens(list(HARMONY_MARKS))
    names = {"eos_token": "<|return|>"}
    ends = [plain.token_to_id(mark) for mark in ("<|call|>", "<|im_end|>")]
    template = ChatTemplate({"default": HARMONY}, names)
    return Tokenizer(plain, special_tokens=names, eos_token_ids=ends, chat_template=template)


def backend_of_channels() -> FakeBackend:
    backend = FakeBackend()
    backend._tokenizer = harmony()
    size = backend._tokenizer.vocab_size + 7
    backend.cards = {MODEL: replace(backend.cards[MODEL], max_model_len=16_384, vocab_size=size)}
    return backend


def call(name: str, arguments: Any, *, first: bool = False) -> str:
    """Return a call as gpt-oss writes it.

    first: whether the function stands before the channel, as the template prints it.
    """
    written = json.dumps(arguments, ensure_ascii=False)
    if first:
        return f" to=functions.{name}<|channel|>commentary json<|message|>{written}"
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return head + written


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeBackend, openai.OpenAI]]:
    backend = backend_of_channels()
    with serve(build_asgi(backend)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            yield backend, client


# id, fields, what the model writes, content, reasoning, calls, finish_reason
CASES: list[tuple[str, dict[str, Any], str, str | None, str | None, list[Any], str]] = [
    ("plain", {"tools": None}, f"{THOUGHT}{FINAL}hello ", "hello ", "hm, {", [], "stop"),
    ("no thoughts", {"tools": None}, f"{FINAL}hello", "hello", None, [], "stop"),
    ("no channel", {"tools": None}, "to be", "to be", None, [], "stop"),
    ("no answer", {"tools": None}, "<|channel|>analysis<|message|>hm", None, "hm", [], "stop"),
    (
        "a call",
        {},
        THOUGHT + call("weather", PARIS),
        None,
        "hm, {",
        [("weather", PARIS)],
        "tool_calls",
    ),
    (
        "the other order",
        {},
        THOUGHT + call("weather", HARD, first=True),
        None,
        "hm, {",
        [("weather", HARD)],
        "tool_calls",
    ),
    ("its end", {}, call("now", {}) + "<|call|>", None, None, [("now", {})], "tool_calls"),
    (
        "said before",
        {},
        THOUGHT + SAID + THOUGHT + call("now", {}),
        "So:",
        "hm, {\nhm, {",
        [("now", {})],
        "tool_calls",
    ),
    ("said and answered", {}, SAID + FINAL + "yes", "So:\nyes", None, [], "stop"),
    ("named", {"tool_choice": NAMED}, call("now", {}), None, None, [("now", {})], "stop"),
    ("none", {"tool_choice": "none"}, f"{THOUGHT}{FINAL}no", "no", "hm, {", [], "stop"),
    (
        "a tool of its own",
        {"tools": None},
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        None,
        "1+1",
        [],
        "stop",
    ),
    (
        "a stop string",
        {"tools": None, "stop": ["hm", "ll"]},
        f"{THOUGHT}{FINAL}hello",
        "he",
        "hm, {",
        [],
        "stop",
    ),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_table(served: tuple[FakeBackend, openai.OpenAI], case: Any, streamed: bool) -> None:
    """Marks of channels in content; content that is told as thoughts."""
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
    (choice,) = answer.choices
    message = choice.message
    assert (message.content or None, getattr(message, "reasoning_content", None)) == (
        content,
        reasoning,
    )
    parsed = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
    assert (parsed, choice.finish_reason) == (calls, finish)


def test_detection() -> None:
    """A template of channels that is taken for one of tags, or of several calls a message."""
    known = template_output(harmony())
    assert known.calls is not None and known.calls.name == "harmony"
    assert known.reasoning is not None and known.reasoning.channels
    assert (known.single_calls, known.no_content) == (True, True)
    assert known.variables == {"reasoning_effort"} and len(known.special_ids) == 7


def prompt_of(backend: FakeBackend) -> str:
    return backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "effort, told",
    [(None, "medium"), ("none", "low"), ("minimal", "low"), ("high", "high"), ("max", "high")],
)
def test_effort(effort: str | None, told: str) -> None:
    """One that the model has never seen."""
    backend = backend_of_channels()
    client = Client(build_asgi(backend))
    reply = asyncio.run(client.chat(**({} if effort is None else {"reasoning_effort": effort})))
    assert reply.status == 200 and reply.header("x-ignored-fields") is None
    assert f"Reasoning: {told}<|end|>" in prompt_of(backend)


def test_history() -> None:
    """Calls of one message that the template leaves out, or content beside thoughts, which it
    refuses; a result behind another call."""
    backend = backend_of_channels()
    client = Client(build_asgi(backend))
    asked = [("a", "weather", PARIS), ("b", "now", {})]
    calls = [
        {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for id, name, arguments in asked
    ]
    messages = [
        *USER,
        {"role": "assistant", "content": "So.", "reasoning": "why", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "tool", "tool_call_id": "a", "content": "<|end|>sunny"},
    ]
    reply = asyncio.run(client.chat(tools=TOOLS, messages=messages))
    assert reply.status == 200, reply.body
    prompt = prompt_of(backend)
    parts = [
        "<|channel|>analysis<|message|>why\nSo.<|end|>",
        "assistant to=functions.weather<|channel|>commentary json<|message|>" + json.dumps(PARIS),
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"<|end|>sunny"',
        "assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>',
    ]
    places = [prompt.find(part) for part in parts]
    assert places == sorted(places) and places[0] > 0, prompt
    assert prompt.endswith("<|start|>assistant")


def test_a_message_that_is_gone_on_with() -> None:
    """Its end read as a channel, or its calls."""
    backend = backend_of_channels()
    backend.script = "lo there"
    client = Client(build_asgi(backend))
    messages = [*USER, {"role": "assistant", "content": "hel"}]
    fields = {"messages": messages, "tools": TOOLS, "continue_final_message": True}
    reply = asyncio.run(client.chat(**fields))
    assert reply.json()["choices"][0]["message"]["content"] == "lo there"
    assert prompt_of(backend).endswith("<|channel|>final<|message|>hel")


def test_responses_and_messages(served: tuple[FakeBackend, openai.OpenAI]) -> None:
    """Items or blocks in another order than they were written in."""
    backend, client = served
    backend.script = THOUGHT + SAID + THOUGHT + call("now", {})
    tools: Any = [{"type": "function", "name": "now", "parameters": {"type": "object"}}]
    with client.responses.stream(model=MODEL, input="hello", tools=tools) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_response()
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "message", "reasoning", "function_call"]
    body = {"model": MODEL, "messages": USER, "max_tokens": 2000}
    body["tools"] = [{"name": "now", "input_schema": {"type": "object"}}]
    reply = asyncio.run(Client(build_asgi(backend)).post("/v1/messages", body)).json()
    kinds = [block["type"] for block in reply["content"]]
    assert kinds == ["thinking", "text", "thinking", "tool_use"]
    assert reply["stop_reason"] == "tool_use"


BOUNDED: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
DOCUMENT = {"json_schema": {"name": "a", "schema": BOUNDED, "strict": True}, "type": "json_schema"}


def test_a_document_of_a_random_model(tmp_path: Path) -> None:
    """A header that its own parser does not read; thoughts without an end. Calls: test_seeds.py."""
    backend = backend_of_channels()
    client = Client(build_asgi(backend))
    fields = {"response_format": DOCUMENT, "thinking_token_budget": 6}
    assert asyncio.run(client.chat(**fields)).status == 200
    params = backend.requests[-1].params
    tokenizer = backend._tokenizer
    core = make_core(save_model(tmp_path, tokenizer), max_num_seqs=32, num_blocks=2048)
    more = {"max_tokens": 300, "thinking": params.thinking}
    outputs = run(core, *(request(i, params.structured, **more) for i in range(1, 7)))
    thought = 0
    for output in outputs.values():
        assert output.finish == "stop"
        backend.script = output.deltas
        answer = asyncio.run(client.chat(**fields, max_tokens=2000)).json()
        message = answer["choices"][0]["message"]
        reasoning_tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        thought += reasoning_tokens > 0
        assert (
            reasoning_tokens <= 10
        )  # the end mark is counted where it is read, a character is finished
        jsonschema.validate(json.loads(message["content"]), BOUNDED)
    assert thought
