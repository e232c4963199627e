"""ollama_chat, ollama_generate: bodies of Ollama's routes as a ChatRequest or a TextRequest."""

from collections.abc import Mapping
from typing import Any

from deployments.api.body_fields import name_fields
from deployments.api.bounds import MAX_MESSAGE_CALLS
from deployments.api.fields.common import LLAMA_SAMPLING
from deployments.api.fields.ollama import (
    CHAT,
    GENERATE,
    ROLES,
    THINK,
    OllamaGeneration,
    Options,
)
from deployments.api.generation.messages import ChatBuilder, no_media, take_messages
from deployments.api.generation.request import (
    ChatMessage,
    ChatRequest,
    TemplateOptions,
    TextRequest,
)
from deployments.api.generation.sampling import take_sampling
from deployments.api.generation.tenancy import take_queue
from deployments.api.http.errors import invalid, wrong_type
from deployments.api.output.constraints import RequestedGrammar, schema_constraint
from deployments.api.output.request import read_choice, read_tools, requested_tools
from engine.text.infill import Gap

_MESSAGE = frozenset(
    {"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"}
)
_NAMES: Mapping[str, str] = {
    **{field: f"options.{name}" for name, field in LLAMA_SAMPLING.items()},
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
}


def ollama_chat(body: Mapping[str, Any], ignored: list[str], *, strict: bool) -> ChatRequest | None:
    """Read a body of /api/chat; None: it asks for no text, only that the model is there.

    The answer is streamed unless `stream` is false. Raises ApiError 400 naming the field.

    ignored: the list that names of fields without effect are added to
    """
    fields = CHAT.read(body, ignored, strict=strict)
    effort = _effort(fields.think)
    if fields.messages in (None, []):
        return None
    messages = _messages(fields.messages, ignored)
    last, template, names = messages[-1], TemplateOptions(), _NAMES
    if last.role == "assistant" and not last.tool_calls:
        # The model continues where the text ends. An empty text has nothing to continue.
        if last.text:
            template = TemplateOptions(opens=False, continues=True)
            names = {**_NAMES, "continue_final_message": last.place}
        elif len(messages) > 1 and not last.reasoning_content:
            messages = messages[:-1]
    tools = read_tools(fields.tools)
    return ChatRequest(
        **_common(fields, body.get("user")),
        names=names,
        messages=messages,
        template=template,
        tools=requested_tools(tools, read_choice(None, tools), parallel=True),
        effort=effort,
        ignored=tuple(ignored),
    )


def ollama_generate(
    body: Mapping[str, Any],
    ignored: list[str],
    *,
    strict: bool,
    template: bool,
) -> ChatRequest | TextRequest | None:
    """Read a body of /api/generate as `ollama_chat` reads one.

    template: whether the model has one, so that the prompt is a user's message unless the request
        says `raw`
    """
    fields = GENERATE.read(body, ignored, strict=strict)
    effort = _effort(fields.think)
    prompt, suffix, system = fields.prompt or "", fields.suffix or "", fields.system or ""
    if not prompt and not suffix:
        return None
    if not fields.raw and not suffix and template:
        builder = ChatBuilder(ignored)
        if system:
            builder.add_message("system", "system", system)
        builder.add_message("user", "prompt", prompt)
        return ChatRequest(
            **_common(fields, body.get("user")),
            prompt_name="prompt",
            names={**_NAMES, "messages": "prompt"},
            messages=builder.finish(),
            effort=effort,
            ignored=tuple(ignored),
        )
    if system:
        what = "raw" if fields.raw else "suffix" if suffix else "a model without a chat template"
        raise invalid(f"system: {what} leaves no place for it", "system", "conflicting_fields")
    if effort is not None:
        ignored.append("think")
    return TextRequest(
        **_common(fields, body.get("user")),
        names=_NAMES,
        prompts=() if suffix else (prompt,),
        gaps=(Gap(prompt, suffix),) if suffix else (),
        ignored=tuple(ignored),
    )


def _common(fields: OllamaGeneration, user: Any) -> dict[str, Any]:
    """Return what chats and completions have in common, by the names of GenerationFields."""
    options = Options() if fields.options is None else fields.options
    most, logprobs = options.num_predict, fields.top_logprobs or 0
    sampling = take_sampling(
        options,
        LLAMA_SAMPLING,
        # Below 0: as far as the context reaches.
        max_tokens=None if most is None or most < 0 else most,
        logprobs=logprobs if fields.logprobs else None,
    )
    return {
        "model": fields.model,
        "sampling": sampling,
        "queue": take_queue(fields, user),
        "stream": fields.stream is not False,
        "constraint": _format(fields.format),
        "limit_name": _NAMES["max_tokens"],
    }


def _format(format: Any) -> RequestedGrammar | None:
    if format == "json":
        return schema_constraint({"type": "object"}, "format")
    if isinstance(format, dict):
        return schema_constraint(format, "format")
    if format not in (None, ""):
        raise invalid('format must be "json" or a JSON schema', "format")
    return None


def _effort(think: Any) -> str | None:
    if think is None or think == "":
        return None
    if not isinstance(think, bool | str) or think not in THINK:
        raise invalid("think must be true, false, low, medium, high or max", "think")
    return THINK[think]


def _messages(value: Any, ignored: list[str]) -> tuple[ChatMessage, ...]:
    """Return the messages of a chat.

    Calls have ids in a chat and need none here: a result answers the first open call of its
    function, or the first one at all.
    """
    builder = ChatBuilder(ignored)
    waiting: list[tuple[str, str]] = []  # (id, function) of calls without a result
    count = 0  # of calls
    for i, message in enumerate(take_messages(value)):
        place = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise invalid(f"{place}.role must be one of {', '.join(ROLES)}", f"{place}.role")
        if message.get("images"):
            path = f"{place}.images"
            raise no_media(path, f"{path}: the models served here take text only")
        ignored += name_fields((n for n in message if n not in _MESSAGE), f"{place}.")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise wrong_type(f"{place}.content", "a string")
        builder.add_message(role, place, content or "")
        if role == "assistant":
            thinking = message.get("thinking")
            if thinking is not None and not isinstance(thinking, str):
                raise wrong_type(f"{place}.thinking", "a string")
            builder.change(reasoning_content=thinking)
            path = f"{place}.tool_calls"
            if calls := _calls(message.get("tool_calls"), path, count):
                count += len(calls)
                waiting += [(id, name) for id, name, _ in calls]
                builder.count_calls(len(calls), len(calls), path)
                builder.change(tool_calls=tuple(builder.call(*call, path) for call in calls))
        elif role == "tool":
            builder.change(tool_call_id=_answered(message, waiting, place))
    return builder.finish()


def _calls(value: Any, place: str, count: int) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return the id, the name and the arguments of each call. count: the calls before these."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type(place, "a list")
    if len(value) > MAX_MESSAGE_CALLS:
        raise invalid(f"{place} may have at most {MAX_MESSAGE_CALLS} items", place)
    calls: list[tuple[str, str, Mapping[str, Any]]] = []
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
        calls.append((id or f"call{count + i:05d}", function["name"], arguments or {}))
    return calls


def _answered(message: Mapping[str, Any], waiting: list[tuple[str, str]], place: str) -> str:
    """Return the id of the call whose result this is; it waits no longer."""
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
    call = named[0] if named else waiting[0]
    waiting.remove(call)
    return call[0]
