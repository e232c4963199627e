"""responses_chat: the body of a request to /v1/responses as the body of a chat."""

import json
from dataclasses import dataclass, field
from typing import Any

from deployments.api.body_fields import check_names, name_fields, take_bool, take_int
from deployments.api.fields.agents import (
    ITEM_ROLES,
    MAX_ITEMS,
    MAX_METADATA,
    RESPONSES,
    RESPONSES_IGNORED,
    RESPONSES_REFUSED,
    RESPONSES_REPEATED,
    TEXT_PARTS,
)
from deployments.api.http.errors import did_you_mean, invalid, shown, wrong_type
from deployments.api.renaming import Renaming
from engine.sampling_params import MAX_LOGPROBS

# Fields of a request that a chat has by the same name, and what is given on as it is.
_SAME = RESPONSES.taken.keys() - {
    *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text"),
    *("reasoning", "include", "previous_response_id", "store", "truncation", "metadata"),
    *("stream_options", "background"),
}
# name -> what truncation, include and the like may say without effect.
_INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")


@dataclass(slots=True)
class ResponsesRequest:
    """chat: the body of the chat. names: of its fields in this request. echo: what the answer
    repeats. items: the conversation so far, for the store. places: name of a function in the chat
    -> (namespace or "", its own name). custom: those of them that take a text.
    stream: events of an answer in the background are wanted; the chat knows nothing of it."""

    chat: dict[str, Any]
    names: Renaming
    ignored: list[str]
    echo: dict[str, Any]
    items: list[dict[str, Any]]
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    store: bool = False
    background: bool = False
    stream: bool = False


def responses_request(
    body: dict[str, Any], past: list[dict[str, Any]], *, stores: bool, strict: bool
) -> ResponsesRequest:
    """past: items of `previous_response_id` and those before. stores: the service keeps answers.

    Items that are not known are left out and named, so that the history of any client can be read.
    Raises ApiError 400 naming the field.
    """
    ignored = _check_names(body, strict)
    names = Renaming()
    chat: dict[str, Any] = {name: body[name] for name in _SAME & body.keys()}
    chat["n"] = 1
    if body.get("user") is not None:
        chat["user"] = body["user"]  # requests may take turns by it
    made = ResponsesRequest(chat, names, ignored, {}, [])
    for own, other in (
        ("input", "messages"),
        ("max_output_tokens", "max_completion_tokens"),
        ("text.format", "response_format"),
        ("text.format", "response_format.json_schema"),
        ("reasoning.effort", "reasoning_effort"),
        ("top_logprobs", "logprobs"),
    ):
        names.add(other, own)
    if (limit := take_int(body, "max_output_tokens", 1, 2**31 - 1)) is not None:
        chat["max_completion_tokens"] = limit
    _switches(body, made, stores)
    _text(body, made)
    _reasoning(body, made)
    _include(body, made)
    _tools(body, made)
    items = _items(body.get("input"))
    made.items = [*past, *items]
    if len(made.items) > MAX_ITEMS:
        raise invalid(f"input and what came before it have more than {MAX_ITEMS} items", "input")
    chat["messages"] = _Messages(made, len(past)).read(body.get("instructions"))
    made.echo = _echo(body, made)
    return made


def _check_names(body: dict[str, Any], strict: bool) -> list[str]:
    for name, instead in RESPONSES_REFUSED.items():
        if body.get(name) is not None:
            raise invalid(f"{name} is not supported; {instead}", name, "not_supported")
    known = RESPONSES.known
    silent = RESPONSES_REPEATED | RESPONSES_IGNORED
    found = [name for name in silent & body.keys() if body[name] is not None and name != "user"]
    rest = {name: value for name, value in body.items() if name not in silent}
    for name in rest.keys() - known if strict else ():
        raise invalid(
            f"unknown field {shown(name)}{did_you_mean(name, known)}", name[:128], "unknown_field"
        )
    return name_fields(sorted(found)) + check_names(rest, known, strict=strict, generates=True)


def _switches(body: dict[str, Any], made: ResponsesRequest, stores: bool) -> None:
    made.store = take_bool(body, "store", stores) and stores
    made.background = take_bool(body, "background")
    if made.background:
        if not stores:
            raise invalid(
                "background needs answers that are kept: the operator sets http.store_bytes",
                "background",
                "not_supported",
            )
        if not made.store:
            raise invalid("background needs store: true", "background", "conflicting_fields")
        made.stream = take_bool(made.chat, "stream")
        made.chat.pop("stream", None)
    if body.get("store") and not stores:
        made.ignored.append("store")
    truncation = body.get("truncation")
    if truncation not in (None, "auto", "disabled"):
        raise invalid('truncation must be "auto" or "disabled"', "truncation")
    if truncation == "auto":
        made.ignored.append("truncation")
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise wrong_type("stream_options", "an object")
        made.ignored += name_fields(options, "stream_options.")
    metadata = body.get("metadata")
    if metadata is not None and (
        not isinstance(metadata, dict)
        or len(metadata) > MAX_METADATA
        or not all(isinstance(value, str) for value in metadata.values())
    ):
        raise wrong_type("metadata", f"an object of at most {MAX_METADATA} strings")


