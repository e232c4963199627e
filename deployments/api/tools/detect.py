"""template_output: the formats of a model, found by rendering its own chat template."""

import re
import weakref
from dataclasses import dataclass
from typing import Any, Literal

from deployments.api.tools.output_format import FORMATS, REASONING, OutputFormat, Reasoning
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer

_NAME, _VALUES = "probe_function", {"probe_key": "probe value"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A key."}},
            "required": ["probe_key"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class TemplateOutput:
    """calls: None if the template writes them in a format that is not known. told: the template
    knows nothing of tools, so messages have to tell of them; "system": in one of that role; "user":
    it takes none of that role; "": it knows tools. text_arguments: it wants the arguments of
    calls in the history as JSON in a string. empty_content: it wants content beside them.
    single_calls: it shows no more than one of a message. no_content: beside calls it refuses
    content and reasoning together. variables: those that a request may set to change how much the
    model thinks. special_ids: the control tokens that the formats are written with."""

    calls: OutputFormat | None
    reasoning: Reasoning | None
    text_arguments: bool = False
    empty_content: bool = False
    single_calls: bool = False
    no_content: bool = False
    variables: frozenset[str] = frozenset()
    special_ids: frozenset[int] = frozenset()
    told: Literal["", "system", "user"] = ""


# Of a template that has none of its own: what most open models have seen.
_TOLD = next(one for one in FORMATS if one.name == "hermes")
_known: "weakref.WeakKeyDictionary[Tokenizer, TemplateOutput]" = weakref.WeakKeyDictionary()
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort")


def template_output(tokenizer: Tokenizer) -> TemplateOutput:
    """Of this model; takes milliseconds the first time."""
    found = _known.get(tokenizer)
    if found is None:
        found = _known[tokenizer] = _found(tokenizer)
    return found


def _found(tokenizer: Tokenizer) -> TemplateOutput:
    if tokenizer.chat_template is None:
        return TemplateOutput(None, None)
    source = "\n".join(tokenizer.chat_template.sources.values())
    reasoning = next((one for one in REASONING if one.known_by in source), None)
    code = " ".join(_CODE.findall(_COMMENT.sub("", source)))
    variables = frozenset(n for n in _VARIABLES if re.search(rf"(?<![\w.'\"]){n}\b", code))
    if "tool_calls" in source:
        for text_arguments, empty_content in ((False, False), (False, True), (True, True)):
            rendered = _rendered(tokenizer, text_arguments, empty_content)
            for one in FORMATS:
                if one.write(_NAME, _VALUES) in rendered and one.opening in rendered:
                    again = _rendered(tokenizer, text_arguments, empty_content, "again")
                    said = _rendered(tokenizer, text_arguments, empty_content, "", "So.", "Hm.")
                    return TemplateOutput(
                        one,
                        reasoning,
                        text_arguments,
                        empty_content,
                        "again" not in again,
                        not said,
                        variables,
                        _special_ids(tokenizer, one, reasoning),
                    )
    told: Literal["", "system", "user"] = ""
    if not re.search(r"tool|function", source) and (reasoning is None or not reasoning.channels):
        told = "system" if _takes_system(tokenizer) else "user"
    calls = _TOLD if told else None
    special = _special_ids(tokenizer, calls, reasoning)
    return TemplateOutput(calls, reasoning, told=told, variables=variables, special_ids=special)


def _takes_system(tokenizer: Tokenizer) -> bool:
    chat = [{"role": "system", "content": "A rule."}, {"role": "user", "content": "A question."}]
    try:
        return "A rule." in tokenizer.render_chat(chat, max_seconds=1.0)
    except InvalidRequest:
        return False


def _special_ids(
    tokenizer: Tokenizer, calls: OutputFormat | None, reasoning: Reasoning | None
) -> frozenset[int]:
    marks = "" if reasoning is None else reasoning.marks
    if calls is not None:
        named = calls.tagged is not None or calls.dialect is not None
        written = calls.write("", {"": ""} if named else {})
        marks += calls.opening + written + calls.separator + calls.closing
    texts = {i: tokenizer.token_text(i) for i in tokenizer.special_ids}
    return frozenset(i for i, text in texts.items() if text and text in marks)


def _rendered(
    tokenizer: Tokenizer,
    text_arguments: bool,
    empty_content: bool,
    second: str = "",
    content: str = "",
    reasoning: str = "",
) -> str:
    """A chat with a call, or two. "": the template refuses it."""
    arguments: Any = '{"probe_key": "probe value"}' if text_arguments else _VALUES
    named = {"probecall": _NAME, **({"probenext": second} if second else {})}
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name in named.items()
    ]
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
    if content or empty_content:
        turn["content"] = content
    if reasoning:
        turn["reasoning_content"] = reasoning
    results = [
        {"role": "tool", "tool_call_id": id, "name": _NAME, "content": "A result."} for id in named
    ]
    chat = [{"role": "user", "content": "A question."}, turn, *results]
    try:
        return tokenizer.render_chat(chat, tools=[_TOOL], max_seconds=1.0)
    except InvalidRequest:
        return ""
