"""Tools and reasoning over chat completions: whole and streamed, with OpenAI's own client, and what
a random model writes under the grammars that requests make."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from deployments.adapters.record_store import AdapterRecord
from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.api.output.detect import template_output
from deployments.api.output.output_format import FORMATS, Reasoning
from engine.messages import AdapterInfo
from engine.structured.compiler import Compiler, Vocabulary
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.asgi import CHAT, Client, Reply
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL, FakeBackend
from tests.engine.text.small_tokenizers import byte_level
from tests.engine.text.test_structured import make_core, request, run, save_model

USER: Any = [{"role": "user", "content": "hello"}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "where": {"$ref": "#/$defs/place"},
        "odd": {"anyOf": [{"type": "null"}, {"const": 7}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "in": {"$ref": "#/$defs/place"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def tool(name: str, schema: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"<|im_end|> {name}", **more}
    return {"type": "function", "function": function | ({"parameters": schema} if schema else {})}


def patch(format: Any = None) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "patch", "format": format}}


def written_as(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


TOOLS: Any = [tool("weather", CITY), tool("now")]


def tokenizer_with(template: str) -> Tokenizer:
    plain = byte_level()
    names = {"eos_token": "<|im_end|>"}
    chat_template = ChatTemplate({"default": template}, names)
    return Tokenizer(plain.backend, special_tokens=names, chat_template=chat_template)


def backend_with(template: str) -> FakeBackend:
    backend = FakeBackend()
    backend._tokenizer = tokenizer_with(template)
    size = backend._tokenizer.vocab_size + 7
    backend.cards = {MODEL: replace(backend.cards[MODEL], max_model_len=24_576, vocab_size=size)}
    return backend


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeBackend, openai.OpenAI]]:
    backend = backend_with(TEMPLATES["hermes"])
    with serve(build_asgi(backend)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            yield backend, client


def written(*calls: tuple[str, Any]) -> str:
    """Return calls as a model of the Hermes family writes them."""
    hermes = next(known for known in FORMATS if known.name == "hermes")
    return "\n".join(hermes.write(name, arguments) for name, arguments in calls)


PARIS = {"city": "Paris", "days": 1}
HARD = {"city": 'a"\n\\{😀}', "days": 2}
CLOSER = {"city": "</tool_call>", "days": 2}
DEEP = {"city": "123", "days": 3, "where": {"x": True, "in": {"x": False}}, "odd": None}
NAMED = {"type": "function", "function": {"name": "now"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
TEXT = "I look { it up."
OPTIONAL = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}}
NUMBERS = {"a": -9007199254740993, "b": 1.5e-07, "c": 6.02e23, "d": 0}
LONG = "f" * 64
MANY: Any = [tool(name, description="") for name in (*(f"f{i}" for i in range(127)), LONG)]
ODD = tool("odd", {"type": "object", "properties": {"a": {"not": {"type": "null"}}}})
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "city", "schema": {**CITY, "required": []}, "strict": True},
}

# Beside what the ids of the table name, tools are tried here:
#   strict, and 200 seeds              test_seeds.py
#   keywords that are not enforced     test_what_is_not_enforced_is_named, test_refused
#   129 tools, names of 65 characters  test_refused
#   cut by max_tokens; logprobs        test_cut_by_max_tokens
#   n                                  test_three_choices
#   seeds, preemption                  tests/engine/text/test_structured.py
#   a replica that is killed           tests/faults/agents.py
#   every chunking                     test_parsers.py
#   templates of real models           test_real_templates.py
#   arguments as a text; bad ones in the history; control tokens as text
#                                      test_detection, test_history
#   unknown ids, results in any order  test_results_of_calls
#   tools of a text, in Lark or regex  test_a_tool_of_text, test_a_tool_of_a_grammar
#   LoRA adapters                      test_through_an_adapter, test_seeds.py
# id, fields, what the model writes, content, reasoning, calls, finish_reason
CASES: list[tuple[str, dict[str, Any], str, str | None, str | None, list[Any], str]] = [
    ("no call", {}, "hello there ", "hello there ", None, [], "stop"),
    ("one", {}, written(("weather", PARIS)), None, None, [("weather", PARIS)], "tool_calls"),
    (
        "text, then a call",
        {},
        f"{TEXT}\n\n" + written(("now", {})),
        TEXT,
        None,
        [("now", {})],
        "tool_calls",
    ),
    (
        "two",
        {},
        written(("weather", PARIS), ("now", {})),
        None,
        None,
        [("weather", PARIS), ("now", {})],
        "tool_calls",
    ),
    (
        "eight of one name",
        {},
        written(*[("now", {})] * 8),
        None,
        None,
        [("now", {})] * 8,
        "tool_calls",
    ),
    (
        "required",
        {"tool_choice": "required"},
        written(("now", {})),
        None,
        None,
        [("now", {})],
        "tool_calls",
    ),
    ("named", {"tool_choice": NAMED}, written(("now", {})), None, None, [("now", {})], "stop"),
    (
        "allowed",
        {"tool_choice": ALLOWED},
        written(("now", {})),
        None,
        None,
        [("now", {})],
        "tool_calls",
    ),
    (
        "not in parallel",
        {"parallel_tool_calls": False},
        written(("now", {})),
        None,
        None,
        [("now", {})],
        "tool_calls",
    ),
    (
        "nothing of what is optional, and some",
        {"tools": [tool("some", OPTIONAL)]},
        written(("some", {}), ("some", {"b": 2.5})),
        None,
        None,
        [("some", {}), ("some", {"b": 2.5})],
        "tool_calls",
    ),
    (
        "large, negative and small numbers",
        {"tools": [tool("some", {"type": "object"})]},
        written(("some", NUMBERS)),
        None,
        None,
        [("some", NUMBERS)],
        "tool_calls",
    ),
    (
        "128 tools, and a long name",
        {"tools": MANY},
        written((LONG, {})),
        None,
        None,
        [(LONG, {})],
        "tool_calls",
    ),
    (
        "a keyword that is not enforced",
        {"tools": [ODD]},
        written(("odd", {"a": None})),
        None,
        None,
        [("odd", {"a": None})],
        "tool_calls",
    ),
    ("a document", {"response_format": FORM}, '{"days": 2}', '{"days": 2}', None, [], "stop"),
    (
        "a call where a document was asked for",
        {"response_format": FORM},
        written(("now", {})),
        None,
        None,
        [("now", {})],
        "tool_calls",
    ),
    ("none", {"tool_choice": "none"}, "hello", "hello", None, [], "stop"),
    ("nested", {}, written(("weather", DEEP)), None, None, [("weather", DEEP)], "tool_calls"),
    ("quotes", {}, written(("weather", HARD)), None, None, [("weather", HARD)], "tool_calls"),
    ("closer", {}, written(("weather", CLOSER)), None, None, [("weather", CLOSER)], "tool_calls"),
    (
        "a stop string in arguments",
        {"stop": ["Paris", "abc"]},
        "x" + written(("weather", PARIS)),
        "x",
        None,
        [("weather", PARIS)],
        "tool_calls",
    ),
    ("a stop string in content", {"stop": ["Paris"]}, "to Paris, now", "to ", None, [], "stop"),
    (
        "a stop string in a document",
        {"response_format": FORM, "stop": ["days"]},
        '{"days": 2}',
        '{"',
        None,
        [],
        "stop",
    ),
    (
        "reasoning, then a call",
        {},
        "<think>\nhm, {\n</think>\n\nSo:\n" + written(("now", {})),
        "So:",
        "hm, {",
        [("now", {})],
        "tool_calls",
    ),
    (
        "a call ends reasoning",
        {},
        "<think>\nhm\n" + written(("now", {})),
        None,
        "hm",
        [("now", {})],
        "tool_calls",
    ),
    (
        "reasoning that the prompt has opened",
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
        "hm\n</think>\n\nyes",
        "yes",
        "hm",
        [],
        "stop",
    ),
    ("effort", {"reasoning_effort": "high"}, "hm</think>yes", "yes", "hm", [], "stop"),
    ("never closed", {"reasoning_effort": "high"}, "hm\nhm", None, "hm\nhm", [], "stop"),
    ("no effort", {"reasoning_effort": "none"}, "yes </think>", "yes </think>", None, [], "stop"),
    ("reasoning without tools", {"tools": None}, "<think>a</think>b", "b", "a", [], "stop"),
    ("no format asked for", {"tools": None}, "<tool_call>", "<tool_call>", None, [], "stop"),
]


def allowed(backend: FakeBackend, text: str) -> bool:
    """Whether the grammar of the last request lets a model write all of a text, and end there."""
    grammar = backend.requests[-1].params.structured
    if grammar is None:
        return True
    tokenizer = backend._tokenizer
    special = {id: name for name, id in tokenizer.backend.get_vocab(True).items()}
    special = {id: name for id, name in special.items() if id in tokenizer.mark_ids}
    known = Vocabulary.outline(special, tokenizer.vocab_size, tokenizer.eos_token_ids)
    matcher = Compiler(known).compile(grammar).deep_copy()
    marks = {name: [id] for id, name in special.items()}
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    ids = [id for piece in pieces for id in marks.get(piece) or known.tokens.tokenize_str(piece)]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_table(served: tuple[FakeBackend, openai.OpenAI], case: Any, streamed: bool) -> None:
    """Each with OpenAI's client: a piece that is lost or told twice adds up to something else."""
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
    assert allowed(backend, text) is (case[0] != "never closed")
    (choice,) = answer.choices
    message = choice.message
    assert (message.content or None, getattr(message, "reasoning_content", None)) == (
        content,
        reasoning,
    )
    assert getattr(message, "reasoning", None) == reasoning
    sent["extra_body"] = {**sent.get("extra_body", {}), "include_reasoning": False}
    hidden = client.chat.completions.create(**sent)
    assert not getattr(hidden.choices[0].message, "reasoning", None)
    assert (hidden.choices[0].message.content or None) == content
    parsed = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
    assert (parsed, choice.finish_reason) == (calls, finish)
    ids = [c.id for c in message.tool_calls or []]
    assert len(set(ids)) == len(ids) and all(len(call_id) == 29 for call_id in ids)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"parallel_tool_calls": False}, written(("now", {}), ("now", {}))),
        ({"tool_choice": "none"}, written(("now", {}))),
        ({"tool_choice": "required"}, "hello"),
        ({"tool_choice": NAMED}, written(("weather", PARIS))),
        ({"tool_choice": ALLOWED}, written(("weather", PARIS))),
        ({}, written(("when", {}))),
        ({}, written(("now", {"a": 1}))),
        ({}, written(("weather", {"city": "Paris"}))),
        ({}, written(("weather", {**PARIS, "unit": "k"}))),
        ({}, written(("weather", {**PARIS, "days": "1"}))),
        ({"response_format": FORM}, "hello"),
        ({"response_format": FORM}, '{"days": 10}'),
    ],
    ids=str,
)
def test_what_no_model_can_write(fields: dict[str, Any], text: str) -> None:
    """A choice of tools, or a schema, that is only asked for in the prompt."""
    backend = backend_with(TEMPLATES["hermes"])
    client = Client(build_asgi(backend))
    assert asyncio.run(client.chat(**{"tools": TOOLS, **fields})).status == 200
    assert not allowed(backend, text)


