"""RESPONSES: the body of /v1/responses, with the items of its conversation."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from deployments.api.fields.body import (
    Fault,
    Known,
    Typed,
    expects,
    of_schema,
    schema_of,
    struct_body,
    words,
)
from deployments.api.fields.chat import ItemContent, Text
from deployments.api.fields.generation import (
    Count,
    ItemChat,
    ReasoningEffort,
    Stop,
    TopLogprobs,
    not_supported,
)
from deployments.api.fields.schema import NEVER, NULL, TEXT, Schema, either, one_of, record
from deployments.api.fields.tools import ARGUMENTS, INPUT, TOOL_NAMED, TextInput, ToolGrammar

MAX_ITEMS = 4096  # items in one input
MAX_METADATA = 16  # pairs


def _other(*kinds: str | None) -> Schema:
    """Return the schema of objects whose type is not in `kinds`; such objects are ignored."""
    return record({"type": {"not": one_of(*kinds)}})


ItemRole = Literal["user", "assistant", "system", "developer"]


class MessageItem(Struct, gc=False):
    """An item that is a message."""

    role: Annotated[ItemRole, words(ItemRole, "one of ", ", ", code="invalid_value")]
    content: ItemContent


class ReasoningItem(Struct, gc=False):
    """An item with the model's reasoning, as lists of text parts."""

    content: Any = None
    summary: Any = None


class _CallItem(Struct, gc=False):
    name: Text
    call_id: Text
    namespace: Any = None


class FunctionCallItem(_CallItem):
    """A call of a function."""

    arguments: Any = None


class CustomCallItem(_CallItem):
    """A call of a tool that takes a text."""

    input: Any = None


class OutputItem(Struct, gc=False):
    """The result of a call in an earlier item."""

    output: ItemContent
    call_id: Any = None


class Item(Known[MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | OutputItem]):
    """An item of a conversation. The `type` of a message may be left out."""

    KINDS: ClassVar = {
        "message": MessageItem,
        "reasoning": ReasoningItem,
        "function_call": FunctionCallItem,
        "custom_tool_call": CustomCallItem,
        "function_call_output": OutputItem,
        "custom_tool_call_output": OutputItem,
    }

    @classmethod
    def kind_of(cls, value: Any) -> type[Struct] | None:
        if not isinstance(value, dict):
            raise Fault("must be an object")
        if not value.get("type") and "role" in value:
            return MessageItem
        return super().kind_of(value)

    @classmethod
    def others(cls) -> Schema:
        """Return the schema of messages without a type, and of ignored objects."""
        message = schema_of(MessageItem)
        message["properties"]["type"] = one_of("", None)
        no_message = {"type": "object", "properties": {"type": one_of("", None), "role": NEVER}}
        return either(message, no_message, _other(*cls.KINDS, "", None))


ITEMS: Typed[list[Item]] = Typed(list[Item])


class _Tool(Struct, kw_only=True, gc=False):
    name: Annotated[Text, of_schema(TOOL_NAMED)]
    description: str | None = None
    strict: bool | None = None


class FunctionTool(_Tool, kw_only=True):
    """A function that the client runs."""

    parameters: Annotated[Any, of_schema(ARGUMENTS)] = None


class GrammarText(ToolGrammar, tag="grammar", tag_field="type"):
    """The input of a custom tool whose text follows a grammar."""


class CustomTool(_Tool, kw_only=True):
    """A tool of the client that takes a text."""

    format: Annotated[TextInput | GrammarText, INPUT] | None = None


class InnerTool(Known[FunctionTool | CustomTool]):
    """A tool in a namespace. Tools of other types are left out."""

    KINDS: ClassVar = {"function": FunctionTool, "custom": CustomTool}
    DEFAULT = "function"


class Namespace(Struct, gc=False):
    """A namespace of tools. Its name becomes a prefix of the tools' names in the chat."""

    name: Annotated[str, Meta(min_length=1), expects("a string")]
    tools: list[InnerTool]


class ItemTool(Known[FunctionTool | CustomTool | Namespace]):
    """A tool, or a namespace of tools. Tools of other types are left out."""

    KINDS: ClassVar = {**InnerTool.KINDS, "namespace": Namespace}
    DEFAULT = "function"

    @classmethod
    def kind_of(cls, value: Any) -> type[Struct] | None:
        kind = super().kind_of(value)
        return None if kind is Namespace and not isinstance(value.get("tools"), list) else kind


_CHOICE = either(TEXT, record({"type": one_of("function", "custom", "allowed_tools")}))


class TextOptions(Struct, kw_only=True, gc=False):
    """The field `text` of a request, which sets the format of the answer."""

    format: dict[str, Any] | None = None


class ReasoningOptions(Struct, kw_only=True, gc=False):
    """The field `reasoning` of a request, which sets the reasoning effort."""

    effort: ReasoningEffort | None = None


Truncation = Literal["auto", "disabled"]
_TRUNCATION = expects('"auto" or "disabled"', "invalid_value")
_STRINGS = expects("a list of strings", whole=True)
_PAIRS = expects(f"an object of at most {MAX_METADATA} strings")


class Responses(ItemChat, kw_only=True):
    """The body of /v1/responses."""

    input: Annotated[
        str | Annotated[list[Item], of_schema({"maxItems": MAX_ITEMS})],
        Meta(extra={"expected": "a string or a list of items"}),
    ]
    stop: Stop = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Count | None = None
    tools: list[ItemTool] | None = None
    tool_choice: Annotated[Any, of_schema(_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], _STRINGS] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Annotated[Truncation, _TRUNCATION] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA), _PAIRS] | None = None
    top_logprobs: TopLogprobs | None = None
    background: bool | None = None


# Fields whose only effect is that the answer repeats them.
RESPONSES_REPEATED = frozenset(
    {"user", "safety_identifier", "prompt_cache_key", "service_tier", "max_tool_calls"}
)
# Fields without effect.
RESPONSES_IGNORED = frozenset(
    {"client_metadata", "prompt_cache_retention", "prompt_cache_options", "moderation"}
)
# refused field -> advice in its error
RESPONSES_REFUSED = {
    "conversation": "send the items, or previous_response_id",
    "prompt": "send the prompt's text as instructions and input",
    "context_management": "leave items out of input",
}
RESPONSES = struct_body(
    Responses,
    ignored=RESPONSES_REPEATED | RESPONSES_IGNORED,
    rejected=not_supported(RESPONSES_REFUSED),
    accepted=dict.fromkeys(RESPONSES_REFUSED, NULL),
    generates=True,
)