def _text(body: dict[str, Any], made: ResponsesRequest) -> None:
    text = body.get("text")
    if text is None:
        return
    if not isinstance(text, dict):
        raise wrong_type("text", "an object")
    made.ignored += name_fields((n for n in text if n != "format" and text[n] is not None), "text.")
    format = text.get("format")
    if format is None:
        return
    if not isinstance(format, dict):
        raise wrong_type("text.format", "an object")
    if format.get("type") == "json_schema":
        inner = {name: value for name, value in format.items() if name != "type"}
        format = {"type": "json_schema", "json_schema": inner}
    made.chat["response_format"] = format


def _reasoning(body: dict[str, Any], made: ResponsesRequest) -> None:
    reasoning = body.get("reasoning")
    if reasoning is None:
        return
    if not isinstance(reasoning, dict):
        raise wrong_type("reasoning", "an object")
    others = (n for n in reasoning if n != "effort" and reasoning[n] is not None)
    made.ignored += name_fields(others, "reasoning.")
    if reasoning.get("effort") is not None:
        made.chat["reasoning_effort"] = reasoning["effort"]


def _include(body: dict[str, Any], made: ResponsesRequest) -> None:
    include = body.get("include")
    if include is None:
        include = []
    if not isinstance(include, list) or not all(isinstance(one, str) for one in include):
        raise wrong_type("include", "a list of strings")
    made.ignored += name_fields((one for one in include if one not in _INCLUDES), "include.")
    if _INCLUDES[1] in include or take_int(body, "top_logprobs", 0, MAX_LOGPROBS):
        made.chat["logprobs"] = True
    else:
        made.chat.pop("top_logprobs", None)


def _tools(body: dict[str, Any], made: ResponsesRequest) -> None:
    tools = body.get("tools")
    if tools is None:
        tools = []
    if not isinstance(tools, list):
        raise wrong_type("tools", "a list")
    found: list[dict[str, Any]] = []
    custom: set[str] = set()

    def add(tool: Any, where: str, space: str) -> None:
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if kind == "namespace" and not space and isinstance(tool.get("tools"), list):
            if not isinstance(tool.get("name"), str) or not tool["name"]:
                raise wrong_type(f"{where}.name", "a string")
            for i, inner in enumerate(tool["tools"]):
                add(inner, f"{where}.tools[{i}]", tool["name"])
            return
        if kind not in ("function", "custom"):
            # One refused turn would end a client's session: it sends the tools that it has.
            if len(made.ignored) < 32:
                made.ignored.append(where)
            return
        name = tool.get("name")
        if not isinstance(name, str):
            raise wrong_type(f"{where}.name", "a string")
        given = {n: v for n, v in tool.items() if n not in ("type", "defer_loading")}
        full = given["name"] = f"{space}__{name}" if space else name
        if kind == "custom":
            custom.add(full)
            format = given.get("format")
            if isinstance(format, dict) and format.get("type") == "grammar":
                inner = {n: v for n, v in format.items() if n != "type"}
                given["format"] = {"type": "grammar", "grammar": inner}
        made.places[full] = (space, name)
        made.names.add(f"tools[{len(found)}].{kind}", where)
        made.names.add(f"tools[{len(found)}]", where)
        found.append({"type": kind, kind: given})

    for i, tool in enumerate(tools):
        add(tool, f"tools[{i}]", "")
    made.custom = frozenset(custom)
    if found:
        made.chat["tools"] = found
    choice = body.get("tool_choice")
    if choice is None:
        return
    if isinstance(choice, str):
        if found or choice == "required":
            made.chat["tool_choice"] = choice
        return
    made.chat["tool_choice"] = _choice(choice)


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_choice(one) for one in choice["tools"]]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    if kind in ("function", "custom"):
        name = choice.get("name")
        space = choice.get("namespace")
        return {"type": kind, kind: {"name": f"{space}__{name}" if space else name}}
    raise invalid(
        f"tool_choice of type {shown(kind)} is not supported; function, custom and allowed_tools "
        "are",
        "tool_choice",
        "not_supported",
    )


def _items(value: Any) -> list[dict[str, Any]]:
    if value is None:
        raise invalid("input is required", "input", "missing_field")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or a list of items")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong_type(f"input[{i}]", "an object")
    return value