def test_three_choices() -> None:
    """Choices whose calls have one id, or share what is left of a call."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = "So:\n" + written(("weather", HARD), ("now", {}))
    client = Client(build_asgi(backend))
    fields = {"tools": TOOLS, "n": 3, "max_tokens": 2000}
    choices = asyncio.run(client.chat(**fields)).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 3
    calls = [call for choice in choices for call in choice["message"]["tool_calls"]]
    assert [call["function"]["name"] for call in calls] == ["weather", "now"] * 3
    assert len({call["id"] for call in calls}) == 6


LISTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "all": {"type": "array", "items": {"type": ["integer", "null"]}},
        "in": {
            "type": "object",
            "properties": {"b": {"enum": ["x", None, 2]}, "a": {"type": "boolean"}},
            "required": ["b"],
        },
        "code": {"type": "string", "pattern": "^[a-z]{2}$"},
    },
    "required": ["text"],
}
_LFM2, _GEMMA = "<|tool_call_start|>[{}]<|tool_call_end|>", "<|tool_call>call:{}<tool_call|>"


@pytest.mark.parametrize(
    "name, around, call, arguments",
    [
        ("lfm2", _LFM2, 'some(text="a\'\\n")', {"text": "a'\n"}),
        ("lfm2", _LFM2, 'some(text="", all=[1, null])', {"text": "", "all": [1, None]}),
        ("lfm2", _LFM2, 'some(text=")", in={"b": 2})', {"text": ")", "in": {"b": 2}}),
        ("lfm2", _LFM2, 'some(text="", code="ab")', {"text": "", "code": "ab"}),
        ("lfm2", _LFM2, "some(text=1)", None),
        ("lfm2", _LFM2, "some(all=[1])", None),
        ("lfm2", _LFM2, 'some(text="", all=["1"])', None),
        ("lfm2", _LFM2, 'some(text="",)', None),
        ("gemma4", _GEMMA, 'some{text:<|"|>a"}\n<|"|>}', {"text": 'a"}\n'}),
        (
            "gemma4",
            _GEMMA,
            'some{all:[1,null],in:{a:true,b:<|"|>x<|"|>},text:<|"|><|"|>}',
            {"all": [1, None], "in": {"a": True, "b": "x"}, "text": ""},
        ),
        ("gemma4", _GEMMA, 'some{code:"ab",text:<|"|><|"|>}', {"code": "ab", "text": ""}),
        ("gemma4", _GEMMA, 'some{in:{b:null},text:<|"|>,<|"|>}', {"in": {"b": None}, "text": ","}),
        ("gemma4", _GEMMA, 'some{in:{a:true},text:<|"|><|"|>}', None),
        ("gemma4", _GEMMA, 'some{code:"abc",text:<|"|><|"|>}', None),
        ("gemma4", _GEMMA, "some{}", None),
        ("gemma4", _GEMMA, "some{all:[],}", None),
    ],
)
def test_arguments_in_a_dialect(name: str, around: str, call: str, arguments: Any) -> None:
    """Values that are not the schema's, or are read as others."""
    backend = backend_with(TEMPLATES[name])
    backend.script = around.format(call)
    client = Client(build_asgi(backend))
    fields = {"tools": [tool("some", LISTED)], "max_tokens": 2000}
    (choice,) = asyncio.run(client.chat(**fields)).json()["choices"]
    assert allowed(backend, backend.script) is (arguments is not None)
    if arguments is not None:
        (tool_call,) = choice["message"]["tool_calls"]
        assert json.loads(tool_call["function"]["arguments"]) == arguments
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("streamed", [False, True])
def test_through_an_adapter(streamed: bool) -> None:
    """A grammar or a parser that only the model's own name gets. What an engine writes with one:
    test_seeds.py."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = "So:\n" + written(("weather", HARD), ("now", {}))
    backend.adapters.records["legal"] = AdapterRecord(name="legal", path="/adapters/legal")
    backend.readers["/adapters/legal"] = AdapterInfo("legal", "r1", "lora", 8, 1, ["q_proj"])
    backend._set_cards()
    with (
        serve(build_asgi(backend)) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=30) as client,
    ):
        sent: Any = {"model": "legal", "messages": USER, "tools": TOOLS}
        if streamed:
            with client.chat.completions.stream(**sent) as stream:
                answer: Any = stream.get_final_completion()
        else:
            answer = client.chat.completions.create(**sent)
    assert backend.requests[-1].adapter is not None and answer.model == "legal"
    assert allowed(backend, backend.script)
    message = answer.choices[0].message
    parsed = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
    assert (message.content, parsed) == ("So:", [("weather", HARD), ("now", {})])


def test_results_of_calls() -> None:
    """Results that come in another order than their calls; one of a call that was never made."""
    backend = backend_with(TEMPLATES["hermes"])
    client = Client(build_asgi(backend))
    function = {"name": "now", "arguments": "{}"}
    calls = [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")]
    results = [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ("c2", "c1")]
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    assert asyncio.run(client.chat(tools=TOOLS, messages=messages)).status == 200
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids)
    assert prompt.index("of c2") < prompt.index("of c1")
    results[1]["tool_call_id"] = "c3"
    refusal = code_of(asyncio.run(client.chat(tools=TOOLS, messages=messages)))
    assert refusal == (400, "invalid_tool_call_id", "messages[3].tool_call_id")


@pytest.mark.parametrize("name", TEMPLATES)
def test_detection(name: str) -> None:
    """A format that its own template is not known by."""
    known = template_output(tokenizer_with(TEMPLATES[name]))
    assert known.calls is not None and known.calls.name == name
    assert known.reasoning == Reasoning("<think>", "</think>")
    assert known.text_arguments == (name == "deepseek-v3")
    assert known.variables == {"enable_thinking"}


def code_of(reply: Reply) -> tuple[int, str, str | None]:
    error = reply.json()["error"]
    return reply.status, error["code"], error["param"]


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({"tools": [tool("a b")]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [tool("a" * 65)]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "invalid_value", "tools[1].function.name"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "invalid_value", "tools"),
        ({"tools": [{"type": "web_search"}]}, "not_supported", "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "invalid_type", "tools[0]"),
        (
            {"tools": [patch({"type": "grammar", "grammar": {"syntax": "x"}})]},
            "invalid_value",
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"tools": [patch(written_as("regex", "("))]},
            "unsupported_schema",
            "tools[0].custom.format#/properties/input/pattern",
        ),
        (
            {"tools": [tool("a", {"type": "string"})]},
            "invalid_type",
            "tools[0].function.parameters",
        ),
        (
            {"tools": [tool("a", {"properties": {"b": {"not": {}}}}, strict=True)]},
            "unsupported_schema",
            "tools[0].function.parameters#/properties/b/not",
        ),
        ({"tool_choice": {"type": "function"}}, "invalid_value", "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
            "invalid_value",
            "tool_choice.allowed_tools",
        ),
        ({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
    ],
)
def test_refused(fields: dict[str, Any], code: str, param: str) -> None:
    """A request that is answered as if it had been understood."""
    client = Client(build_asgi(backend_with(TEMPLATES["hermes"])))
    assert code_of(asyncio.run(client.chat(**{"tools": TOOLS, **fields}))) == (400, code, param)


@pytest.mark.parametrize(
    "template, name",
    [("qwen3-coder", "a>\n"), ("qwen3-coder", ""), ("lfm2", "a=b"), ("lfm2", "a ")],
)
def test_a_property_that_cannot_be_named(template: str, name: str) -> None:
    """A call that is valid as it is written, and read with other arguments."""
    client = Client(build_asgi(backend_with(TEMPLATES[template])))
    odd = tool("odd", {"type": "object", "properties": {name: {"type": "string"}}})
    reply = asyncio.run(client.chat(tools=[odd]))
    assert code_of(reply) == (400, "not_supported", "tools")
    assert json.dumps(name) in reply.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_of_text(served: tuple[FakeBackend, openai.OpenAI], streamed: bool) -> None:
    """A text that comes as the JSON it was written in; the end of another tool's arguments."""
    backend, client = served
    text = 'a\n"\\ 😀'
    backend.script = written(("patch", {"input": text}), ("now", {}))
    sent: Any = {"model": MODEL, "messages": USER, "tools": [*TOOLS, patch()]}
    if streamed:
        merged: dict[int, dict[str, str]] = {}
        for chunk in client.chat.completions.create(**sent, stream=True):
            for call in chunk.to_dict()["choices"][0]["delta"].get("tool_calls") or ():  # type: ignore[index]
                known = merged.setdefault(call["index"], call)
                if call is not known:
                    kind = known["type"]
                    for name, piece in call[kind].items():
                        known[kind][name] += piece
        calls: list[Any] = list(merged.values())
    else:
        answer = client.chat.completions.create(**sent)
        calls = answer.to_dict()["choices"][0]["message"]["tool_calls"]  # type: ignore[index]
    assert calls[0]["type"] == "custom" and calls[0]["custom"] == {"name": "patch", "input": text}
    assert calls[1]["type"] == "function" and calls[1]["function"]["name"] == "now"
    history = [
        *USER,
        {"role": "assistant", "tool_calls": [{k: v for k, v in calls[0].items() if k != "index"}]},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "done"},
    ]
    client.chat.completions.create(**{**sent, "messages": history})
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    assert written(("patch", {"input": text})) in prompt


