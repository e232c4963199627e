"""render_options: what tools and reasoning add to the rendering of a chat."""

import json
from typing import Any

from deployments.api.errors import invalid
from deployments.api.tools.detect import template_output
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
    if known.text_arguments or known.empty_content:
        for message in messages:
            _adapt(message, known.text_arguments, known.empty_content)
    effort = body.get("reasoning_effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise invalid(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort"
            )
        for name in known.variables - shape.keys():
            options[name] = effort if name == "reasoning_effort" else effort != "none"
        if not known.variables:
            ignored.append("reasoning_effort")
    return options


def _adapt(message: dict[str, Any], text_arguments: bool, empty_content: bool) -> None:
    calls = message.get("tool_calls")
    if not calls:
        return
    if empty_content:
        message.setdefault("content", "")
    if text_arguments:
        for call in calls:
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
