"""check_messages: the chat of a request, validated, in the form that templates expect."""

from dataclasses import dataclass, field
from typing import Any

from deployments.api.bounds import (
    MAX_CALLS,
    MAX_MESSAGE_CALLS,
    MAX_MESSAGE_PARTS,
    MAX_MESSAGES,
    MAX_PARTS,
    ROLES,
)
from deployments.api.http.errors import ApiError, invalid, shown, wrong_type
from deployments.api.http.json_body import MAX_CONTAINERS, parse_inner

_MODALITIES = ("image_url", "input_image", "input_audio", "audio_url", "video_url", "file")
# What answers carry and callers send back; of no use to a template.
_ECHOED = frozenset({"refusal", "annotations", "audio", "function_call", "id", "parsed"})
_KNOWN = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id"),
        *("reasoning_content", "reasoning"),  # two names of one field
    }
)


def check_messages(value: Any, ignored: list[str]) -> list[dict[str, Any]]:
    """Return the messages with string contents and decoded tool arguments.

    Unused keys go to ignored. Several text parts become one string, in order and with nothing
    between them. Large chats belong in a thread.
    Raises ApiError 400 naming the part at fault, e.g. ``messages[0].content[1].type``.
    """
    seen = _ChatState(ignored)
    return [_message(item, f"messages[{i}]", seen) for i, item in enumerate(take_messages(value))]


def take_messages(value: Any) -> list[Any]:
    """Return a list of an allowed length, its items as they are. Raises ApiError 400."""
    if value is None:
        raise invalid("messages is required", "messages", "missing_field")
    if not isinstance(value, list):
        raise wrong_type("messages", "a list")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid(f"messages must have 1 to {MAX_MESSAGES} items", "messages")
    return value


@dataclass(slots=True)
class _ChatState:
    """The counts and tool call ids of the messages so far.

    asked: the tool call ids that may be answered
    brackets: the brackets in tools' arguments, JSON in a string that was not counted with the body
    """

    ignored: list[str]
    asked: set[str] = field(default_factory=set)
    parts: int = 0
    calls: int = 0
    brackets: int = 0


def _message(item: Any, path: str, seen: _ChatState) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise wrong_type(path, "an object")
    given = item.get("role")
    if given is None:
        raise invalid(f"{path}.role is required", f"{path}.role", "missing_field")
    if not isinstance(given, str):
        raise wrong_type(f"{path}.role", "a string")
    role = ROLES.get(given)
    if role is None:
        raise invalid(
            f"{path}.role {shown(given)} is unknown; use one of {', '.join(ROLES)}", f"{path}.role"
        )
    message: dict[str, Any] = {"role": role}
    calls = item.get("tool_calls") if role == "assistant" else None
    content = item.get("content")
    if role == "assistant" and (content == [] or (content is None and not calls)):
        content = _unsaid(item, path)
    if content is not None:
        message["content"] = _content(content, f"{path}.content", seen)
    elif not calls:
        raise invalid(f"{path}.content is required", f"{path}.content", "missing_field")
    for name in ("name", "reasoning_content", "reasoning"):
        if (value := item.get(name)) is not None:
            if not isinstance(value, str):
                raise wrong_type(f"{path}.{name}", "a string")
            message[name] = value
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls", seen)
    if role == "tool":
        answered = item.get("tool_call_id")
        if not isinstance(answered, str) or answered not in seen.asked:
            raise invalid(
                f"{path}.tool_call_id must be the id of a tool call in an earlier message",
                f"{path}.tool_call_id",
                "invalid_tool_call_id",
            )
        message["tool_call_id"] = answered
    for name in item:
        told = name in _KNOWN or (name == "refusal" and message.get("content") == item[name])
        if not told and (name not in _ECHOED or item[name]) and len(seen.ignored) < 16:
            safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "?" for c in name)
            seen.ignored.append(f"{path}.{safe[:64]}")
    return message


def _unsaid(item: dict[str, Any], path: str) -> str:
    """Return the content of an assistant's message that has none: its refusal, or nothing.

    Clients send back answers of reasoning alone and empty ones like this. Some clients leave out
    what is null or empty.
    """
    refusal = item.get("refusal")
    if refusal is not None and not isinstance(refusal, str):
        raise wrong_type(f"{path}.refusal", "a string")
    return refusal or ""


def _content(content: Any, path: str, seen: _ChatState) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(path, "a string or a list of parts")
    if not 1 <= len(content) <= MAX_MESSAGE_PARTS:
        raise invalid(f"{path} must have 1 to {MAX_MESSAGE_PARTS} parts", path)
    seen.parts += len(content)
    if seen.parts > MAX_PARTS:
        raise invalid(f"messages may have at most {MAX_PARTS} parts together", path)
    return "".join([_part(part, f"{path}[{i}]") for i, part in enumerate(content)])


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object with a type")
    kind = part.get("type")
    if kind in _MODALITIES:
        raise invalid(
            "the models served here take text only", f"{path}.type", "modality_not_supported"
        )
    if kind not in ("text", "refusal"):
        raise invalid(f'{path}.type must be "text"', f"{path}.type")
    text = part.get(kind)
    if not isinstance(text, str):
        raise wrong_type(f"{path}.{kind}", "a string")
    return text


def _tool_calls(calls: Any, path: str, seen: _ChatState) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong_type(path, "a list")
    if len(calls) > MAX_MESSAGE_CALLS:
        raise invalid(f"{path} may have at most {MAX_MESSAGE_CALLS} items", path)
    seen.calls += len(calls)
    if seen.calls > MAX_CALLS:
        raise invalid(f"messages may have at most {MAX_CALLS} tool calls together", path)
    found = []
    for i, call in enumerate(calls):
        here = f"{path}[{i}]"
        kind = call.get("type", "function") if isinstance(call, dict) else None
        function = call.get(kind) if kind in ("function", "custom") else None
        if not isinstance(function, dict):
            raise invalid(f"{here} must be a function call", here, "invalid_type")
        if not isinstance(call.get("id"), str):
            raise wrong_type(f"{here}.id", "a string")
        if not isinstance(function.get("name"), str):
            raise wrong_type(f"{here}.{kind}.name", "a string")
        seen.asked.add(call["id"])
        if kind == "custom":
            arguments: Any = {"input": function.get("input") or ""}
        else:
            arguments = _arguments(function.get("arguments"), f"{here}.function.arguments", seen)
        found.append(
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": function["name"],
                    "arguments": arguments,
                },
            }
        )
    return found


def _arguments(value: Any, path: str, seen: _ChatState) -> Any:
    """Return a tool call's arguments as an object, which templates print, from JSON in a string."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        seen.brackets += value.count("[") + value.count("{")
        if seen.brackets > MAX_CONTAINERS:
            raise invalid(
                f"the arguments of tool calls may have at most {MAX_CONTAINERS} lists and objects "
                "together",
                path,
                "json_too_large",
            )
        try:
            value = parse_inner(value)
        except ApiError as error:
            if error.code != "invalid_json":
                raise invalid(f"{path}: {error.message}", path, error.code) from None
    if isinstance(value, dict):
        return value
    # A model wrote it. Refused, it would end the conversation: the history keeps it for good.
    if len(seen.ignored) < 16:
        seen.ignored.append(path)
    return {"_raw": value}