@pytest.mark.parametrize("template", ["hermes", "qwen3-coder"])
@pytest.mark.parametrize("syntax", ["regex", "lark"])
def test_a_tool_of_a_grammar(tmp_path: Path, template: str, syntax: str) -> None:
    """A text that its grammar does not describe. In JSON no grammar in Lark can be held to."""
    backend = backend_with(TEMPLATES[template])
    client = Client(build_asgi(backend))
    pattern = "[a-c]{2,5}-[0-9]{1,3}!"
    tools = [patch(written_as(syntax, pattern if syntax == "regex" else f"start: /{pattern}/"))]
    # Without thoughts, which a random model does not end.
    fields = {"tools": tools, "tool_choice": "required", "reasoning_effort": "none"}
    fields["parallel_tool_calls"] = False
    reply = asyncio.run(client.chat(**fields))
    assert reply.status == 200, reply.body
    if (template, syntax) == ("hermes", "lark"):
        assert reply.header("x-ignored-fields") == "tools[0].custom.format"
        return
    assert reply.header("x-ignored-fields") is None
    grammar = backend.requests[-1].params.structured
    core = make_core(save_model(tmp_path, backend._tokenizer))
    outputs = run(core, *(request(i, grammar, max_tokens=400) for i in range(1, 5)))
    for output in outputs.values():
        assert output.finish == "stop"
        ids = [i for i in output.tokens if i != 2]
        backend.script = backend._tokenizer.decode(ids, skip_special_tokens=False)
        message = asyncio.run(client.chat(**fields, max_tokens=2000)).json()["choices"][0][
            "message"
        ]
        (called,) = message["tool_calls"]
        assert re.fullmatch(pattern, called["custom"]["input"])


