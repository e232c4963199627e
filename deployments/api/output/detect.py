"""template_output: detects a model's formats of tool calls and reasoning, by rendering its chat
template and from its checkpoint's response_template."""

import json
import logging
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deployments.api.http.json_body import JsonObject
from deployments.api.output.output_format import (
    FORMATS,
    REASONING,
    WRAPPERS,
    OutputFormat,
    Reasoning,
)
from deployments.api.output.response_template import DeclaredOutput, declared_output
from engine.errors import InvalidRequest
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("manta.api")

_NAME, _VALUES = "probe_function", {"probe_key": "probe value"}
_TOOL: JsonObject = {
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
    """The output formats of a model, and the properties of its chat template.

    calls: the format of tool calls; None if the model's format is not known
    described_in: the role of the message in which we describe the tools, if the template does not:
        "system", or "user" if the template refuses "system"; "": the template describes tools
    history: the format in which earlier calls are written into contents, if the template ignores
        calls
    text_arguments: whether the template expects arguments of earlier calls as JSON in a string
    empty_content: whether the template requires content beside calls
    single_calls: whether the template shows only one call per message
    no_content: whether the template refuses content and reasoning together beside calls
    plan: the message field from which the template takes the text before calls, if it ignores
        `content` beside calls
    variables: the template variables that control the reasoning effort
    special_ids: the ids of control tokens that occur in the formats
    wrapper: the delimiters at the beginning and at the end of content; (): none
    problems: messages about parts of the checkpoint's response_template that cannot be used
    """

    calls: OutputFormat | None
    reasoning: Reasoning | None
    text_arguments: bool = False
    empty_content: bool = False
    single_calls: bool = False
    no_content: bool = False
    plan: str = ""
    variables: frozenset[str] = frozenset()
    special_ids: frozenset[int] = frozenset()
    described_in: Literal["", "system", "user"] = ""
    history: OutputFormat | None = None
    wrapper: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


# The format for templates without a format of tool calls: most open models were trained on it.
_TOLD = next(format for format in FORMATS if format.name == "hermes")
_known: "weakref.WeakKeyDictionary[Tokenizer, TemplateOutput]" = weakref.WeakKeyDictionary()
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort")


def template_output(tokenizer: Tokenizer) -> TemplateOutput:
    """Return the output formats of a tokenizer's model; cached, as detection takes milliseconds."""
    output = _known.get(tokenizer)
    if output is None:
        output = _known[tokenizer] = _found(tokenizer)
        for problem in output.problems:
            logger.info("%s; the chat template is looked at instead", problem)
    return output


def _found(tokenizer: Tokenizer) -> TemplateOutput:
    template = tokenizer.chat_template
    if template is None:
        return TemplateOutput(None, None)
    source = "\n".join(template.sources.values())
    shapes = [_Shape(*flags) for flags in _FLAGS] if "tool_calls" in source else []
    declared = _declared(tokenizer, template, shapes)
    reasoning = next((form for form in REASONING if form.known_by in source), None)
    declared_reasoning = declared.reasoning
    if declared_reasoning is not None and (
        reasoning is None or reasoning.start.strip() != declared_reasoning.start
    ):
        reasoning = declared_reasoning
    wrapper = next((marks for marks in WRAPPERS if marks[0] in source), declared.wrapper)
    if reasoning is not None and reasoning.channels:
        wrapper = ()
    code = " ".join(_CODE.findall(_COMMENT.sub("", source)))
    more: JsonObject = {
        "variables": frozenset(n for n in _VARIABLES if re.search(rf"(?<![\w.'\"]){n}\b", code)),
        "wrapper": wrapper,
        "problems": declared.problems,
    }
    calls, shape = _shown(template, shapes, FORMATS)
    if declared.calls is not None and shapes and not _same(calls, declared.calls):
        calls = declared.calls
        _, shape = _shown(template, shapes, (calls,))
        calls = _separated(calls, _rendered(template, shape, "again"))
    if calls is not None:
        again = _rendered(template, shape, "again")
        beside = _rendered(template, shape, "", "So.", "Hm.")
        plan = "tool_plan" if "tool_plan" in code else ""
        if not plan and "Hm." in beside and "So." not in beside:
            plan = "reasoning_content"
        more |= {"single_calls": "again" not in again, "no_content": not beside, "plan": plan}
    else:
        more["history"] = None if shapes else _TOLD
    if (
        calls is None
        and not re.search(r"tool|function", source)
        and (reasoning is None or not reasoning.channels)
    ):
        more["described_in"] = "system" if _takes_system(template) else "user"
        calls = _TOLD
    special = _special_ids(tokenizer, calls, reasoning)
    flags = (shape.text_arguments, shape.empty_content)
    return TemplateOutput(calls, reasoning, *flags, special_ids=special, **more)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The form of an earlier call in a message; templates differ in the forms that they accept.

    named_ids: whether ids are functions.NAME:INDEX
    text_arguments, empty_content: see TemplateOutput
    """

    named_ids: bool = False
    text_arguments: bool = False
    empty_content: bool = False


_FLAGS = [
    (named, *flags)
    for named in (False, True)
    for flags in ((False, False), (False, True), (True, True))
]


def _shown(
    template: ChatTemplate, shapes: Sequence[_Shape], formats: Sequence[OutputFormat]
) -> tuple[OutputFormat | None, _Shape]:
    """Return the first of the formats in which the template writes a call, and the shape of call
    that it accepts.

    The format is None if the template writes calls in none of the formats.
    """
    first_shape = None
    for shape in shapes:
        rendered = _rendered(template, shape)
        first_shape = first_shape or (shape if rendered else None)
        for format in formats:
            written = format.write(_NAME, _VALUES) in rendered and format.opening in rendered
            if written and format.named_ids == shape.named_ids:
                return format, shape
    return None, first_shape or _Shape()


def _declared(
    tokenizer: Tokenizer, template: ChatTemplate, shapes: Sequence[_Shape]
) -> DeclaredOutput:
    if tokenizer.response_template is None:
        return DeclaredOutput()
    ((key, value),) = _VALUES.items()
    examples = [_rendered(template, shape) for shape in shapes if not shape.named_ids]
    ends = [tokenizer.token_text(id) for id in tokenizer.eos_token_ids]
    return declared_output(tokenizer.response_template, _NAME, key, value, examples, ends)


def _separated(declared: OutputFormat, shown: str) -> OutputFormat:
    """Return the format with its separator set to the text that the template writes between two
    calls.

    shown: a rendered chat with two calls
    """
    _, _, after_name = shown.partition(declared.write(_NAME, _VALUES))
    between, again, _ = after_name.partition(declared.write("again", _VALUES))
    return replace(declared, separator=between) if again else declared


def _same(known: OutputFormat | None, declared: OutputFormat) -> bool:
    """Whether two formats write a call in the same way, except for white space and the end of the
    turn.

    If so, the known format is used, because it has more details than a declaration.
    """
    if known is None:
        return False
    calls = [form.opening + form.write(_NAME, _VALUES) for form in (known, declared)]
    bare = ["".join(call.split()) for call in calls]
    return bare[1].startswith(bare[0])


def _takes_system(template: ChatTemplate) -> bool:
    chat = [{"role": "system", "content": "A rule."}, {"role": "user", "content": "A question."}]
    try:
        return "A rule." in template.render(chat, max_seconds=1.0)
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
    template: ChatTemplate, shape: _Shape, second: str = "", content: str = "", reasoning: str = ""
) -> str:
    """Return a rendered chat with a tool call in this shape; "" if the template refuses the chat.

    second: the function of a second call; "": there is none.
    content, reasoning: content and reasoning of the message with the calls.
    """
    arguments: Any = json.dumps(_VALUES) if shape.text_arguments else _VALUES
    names = [_NAME, *([second] if second else [])]
    ids = ["probecall", "probenext"]
    if shape.named_ids:
        ids = [f"functions.{name}:{i}" for i, name in enumerate(names)]
    called = dict(zip(ids, names, strict=False))
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name in called.items()
    ]
    turn: JsonObject = {"role": "assistant", "tool_calls": calls}
    if content or shape.empty_content:
        turn["content"] = content
    if reasoning:
        turn["reasoning_content"] = reasoning
    results = [
        {"role": "tool", "tool_call_id": id, "name": _NAME, "content": "A result."} for id in called
    ]
    chat = [{"role": "user", "content": "A question."}, turn, *results]
    try:
        return template.render(chat, tools=[_TOOL], max_seconds=1.0)
    except InvalidRequest:
        return ""
