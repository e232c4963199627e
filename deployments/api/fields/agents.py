"""RESPONSES and MESSAGES: the bodies of /v1/responses and /v1/messages.

Both are read into a chat, so fields of ours mean what they mean there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deployments.api.bounds import MAX_MESSAGE_PARTS
from deployments.api.fields.body import struct_body
from deployments.api.fields.common import UINT31
from deployments.api.fields.formats import STRUCTURED_OUTPUTS
from deployments.api.fields.generation import (
    COMPLETION,
    CacheSalt,
    ReasoningEffort,
    Sampling,
    Stop,
    ThinkingBudget,
    TopLogprobs,
    of_schema,
)
from deployments.api.fields.schema import (
    BOOLEAN,
    NEVER,
    NOTHING,
    NULL,
    TEXT,
    Schema,
    either,
    list_of,
    one_of,
    optional,
    record,
)
from deployments.api.fields.tools import ARGUMENTS, TOOL_NAMED

MAX_ITEMS = 4096  # of one input
MAX_METADATA = 16  # pairs
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
ITEM_ROLES = ("user", "assistant", "system", "developer")
DATA = ("image", "document", "audio", "video")  # blocks that a model of text cannot read
BLOCK_ROLES = ("user", "assistant", "system")
# A client's tool_choice -> that of a chat.
CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}

_Count = Annotated[int, Meta(ge=1, le=UINT31)]


def _not_supported(instead: Mapping[str, str]) -> Mapping[str, tuple[str, str]]:
    """Return the errors of fields that are refused. instead: what to do in the place of each."""
    return {
        name: (f"{name} is not supported; {advice}", "not_supported")
        for name, advice in instead.items()
    }


def _other(*kinds: str | None) -> Schema:
    """Return the schema of objects of other types, which are left out and listed as ignored."""
    return record({"type": {"not": one_of(*kinds)}})


_TEXT_PART = record({"type": one_of(*TEXT_PARTS), "text": TEXT})
_REFUSAL = record({"type": one_of("refusal"), "refusal": TEXT})
_PARTS = either(TEXT, list_of(either(_TEXT_PART, _REFUSAL), 0, MAX_MESSAGE_PARTS))
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ITEM = either(
    {
        "type": "object",
        "properties": {
            "type": one_of("message", "", None),
            "role": one_of(*ITEM_ROLES),
            "content": _PARTS,
        },
        "required": ["role", "content"],
    },
    record({"type": one_of("reasoning")}),
    record({"type": one_of(*_CALLS), "name": TEXT, "call_id": TEXT}),
    record({"type": one_of(*_OUTPUTS), "call_id": TEXT, "output": _PARTS}),
    _other("message", "reasoning", *_CALLS, *_OUTPUTS, "", None),
    {"type": "object", "properties": {"type": one_of("", None), "role": NEVER}},
)
_OPTIONAL_TOOL: Mapping[str, Schema] = {"description": TEXT, "strict": BOOLEAN}
_TOOL = either(
    {
        "type": "object",
        "properties": {
            "type": one_of("function"),
            "name": TOOL_NAMED,
            "parameters": optional(ARGUMENTS),
            **{name: optional(schema) for name, schema in _OPTIONAL_TOOL.items()},
        },
        "required": ["name"],
    },
    record({"type": one_of("custom"), "name": TOOL_NAMED}, **_OPTIONAL_TOOL),
    _other("function", "custom"),
    {"not": {"type": "object"}},
)
_CHOICE = either(TEXT, record({"type": one_of("function", "custom", "allowed_tools")}))


class ItemChat(Sampling, kw_only=True):
    """The fields that the bodies of Responses and Messages share."""

    cache_salt: CacheSalt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: ThinkingBudget | None = None
    structured_outputs: Annotated[Any, of_schema(STRUCTURED_OUTPUTS.schema)] = None


class TextOptions(Struct, kw_only=True, gc=False):
    """The field `text`."""

    format: dict[str, Any] | None = None


class ReasoningOptions(Struct, kw_only=True, gc=False):
    """The field `reasoning`."""

    effort: ReasoningEffort | None = None


Truncation = Literal["auto", "disabled"]


class Responses(ItemChat, kw_only=True):
    """The body of /v1/responses."""

    input: Annotated[Any, of_schema(either(TEXT, list_of(_ITEM, 0, MAX_ITEMS)))]
    stop: Stop = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: _Count | None = None
    tools: Annotated[Any, of_schema(list_of(_TOOL))] = None
    tool_choice: Annotated[Any, of_schema(_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: (
        Annotated[
            list[str],
            Meta(extra={"expected": "a list of strings", "code": "invalid_type", "whole": True}),
        ]
        | None
    ) = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: (
        Annotated[
            Truncation,
            Meta(extra={"expected": '"auto" or "disabled"', "code": "invalid_value"}),
        ]
        | None
    ) = None
    metadata: (
        Annotated[
            dict[str, str],
            Meta(
                max_length=MAX_METADATA,
                extra={
                    "expected": f"an object of at most {MAX_METADATA} strings",
                    "code": "invalid_type",
                },
            ),
        ]
        | None
    ) = None
    top_logprobs: TopLogprobs | None = None
    background: bool | None = None


# Repeated in the answer, without effect otherwise.
RESPONSES_REPEATED = frozenset(
    {"user", "safety_identifier", "prompt_cache_key", "service_tier", "max_tool_calls"}
)
# Fields without effect: a request that has them is answered as if it had not.
RESPONSES_IGNORED = frozenset(
    {"client_metadata", "prompt_cache_retention", "prompt_cache_options", "moderation"}
)
# name -> what to do instead.
RESPONSES_REFUSED = {
    "conversation": "send the items, or previous_response_id",
    "prompt": "send the prompt's text as instructions and input",
    "context_management": "leave items out of input",
}
RESPONSES = struct_body(
    Responses,
    ignored=RESPONSES_REPEATED | RESPONSES_IGNORED,
    refused=dict.fromkeys(RESPONSES_REFUSED, NULL),
    rejected=_not_supported(RESPONSES_REFUSED),
    generates=True,
)

_BLOCK = either(
    record({"type": one_of("text"), "text": TEXT}),
    {
        "not": {
            "type": "object",
            "properties": {"type": one_of("text", *DATA)},
            "required": ["type"],
        }
    },
)
_TEXTS = either(TEXT, list_of(_BLOCK))
_MESSAGES_TOOL = either(
    record({"name": TOOL_NAMED, "input_schema": ARGUMENTS}, **_OPTIONAL_TOOL),
    record({}, input_schema=NULL),
)
_TOOL_CHOICE = record(
    {"type": one_of("tool", *CHOICES)}, name=TEXT, disable_parallel_tool_use=BOOLEAN
)
_STOP = COMPLETION.taken["stop"]


class OutputConfig(Struct, kw_only=True, gc=False):
    """The field `output_config`."""

    effort: ReasoningEffort | None = None
    format: Annotated[Any, of_schema(record({"type": one_of("json_schema")}))] = None


class Messages(ItemChat, kw_only=True):
    """The body of /v1/messages; max_tokens is not required where tokens are only counted."""

    messages: Annotated[
        Any, of_schema(list_of(record({"role": one_of(*BLOCK_ROLES), "content": _TEXTS}), 1))
    ]
    system: Annotated[Any, of_schema(_TEXTS)] = None
    max_tokens: _Count | None = None
    stop_sequences: Annotated[Any, of_schema(either(_STOP, NOTHING))] = None
    stream: bool | None = None
    tools: Annotated[Any, of_schema(either(list_of(_MESSAGES_TOOL), NOTHING))] = None
    tool_choice: Annotated[Any, of_schema(_TOOL_CHOICE)] = None
    thinking: Annotated[
        Any, of_schema(record({"type": one_of("enabled", "disabled", "adaptive")}))
    ] = None
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
    refused=dict.fromkeys(MESSAGES_REFUSED, NOTHING),
    rejected=_not_supported(MESSAGES_REFUSED),
    generates=True,
    required=("max_tokens",),
)
# The body of /v1/messages/count_tokens, without fields about the answer's length.
COUNTED = replace(MESSAGES, required=("messages",))
