"""MESSAGES: the body of /v1/messages, with the content blocks of its messages."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from deployments.api.fields.body import (
    Fault,
    Known,
    expects,
    of_schema,
    schema_of,
    struct_body,
    told_of,
)
from deployments.api.fields.chat import AnthropicImage, MisplacedBlock, Text
from deployments.api.fields.generation import (
    COMPLETION,
    Count,
    ItemChat,
    ReasoningEffort,
    ThinkingBudget,
    not_supported,
)
from deployments.api.fields.schema import NEVER, NOTHING, NULL, TEXT, Schema, either, record
from deployments.api.fields.tools import ARGUMENTS, TOOL_NAMED

_NO_BLOCKS = expects("a string or a list of blocks")


class TextBlock(Struct, gc=False):
    """A block of text."""

    text: Text


class MediaBlock(Struct, gc=False):
    """A block of media that no model accepts: a document, audio or a video."""

    source: Annotated[Any, of_schema(NEVER)] = None


_TEXT_BLOCKS: Mapping[str, type[Struct]] = {
    "text": TextBlock,
    "image": MisplacedBlock,
    **dict.fromkeys(("document", "audio", "video"), MediaBlock),
}
_SEEN_BLOCKS: Mapping[str, type[Struct]] = {**_TEXT_BLOCKS, "image": AnthropicImage}


class TextOnlyBlock(Known[TextBlock | AnthropicImage | MediaBlock]):
    """A block where only text is allowed; blocks of other types are ignored or refused."""

    KINDS = _TEXT_BLOCKS


Texts = Annotated[str | list[TextOnlyBlock], _NO_BLOCKS]


class ResultBlock(TextOnlyBlock):
    """A block of a tool's result."""

    KINDS = _SEEN_BLOCKS


ResultContent = Annotated[str | list[ResultBlock], _NO_BLOCKS]


class ThinkingBlock(Struct, gc=False):
    """A block of the model's thinking."""

    thinking: Text


class ToolUse(Struct, gc=False):
    """A call of a tool."""

    id: Text
    name: Text
    input: Any = None


class ToolResult(Struct, gc=False):
    """The result of a call in an earlier message."""

    tool_use_id: Any = None
    content: ResultContent | None = None
    is_error: Any = None


class UserBlock(Known[TextBlock | ToolResult | AnthropicImage | MediaBlock]):
    """A block of a user's message."""

    KINDS: ClassVar = {**_SEEN_BLOCKS, "tool_result": ToolResult}


class AssistantBlock(Known[TextBlock | ThinkingBlock | ToolUse | AnthropicImage | MediaBlock]):
    """A block of an assistant's message."""

    KINDS: ClassVar = {**_TEXT_BLOCKS, "thinking": ThinkingBlock, "tool_use": ToolUse}


class SystemTurn(Struct, tag="system", tag_field="role", gc=False):
    """A system message between the other messages."""

    content: Texts


class UserTurn(Struct, tag="user", tag_field="role", gc=False):
    """A message of the user, with the results of calls."""

    content: Annotated[str | list[UserBlock], _NO_BLOCKS]


class AssistantTurn(Struct, tag="assistant", tag_field="role", gc=False):
    """An answer of the model."""

    content: Annotated[str | list[AssistantBlock], _NO_BLOCKS]


Turn = Annotated[
    SystemTurn | UserTurn | AssistantTurn, told_of("role", "user, assistant or system")
]


_NO_TOOL = expects("an object with a function that has a name", up=1)


class CalledTool(Struct, gc=False):
    """A tool that the client runs."""

    name: Annotated[str, of_schema(TOOL_NAMED), _NO_TOOL]
    input_schema: Annotated[Any, of_schema(ARGUMENTS)]
    description: str | None = None
    strict: bool | None = None


class MessagesTool(Known[CalledTool]):
    """A tool. Tools without input_schema, which Anthropic's servers would run, are ignored."""

    KINDS: ClassVar = {"": CalledTool}

    @classmethod
    def kind_of(cls, value: Any) -> type[Struct] | None:
        if not isinstance(value, dict):
            raise Fault("must be an object")
        return None if value.get("input_schema") is None else CalledTool

    @classmethod
    def schema(cls) -> Schema:
        return either(schema_of(CalledTool), record({}, input_schema=NULL))


_STOP = COMPLETION.taken["stop"]
_CHOICES = "auto, any, tool or none"


class ChoiceField(Struct, gc=False):
    """The choice of tools that may be called.

    name: the tool to call, for the type `tool`.
    """

    type: Annotated[Literal["auto", "any", "tool", "none"], expects(_CHOICES, "invalid_value")]
    name: Annotated[Any, of_schema(TEXT)] = None
    disable_parallel_tool_use: bool | None = None


_THOUGHTS = "enabled, disabled or adaptive"


class Thinking(Struct, gc=False):
    """Whether the model reasons. budget_tokens: maximum reasoning tokens, if `enabled`."""

    type: Annotated[Literal["enabled", "disabled", "adaptive"], expects(_THOUGHTS, "invalid_value")]
    budget_tokens: ThinkingBudget | None = None


class _OfSchema(Struct, gc=False):
    type: Literal["json_schema"]
    schema: Any = None


SchemaFormat = Annotated[_OfSchema, expects("of type json_schema", "invalid_value", whole=True)]


class OutputConfig(Struct, kw_only=True, gc=False):
    """The field `output_config`."""

    effort: ReasoningEffort | None = None
    format: SchemaFormat | None = None


class Messages(ItemChat, kw_only=True):
    """The body of /v1/messages; max_tokens is not required where tokens are only counted."""

    messages: Annotated[
        list[Turn],
        of_schema({"minItems": 1}),
        Meta(extra={"expected": "a list of at least one message"}),
    ]
    system: Texts | None = None
    max_tokens: Count | None = None
    stop_sequences: Annotated[Any, of_schema(either(_STOP, NOTHING))] = None
    stream: bool | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: Annotated[ChoiceField, told_of("type", _CHOICES)] | None = None
    thinking: Annotated[Thinking, told_of("type", _THOUGHTS)] | None = None
    output_config: OutputConfig | None = None
    metadata: Any = None


MESSAGES_IGNORED = frozenset({"service_tier", "cache_control", "context_management", "betas"})
MESSAGES_REFUSED = {
    "container": "run tools beside the client",
    "mcp_servers": "give the servers' tools as tools",
}
MESSAGES = struct_body(
    Messages,
    ignored=MESSAGES_IGNORED,
    rejected=not_supported(MESSAGES_REFUSED),
    generates=True,
    required=("max_tokens",),
)
# The body of /v1/messages/count_tokens, which has no fields about the answer's length.
COUNTED = replace(MESSAGES, required=("messages",))
