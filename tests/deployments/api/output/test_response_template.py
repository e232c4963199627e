"""Formats that a checkpoint declares in its response_template: read as transformers reads them."""

import ast
import asyncio
import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from deployments.api.app import build_asgi
from deployments.api.output.detect import template_output
from deployments.api.output.output_format import FORMATS, OutputFormat
from deployments.api.output.parser import OutputParser
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.test_parsers import FUNCTIONS, merged
from tests.deployments.api.output.test_real_templates import template
from tests.deployments.api.output.test_tools import (
    CITY,
    PARIS,
    USER,
    allowed,
    backend_with,
    code_of,
    tokenizer_with,
    tool,
)
from tests.deployments.api.output.tool_templates import (
    DECLARED,
    HERMES,
    RESPONSE_TEMPLATE,
    response_template,
)
from tests.engine.text.test_structured import save_model
from tests.published_templates import trl

# Without what formats write as JSON, or transformers leaves a text: limits of strings, references.
PLAIN = {
    "city": {"type": "string"},
    "where": {"type": "object", "properties": {"x": {"type": "boolean"}}},
}
SCHEMA = {**CITY, "properties": {**CITY["properties"], **PLAIN}}
TOOLS: Any = [tool("weather", SCHEMA), tool("now")]
DEEP = {"city": "Paris", "days": 3, "where": {"x": True}}


def declared(name: str) -> tuple[str, dict[str, Any]]:
    source, calls = DECLARED[name]
    return source, response_template(calls)


def written(format: OutputFormat) -> str:
    calls = [format.write("weather", DEEP), format.write("now", {})]
    return "So:\n" + format.opening + format.separator.join(calls) + format.closing


@pytest.mark.parametrize("name", DECLARED)
def test_calls_as_declared(name: str) -> None:
    """A declaration that is read otherwise than transformers reads it, or not enforced; a history
    that shows other calls than the model writes."""
    source, spec = declared(name)
    backend = backend_with(source)
    backend._tokenizer.response_template = spec
    client = Client(build_asgi(backend))
    known = template_output(backend._tokenizer)
    assert known.calls is not None and not known.problems
    backend.script = text = f"<think>\nhm\n</think>\n\n{written(known.calls)}"
    message = asyncio.run(client.chat(tools=TOOLS, max_tokens=2000)).json()["choices"][0]["message"]
    assert allowed(backend, text)
    assert not allowed(backend, text.replace("3", "12"))
    assert not allowed(backend, text.replace("now", "new"))
    theirs = parse_response(text, spec, prefix="", tools=TOOLS)
    calls = [call["function"] for call in theirs["tool_calls"]]
    ours = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert [(name, json.loads(arguments)) for name, arguments in ours] == [
        (function["name"], function["arguments"]) for function in calls
    ]
    assert [message[field] for field in ("content", "reasoning_content")] == ["So:", "hm"]
    assert (theirs["content"], theirs["reasoning_content"]) == ("So:", "hm")
    message["reasoning_content"] = ""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        for call in message["tool_calls"]
    ]
    asyncio.run(client.chat(tools=TOOLS, messages=[*USER, message, *results]))
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    assert written(known.calls).removeprefix("So:\n") in prompt


