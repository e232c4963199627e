"""render_options: adapts a chat's messages and template variables to tools and reasoning effort."""

import hashlib
import json
import re
from collections.abc import Collection
from typing import Any

from deployments.api.http.errors import invalid
from deployments.api.output.detect import TemplateOutput, template_output
from deployments.api.output.output_format import OutputFormat
from deployments.api.output.request import RequestedTools
from engine.text.tokenizer import Tokenizer

TemplateMessage = dict[str, Any]
TemplateVariables = dict[str, Any]

# The text that describes the tools if the template does not.
_TOOLS = """# Tools

You may call functions to help with the request. These are their signatures:
<tools>
{}
</tools>

To call one, write a JSON object with its name and arguments between these tags:
<tool_call>
{{"name": "a function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def render_options(
    tokenizer: Tokenizer,
    messages: list[TemplateMessage],
    tools: RequestedTools | None,
    effort: str | None,
    variables: Collection[str],
    ignored: list[str],
) -> TemplateVariables:
    """Return the template variables, and change `messages` in place to the form that the template
    needs.

    effort: the reasoning effort; if the template has no variable for it, `reasoning_effort` is
        added to `ignored`
    variables: names that the request itself sets

    Raises ApiError 400 tools_not_supported.
    """
    known = template_output(tokenizer)
    options: TemplateVariables = {}
    has_calls = False
    for message in messages:
        has_calls = has_calls or "tool_calls" in message or message["role"] == "tool"
    if has_calls and known.history is not None:
        messages[:] = _told_history(messages, known.history)
    if tools is None:
        template = tokenizer.chat_template
        if has_calls and template is not None and "tool_use" in template.sources:
            options["tools"] = []  # selects the template `tool_use`, which renders calls
    elif known.described_in:
        if tools.mode != "none":
            _tell(messages, tools, known)
    elif known.calls is not None:
        options["tools"] = [tool.declaration for tool in tools.tools]
    elif tools.mode != "none":
        problems = "".join(f"; {problem}" for problem in known.problems)
        raise invalid(
            "this model takes no tools: it has no chat template, or one that writes tool calls "
            f"in a format that is not known here{problems}",
            "tools",
            "tools_not_supported",
        )
    if known.single_calls:
        messages[:] = _one_call_each(messages)
    if known.calls is not None and known.calls.named_ids:
        _name_ids(messages)
    if known.calls is not None and known.calls.short_ids:
        _shorten_ids(messages)
    if known.text_arguments or known.empty_content or known.no_content or known.plan:
        for message in messages:
            _adapt(message, known)
    if effort is not None:
        efforts = dict(known.reasoning.efforts) if known.reasoning is not None else {}
        for name in known.variables - set(variables):
            value = efforts.get(effort, effort)
            options[name] = value if name == "reasoning_effort" else effort != "none"
        if not known.variables:
            ignored.append("reasoning_effort")
    return options


def _told_history(messages: list[TemplateMessage], calls: OutputFormat) -> list[TemplateMessage]:
    """Return messages with calls and results converted into contents, for templates that ignore
    them."""
    out: list[TemplateMessage] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "assistant" and message.get("tool_calls"):
            functions = (call["function"] for call in message["tool_calls"])
            written = [
                calls.write(function["name"], function["arguments"]) for function in functions
            ]
            text = "\n".join([content, *written] if content else written)
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            out.append({**others, "content": text})
        elif role == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if out and out[-1].get("results"):
                out[-1]["content"] += f"\n{result}"
            else:
                out.append({"role": "user", "content": result, "results": True})
        else:
            out.append(dict(message))
    for message in out:
        message.pop("results", None)
    return out


def _tell(messages: list[TemplateMessage], tools: RequestedTools, known: TemplateOutput) -> None:
    """Add a description of the tools to the first message, for templates that do not describe
    tools."""
    declarations = [json.dumps(tool.declaration, ensure_ascii=False) for tool in tools.tools]
    text = _TOOLS.format("\n".join(declarations))
    if messages[0]["role"] == "system" or known.described_in == "user":
        messages[0]["content"] = f"{messages[0].get('content') or ''}\n\n{text}".lstrip()
    else:
        messages.insert(0, {"role": "system", "content": text})


def _adapt(message: TemplateMessage, known: TemplateOutput) -> None:
    calls = message.get("tool_calls")
    if not calls:
        return
    if known.no_content and message.get("content"):
        # The template renders the text before a call as reasoning, so content is moved to the
        # reasoning.
        for name in ("reasoning_content", "reasoning"):
            if message.get(name):
                message[name] = f"{message[name]}\n{message.pop('content')}"
                break
    if known.plan:
        texts = [message.get(name) for name in ("reasoning_content", "reasoning", "content")]
        if joined := "\n".join(text for text in texts if text):
            message[known.plan] = joined
    if known.empty_content:
        message.setdefault("content", "")
    if known.text_arguments:
        for call in calls:
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)


def _name_ids(messages: list[TemplateMessage]) -> None:
    """Replace clients' call ids by the ids that the model writes, `functions.NAME:NUMBER`."""
    ids: dict[str, str] = {}
    count = 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            named = f"functions.{call['function']['name']}:{count}"
            ids[call["id"]] = named
            call["id"] = named
            count += 1
        if message["role"] == "tool":
            message["tool_call_id"] = ids[message["tool_call_id"]]


def _shorten_ids(messages: list[TemplateMessage]) -> None:
    """Replace longer call ids by the nine letters and digits that the template accepts."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["id"] = _short(call["id"])
        if message["role"] == "tool":
            message["tool_call_id"] = _short(message["tool_call_id"])


def _short(id: str) -> str:
    if _SHORT_ID.fullmatch(id):
        return id
    return hashlib.blake2b(id.encode(), digest_size=16).hexdigest()[:9]


def _one_call_each(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Return messages with one call per message, each followed by its results."""
    out: list[TemplateMessage] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            out.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            out.append({**(message if i == 0 else {"role": "assistant"}), "tool_calls": [call]})
            out += [result for result in results if result["tool_call_id"] == call["id"]]
        asked = {call["id"] for call in calls}
        out += [result for result in results if result["tool_call_id"] not in asked]
    return out