def test_what_is_not_enforced_is_named() -> None:
    """A keyword of a tool's schema that is dropped without a word."""
    client = Client(build_asgi(backend_with(TEMPLATES["hermes"])))
    odd = tool("a", {"properties": {"b": {"not": {"type": "null"}}}})
    reply = asyncio.run(client.chat(tools=[odd]))
    assert reply.header("x-ignored-fields") == "tools[0].function.parameters#/properties/b/not"


def test_a_model_without_tools() -> None:
    """Tools that never get into the prompt, of a template that has them in a form of its own."""
    client = Client(build_asgi(backend_with("{{ tools }}{{ messages[0].content }}")))
    reply = asyncio.run(client.chat(tools=[tool("a")]))
    assert code_of(reply) == (400, "tools_not_supported", "tools")
    reply = asyncio.run(client.chat(tools=[tool("a")], tool_choice="none"))
    assert reply.status == 200
    reply = asyncio.run(client.chat(reasoning_effort="high"))
    assert reply.header("x-ignored-fields") == "reasoning_effort"


@pytest.mark.parametrize("takes_system", [True, False])
def test_a_template_that_knows_nothing_of_tools(takes_system: bool) -> None:
    """Tools, calls or results that such a model is not told of; a call of its that is content."""
    plain = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    backend = backend_with(plain if takes_system else refuses + plain)
    client = Client(build_asgi(backend))
    backend.script = f"{TEXT}\n" + written(("weather", PARIS))
    answer = asyncio.run(client.chat(tools=TOOLS, max_tokens=500)).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == PARIS
    assert (answer["message"]["content"], answer["finish_reason"]) == (TEXT, "tool_calls")
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for text in ("sun", "5")
    ]
    backend.script = "Sunny."
    history = [*USER, answer["message"], *results]
    asyncio.run(client.chat(tools=TOOLS, messages=history, max_tokens=500))
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    roles = re.findall(r"<\|im_start\|>(\w+)\n", prompt)
    assert roles == ["system", "user", "assistant", "user"][not takes_system :]
    first = prompt.partition("<|im_end|>\n<|im_start|>")[0]
    for tool in TOOLS:
        assert json.dumps(tool["function"]["name"]) in first
    assert f"assistant\n{TEXT}\n{written(('weather', PARIS))}<|im_end|>" in prompt
    response = "<tool_response>\n{}\n</tool_response>"
    assert f"user\n{response.format('sun')}\n{response.format('5')}<|im_end|>" in prompt
    # Without tools, as many clients ask for the last answer, the history is told the same.
    assert asyncio.run(client.chat(messages=history, max_tokens=500)).status == 200
    alone = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    asked = prompt.index("<|im_start|>assistant")
    assert alone.endswith(prompt[asked:]) and "# Tools" not in alone