@pytest.mark.parametrize("name", DECLARED)
def test_cut_at_every_byte(name: str) -> None:
    """Other events where a chunk ends inside a mark."""
    source, spec = declared(name)
    tokenizer = tokenizer_with(source)
    tokenizer.response_template = spec
    known = template_output(tokenizer)
    assert known.calls is not None
    raw = {function.name: function.raw(known.calls) for function in FUNCTIONS}
    data = written(known.calls).encode()

    def parser() -> OutputParser:
        return OutputParser(known.calls, raw, known.reasoning, "may")

    whole = merged(parser(), [data.decode()])
    assert [event.kind for event in whole].count("end") == 2
    for cut in range(len(data) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")()
        pieces = [decoder.decode(data[:cut]), decoder.decode(data[cut:], final=True)]
        assert merged(parser(), pieces) == whole, data[:cut]


_JSON = DECLARED["json behind a name"][1]
_TAGS = DECLARED["tags"][1]


@pytest.mark.parametrize(
    "spec, problem",
    [
        (response_template({**_JSON, "close_pattern": "</do>|$"}), "tool_calls.close_pattern: "),
        (response_template({**_JSON, "open_pattern": "<do+>"}), "tool_calls.open_pattern: "),
        (response_template({**_JSON, "content": "kv-lines"}), "tool_calls.content: kv-lines"),
        (response_template({**_JSON, "transform": "{content}"}), "tool_calls.transform: "),
        (
            response_template({**_JSON, "content_args": {"unquoted_keys": True}}),
            "tool_calls.content_args: ",
        ),
        (response_template({**_TAGS, "content_args": {}}), "tool_calls.content_args.tag_pattern: "),
        (response_template({"open": "<do>"}), "tool_calls: "),
        (response_template({**_TAGS, "content_args": "x"}), "tool_calls: a value in it "),
        (
            response_template({**_JSON, "content_args": {"unquoted_keys": 1, "string_delims": 1}}),
            "tool_calls: a value in it ",
        ),
        ({**RESPONSE_TEMPLATE, "version": 2}, "response_template: version 2 "),
        ({**RESPONSE_TEMPLATE, "extra": 1}, "response_template: extra: "),
        ([], "response_template: it is no object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_grammar_can_be_made_of(spec: Any, problem: str) -> None:
    """Tools whose calls would come as text; a refusal that does not say what is in the way."""
    backend = backend_with(declared("json behind a name")[0])
    backend._tokenizer.response_template = spec
    client = Client(build_asgi(backend))
    refused = asyncio.run(client.chat(tools=TOOLS))
    assert code_of(refused) == (400, "tools_not_supported", "tools")
    assert problem in refused.json()["error"]["message"]
    assert asyncio.run(client.chat()).status == 200


def test_the_table_stands_in() -> None:
    """Tools of a known family that a declaration takes away, as no grammar can be made of it."""
    tokenizer = tokenizer_with(HERMES)
    tokenizer.response_template = response_template({"open_pattern": "<tool_call>|x"})
    known = template_output(tokenizer)
    assert known.calls is not None and known.calls.name == "hermes"
    (problem,) = known.problems
    assert problem.startswith("response_template.fields.tool_calls.open_pattern: ")


def test_it_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    """A declaration that is never looked for."""
    source, spec = declared("tags")
    folder = save_model(tmp_path, tokenizer_with(source))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    assert Tokenizer.load(folder).response_template is None
    path.write_text(json.dumps({**config, "response_template": spec}))
    assert Tokenizer.load(folder).response_template == spec


# Template -> the declaration that TRL has for it, and the format that is known here.
REAL = {
    "qwen3": ("qwen3", "hermes"),
    "qwen3_5_think": ("qwen3_5", "qwen3-coder"),
    "nemotron_3_nano": ("nemotron_3", "qwen3-coder"),
    "glm4moe": ("glm4moe", "glm-4.5"),
    "llama3_1": ("llama3", "llama3-json"),
    "gptoss": ("gptoss", "harmony"),
    "gemma4_v5": ("gemma4", "gemma4"),
    "lfm2_2_5": ("lfm2_2_5", "lfm2"),
}


@pytest.mark.parametrize("name", REAL)
def test_declarations_of_real_models(name: str) -> None:
    """A declaration that takes the place of a format that is known better, or is read otherwise
    than that format."""
    source, (called, format) = template(name), REAL[name]
    tokenizer = tokenizer_with(source)
    tokenizer.response_template = _of_trl(f"{called}_template")
    known = template_output(tokenizer)
    assert known.calls is not None and known.calls.name == format
    assert [problem.split(":")[0] for problem in known.problems] == {
        "lfm2": ["response_template.fields.tool_calls.open_pattern"],
        "qwen3-coder": ["response_template.fields.reasoning_content.open_pattern"]
        * (called == "nemotron_3"),
    }.get(format, [])
    expected = next(candidate for candidate in FORMATS if candidate.name == format)
    end = "<|eot_id|>" if format == "llama3-json" else ""
    text = expected.opening + expected.write("weather", PARIS) + expected.closing + end
    theirs = parse_response(text, tokenizer.response_template, prefix="", tools=TOOLS)
    (call,) = theirs["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": PARIS}


def _of_trl(name: str) -> Any:
    """Return a dictionary in TRL's source, which is read and not imported."""
    tree = ast.parse((trl() / "chat_template_utils.py").read_text())
    names: dict[str, Any] = {"_XML_INLINE_VALUE_PARSER": {"name": "text"}}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.For) or (
            isinstance(target, ast.Name) and (target.id == name or "LFM2_2_5" in target.id)
        ):
            exec(compile(ast.Module([node], []), "trl", "exec"), names)
    return names[name]
