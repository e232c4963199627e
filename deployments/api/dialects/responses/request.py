"""responses_request: converts the body of a request to /v1/responses into a ChatRequest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.api.body_fields import name_fields
from deployments.api.fields import responses
from deployments.api.fields.chat import ItemContent, TextPart
from deployments.api.fields.tools import no_choice
from deployments.api.generation.call import template_options
from deployments.api.generation.messages import ChatBuilder
from deployments.api.generation.request import ChatMessage, ChatRequest, Content
from deployments.api.generation.sampling import take_sampling
from deployments.api.generation.tenancy import take_queue
from deployments.api.http.errors import invalid, shown
from deployments.api.http.json_body import JsonObject
from deployments.api.options import ApiOptions
from deployments.api.output.constraints import (
    only_constraint,
    take_response_format,
    take_structured_outputs,
)
from deployments.api.output.request import (
    RequestedTool,
    ToolChoice,
    add_custom,
    add_tool,
    allowed_tools,
    check_tool_count,
    named_tool,
    read_choice,
    requested_tools,
)

SentItem = JsonObject  # an item of a conversation, as sent by the client

_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = ("reasoning.encrypted_content", _LOGPROBS)  # the supported values of `include`
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
_MOST_IGNORED = 32


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request to /v1/responses.

    chat: the request as a ChatRequest
    echo: the request's fields that the answer repeats
    items: the conversation before the answer, for the ResponseStore
    places: name of a function in the chat -> (namespace or "", name within it)
    custom: the names in `places` of custom tools, which take a text
    stream: whether the events of a background answer are streamed; if so, `chat.stream` is false
    """

    chat: ChatRequest
    echo: Mapping[str, Any]
    items: list[SentItem]
    places: Mapping[str, tuple[str, str]]
    custom: frozenset[str]
    store: bool
    background: bool
    stream: bool


def responses_request(
    body: Mapping[str, Any],
    past: list[SentItem],
    ignored: list[str],
    *,
    stores: bool,
    options: ApiOptions,
) -> ResponsesRequest:
    """Convert a request's body into a ResponsesRequest. Raises ApiError 400 naming the field.

    Unknown items are left out and named in `ignored`, so that histories of all clients are
    accepted.

    past: the items of `previous_response_id` and of all responses before it
    stores: whether the service keeps answers
    """
    fields = responses.RESPONSES.read(body, ignored, strict=options.strict)
    store = fields.store is not False and stores
    background = bool(fields.background)
    _check_switches(fields, ignored, stores)
    text = fields.text.format if fields.text is not None else None
    tools = _Tools(fields, ignored)
    new = fields.input
    if isinstance(new, str):
        new = responses.ITEMS.read([{"type": "message", "role": "user", "content": new}], "input")
    items = [*past, *(item.sent for item in new)]
    if len(items) > responses.MAX_ITEMS:
        raise invalid(
            f"input and what came before it have more than {responses.MAX_ITEMS} items", "input"
        )
    reader = _Messages(ignored)
    messages = reader.read(
        fields.instructions, responses.ITEMS.read(past, "previous_response_id"), new
    )
    include = fields.include or ()
    logprobs = (fields.top_logprobs or 0) if _LOGPROBS in include or fields.top_logprobs else None
    chat = ChatRequest(
        model=fields.model,
        sampling=take_sampling(fields, max_tokens=fields.max_output_tokens, logprobs=logprobs),
        queue=take_queue(fields, body.get("user"), fields.cache_salt),
        stream=bool(fields.stream) and not background,
        constraint=only_constraint(
            take_response_format(text, "text.format", flat=True),
            take_structured_outputs(fields.structured_outputs),
        ),
        names=_NAMES,
        messages=messages,
        template=template_options(options, fields.chat_template_kwargs),
        tools=requested_tools(
            tools.tools, tools.choice, parallel=fields.parallel_tool_calls is not False
        ),
        effort=None if fields.reasoning is None else fields.reasoning.effort,
        thinking_budget=fields.thinking_token_budget,
    )
    return ResponsesRequest(
        chat,
        _echo(body, store=store, background=background),
        items,
        tools.places,
        frozenset(tools.custom),
        store,
        background,
        bool(fields.stream) and background,
    )


