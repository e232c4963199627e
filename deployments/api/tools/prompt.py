"""render_options: what tools and reasoning add to the rendering of a chat."""

import json
from typing import Any

from deployments.api.http.errors import invalid
from deployments.api.tools.detect import TemplateOutput, template_output
from deployments.api.tools.request import RequestedTools
from engine.text.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def render_options(
    tokenizer: Tokenizer,
    body: dict[str, Any],
    messages: list[dict[str, Any]],
    tools: RequestedTools | None,
    shape: dict[str, Any],
    ignored: list[str],
) -> dict[str, Any]:
    """Names for the template beside those in `shape`, which win. Changes messages to the form that
    this template wants. ignored: fields that it does not read are added.

    Raises ApiError 400: tools_not_supported, invalid_value.
    """
    known = template_output(tokenizer)
    options: dict[str, Any] = {}
    if tools is not None:
        if known.calls is not None:
            options["tools"] = [tool.given for tool in tools.tools]
        elif tools.mode != "none":
            raise invalid(
                "this model takes no tools: its chat template writes no tool calls, or writes "
                "them in a format that is not known here",
                "tools",
                "tools_not_supported",
            )
    if known.single_calls:
        messages[:] = _one_call_each(messages)
    if known.text_arguments or known.empty_content or known.no_content:
        for message in messages:
            _adapt(message, known)
    effort = body.get("reasoning_effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise invalid(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort"
            )
        efforts = dict(known.reasoning.efforts) if known.reasoning is not None else {}
        for name in known.variables - shape.keys():
            told = efforts.get(effort, effort)
            options[name] = told if name == "reasoning_effort" else effort != "none"
        if not known.variables:
            ignored.append("reasoning_effort")
    return options


def _adapt(message: dict[str, Any], known: TemplateOutput) -> None:
    calls = message.get("tool_calls")
    if not calls:
        return
    if known.no_content and message.get("content"):
        # What is said before a call is thought, to such a template, if there are thoughts.
        for name in ("reasoning_content", "reasoning"):
            if message.get(name):
                message[name] = f"{message[name]}\n{message.pop('content')}"
                break
    if known.empty_content:
        message.setdefault("content", "")
    if known.text_arguments:
        for call in calls:
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call as a message of its own, with its results behind it."""
    out: list[dict[str, Any]] = []
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
            out += [one for one in results if one["tool_call_id"] == call["id"]]
        asked = {call["id"] for call in calls}
        out += [one for one in results if one["tool_call_id"] not in asked]
    return out
