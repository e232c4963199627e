"""messages_request: converts the body of a request to /v1/messages into a ChatRequest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deployments.api.body_fields import name_hint
from deployments.api.fields import anthropic
from deployments.api.fields.chat import AnthropicImage, OtherMedia, TextPart
from deployments.api.generation.call import template_options
from deployments.api.generation.images import misplaced_image, no_media
from deployments.api.generation.messages import ChatBuilder
from deployments.api.generation.request import ChatMessage, ChatRequest, Content, ImagePart
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

# Claude Code begins its system prompt with a line that contains a hash of each request. The line is
# removed, as it would prevent every hit in the prefix cache.
_ACCOUNTING = "x-anthropic-billing-header"
_MOST_NAMED = 32
# thinking.type -> reasoning effort
_EFFORTS = {"enabled": "medium", "disabled": "none", "adaptive": None}


def messages_request(
    body: Mapping[str, Any], ignored: list[str], options: ApiOptions, *, counts: bool = False
) -> ChatRequest:
    """Convert the body of a request to /v1/messages into a ChatRequest. Raises ApiError 400 naming
    the field.

    Unknown blocks are left out.

    ignored: the list that names of ignored fields and blocks are added to
    counts: whether the request only counts tokens, so that max_tokens is optional
    """
    fields = anthropic.MESSAGES.read(body, ignored, strict=options.strict)
    if fields.max_tokens is None and not counts:
        raise invalid("max_tokens is required", "max_tokens", "missing_field")
    if not fields.messages:
        raise wrong_type("messages", "a list of at least one message")
    sampling = take_sampling(fields, max_tokens=fields.max_tokens)
    if fields.stop_sequences:
        sampling = replace(sampling, values={**sampling.values, "stop": fields.stop_sequences})
    tools = _tools(fields, ignored)
    effort, budget = None, fields.thinking_token_budget
    names = {"stop": "stop_sequences", "reasoning_effort": "thinking"}
    if (thinking := fields.thinking) is not None:
        effort = _EFFORTS[thinking.type]
        if thinking.type == "enabled" and thinking.budget_tokens is not None:
            budget = thinking.budget_tokens
            names["thinking_token_budget"] = "thinking.budget_tokens"
    config = anthropic.OutputConfig() if fields.output_config is None else fields.output_config
    if config.effort is not None and effort != "none":
        effort, names["reasoning_effort"] = config.effort, "output_config.effort"
    user = _user(fields.metadata, ignored)
    reader = _Reader(ignored)
    reader.system(fields.system)
    messages = reader.messages(fields.messages)
    last = messages[-1]
    # If the last message is the assistant's, the model continues it.
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
    )


def _user(metadata: Any, ignored: list[str]) -> str | None:
    """Return `metadata.user_id`, which may be the tenant for fair queueing; other metadata is
    ignored."""
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        user: str = metadata["user_id"]
        ignored.append("metadata.user_id")  # only used for fair queueing
        return user
    if metadata:
        ignored.append("metadata")
    return None


def _tools(fields: anthropic.Messages, ignored: list[str]) -> RequestedTools | None:
    tools: list[RequestedTool] = []
    for i, tool in enumerate(fields.tools or ()):
        where = f"tools[{i}]"
        name_hint(tool.sent, ignored)
        if (called := tool.known) is None:
            if len(ignored) < _MOST_NAMED:
                ignored.append(where)
            continue
        declared = {"name": called.name, "parameters": called.input_schema}
        if called.description is not None:
            declared["description"] = called.description
        if called.strict is not None:
            declared["strict"] = called.strict
        add_tool(tools, declared, where, schema_name="input_schema")
    check_tool_count(tools)
    choice = fields.tool_choice
    serial = choice is not None and choice.disable_parallel_tool_use
    return requested_tools(tools, _choice(choice, tools), parallel=not serial)


def _choice(choice: anthropic.ChoiceField | None, tools: list[RequestedTool]) -> ToolChoice:
    if choice is None:
        return read_choice(None, tools)
    if choice.type == "tool":
        return named_tool(choice.name, [tool.name for tool in tools])
    mode = "required" if choice.type == "any" else choice.type
    return read_choice(mode if tools or mode == "required" else None, tools)


def _format(format: anthropic.SchemaFormat | None) -> RequestedGrammar | None:
    """Return the grammar that `output_config.format` asks for."""
    if format is None:
        return None
    where = "output_config.format.schema"
    if format.schema is None:
        raise invalid(f"{where} is required", where, "missing_field")
    return schema_constraint(format.schema, where)


class _Reader:
    """The conversion of Anthropic's turns, made of blocks, into the messages of a chat.

    A tool's result becomes a separate message.
    """

    def __init__(self, ignored: list[str]) -> None:
        self._builder = ChatBuilder(ignored)
        self._ignored = ignored

    def _leave_out(self, place: str) -> None:
        if len(self._ignored) < _MOST_NAMED:
            self._ignored.append(place)

    def system(self, system: anthropic.Texts | None) -> None:
        """Add the texts of the field `system` as the system message."""
        texts = self._texts(system, "system")
        lasting = [text for text in texts if text and not text.startswith(_ACCOUNTING)]
        if lasting:
            self._builder.add_message("system", "system", "\n\n".join(lasting))

    def _texts(self, content: anthropic.Texts | None, place: str) -> list[str]:
        """Return the texts of a string or of a list of blocks. Raises ApiError 400."""
        if content is None or isinstance(content, str):
            return [] if content is None else [content]
        texts = []
        for i, block in enumerate(content):
            here = f"{place}[{i}]"
            name_hint(block.sent, self._ignored)
            match block.known:
                case anthropic.TextBlock(text):
                    texts.append(text)
                case AnthropicImage():
                    raise no_media(misplaced_image(here, "system"), f"{here}.type")
                case anthropic.MediaBlock():
                    raise no_media(f"{here}: system prompts are texts", f"{here}.type")
                case None:
                    self._leave_out(here)
        return texts

    def messages(self, turns: list[anthropic.Turn]) -> tuple[ChatMessage, ...]:
        """Convert the field `messages`; return all messages of the chat, including the one from
        `system`."""
        for i, turn in enumerate(turns):
            place = f"messages[{i}].content"
            if isinstance(turn, anthropic.SystemTurn):
                text = "\n\n".join(self._texts(turn.content, place))
                self._builder.add_message("system", place, text)
                continue
            role = "assistant" if isinstance(turn, anthropic.AssistantTurn) else "user"
            if isinstance(turn.content, str):
                self._builder.add_message(role, place, turn.content)
            else:
                self._blocks(role, turn.content, place)
        return self._builder.finish()

    def _blocks(
        self,
        role: str,
        blocks: Sequence[anthropic.UserBlock | anthropic.AssistantBlock],
        place: str,
    ) -> None:
        is_open = False  # whether the next block may be added to the last message
        if role == "assistant" and not blocks:  # an empty answer
            self._builder.add_message(role, place, "")
        for i, block in enumerate(blocks):
            here = f"{place}[{i}]"
            name_hint(block.sent, self._ignored)
            match block.known:
                case None:
                    self._leave_out(here)
                case anthropic.ToolResult() as result:
                    self._result(result, here)
                    is_open = False
                case content:
                    if not is_open:
                        self._builder.add_message(role, place)
                    is_open = True
                    if isinstance(content, anthropic.MediaBlock):
                        self._add_part(_other(block.sent, here))
                    else:
                        self._add(content, here)

    def _add(
        self,
        block: anthropic.TextBlock | anthropic.ThinkingBlock | anthropic.ToolUse | AnthropicImage,
        here: str,
    ) -> None:
        """Add a block's content to the last message. here: the block's path in the request."""
        last = self._builder.messages[-1]
        match block:
            case anthropic.TextBlock(text):
                self._builder.change(content=_with_text(last.content or (), text))
            case AnthropicImage():
                self._add_part(_image(block, here))
            case anthropic.ThinkingBlock(thought):
                self._builder.change(reasoning_content=(last.reasoning_content or "") + thought)
            case anthropic.ToolUse(id, name, input):
                self._builder.count_calls(1, len(last.tool_calls) + 1, f"{last.place}.tool_calls")
                call = self._builder.call(id, name, input or {}, f"{here}.input")
                self._builder.change(tool_calls=(*last.tool_calls, call))

    def _add_part(self, part: ImagePart) -> None:
        """Add a part to the last message."""
        content = self._builder.messages[-1].content or ()
        self._builder.change(content=(*content, part))

    def _result(self, result: anthropic.ToolResult, here: str) -> None:
        content = self._result_content(result.content, f"{here}.content")
        id = self._builder.check_answered(result.tool_use_id, f"{here}.tool_use_id")
        self._builder.add_message("tool", here)
        self._builder.change(content=content or (TextPart(""),), tool_call_id=id)
        if result.is_error:
            self._leave_out(f"{here}.is_error")

    def _result_content(self, result: anthropic.ResultContent | None, place: str) -> Content:
        """Return the texts and images of a tool's result. Raises ApiError 400."""
        if result is None or isinstance(result, str):
            return (TextPart(result or ""),)
        content: Content = ()
        for i, block in enumerate(result):
            here = f"{place}[{i}]"
            name_hint(block.sent, self._ignored)
            match block.known:
                case anthropic.TextBlock(text):
                    content = _with_text(content, text)
                case AnthropicImage() as image:
                    content = (*content, _image(image, here))
                case anthropic.MediaBlock():
                    content = (*content, _other(block.sent, here))
                case None:
                    self._leave_out(here)
        return content


def _image(image: AnthropicImage, here: str) -> ImagePart:
    return ImagePart(image, here, f"{here}.type")


def _other(sent: Any, here: str) -> ImagePart:
    return ImagePart(OtherMedia(sent["type"]), here, f"{here}.type")


def _with_text(content: Content, text: str) -> Content:
    """Return the content with a text appended: to the last part if that is a text, else as a new
    part."""
    last = content[-1] if content else None
    if isinstance(last, TextPart):
        return (*content[:-1], TextPart(last.text + text))
    return (*content, TextPart(text))