def _check_switches(fields: responses.Responses, ignored: list[str], stores: bool) -> None:
    """Check `background` and `store`, and add the names of fields without effect to `ignored`.

    stores: whether the service keeps answers.

    Raises ApiError 400.
    """
    if fields.background and not stores:
        raise invalid(
            "background needs answers that are kept: the operator sets http.store_bytes",
            "background",
            "not_supported",
        )
    if fields.background and fields.store is False:
        raise invalid("background needs store: true", "background", "conflicting_fields")
    if fields.store and not stores:
        ignored.append("store")
    if fields.truncation == "auto":
        ignored.append("truncation")
    ignored += name_fields(fields.stream_options or (), "stream_options.")
    include = fields.include or ()
    ignored += name_fields((name for name in include if name not in _INCLUDES), "include.")


class _Tools:
    """The tools of a request, including tools in namespaces.

    places: name of a tool in the chat -> (namespace or "", name within it)
    custom: the names of custom tools, which take a text
    """

    def __init__(self, fields: responses.Responses, ignored: list[str]) -> None:
        self.tools: list[RequestedTool] = []
        self.places: dict[str, tuple[str, str]] = {}
        self.custom: set[str] = set()
        self._ignored = ignored
        for i, tool in enumerate(fields.tools or ()):
            self._add(tool, f"tools[{i}]", "")
        check_tool_count(self.tools)
        self.choice = self._choice(fields.tool_choice)

    def _add(self, tool: responses.ItemTool | responses.InnerTool, where: str, space: str) -> None:
        known = tool.known
        if isinstance(known, responses.Namespace):
            for i, inner in enumerate(known.tools):
                self._add(inner, f"{where}.tools[{i}]", known.name)
            return
        if known is None:
            # Unknown tools are left out rather than refused: clients always send all their tools,
            # so a refusal would end their sessions.
            if len(self._ignored) < _MOST_IGNORED:
                self._ignored.append(where)
            return
        full = f"{space}__{known.name}" if space else known.name
        if isinstance(known, responses.CustomTool):
            grammar = known.format if isinstance(known.format, responses.GrammarText) else None
            add_custom(self.tools, full, known.description, grammar, where)
            self.custom.add(full)
        else:
            declared = {n: v for n, v in tool.sent.items() if n not in ("type", "defer_loading")}
            add_tool(self.tools, {**declared, "name": full}, where)
        self.places[full] = (space, known.name)

    def _choice(self, choice: Any) -> ToolChoice:
        if isinstance(choice, str):
            return read_choice(choice if self.tools or choice == "required" else None, self.tools)
        if choice is None or not isinstance(choice, dict):
            return read_choice(choice, self.tools)
        kind = choice.get("type")
        if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
            return allowed_tools(choice.get("mode"), choice.get("tools"), self._one)
        return self._one(choice)

    def _one(self, choice: Any) -> ToolChoice:
        if not isinstance(choice, dict):
            raise no_choice()
        kind, name, space = choice.get("type"), choice.get("name"), choice.get("namespace")
        if kind not in ("function", "custom"):
            raise invalid(
                f"tool_choice of type {shown(kind)} is not supported; function, custom and "
                "allowed_tools are",
                "tool_choice",
                "not_supported",
            )
        return named_tool(f"{space}__{name}" if space else name, self.places)


