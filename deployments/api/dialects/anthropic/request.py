"""messages_request: the body of a request to /v1/messages as the body of a chat."""

import json
from dataclasses import dataclass
from typing import Any

from deployments.api.body_fields import check_names, name_fields, take_bool, take_int
from deployments.api.fields.agents import (
    BLOCK_ROLES,
    CHOICES,
    DATA,
    MESSAGES,
    MESSAGES_IGNORED,
    MESSAGES_REFUSED,
)
from deployments.api.http.errors import did_you_mean, invalid, shown, wrong_type
from deployments.api.renaming import Renaming

# A client's accounting puts a hash of each request at the very front of its system prompt, where
# it would keep every prefix from being found again.
_ACCOUNTING = "x-anthropic-billing-header"
_OWN = frozenset(
    {
        *("messages", "system", "stop_sequences", "tools", "tool_choice"),
        *("thinking", "output_config", "metadata"),
    }
)
_MOST_NAMED = 32


@dataclass(slots=True)
class MessagesRequest:
    """A request to /v1/messages that was read into a chat.

    chat: the body of the chat
    names: the names of the chat's fields in this request
    ignored: the fields and blocks without effect
    """

    chat: dict[str, Any]
    names: Renaming
    ignored: list[str]


def messages_request(
    body: dict[str, Any], *, strict: bool, counts: bool = False
) -> MessagesRequest:
    """Convert the body of a request to /v1/messages into the body of a chat.

    Unknown blocks are left out and named in `ignored`. Raises ApiError 400 naming the field.

    counts: whether the request only counts tokens; max_tokens is optional then
    """
    for name, instead in MESSAGES_REFUSED.items():
        if body.get(name):
            raise invalid(f"{name} is not supported; {instead}", name, "not_supported")
    known = MESSAGES.known
    for name in body.keys() - known - MESSAGES_IGNORED if strict else ():
        raise invalid(
            f"unknown field {shown(name)}{did_you_mean(name, known)}", name[:128], "unknown_field"
        )
    told = {name: value for name, value in body.items() if name not in MESSAGES_IGNORED}
    ignored = name_fields(sorted(n for n in MESSAGES_IGNORED & body.keys() if n != "cache_control"))
    ignored += check_names(told, known, strict=False, generates=True)
    names = Renaming()
    chat = {name: body[name] for name in (MESSAGES.taken.keys() - _OWN) & body.keys()}
    chat["n"] = 1
    made = MessagesRequest(chat, names, ignored)
    for own, other in (
        ("stop_sequences", "stop"),
        ("output_config.format", "response_format"),
        ("output_config.format", "response_format.json_schema"),
        ("thinking", "reasoning_effort"),
        ("tool_choice.disable_parallel_tool_use", "parallel_tool_calls"),
        ("metadata.user_id", "user"),
    ):
        names.add(other, own)
    if take_int(body, "max_tokens", 1, 2**31 - 1) is None and not counts:
        raise invalid("max_tokens is required", "max_tokens", "missing_field")
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    _tools(body, made)
    _thinking(body, made)
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        chat["user"] = metadata["user_id"]  # requests may take turns by it
    elif metadata:
        ignored.append("metadata")
    reader = _Reader(made)
    reader.system(body.get("system"))
    reader.messages(body.get("messages"))
    last: dict[str, Any] = reader.out[-1] if reader.out else {"role": ""}
    if last["role"] == "assistant" and "tool_calls" not in last and last.get("content"):
        chat["continue_final_message"] = True  # the model goes on where it ends
    chat["messages"] = reader.out
    return made


def _tools(body: dict[str, Any], made: MessagesRequest) -> None:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise wrong_type("tools", "a list")
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong_type(where, "an object")
        schema = tool.get("input_schema")
        if schema is None:  # of the server's own: a client sends those that it has
            if len(made.ignored) < _MOST_NAMED:
                made.ignored.append(where)
            continue
        at = f"tools[{len(found)}].function"
        made.names.add(f"{at}.parameters", f"{where}.input_schema")
        made.names.add(at, where)
        made.names.add(f"tools[{len(found)}]", where)
        function = {"name": tool.get("name"), "parameters": schema}
        function |= {name: tool[name] for name in ("description", "strict") & tool.keys()}
        found.append({"type": "function", "function": function})
    if found:
        made.chat["tools"] = found
    choice = body.get("tool_choice")
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        made.chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        if found or kind == "any":
            made.chat["tool_choice"] = CHOICES[kind]
    else:
        raise invalid("tool_choice.type must be auto, any, tool or none", "tool_choice.type")
    if take_bool(choice, "disable_parallel_tool_use"):
        made.chat["parallel_tool_calls"] = False