def test_calls_of_a_history_take_the_template_for_tools() -> None:
    """Of two templates the other one shows no calls; without `tools` it was the one taken."""
    backend = backend_with(TEMPLATES["hermes"])
    shows = TEMPLATES["hermes"]
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    backend._tokenizer.chat_template = ChatTemplate({"default": plain, "tool_use": shows}, {})
    function = {"name": "weather", "arguments": json.dumps(PARIS)}
    call = {"id": "c", "type": "function", "function": function}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "c", "content": "sun"})
    assert asyncio.run(Client(build_asgi(backend)).chat(messages=history)).status == 200
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    assert written(("weather", PARIS)) in prompt


def test_a_budget_of_thoughts() -> None:
    """A budget that does not reach the engine, or is dropped without a word."""
    backend = backend_with(TEMPLATES["hermes"])
    client = Client(build_asgi(backend))

    def ask(path: str = "/v1/chat/completions", **fields: Any) -> Reply:
        return asyncio.run(client.post(path, {**CHAT, **fields}))

    assert ask(thinking_token_budget=5).status == 200
    thinking = backend.requests[-1].params.thinking
    assert thinking is not None and (thinking.tokens, thinking.start) == (5, "<think>")
    assert thinking.ends == ("</think>",) and backend.requests[-1].params.structured is not None
    enabled = {"type": "enabled", "budget_tokens": 7}
    assert ask("/v1/messages", thinking=enabled, max_tokens=20).status == 200
    thinking = backend.requests[-1].params.thinking
    assert thinking is not None and (thinking.tokens, thinking.start) == (7, "")
    assert ask(thinking_token_budget=5, tools=TOOLS).status == 200
    thinking = backend.requests[-1].params.thinking
    assert thinking is not None and thinking.ends == ("</think>", "<tool_call>")
    assert ask(thinking_token_budget=-1).status == 200
    assert backend.requests[-1].params.thinking is None
    off = ask(thinking_token_budget=5, reasoning_effort="none")
    assert off.header("x-ignored-fields") == "thinking_token_budget"
    refusal = code_of(ask(thinking_token_budget=-2))
    assert refusal == (400, "invalid_value", "thinking_token_budget")