class _Messages:
    """The conversion of items to chat messages. All items of one assistant turn become one
    message."""

    def __init__(self, ignored: list[str]) -> None:
        self._builder = ChatBuilder(ignored)
        self._ignored = ignored
        self._place = ""
        self._said = False  # whether the assistant's next item may extend its last message

    def read(
        self, instructions: str | None, past: list[responses.Item], new: list[responses.Item]
    ) -> tuple[ChatMessage, ...]:
        """Return the chat's messages. past: the items of earlier responses. new: the request's own
        items."""
        if instructions:
            self._builder.add_message("system", "instructions", instructions)
        self._place = "previous_response_id"
        for item in past:
            self._item(item)
        for i, item in enumerate(new):
            self._place = f"input[{i}]"
            self._item(item)
        self._merge()
        return self._builder.finish("input")

    @property
    def _last(self) -> ChatMessage:
        return self._builder.messages[-1]

    def _assistant(self) -> ChatMessage:
        """Return the assistant's message to which items are added, after creating it if there is
        none."""
        if not self._said:
            self._builder.add_message("assistant", self._place)
            self._said = True
        return self._last

    def _item(self, item: responses.Item) -> None:
        match item.known:
            case responses.MessageItem() as message:
                self._message(message)
            case responses.ReasoningItem(content, summary):
                self._reasoning("".join(_texts(content) or _texts(summary)))
            case responses.FunctionCallItem() as call:
                self._call(call, call.arguments)
            case responses.CustomCallItem() as call:
                self._call(call, {"input": call.input or ""})
            case responses.OutputItem() as result:
                content = self._content(result.output, f"{self._place}.output")
                id = self._builder.check_answered(result.call_id, f"{self._place}.call_id")
                self._builder.add_message("tool", self._place)
                self._builder.change(content=content, tool_call_id=id)
                self._said = False
            case None if len(self._ignored) < _MOST_IGNORED:
                self._ignored.append(self._place)

    def _reasoning(self, text: str) -> None:
        if not text:
            return
        if self._said and (self._last.content is not None or self._last.tool_calls):
            self._said = False
        before = self._assistant().reasoning_content or ""
        self._builder.change(reasoning_content=before + text)

    def _message(self, item: responses.MessageItem) -> None:
        content = self._content(item.content, f"{self._place}.content")
        if item.role == "assistant":
            if self._said and (self._last.content is not None or self._last.tool_calls):
                self._said = False
            if item.content != []:
                self._assistant()
                self._builder.change(content=content)
            return
        role = "system" if item.role == "developer" else item.role
        self._builder.add_message(role, self._place)
        self._builder.change(content=content)
        self._said = False

    def _content(self, content: ItemContent, path: str) -> Content:
        if not content:
            return (TextPart(""),)
        if isinstance(content, str):
            return (TextPart(content),)
        return self._builder.content(content, path)

    def _call(
        self, item: responses.FunctionCallItem | responses.CustomCallItem, arguments: Any
    ) -> None:
        name = f"{item.namespace}__{item.name}" if item.namespace else item.name
        message = self._assistant()
        self._builder.count_calls(1, len(message.tool_calls) + 1, f"{message.place}.tool_calls")
        call = self._builder.call(item.call_id, name, arguments, f"{self._place}.arguments")
        self._builder.change(tool_calls=(*message.tool_calls, call))

    def _merge(self) -> None:
        """Merge the system messages at the beginning into one, as chat templates accept only
        one."""
        messages = self._builder.messages
        leading = 0
        while leading < len(messages) and messages[leading].role == "system":
            leading += 1
        if leading > 1:
            parts: list[Any] = []
            for message in messages[:leading]:
                parts += [TextPart("\n\n"), *(message.content or ())]
            first = msgspec.structs.replace(messages[leading - 1], content=tuple(parts[1:]))
            messages[:leading] = [first]


def _texts(parts: Any) -> list[str]:
    if not isinstance(parts, list):
        return []
    return [p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]


def _format_echo(format: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the requested output format in the form that the answer repeats: without null keys.

    A `json_schema` format also gets the fields that Open Responses requires: `strict`, and
    `description`, which OpenAI's clients expect to be a string.
    """
    asked = {name: value for name, value in format.items() if value is not None}
    if format.get("type") != "json_schema":
        return asked
    return {"description": "", **asked, "strict": bool(format.get("strict"))}


def _echo(body: Mapping[str, Any], *, store: bool, background: bool) -> Mapping[str, Any]:
    """Return the answer's fields that repeat fields of the request, with defaults for missing
    ones."""
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
        "store": store,
        "background": background,
        "service_tier": "default",
        "metadata": body.get("metadata") or {},
        "safety_identifier": body.get("safety_identifier"),
        "prompt_cache_key": body.get("prompt_cache_key"),
    }
