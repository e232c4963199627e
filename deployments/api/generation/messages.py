"""ChatBuilder: the messages of a chat as a dialect reads them, within the bounds of all dialects.
check_messages: the messages of OpenAI's dialect."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from deployments.api.bounds import (
    MAX_CALLS,
    MAX_MESSAGE_CALLS,
    MAX_MESSAGE_PARTS,
    MAX_MESSAGES,
    MAX_PARTS,
    ROLES,
)
from deployments.api.generation.request import (
    ChatMessage,
    ContentPart,
    MediaPart,
    TextPart,
    ToolCall,
)
from deployments.api.http.errors import ApiError, invalid, shown, wrong_type
from deployments.api.http.json_body import MAX_CONTAINERS, parse_inner

_MOST_IGNORED = 16
# The types of parts that are no text.
_MEDIA: Mapping[str, Literal["image", "audio", "video", "file"]] = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "file",
}
# Fields of answers that callers send back, and that templates do not use.
_ECHOED = frozenset({"refusal", "annotations", "audio", "function_call", "id", "parsed"})
_KNOWN = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id"),
        *("reasoning_content", "reasoning"),  # two names of one field
    }
)


class ChatBuilder:
    """The messages of a chat so far, with the counts that bound them.

    ignored: the list that names of things without effect are added to
    """

    def __init__(self, ignored: list[str]) -> None:
        self.messages: list[ChatMessage] = []
        self._ignored = ignored
        self._asked: set[str] = set()  # ids of calls, which may be answered
        self._parts = self._calls = 0
        # Brackets in tools' arguments: JSON in strings, which was not counted with the body.
        self._brackets = 0

    def add_message(self, role: str, place: str, text: str | None = None) -> None:
        """Add a message, with one text as its content or with none."""
        content = None if text is None else (TextPart(text),)
        self.messages.append(ChatMessage(role, place, content))

    def change(self, **fields: Any) -> None:
        """Change fields of the last message."""
        self.messages[-1] = msgspec.structs.replace(self.messages[-1], **fields)

    def ignore(self, path: str) -> None:
        """Name something without effect, unless many are named already."""
        if len(self._ignored) < _MOST_IGNORED:
            self._ignored.append(path)

    def content(self, parts: Any, path: str) -> tuple[TextPart, ...]:
        """Return the checked parts of a list. Raises ApiError 400."""
        if not 1 <= len(parts) <= MAX_MESSAGE_PARTS:
            raise invalid(f"{path} must have 1 to {MAX_MESSAGE_PARTS} parts", path)
        self._parts += len(parts)
        if self._parts > MAX_PARTS:
            raise invalid(f"messages may have at most {MAX_PARTS} parts together", path)
        return tuple([_read_text(part, f"{path}[{i}]") for i, part in enumerate(parts)])

    def count_calls(self, new: int, whole: int, path: str) -> None:
        """Count tool calls of a message. Raises ApiError 400.

        new: the calls that are counted now
        whole: the calls of the message with these
        """
        if whole > MAX_MESSAGE_CALLS:
            raise invalid(f"{path} may have at most {MAX_MESSAGE_CALLS} items", path)
        self._calls += new
        if self._calls > MAX_CALLS:
            raise invalid(f"messages may have at most {MAX_CALLS} tool calls together", path)

    def call(self, id: str, name: str, arguments: Any, path: str) -> ToolCall:
        """Return a tool call, whose id may be answered from now on. Raises ApiError 400.

        arguments: an object, or JSON in a string
        path: the client's name of the arguments
        """
        self._asked.add(id)
        return ToolCall(id, name, self._arguments(arguments, path))

    def check_answered(self, id: Any, path: str) -> str:
        """Return the id of an earlier tool call. Raises ApiError 400."""
        if not isinstance(id, str) or id not in self._asked:
            raise invalid(
                f"{path} must be the id of a tool call in an earlier message",
                path,
                "invalid_tool_call_id",
            )
        return id

    def finish(self, name: str = "messages") -> tuple[ChatMessage, ...]:
        """Return the messages. name: the client's name of the list. Raises ApiError 400."""
        check_count(self.messages, name)
        empty = (TextPart(""),)
        return tuple(
            [
                message
                if message.content is not None or message.tool_calls
                else msgspec.structs.replace(message, content=empty)
                for message in self.messages
            ]
        )

    def _arguments(self, value: Any, path: str) -> Any:
        """Return a tool call's arguments as an object, which templates print."""
        if value is None or value == "":
            return {}
        if isinstance(value, str):
            self._brackets += value.count("[") + value.count("{")
            if self._brackets > MAX_CONTAINERS:
                raise invalid(
                    f"the arguments of tool calls may have at most {MAX_CONTAINERS} lists and "
                    "objects together",
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
        # The model wrote these arguments. Refusing them would end the conversation, whose history
        # keeps them.
        self.ignore(path)
        return {"_raw": value}


def read_part(part: Any, path: str) -> ContentPart:
    """Return a content part. Raises ApiError 400."""
    if not isinstance(part, dict):
        raise wrong_type(path, "an object with a type")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA:
        return MediaPart(_MEDIA[kind], part)
    if kind not in ("text", "refusal"):
        raise invalid(f'{path}.type must be "text"', f"{path}.type")
    text = part.get(kind)
    if not isinstance(text, str):
        raise wrong_type(f"{path}.{kind}", "a string")
    return TextPart(text)


def _read_text(value: Any, path: str) -> TextPart:
    part = read_part(value, path)
    if isinstance(part, TextPart):
        return part
    raise no_media(f"{path}.type")


def no_media(path: str, message: str = "the models served here take text only") -> ApiError:
    """Return the error for content that is no text."""
    return invalid(message, path, "modality_not_supported")


def check_messages(value: Any, ignored: list[str]) -> tuple[ChatMessage, ...]:
    """Return the messages of a list in OpenAI's form, with decoded tool arguments.

    Unused keys go to ignored. Large chats belong in a thread.
    Raises ApiError 400 naming the part at fault, e.g. ``messages[0].content[1].type``.
    """
    builder = ChatBuilder(ignored)
    for i, item in enumerate(take_messages(value)):
        builder.messages.append(read_message(item, f"messages[{i}]", builder))
    return tuple(builder.messages)


def take_messages(value: Any) -> list[Any]:
    """Return a list of an allowed length, its items as they are. Raises ApiError 400."""
    if value is None:
        raise invalid("messages is required", "messages", "missing_field")
    if not isinstance(value, list):
        raise wrong_type("messages", "a list")
    check_count(value, "messages")
    return value


def check_count(messages: Sequence[object], name: str) -> None:
    """Check the number of messages. Raises ApiError 400."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid(f"{name} must have 1 to {MAX_MESSAGES} items", name)


def read_message(item: Any, path: str, builder: ChatBuilder) -> ChatMessage:
    """Return a message in OpenAI's form. path: the client's name of it. Raises ApiError 400."""
    if not isinstance(item, dict):
        raise wrong_type(path, "an object")
    role = read_role(item.get("role"), f"{path}.role")
    calls = item.get("tool_calls") if role == "assistant" else None
    content = item.get("content")
    if role == "assistant" and (content == [] or (content is None and not calls)):
        content = _unsaid(item.get("refusal"), path)
    parts: tuple[TextPart, ...] | None = None
    if isinstance(content, str):
        parts = (TextPart(content),)
    elif content is not None:
        if not isinstance(content, list):
            raise wrong_type(f"{path}.content", "a string or a list of parts")
        parts = builder.content(content, f"{path}.content")
    elif not calls:
        raise invalid(f"{path}.content is required", f"{path}.content", "missing_field")
    for name in ("name", "reasoning_content", "reasoning"):
        if not isinstance(item.get(name), str | None):
            raise wrong_type(f"{path}.{name}", "a string")
    tool_calls = _tool_calls(calls, f"{path}.tool_calls", builder) if calls else ()
    answered = None
    if role == "tool":
        answered = builder.check_answered(item.get("tool_call_id"), f"{path}.tool_call_id")
    message = ChatMessage(
        role,
        path,
        parts,
        item.get("name"),
        item.get("reasoning_content"),
        item.get("reasoning"),
        tool_calls,
        answered,
    )
    for name in item:
        known = name in _KNOWN
        if not known and (name not in _ECHOED or item[name]):
            if name == "refusal" and parts is not None and message.text == item[name]:
                continue
            safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "?" for c in name)
            builder.ignore(f"{path}.{safe[:64]}")
    return message


def read_role(role: Any, path: str) -> str:
    """Return the role as templates know it. Raises ApiError 400."""
    if role is None:
        raise invalid(f"{path} is required", path, "missing_field")
    if not isinstance(role, str):
        raise wrong_type(path, "a string")
    known = ROLES.get(role)
    if known is None:
        raise invalid(f"{path} {shown(role)} is unknown; use one of {', '.join(ROLES)}", path)
    return known


def _unsaid(refusal: Any, path: str) -> str:
    """Return the content of an assistant's message that has none: its refusal, or nothing.

    Clients send back answers of reasoning alone and empty ones like this. Some clients leave out
    what is null or empty.
    """
    if refusal is not None and not isinstance(refusal, str):
        raise wrong_type(f"{path}.refusal", "a string")
    return refusal or ""


def _tool_calls(calls: Any, path: str, builder: ChatBuilder) -> tuple[ToolCall, ...]:
    if not isinstance(calls, list):
        raise wrong_type(path, "a list")
    builder.count_calls(len(calls), len(calls), path)
    read = []
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
        if kind == "custom":
            arguments: Any = {"input": function.get("input") or ""}
        else:
            arguments = function.get("arguments")
        where = f"{here}.function.arguments"
        read.append(builder.call(call["id"], function["name"], arguments, where))
    return tuple(read)
