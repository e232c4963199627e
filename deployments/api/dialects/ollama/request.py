"""ollama_chat, ollama_generate: bodies of Ollama's routes as the body of a chat or a completion."""

from dataclasses import dataclass, field
from typing import Any

from deployments.api.body_fields import check_names, name_fields, take_bool, take_int
from deployments.api.bounds import MAX_MESSAGE_CALLS
from deployments.api.fields.ollama import (
    CHAT,
    GENERATE,
    IGNORED,
    OPTIONS,
    REFUSED,
    ROLES,
    SAME,
    THINK,
)
from deployments.api.fields.schema import Body
from deployments.api.generation.messages import take_messages
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.renaming import Renaming
from engine.sampling_params import MAX_LOGPROBS

_TAKEN_AS_THEY_ARE = ("model", "tools", "priority", "deadline_seconds")
_MESSAGE = frozenset(
    {"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"}
)


@dataclass(slots=True)
class OllamaRequest:
    """chat: the body of the chat, or of the completion. names: of its fields in this request.
    ignored: without effect. loads: it asks for no text, only that the model is there."""

    chat: dict[str, Any] = field(default_factory=dict)
    names: Renaming = field(default_factory=Renaming)
    ignored: list[str] = field(default_factory=list)
    is_chat: bool = True
    loads: bool = False


