"""messages_request: the body of a request to /v1/messages as a ChatRequest."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deployments.api.body_fields import take_bool, take_int
from deployments.api.fields.agents import (
    BLOCK_ROLES,
    CHOICES,
    DATA,
    MESSAGES,
    Messages,
    OutputConfig,
)
from deployments.api.fields.chat import TextPart
from deployments.api.fields.common import UINT31
from deployments.api.generation.call import template_options
from deployments.api.generation.messages import ChatBuilder, no_media
from deployments.api.generation.request import ChatMessage, ChatRequest
from deployments.api.generation.sampling import take_sampling
from deployments.api.generation.tenancy import take_queue
from deployments.api.http.errors import invalid, wrong_type
from deployments.api.options import ApiOptions
from deployments.api.output.constraints import (
    RequestedGrammar,
    only_constraint,
    schema_constraint,
    take_structured_outputs,
)
from deployments.api.output.request import (
    RequestedTool,
    RequestedTools,
    ToolChoice,
    add_tool,
    check_tool_count,
    named_tool,
    read_choice,
    requested_tools,
)

# A client's accounting puts a hash of each request at the very front of its system prompt, where
# it would keep every prefix from being found again.
_ACCOUNTING = "x-anthropic-billing-header"
_MOST_NAMED = 32

Block = Mapping[str, Any]


def messages_request(
    body: Mapping[str, Any], options: ApiOptions, *, counts: bool = False
) -> ChatRequest:
    """Read the body of a request to /v1/messages. Raises ApiError 400 naming the field.

    Unknown blocks are left out and named in x-ignored-fields.

    counts: whether the request only counts tokens; max_tokens is optional then
    """
    ignored: list[str] = []
    fields = MESSAGES.read(body, ignored, strict=options.strict)
    if fields.max_tokens is None and not counts:
        raise invalid("max_tokens is required", "max_tokens", "missing_field")
    sampling = take_sampling(fields, max_tokens=fields.max_tokens)
    if fields.stop_sequences:
        sampling = replace(sampling, values={**sampling.values, "stop": fields.stop_sequences})
    tools = _tools(fields, ignored)
    effort, budget = _thinking(fields.thinking)
    names = {"stop": "stop_sequences", "reasoning_effort": "thinking"}
    config = OutputConfig() if fields.output_config is None else fields.output_config
    if config.effort is not None and effort != "none":
        effort, names["reasoning_effort"] = config.effort, "output_config.effort"
    if budget is None:
        budget = fields.thinking_token_budget
    else:
        names["thinking_token_budget"] = name = "thinking.budget_tokens"
        take_int({name: budget}, name, -1, UINT31)
    user = _user(fields.metadata, ignored)
    reader = _Reader(ignored)
    reader.system(fields.system)
    messages = reader.messages(fields.messages)
    last = messages[-1]
    # The model goes on where an assistant's message ends.
    continues = last.role == "assistant" and not last.tool_calls and bool(last.text)
    return ChatRequest(
        model=fields.model,
        sampling=sampling,
        queue=take_queue(fields, user, fields.cache_salt),
        stream=bool(fields.stream),
        constraint=only_constraint(
            _format(config.format), take_structured_outputs(fields.structured_outputs)
        ),
        names=names,
        messages=messages,
        template=template_options(options, fields.chat_template_kwargs, continues=continues),
        tools=tools,
        effort=effort,
        thinking_budget=budget,
        ignored=tuple(ignored),
    )


def _user(metadata: Any, ignored: list[str]) -> str | None:
    """Return the user, by whom requests may take turns."""
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        user: str = metadata["user_id"]
        ignored.append("metadata.user_id")  # requests may take turns by it, and that is all
        return user
    if metadata:
        ignored.append("metadata")
    return None


def _tools(fields: Messages, ignored: list[str]) -> RequestedTools | None:
    listed = fields.tools or []
    if not isinstance(listed, list):
        raise wrong_type("tools", "a list")
    tools: list[RequestedTool] = []
    for i, tool in enumerate(listed):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong_type(where, "an object")
        schema = tool.get("input_schema")
        if schema is None:  # types of server tools, which clients send anyway
            if len(ignored) < _MOST_NAMED:
                ignored.append(where)
            continue
        if not isinstance(tool.get("name"), str):
            raise wrong_type(where, "an object with a function that has a name")
        function = {"name": tool["name"], "parameters": schema}
        function |= {name: tool[name] for name in ("description", "strict") & tool.keys()}
        add_tool(tools, function, where, schema_name="input_schema")
    check_tool_count(tools)
    choice = fields.tool_choice
    serial = choice is not None and take_bool(_object(choice), "disable_parallel_tool_use")
    return requested_tools(tools, _choice(choice, tools), parallel=not serial)


def _object(choice: Any) -> Mapping[str, Any]:
    return choice if isinstance(choice, dict) else {}


def _choice(choice: Any, tools: list[RequestedTool]) -> ToolChoice:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if choice is None:
        return read_choice(None, tools)
    if kind == "tool":
        return named_tool(choice.get("name"), [tool.name for tool in tools])
    if isinstance(kind, str) and kind in CHOICES:
        return read_choice(CHOICES[kind] if tools or kind == "any" else None, tools)
    raise invalid("tool_choice.type must be auto, any, tool or none", "tool_choice.type")


def _thinking(thinking: Any) -> tuple[str | None, Any]:
    """Return the effort that `thinking` asks for, and its budget, which is not yet checked."""
    if thinking is None:
        return None, None
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type must be enabled, disabled or adaptive", "thinking.type")
    if kind == "adaptive":
        return None, None
    if kind == "disabled":
        return "none", None
    return "medium", thinking.get("budget_tokens")


def _format(format: Any) -> RequestedGrammar | None:
    """Return the limit of the output that `output_config.format` asks for."""
    if format is None:
        return None
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        raise invalid("output_config.format must be of type json_schema", "output_config.format")
    where = "output_config.format.schema"
    if format.get("schema") is None:
        raise invalid(f"{where} is required", where, "missing_field")
    return schema_constraint(format["schema"], where)


class _Reader:
    """The conversion of messages with blocks into messages of a chat.

    A tool's result becomes a message of its own.
    """

    def __init__(self, ignored: list[str]) -> None:
        self._builder = ChatBuilder(ignored)
        self._ignored = ignored

    def _leave_out(self, place: str) -> None:
        if len(self._ignored) < _MOST_NAMED:
            self._ignored.append(place)

    def system(self, system: Any) -> None:
        """Read the field `system`."""
        texts = self._texts(system, "system") if system is not None else []
        lasting = [text for text in texts if text and not text.startswith(_ACCOUNTING)]
        if lasting:
            self._builder.add_message("system", "system", "\n\n".join(lasting))

    def _texts(self, value: Any, place: str) -> list[str]:
        """Return the texts of a string or of a list of text blocks. Raises ApiError 400."""
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise wrong_type(place, "a string or a list of blocks")
        texts = []
        for i, block in enumerate(value):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in DATA:
                raise no_media(f"{place}[{i}].type")
            if kind != "text":
                self._leave_out(f"{place}[{i}]")
            elif not isinstance(block.get("text"), str):
                raise wrong_type(f"{place}[{i}].text", "a string")
            else:
                texts.append(block["text"])
        return texts

    def messages(self, messages: Any) -> tuple[ChatMessage, ...]:
        """Read the field `messages`, and return all messages."""
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
                self._builder.add_message(role, place, content)
            elif not isinstance(content, list):
                raise wrong_type(place, "a string or a list of blocks")
            elif role == "system":
                self._builder.add_message(role, place, "\n\n".join(self._texts(content, place)))
            else:
                self._blocks(role, content, place)
        return self._builder.finish()

    def _blocks(self, role: str, blocks: list[Any], place: str) -> None:
        added = False  # whether the last message is of these blocks, and may get more
        if role == "assistant" and not blocks:  # an empty answer
            self._builder.add_message(role, place, "")
        known = ("text", "thinking", "tool_use") if role == "assistant" else ("text",)
        for i, block in enumerate(blocks):
            here = f"{place}[{i}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in DATA:
                raise no_media(f"{here}.type")
            if kind == "tool_result" and role == "user":
                added = False
                self._result(block, here)
                continue
            if kind not in known:
                self._leave_out(here)
                continue
            if not added:
                added = True
                self._builder.add_message(role, place)
            if kind == "tool_use":
                self._call(block, here)
                continue
            text = block.get(kind)
            if not isinstance(text, str):
                raise wrong_type(f"{here}.{kind}", "a string")
            last = self._builder.messages[-1]
            if kind == "thinking":
                self._builder.change(reasoning_content=(last.reasoning_content or "") + text)
            else:
                self._builder.change(content=(TextPart(last.text + text),))

    def _call(self, block: Block, here: str) -> None:
        for name in ("id", "name"):
            if not isinstance(block.get(name), str):
                raise wrong_type(f"{here}.{name}", "a string")
        last = self._builder.messages[-1]
        count = len(last.tool_calls) + 1
        self._builder.count_calls(1, count, f"{last.place}.tool_calls")
        arguments = block.get("input") or {}
        call = self._builder.call(block["id"], block["name"], arguments, f"{here}.input")
        self._builder.change(tool_calls=(*last.tool_calls, call))

    def _result(self, block: Block, here: str) -> None:
        content = block.get("content")
        texts = [] if content is None else self._texts(content, f"{here}.content")
        id = self._builder.check_answered(block.get("tool_use_id"), f"{here}.tool_use_id")
        self._builder.add_message("tool", here, "".join(texts))
        self._builder.change(tool_call_id=id)
        if block.get("is_error"):
            self._leave_out(f"{here}.is_error")
