"""RESPONSES and MESSAGES: the bodies of /v1/responses and /v1/messages.

Both are read into a chat, so fields of ours mean what they mean there.
"""

from collections.abc import Mapping
from dataclasses import replace

from deployments.api.body_fields import NOT_ALLOWED, WITHOUT_EFFECT
from deployments.api.bounds import MAX_MESSAGE_PARTS
from deployments.api.fields.generation import (
    ARGUMENTS,
    CHAT,
    TOOL_NAMED,
    Sampling,
)
from deployments.api.fields.schema import (
    BOOLEAN,
    NEVER,
    NOTHING,
    NULL,
    OBJECT,
    TEXT,
    Body,
    Schema,
    either,
    integer,
    list_of,
    one_of,
    optional,
    record,
)

MAX_ITEMS = 4096  # of one input
MAX_METADATA = 16  # pairs
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
ITEM_ROLES = ("user", "assistant", "system", "developer")
DATA = ("image", "document", "audio", "video")  # blocks that a model of text cannot read
BLOCK_ROLES = ("user", "assistant", "system")
# Of a client's tool_choice -> of a chat.
CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}

_OURS: Mapping[str, Schema] = {
    name: CHAT.taken[name]
    for name in (
        *Sampling.__struct_fields__,
        *("stop", "cache_salt", "chat_template_kwargs"),
        *("thinking_token_budget", "structured_outputs"),
    )
}
_AT_LEAST_ONE = integer(1, 2**31 - 1)
_NOT_ALLOWED: Mapping[str, Schema] = dict.fromkeys(sorted(NOT_ALLOWED), NEVER)


def _other(*kinds: str | None) -> Schema:
    """An object of another type: it is left out and named."""
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
            **{name: optional(one) for name, one in _OPTIONAL_TOOL.items()},
        },
        "required": ["name"],
    },
    record({"type": one_of("custom"), "name": TOOL_NAMED}, **_OPTIONAL_TOOL),
    _other("function", "custom"),
    {"not": {"type": "object"}},
)
_RESPONSES: Mapping[str, Schema] = {
    **_OURS,
    "model": TEXT,
    "input": either(TEXT, list_of(_ITEM, 0, MAX_ITEMS)),
    "instructions": TEXT,
    "stream": BOOLEAN,
    "stream_options": OBJECT,
    "max_output_tokens": _AT_LEAST_ONE,
    "tools": list_of(_TOOL),
    "tool_choice": either(TEXT, record({"type": one_of("function", "custom", "allowed_tools")})),
    "parallel_tool_calls": BOOLEAN,
    "text": record({}, format=OBJECT),
    "reasoning": record({}, effort=CHAT.taken["reasoning_effort"]),
    "include": list_of(TEXT),
    "previous_response_id": TEXT,
    "store": BOOLEAN,
    "truncation": one_of("auto", "disabled"),
    "metadata": {
        "type": "object",
        "additionalProperties": TEXT,
        "maxProperties": MAX_METADATA,
    },
    "top_logprobs": CHAT.taken["top_logprobs"],
    "background": BOOLEAN,
}
# Repeated in the answer, without effect otherwise.
RESPONSES_REPEATED = frozenset(
    {"user", "safety_identifier", "prompt_cache_key", "service_tier", "max_tool_calls"}
)
# Mean nothing here; a request that sends them is answered without them.
RESPONSES_IGNORED = frozenset(
    {"client_metadata", "prompt_cache_retention", "prompt_cache_options", "moderation"}
)
# name -> what to do instead.
RESPONSES_REFUSED = {
    "conversation": "send the items, or previous_response_id",
    "prompt": "send the prompt's text as instructions and input",
    "context_management": "leave items out of input",
}
RESPONSES = Body(
    _RESPONSES,
    ("input",),
    (RESPONSES_REPEATED | RESPONSES_IGNORED | WITHOUT_EFFECT) - _RESPONSES.keys() - {"user"},
    frozenset({"user"}),
    {**dict.fromkeys(RESPONSES_REFUSED, NULL), **_NOT_ALLOWED},
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
_MESSAGES: Mapping[str, Schema] = {
    **{name: schema for name, schema in _OURS.items() if name != "stop"},
    "model": TEXT,
    "messages": list_of(record({"role": one_of(*BLOCK_ROLES), "content": _TEXTS}), 1),
    "system": _TEXTS,
    "max_tokens": _AT_LEAST_ONE,
    "stop_sequences": either(CHAT.taken["stop"], NOTHING),
    "stream": BOOLEAN,
    "tools": either(list_of(_MESSAGES_TOOL), NOTHING),
    "tool_choice": record(
        {"type": one_of("tool", *CHOICES)}, name=TEXT, disable_parallel_tool_use=BOOLEAN
    ),
    "thinking": record({"type": one_of("enabled", "disabled", "adaptive")}),
    "output_config": record(
        {}, effort=CHAT.taken["reasoning_effort"], format=record({"type": one_of("json_schema")})
    ),
    "metadata": {},
}
MESSAGES_IGNORED = frozenset({"service_tier", "cache_control", "context_management", "betas"})
MESSAGES_REFUSED = {
    "container": "run tools beside the client",
    "mcp_servers": "give the servers' tools as tools",
}
MESSAGES = Body(
    _MESSAGES,
    ("messages", "max_tokens"),
    (MESSAGES_IGNORED | WITHOUT_EFFECT) - _MESSAGES.keys() - {"cache_control"},
    frozenset({"cache_control"}),
    {**dict.fromkeys(MESSAGES_REFUSED, NOTHING), **_NOT_ALLOWED},
)
# Of /v1/messages/count_tokens: nothing is said of the answer's length.
COUNTED = replace(MESSAGES, required=("messages",))