def test_a_plain_chat_has_no_parser() -> None:
    """A cost for chats that have neither tools nor thoughts."""
    backend = FakeBackend()
    client = Client(build_asgi(backend))
    plain = asyncio.run(client.chat())
    assert plain.json()["choices"][0]["message"].keys() == {"role", "content", "refusal"}
    assert "completion_tokens_details" not in plain.json()["usage"]
    assert backend.requests[-1].params.structured is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_history(name: str) -> None:
    """Calls and their results, rendered otherwise than the model writes them; one bad call that
    ends every later turn."""
    backend = backend_with(TEMPLATES[name])
    client = Client(build_asgi(backend))
    known = template_output(backend._tokenizer).calls
    assert known is not None

    def turn(arguments: str) -> dict[str, Any]:
        function = {"name": "weather", "arguments": arguments}
        call = {"id": "c1", "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call], "reasoning": "why"}

    result = {"role": "tool", "tool_call_id": "c1", "content": "<|im_end|>sunny"}
    messages = [*USER, turn(json.dumps(DEEP)), result]
    assert asyncio.run(client.chat(tools=TOOLS, messages=messages)).status == 200
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    assert known.write("weather", DEEP) in prompt and "<think>\nwhy\n</think>" in prompt
    (end,) = backend._tokenizer.eos_token_ids
    counts = [prompt.count("<|im_end|>"), backend.requests[-1].token_ids.count(end)]
    assert counts == [7, 4], "what descriptions and results say is no control token"
    bad = asyncio.run(client.chat(tools=TOOLS, messages=[*USER, turn('{"a"'), result]))
    assert bad.status == 200
    assert bad.header("x-ignored-fields") == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("kept", [True, False])
def test_a_cut_stream_goes_on(kept: bool) -> None:
    """Cut after each event in turn: a call's id that is another one, or said twice; a piece of its
    arguments that is missing. kept: a replica still has the tokens; else they are made again."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = "<think>\nhm\n</think>\n\nSo:\n" + written(("weather", HARD), ("now", {}))
    secret = b"s" * 32
    client = Client(build_asgi(backend, ApiOptions(event_secret=secret)))
    body = {"tools": TOOLS, "max_tokens": 2000, "stream": True}

    async def ask(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        sent = (b"content-type", b"application/json"), *headers
        reply = await client.post("/v1/chat/completions", {**CHAT, **body}, headers=sent)
        assert reply.status == 200, reply.body
        blocks = [block.split(b"\n") for block in reply.body.split(b"\n\n") if b"data: " in block]
        return [(lines[0].partition(b": ")[2], lines[-1]) for lines in blocks]

    whole = asyncio.run(ask((b"x-event-ids", b"1")))
    past = dict(backend.kept)
    assert len(whole) > 20
    for place, (last, _) in enumerate(whole[:-1]):
        backend.kept = dict(past) if kept else {}
        rest = asyncio.run(ask((b"last-event-id", last)))
        assert [data for _, data in rest] == [data for _, data in whole[place + 1 :]]


def test_cut_by_max_tokens() -> None:
    """An answer that is cut inside a call and says that the call is complete; marks of a call in
    content; log-probabilities of tokens that are not content; choices that share a parser."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = "So:\n" + written(("weather", HARD), ("now", {}))
    client = Client(build_asgi(backend))
    size = len(backend._tokenizer.encode(backend.script))
    for limit in range(1, size, 3):
        fields = {"tools": TOOLS, "max_tokens": limit, "n": 2, "logprobs": True}
        choices = asyncio.run(client.chat(**fields)).json()["choices"]
        assert choices[0]["message"]["content"] == choices[1]["message"]["content"]
        for choice in choices:
            assert choice["finish_reason"] == "length"
            assert "<tool_call>" not in choice["message"]["content"]
            assert len(choice["logprobs"]["content"]) <= 6
        ids = [call["id"] for choice in choices for call in choice["message"].get("tool_calls", [])]
        assert len(set(ids)) == len(ids)
