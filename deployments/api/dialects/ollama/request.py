"""ollama_chat, ollama_generate: convert bodies of Ollama's routes into a ChatRequest or
TextRequest."""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.api.body_fields import name_fields
from deployments.api.fields import ollama
from deployments.api.fields.chat import OllamaImage
from deployments.api.fields.generation import LLAMA_SAMPLING
from deployments.api.generation.messages import ChatBuilder
from deployments.api.generation.request import (
    ChatMessage,
    ChatRequest,
    ImagePart,
    TemplateOptions,
    TextRequest,
)
from deployments.api.generation.sampling import take_sampling
from deployments.api.generation.tenancy import take_queue
from deployments.api.http.errors import invalid, wrong_type
from deployments.api.http.json_body import JsonObject
from deployments.api.output.constraints import RequestedGrammar, schema_constraint
from deployments.api.output.request import read_choice, read_tools, requested_tools
from engine.text.infill import Gap

_MESSAGE = frozenset(
    ("role", *ollama.AssistantMessage.__struct_fields__, *ollama.ToolMessage.__struct_fields__)
)
_NAMES: Mapping[str, str] = {
    **{field: f"options.{name}" for name, field in LLAMA_SAMPLING.items()},
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
}


def ollama_chat(body: Mapping[str, Any], ignored: list[str], *, strict: bool) -> ChatRequest | None:
    """Convert a body of /api/chat; return None if it has no messages and only loads the model.

    The answer is streamed unless `stream` is false. Raises ApiError 400 naming the field.

    ignored: the list that names of fields without effect are added to
    """
    fields = ollama.CHAT.read(body, ignored, strict=strict)
    effort = _effort(fields.think)
    if not fields.messages:
        return None
    messages = _messages(fields.messages, body["messages"], ignored)
    last, template, names = messages[-1], TemplateOptions(), _NAMES
    if last.role == "assistant" and not last.tool_calls:
        # If the last message is the assistant's, the model continues its text, unless it is empty.
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
    )


def ollama_generate(
    body: Mapping[str, Any], ignored: list[str], *, strict: bool, template: bool
) -> ChatRequest | TextRequest | None:
    """Convert a body of /api/generate; return None if the body only asks to load the model.

    Such a body has no prompt, no suffix and no images. Raises ApiError 400.

    template: whether the model has a chat template. If so, the prompt becomes a user message,
        unless the request sets `raw` or a suffix
    """
    fields = ollama.GENERATE.read(body, ignored, strict=strict)
    effort = _effort(fields.think)
    prompt, suffix, system = fields.prompt or "", fields.suffix or "", fields.system or ""
    if not prompt and not suffix and not fields.images:
        return None
    if not fields.raw and not suffix and template:
        builder = ChatBuilder(ignored)
        if system:
            builder.add_message("system", "system", system)
        builder.add_message("user", "prompt", prompt)
        _add_images(builder, fields.images, "images")
        return ChatRequest(
            **_common(fields, body.get("user")),
            names={**_NAMES, "messages": "prompt"},
            messages=builder.finish(),
            effort=effort,
        )
    what = "raw" if fields.raw else "suffix" if suffix else "a model without a chat template"
    for name, value, it in (("images", fields.images, "them"), ("system", system, "it")):
        if value:
            message = f"{name}: {what} leaves no place for {it}"
            raise invalid(message, name, "conflicting_fields")
    if effort is not None:
        ignored.append("think")
    return TextRequest(
        **_common(fields, body.get("user")),
        names=_NAMES,
        prompts=() if suffix else (prompt,),
        gaps=(Gap(prompt, suffix),) if suffix else (),
    )


def _common(fields: ollama.OllamaGeneration, user: Any) -> dict[str, Any]:
    """Return {field of GenerationFields: value} for the fields that chats and completions share."""
    options = ollama.Options() if fields.options is None else fields.options
    most, logprobs = options.num_predict, fields.top_logprobs or 0
    sampling = take_sampling(
        options,
        LLAMA_SAMPLING,
        # A negative num_predict means that only the context limits the output.
        max_tokens=None if most is None or most < 0 else most,
        logprobs=logprobs if fields.logprobs else None,
    )
    return {
        "model": fields.model,
        "sampling": sampling,
        "queue": take_queue(fields, user),
        "stream": fields.stream is not False,
        "constraint": _format(fields.format),
    }


def _format(format: str | JsonObject | None) -> RequestedGrammar | None:
    if not format and format != {}:
        return None
    return schema_constraint({"type": "object"} if format == "json" else format, "format")


def _effort(think: bool | str | None) -> str | None:
    if isinstance(think, bool):
        return "medium" if think else "none"
    return think or None


def _messages(
    messages: Sequence[ollama.OllamaMessage], sent: list[JsonObject], ignored: list[str]
) -> tuple[ChatMessage, ...]:
    """Return the messages of a chat.

    Tool calls get ids, which Ollama's may lack. A tool result without an id answers the first call
    of its function that has no result, or else the first call of any function without a result.

    sent: the messages as sent by the client
    """
    builder = ChatBuilder(ignored)
    waiting: list[tuple[str, str]] = []  # (id, function) of calls without a result
    count = 0  # number of calls so far
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        ignored += name_fields((n for n in sent[i] if n not in _MESSAGE), f"{place}.")
        builder.add_message(message.role, place, message.content or "")
        _add_images(builder, message.images, f"{place}.images")
        if isinstance(message, ollama.AssistantMessage):
            builder.change(reasoning_content=message.thinking)
            if not message.tool_calls:
                continue
            path = f"{place}.tool_calls"
            builder.count_calls(len(message.tool_calls), len(message.tool_calls), path)
            calls = []
            for call in message.tool_calls:
                # Ids have nine letters and digits, because some templates accept no others.
                id, name = call.id or f"call{count:05d}", call.function.name
                count += 1
                waiting.append((id, name))
                calls.append(builder.call(id, name, call.function.arguments, path))
            builder.change(tool_calls=tuple(calls))
        elif isinstance(message, ollama.ToolMessage):
            builder.change(tool_call_id=_answered(message, waiting, place))
    return builder.finish()


def _add_images(builder: ChatBuilder, images: Any, place: str) -> None:
    """Put images before the text of the last message, as Ollama does."""
    if not images:
        return
    if not isinstance(images, list):
        raise wrong_type(place, "a list of images in base64")
    parts = [
        ImagePart(OllamaImage(image), f"{place}[{i}]", place) for i, image in enumerate(images)
    ]
    builder.change(content=(*parts, *(builder.messages[-1].content or ())))


def _answered(message: ollama.ToolMessage, waiting: list[tuple[str, str]], place: str) -> str:
    """Return the id of the call that a message answers, and remove the call from `waiting`."""
    id, name = message.tool_call_id, message.tool_name
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
