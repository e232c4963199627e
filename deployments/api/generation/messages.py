"""ChatBuilder: builds and checks a chat's messages, for all dialects.
check_messages: converts messages in OpenAI's form."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deployments.api.body_fields import (
    MAX_CALLS,
    MAX_MESSAGE_CALLS,
    MAX_MESSAGE_PARTS,
    MAX_MESSAGES,
    MAX_PARTS,
    ROLES,
    name_fields,
    name_hint,
)
from deployments.api.fields import chat
from deployments.api.generation.request import ChatMessage, Content, ImagePart, ToolCall
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.http.json_body import MAX_CONTAINERS, JsonObject, parse_inner

_MOST_IGNORED = 16
# Fields of answers that clients send back in later requests, and that templates do not use.
_ECHOED = frozenset({"refusal", "annotations", "audio", "function_call", "id", "parsed"})
_KNOWN = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id"),
        *("reasoning_content", "reasoning"),  # two names of one field
    }
)
# part's field with an object -> the keys that the object may have
_INNER_NAMES = {
    "image_url": frozenset({"url", "detail"}),
    "video_url": frozenset({"url"}),
    "file": frozenset({"file_data", "file_id", "filename"}),
}


@functools.cache
def _part_names(part: type[msgspec.Struct]) -> frozenset[str]:
    """Return the keys that are accepted in a part, including `cache_control`."""
    return frozenset({"type", "cache_control", *part.__struct_fields__})


class ChatBuilder:
    """The messages of a chat so far, with the counts that are checked against limits.

    ignored: the list that names of fields without effect are added to
    """

    def __init__(self, ignored: list[str]) -> None:
        self.messages: list[ChatMessage] = []
        self._ignored = ignored
        self._asked: set[str] = set()  # ids of tool calls that results may answer
        self._parts = self._calls = 0
        # Number of brackets in tool arguments, whose JSON strings were not counted with the body.
        self._brackets = 0

    def add_message(self, role: str, place: str, text: str | None = None) -> None:
        """Add a message, with one text as its content or without content."""
        content = None if text is None else (chat.TextPart(text),)
        self.messages.append(ChatMessage(role, place, content))

    def change(self, **fields: Any) -> None:
        """Change fields of the last message."""
        self.messages[-1] = msgspec.structs.replace(self.messages[-1], **fields)

    def ignore(self, path: str) -> None:
        """Add a field's path to the names in x-ignored-fields, up to a maximum."""
        if len(self._ignored) < _MOST_IGNORED:
            self._ignored.append(path)

    def content(self, parts: Sequence[chat.Part], path: str) -> Content:
        """Convert a list of content parts into a message's content. Raises ApiError 400."""
        if not 1 <= len(parts) <= MAX_MESSAGE_PARTS:
            raise invalid(f"{path} must have 1 to {MAX_MESSAGE_PARTS} parts", path)
        self._parts += len(parts)
        if self._parts > MAX_PARTS:
            raise invalid(f"messages may have at most {MAX_PARTS} parts together", path)
        content: list[chat.TextPart | chat.RefusalPart | ImagePart] = []
        for i, part in enumerate(parts):
            place = f"{path}[{i}]"
            if isinstance(part, chat.MediaPart):
                kind = str(part.__struct_config__.tag)
                content.append(ImagePart(chat.OtherMedia(kind), place, f"{place}.type"))
            elif isinstance(
                part, (chat.ImageUrlPart, chat.InputImagePart, chat.FilePart, chat.WrittenClip)
            ):
                content.append(ImagePart(part, place, f"{place}.type"))
            else:
                content.append(part)
        return tuple(content)

    def count_calls(self, new: int, whole: int, path: str) -> None:
        """Count tool calls. Raises ApiError 400 if this message, or all messages together, have too
        many.

        new: the number of calls to add
        whole: the number of calls of the message, including the new ones
        """
        if whole > MAX_MESSAGE_CALLS:
            raise invalid(f"{path} may have at most {MAX_MESSAGE_CALLS} items", path)
        self._calls += new
        if self._calls > MAX_CALLS:
            raise invalid(f"messages may have at most {MAX_CALLS} tool calls together", path)

    def call(self, id: str, name: str, arguments: Any, path: str) -> ToolCall:
        """Return a tool call, and remember its id, to which later results refer. Raises ApiError
        400.

        arguments: an object, or JSON in a string
        path: the path of the arguments in the body
        """
        self._asked.add(id)
        return ToolCall(id, name, self._arguments(arguments, path))

    def check_answered(self, id: Any, path: str) -> str:
        """Check that an id belongs to an earlier tool call, and return it. Raises ApiError 400."""
        if not isinstance(id, str) or id not in self._asked:
            raise invalid(
                f"{path} must be the id of a tool call in an earlier message",
                path,
                "invalid_tool_call_id",
            )
        return id

    def add_openai_message(self, message: chat.Message, item: Mapping[str, Any], path: str) -> None:
        """Add a message in OpenAI's form. Raises ApiError 400.

        item: the message as the client wrote it
        path: the message's path in the body
        """
        content: Any = message.content
        calls = answered = None
        if isinstance(message, chat.AssistantMessage):
            calls = message.tool_calls
            if content == [] or (content is None and not calls):
                content = message.refusal or ""
                if not isinstance(content, str):
                    raise wrong_type(f"{path}.refusal", "a string")
        elif isinstance(message, chat.ToolMessage):
            answered = self.check_answered(message.tool_call_id, f"{path}.tool_call_id")
        parts: Content | None = None
        if isinstance(content, str):
            parts = (chat.TextPart(content),)
        elif content is not None:
            parts = self.content(content, f"{path}.content")
            for i, (part, sent) in enumerate(zip(content, item["content"], strict=True)):
                self._name_unused(part, sent, f"{path}.content[{i}].")
        read = ChatMessage(
            ROLES[item["role"]],
            path,
            parts,
            message.name,
            message.reasoning_content,
            message.reasoning,
            self._tool_calls(calls, f"{path}.tool_calls") if calls else (),
            answered,
        )
        for name in item if not item.keys() <= _KNOWN else ():
            if name in _KNOWN or (name in _ECHOED and not item[name]):
                continue
            if name == "refusal" and parts is not None and read.text == item[name]:
                continue
            self.ignore(name_fields([name], f"{path}.")[0])
        self.messages.append(read)

    def _name_unused(self, part: chat.Part, sent: Mapping[str, Any], inside: str) -> None:
        """Add the names of a part's keys without effect to the ignored fields.

        sent: the part as the client wrote it
        inside: the text before each key
        """
        self._name_others(sent, _part_names(type(part)), inside)
        name_hint(sent, self._ignored)
        for name, known in _INNER_NAMES.items():
            if isinstance(inner := sent.get(name), dict):
                self._name_others(inner, known, f"{inside}{name}.")

    def _name_others(self, sent: Mapping[str, Any], known: frozenset[str], inside: str) -> None:
        for name in () if sent.keys() <= known else sent:
            if name not in known and sent[name] not in (None, []):
                self.ignore(name_fields([name], inside)[0])

    def _tool_calls(self, calls: Any, path: str) -> tuple[ToolCall, ...]:
        if not isinstance(calls, list):
            raise wrong_type(path, "a list")
        self.count_calls(len(calls), len(calls), path)
        read = []
        for i, item in enumerate(calls):
            call = chat.CALL.read(item, f"{path}[{i}]")
            if isinstance(call, chat.CustomCall):
                name, arguments = call.custom.name, {"input": call.custom.input or ""}
            else:
                name, arguments = call.function.name, call.function.arguments
            where = f"{path}[{i}].function.arguments"
            read.append(self.call(call.id, name, arguments, where))
        return tuple(read)

    def finish(self, name: str = "messages") -> tuple[ChatMessage, ...]:
        """Check and return the complete list of messages. name: the client's name of the list.
        Raises ApiError 400."""
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            raise invalid(f"{name} must have 1 to {MAX_MESSAGES} items", name)
        empty = (chat.TextPart(""),)
        return tuple(
            [
                message
                if message.content is not None or message.tool_calls
                else msgspec.structs.replace(message, content=empty)
                for message in self.messages
            ]
        )

    def _arguments(self, value: Any, path: str) -> Any:
        """Return a tool call's arguments as an object, which templates serialise."""
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
        # The model generated these arguments. Refusing them would make the conversation unusable,
        # as they stay in its history.
        self.ignore(path)
        return {"_raw": value}


def check_messages(
    messages: Sequence[chat.Message], items: Sequence[JsonObject], ignored: list[str]
) -> tuple[ChatMessage, ...]:
    """Convert messages in OpenAI's form into ChatMessages, with decoded tool arguments.

    items: the messages as sent by the client; their unused keys are added to `ignored`

    Large chats should be read in a thread.
    Raises ApiError 400 naming the part at fault, e.g. ``messages[0].content[1].type``.
    """
    builder = ChatBuilder(ignored)
    for i, message in enumerate(messages):
        builder.add_openai_message(message, items[i], f"messages[{i}]")
    return tuple(builder.messages)