def ollama_chat(body: dict[str, Any], *, strict: bool) -> OllamaRequest:
    """Streamed unless `stream` is false. Raises ApiError 400 naming the field."""
    made = _read(body, CHAT, strict)
    chat = made.chat
    if body.get("messages") in (None, []):
        made.loads = True
        return made
    chat["messages"] = _messages(body.get("messages"), made)
    last = chat["messages"][-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        # The model goes on where it ends. Where that is its beginning there is nothing to say.
        if last["content"]:
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
            made.names.add("continue_final_message", f"messages[{len(chat['messages']) - 1}]")
        elif len(chat["messages"]) > 1 and not last["reasoning_content"]:
            chat["messages"].pop()
    return made


def ollama_generate(body: dict[str, Any], *, strict: bool, template: bool) -> OllamaRequest:
    """Read a body of /api/generate as `ollama_chat` reads one.

    template: the model has one, so the prompt is a user's message unless the
    request says `raw`."""
    made = _read(body, GENERATE, strict)
    chat, names = made.chat, made.names
    for name, reason in REFUSED.items():
        if body.get(name):
            code = "modality_not_supported" if name == "images" else "not_supported"
            raise invalid(f"{name}: {reason}", name, code)
    prompt, suffix, system = (_text(body, name) for name in ("prompt", "suffix", "system"))
    raw = take_bool(body, "raw")
    if not prompt and not suffix:
        made.loads = True
        return made
    if system and (raw or suffix or not template):
        what = "raw" if raw else "suffix" if suffix else "a model without a chat template"
        raise invalid(f"system: {what} leaves no place for it", "system", "conflicting_fields")
    if raw or suffix or not template:
        made.is_chat = False
        chat["prompt"] = prompt
        if suffix:
            chat["suffix"] = suffix
        if (alternatives := chat.pop("top_logprobs", None)) is not None:
            chat["logprobs"] = alternatives
        return made
    messages = [{"role": "system", "content": system}] if system else []
    names.add(f"messages[{len(messages)}]", "prompt")
    names.add("messages", "prompt")
    chat["messages"] = [*messages, {"role": "user", "content": prompt}]
    if messages:
        names.add("messages[0]", "system")
    return made


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong_type(name, "a string")
    return value or ""


def _read(body: dict[str, Any], fields: Body, strict: bool) -> OllamaRequest:
    """The fields that both routes have."""
    made = OllamaRequest()
    chat, names = made.chat, made.names
    given = {name: value for name, value in body.items() if name not in IGNORED}
    made.ignored += name_fields(sorted(n for n in IGNORED & body.keys() if body[n] is not None))
    made.ignored += check_names(given, fields.known, strict=strict)
    taken = [name for name in _TAKEN_AS_THEY_ARE if name in fields.known]
    chat |= {name: body[name] for name in (*taken, "user") if name in body}
    chat |= {"n": 1, "stream": take_bool(body, "stream", True)}
    _options(body.get("options"), made)
    alternatives = take_int(body, "top_logprobs", 0, MAX_LOGPROBS)
    if take_bool(body, "logprobs"):
        chat |= {"logprobs": True, "top_logprobs": alternatives or 0}
    format = body.get("format")
    names.add("response_format", "format")
    if format == "json":
        chat["response_format"] = {"type": "json_object"}
    elif isinstance(format, dict):
        names.add("response_format.json_schema.schema", "format")
        inner = {"name": "format", "schema": format}
        chat["response_format"] = {"type": "json_schema", "json_schema": inner}
    elif format not in (None, ""):
        raise invalid('format must be "json" or a JSON schema', "format")
    think = body.get("think")
    names.add("reasoning_effort", "think")
    if think is not None and think != "":
        if not isinstance(think, bool | str) or think not in THINK:
            raise invalid("think must be true, false, low, medium, high or max", "think")
        chat["reasoning_effort"] = THINK[think]
    return made


def _options(options: Any, made: OllamaRequest) -> None:
    if options is None:
        return
    if not isinstance(options, dict):
        raise wrong_type("options", "an object")
    made.ignored += name_fields((n for n in options if n not in OPTIONS), "options.")
    for name, same in SAME.items():
        if options.get(name) is not None:
            made.chat[same] = options[name]
            made.names.add(same, f"options.{name}")
    try:
        most = take_int(options, "num_predict", -2, 2**31 - 1)
    except ApiError as error:
        raise invalid(f"options.{error.message}", "options.num_predict", error.code) from None
    made.names.add("max_tokens", "options.num_predict")
    if most is not None and most >= 0:  # below: as far as the context reaches
        made.chat["max_tokens"] = most


def _messages(value: Any, made: OllamaRequest) -> list[dict[str, Any]]:
    """Calls have ids in a chat and need none here: a result answers the first open call of its
    function, or the first one at all."""
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # (id, function) of calls without a result
    count = 0  # of calls
    for i, message in enumerate(take_messages(value)):
        place = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise invalid(f"{place}.role must be one of {', '.join(ROLES)}", f"{place}.role")
        if message.get("images"):
            raise invalid(
                f"{place}.images: the models served here take text only",
                f"{place}.images",
                "modality_not_supported",
            )
        made.ignored += name_fields((n for n in message if n not in _MESSAGE), f"{place}.")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise wrong_type(f"{place}.content", "a string")
        told: dict[str, Any] = {"role": role, "content": "" if content is None else content}
        if role == "assistant":
            made.names.add(f"{place}.reasoning_content", f"{place}.thinking")
            told["reasoning_content"] = message.get("thinking")
            if calls := _calls(message.get("tool_calls"), f"{place}.tool_calls", count):
                count += len(calls)
                waiting += [(call["id"], call["function"]["name"]) for call in calls]
                told["tool_calls"] = calls
        elif role == "tool":
            told["tool_call_id"] = _answered(message, waiting, place)
        found.append(told)
    return found


def _calls(value: Any, place: str, count: int) -> list[dict[str, Any]]:
    """count: of calls before these."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type(place, "a list")
    if len(value) > MAX_MESSAGE_CALLS:
        raise invalid(f"{place} may have at most {MAX_MESSAGE_CALLS} items", place)
    found = []
    for i, call in enumerate(value):
        here = f"{place}[{i}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise wrong_type(here, "an object with name and arguments")
        if not isinstance(function.get("name"), str):
            raise wrong_type(f"{here}.name", "a string")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, dict):
            raise wrong_type(f"{here}.arguments", "an object")
        id = call.get("id")
        if id is not None and not isinstance(id, str):
            raise wrong_type(f"{place}[{i}].id", "a string")
        # Nine letters and digits: some templates take no others.
        id = id or f"call{count + i:05d}"
        function = {"name": function["name"], "arguments": arguments or {}}
        found.append({"id": id, "type": "function", "function": function})
    return found


def _answered(message: dict[str, Any], waiting: list[tuple[str, str]], place: str) -> str:
    """The id of the call whose result this is; it waits no longer."""
    for key in ("tool_call_id", "tool_name"):
        if not isinstance(message.get(key) or "", str):
            raise wrong_type(f"{place}.{key}", "a string")
    id, name = message.get("tool_call_id"), message.get("tool_name")
    named = [(own, of) for own, of in waiting if (own == id if id else of == name)]
    if not waiting or (id and not named):
        raise invalid(
            f"{place} is the result of no call: an assistant's message with tool_calls goes before",
            place,
            "invalid_tool_call_id",
        )
    one = named[0] if named else waiting[0]
    waiting.remove(one)
    return one[0]