def _thinking(body: dict[str, Any], made: MessagesRequest) -> None:
    chat = made.chat
    thinking = body.get("thinking")
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        if kind not in ("enabled", "disabled", "adaptive"):
            raise invalid("thinking.type must be enabled, disabled or adaptive", "thinking.type")
        if kind != "adaptive":
            chat["reasoning_effort"] = "none" if kind == "disabled" else "medium"
        if kind == "enabled" and thinking.get("budget_tokens") is not None:
            chat["thinking_token_budget"] = thinking["budget_tokens"]
            made.names.add("thinking_token_budget", "thinking.budget_tokens")
    config = body.get("output_config")
    if config is None:
        return
    if not isinstance(config, dict):
        raise wrong_type("output_config", "an object")
    if config.get("effort") is not None and chat.get("reasoning_effort") != "none":
        chat["reasoning_effort"] = config["effort"]
        made.names.add("reasoning_effort", "output_config.effort")
    others = (n for n in config if n not in ("effort", "format") and config[n] is not None)
    made.ignored += name_fields(others, "output_config.")
    format = config.get("format")
    if format is None:
        return
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        raise invalid("output_config.format must be of type json_schema", "output_config.format")
    inner = {"name": "output", "schema": format.get("schema")}
    chat["response_format"] = {"type": "json_schema", "json_schema": inner}


class _Reader:
    """The conversion of messages with blocks into messages of a chat.

    A tool's result becomes a message of its own.
    """

    def __init__(self, made: MessagesRequest) -> None:
        self.out: list[dict[str, Any]] = []
        self._made = made

    def _add(self, message: dict[str, Any], place: str) -> str:
        at = f"messages[{len(self.out)}]"
        self._made.names.add(at, place)
        self.out.append(message)
        return at

    def _leave_out(self, place: str) -> None:
        if len(self._made.ignored) < _MOST_NAMED:
            self._made.ignored.append(place)

    def system(self, system: Any) -> None:
        texts = self._texts(system, "system") if system is not None else []
        kept = [text for text in texts if text and not text.startswith(_ACCOUNTING)]
        if kept:
            self._add({"role": "system", "content": "\n\n".join(kept)}, "system")

    def _texts(self, value: Any, place: str) -> list[str]:
        """Return the texts of a string or of a list of text blocks. Raises ApiError 400."""
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise wrong_type(place, "a string or a list of blocks")
        found = []
        for i, block in enumerate(value):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in DATA:
                raise _not_text(f"{place}[{i}]")
            if kind != "text":
                self._leave_out(f"{place}[{i}]")
            elif not isinstance(block.get("text"), str):
                raise wrong_type(f"{place}[{i}].text", "a string")
            else:
                found.append(block["text"])
        return found

    def messages(self, messages: Any) -> None:
        if messages is None:
            raise invalid("messages is required", "messages", "missing_field")
        if not isinstance(messages, list) or not messages:
            raise wrong_type("messages", "a list of at least one message")
        for i, message in enumerate(messages):
            place = f"messages[{i}]"
            role = message.get("role") if isinstance(message, dict) else None
            if role not in BLOCK_ROLES:
                raise invalid(f"{place}.role must be user, assistant or system", f"{place}.role")
            content, place = message.get("content"), f"{place}.content"
            if isinstance(content, str):
                self._add({"role": role, "content": content}, place)
            elif not isinstance(content, list):
                raise wrong_type(place, "a string or a list of blocks")
            elif role == "system":
                texts = self._texts(content, place)
                self._add({"role": role, "content": "\n\n".join(texts)}, place)
            else:
                self._blocks(role, content, place)

    def _blocks(self, role: str, blocks: list[Any], place: str) -> None:
        said: dict[str, Any] | None = None
        if role == "assistant" and not blocks:  # an answer that was empty
            self._add({"role": role, "content": ""}, place)
        for i, block in enumerate(blocks):
            here = f"{place}[{i}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in DATA:
                raise _not_text(here)
            if kind == "tool_result" and role == "user":
                said = None
                self._result(block, here)
                continue
            known = ("text", "thinking", "tool_use") if role == "assistant" else ("text",)
            if kind not in known:
                self._leave_out(here)
                continue
            if said is None:
                said = {"role": role}
                self._add(said, place)
            if kind == "tool_use":
                self._call(block, said, here)
                continue
            text = block.get(kind)
            if not isinstance(text, str):
                raise wrong_type(f"{here}.{kind}", "a string")
            name = "reasoning_content" if kind == "thinking" else "content"
            said[name] = said.get(name, "") + text
        if said is not None and not said.keys() & {"content", "tool_calls"}:
            said["content"] = ""

    def _call(self, block: dict[str, Any], said: dict[str, Any], here: str) -> None:
        for name in ("id", "name"):
            if not isinstance(block.get(name), str):
                raise wrong_type(f"{here}.{name}", "a string")
        calls = said.setdefault("tool_calls", [])
        at = f"messages[{len(self.out) - 1}].tool_calls[{len(calls)}]"
        self._made.names.add(at, here)
        self._made.names.add(f"{at}.function.arguments", f"{here}.input")
        arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
        function = {"name": block["name"], "arguments": arguments}
        calls.append({"id": block["id"], "type": "function", "function": function})

    def _result(self, block: dict[str, Any], here: str) -> None:
        content = block.get("content")
        texts = [] if content is None else self._texts(content, f"{here}.content")
        id = block.get("tool_use_id")
        at = self._add({"role": "tool", "tool_call_id": id, "content": "".join(texts)}, here)
        self._made.names.add(f"{at}.tool_call_id", f"{here}.tool_use_id")
        if block.get("is_error"):
            self._leave_out(f"{here}.is_error")


def _not_text(place: str) -> Exception:
    return invalid(
        "the models served here take text only", f"{place}.type", "modality_not_supported"
    )