class _Messages:
    """Items to messages: what one turn of the assistant has said is one message."""

    def __init__(self, made: ResponsesRequest, past: int) -> None:
        self._made, self._past = made, past
        self._out: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # of the assistant, the last in _out
        self._place = ""

    def read(self, instructions: Any) -> list[dict[str, Any]]:
        if instructions is not None:
            if not isinstance(instructions, str):
                raise wrong_type("instructions", "a string")
            if instructions:
                self._add({"role": "system", "content": instructions}, "instructions")
        for i, item in enumerate(self._made.items):
            own = i - self._past
            self._place = f"input[{own}]" if own >= 0 else "previous_response_id"
            self._item(item)
        return self._merged()

    def _add(self, message: dict[str, Any], place: str = "") -> dict[str, Any]:
        self._made.names.add(f"messages[{len(self._out)}]", place or self._place)
        self._out.append(message)
        self._turn = None
        return message

    def _assistant(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = self._add({"role": "assistant"})
        return self._turn

    def _item(self, item: dict[str, Any]) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            text = "".join(_texts(item.get("content")) or _texts(item.get("summary")))
            if text:
                if self._turn is not None and (
                    "content" in self._turn or "tool_calls" in self._turn
                ):
                    self._turn = None
                turn = self._assistant()
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, kind)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            if isinstance(output, list):
                output = [self._part(part) for part in output]
            elif not isinstance(output, str):
                raise wrong_type(f"{self._place}.output", "a string or a list of parts")
            at = f"messages[{len(self._out)}]"
            self._made.names.add(f"{at}.tool_call_id", f"{self._place}.call_id")
            self._made.names.add(f"{at}.content", f"{self._place}.output")
            answer = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output or ""}
            self._add(answer)
        elif len(self._made.ignored) < 32:
            self._made.ignored.append(self._place)

    def _message(self, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in ITEM_ROLES:
            raise invalid(
                f"{self._place}.role must be one of {', '.join(ITEM_ROLES)}", f"{self._place}.role"
            )
        content = item.get("content")
        if isinstance(content, list):
            content = [self._part(part) for part in content]
        elif not isinstance(content, str):
            raise wrong_type(f"{self._place}.content", "a string or a list of parts")
        if role == "assistant":
            if self._turn is not None and self._turn.keys() & {"content", "tool_calls"}:
                self._turn = None
            if content != []:
                self._assistant()["content"] = content
            return
        self._add({"role": "system" if role == "developer" else role, "content": content or ""})

    def _part(self, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_PARTS:
            return {"type": "text", "text": part.get("text")}
        return {**part, "type": "file"} if kind == "input_file" else part

    def _call(self, item: dict[str, Any], kind: str) -> None:
        name, id = item.get("name"), item.get("call_id")
        if not isinstance(name, str):
            raise wrong_type(f"{self._place}.name", "a string")
        if not isinstance(id, str):
            raise wrong_type(f"{self._place}.call_id", "a string")
        if space := item.get("namespace"):
            name = f"{space}__{name}"
        arguments = item.get("arguments")
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        calls = self._assistant().setdefault("tool_calls", [])
        at = f"messages[{len(self._out) - 1}].tool_calls[{len(calls)}]"
        self._made.names.add(at, self._place)
        self._made.names.add(f"{at}.function", self._place)
        function = {"name": name, "arguments": arguments}
        calls.append({"id": id, "type": "function", "function": function})

    def _merged(self) -> list[dict[str, Any]]:
        """Templates take one system message, at the beginning."""
        leading = 0
        while leading < len(self._out) and self._out[leading]["role"] == "system":
            leading += 1
        if leading < 2:
            return self._out
        parts = [m["content"] for m in self._out[:leading]]
        texts = [p if isinstance(p, str) else "".join(_texts(p)) for p in parts]
        first = {"role": "system", "content": "\n\n".join(texts)}
        self._made.names.shift("messages", leading - 1)
        return [first, *self._out[leading:]]


def _texts(parts: Any) -> list[str]:
    if not isinstance(parts, list):
        return []
    return [p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]


def _format_echo(format: dict[str, Any]) -> dict[str, Any]:
    """Repeat the format as asked, without what is null.

    Of a schema with the fields that Open Responses requires,
    where OpenAI's description is a text and never null."""
    told = {name: value for name, value in format.items() if value is not None}
    if format.get("type") != "json_schema":
        return told
    return {"description": "", **told, "strict": bool(format.get("strict"))}


def _echo(body: dict[str, Any], made: ResponsesRequest) -> dict[str, Any]:
    """Fields of the answer that say what was asked; null where nothing was."""
    text = body.get("text") or {}
    reasoning = body.get("reasoning") or {}
    tools = [
        {**tool, "strict": tool.get("strict"), "parameters": tool.get("parameters")}
        if isinstance(tool, dict) and tool.get("type") == "function"
        else tool
        for tool in body.get("tools") or []
    ]
    return {
        "previous_response_id": body.get("previous_response_id"),
        "instructions": body.get("instructions"),
        "tools": tools,
        "tool_choice": "auto" if body.get("tool_choice") is None else body["tool_choice"],
        "truncation": body.get("truncation") or "disabled",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "text": {**text, "format": _format_echo(text.get("format") or {"type": "text"})},
        "presence_penalty": body.get("presence_penalty") or 0.0,
        "frequency_penalty": body.get("frequency_penalty") or 0.0,
        "top_logprobs": body.get("top_logprobs") or 0,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "user": body.get("user"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "store": made.store,
        "background": made.background,
        "service_tier": "default",
        "metadata": body.get("metadata") or {},
        "safety_identifier": body.get("safety_identifier"),
        "prompt_cache_key": body.get("prompt_cache_key"),
    }
