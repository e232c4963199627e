"""CHAT and COMPLETION: the bodies of /v1/chat/completions and /v1/completions."""

from collections.abc import Mapping

from deployments.api.bounds import (
    ALIASES,
    DEADLINE,
    EFFORTS,
    MAX_DEADLINE,
    MAX_MESSAGE_CALLS,
    MAX_MESSAGE_PARTS,
    MAX_MESSAGES,
    MAX_SALT_BYTES,
    MAX_TAGS,
    MAX_TOOLS,
    ROLES,
    SCHEMA_NAME,
    TOOL_NAME,
)
from deployments.api.caller import LEAST_PRIORITY
from deployments.api.fields.schema import (
    BOOLEAN,
    FILLED,
    NOTHING,
    NULL,
    OBJECT,
    TEXT,
    TOKEN,
    Schema,
    either,
    integer,
    list_of,
    number,
    one_of,
    openai_body,
    record,
    text,
)
from engine.sampling_params import (
    ABOVE_LEAST,
    BIAS_RANGE,
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
)
from engine.structured.grammar import MAX_BYTES, MAX_CHOICES


def _range(name: str) -> Schema:
    low, high = RANGES[name]
    if isinstance(low, int):
        return integer(low, high)
    return number(low, high, above=name in ABOVE_LEAST)


# Other servers' names -> the field that says the same.
SAME_FIELDS: Mapping[str, str] = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}
# Fields of both routes that change what is generated or returned.
SAMPLING: Mapping[str, Schema] = {
    **{name: _range(name) for name in RANGES},
    **{name: _range(own) for name, own in SAME_FIELDS.items()},
    "top_k": integer(-1, RANGES["top_k"][1]),  # -1 is how other servers spell "all"
    "stop": either(_STOP, list_of(_STOP, 0, MAX_STOP_STRINGS), one_of("")),
    "stop_token_ids": list_of(TOKEN, 0, MAX_STOP_TOKEN_IDS),
    "include_stop_str_in_output": BOOLEAN,
    "ignore_eos": BOOLEAN,
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": number(*BIAS_RANGE),
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "skip_special_tokens": BOOLEAN,
    "allowed_token_ids": list_of(TOKEN, 0, MAX_ALLOWED_IDS),
    "bad_words": list_of(
        {"type": "string", "pattern": r"\S", "maxLength": MAX_STOP_BYTES}, 0, MAX_BAD_WORDS
    ),
    "bad_words_ids": list_of(list_of(TOKEN, 1, MAX_BAD_WORD_IDS), 0, MAX_BAD_WORDS),
    "suppress_tokens": list_of(TOKEN, 0, MAX_BAD_WORDS),
}

_JSON_SCHEMA: Schema = either(OBJECT, BOOLEAN, text(MAX_BYTES))
_GRAMMAR: Schema = {"type": "string", "maxLength": MAX_BYTES, "pattern": r"\S"}
_GRAMMARS: Mapping[str, Schema] = {
    "json": _JSON_SCHEMA,
    "regex": _GRAMMAR,
    "choice": list_of(FILLED, 1, MAX_CHOICES),
    "grammar": _GRAMMAR,
}
_NAMED_SCHEMA = record(
    {
        "name": {"type": "string", "pattern": f"^{SCHEMA_NAME.pattern}$"},
        "schema": _JSON_SCHEMA,
    },
    strict=BOOLEAN,
)
_TAGS: Mapping[str, Schema] = {
    "structures": list_of(record({"begin": FILLED}, schema=_JSON_SCHEMA, end=TEXT), 1, MAX_TAGS),
    "triggers": list_of(FILLED, 1, MAX_TAGS),
}
RESPONSE_FORMAT: Schema = either(
    record({"type": one_of("text")}),
    record({"type": one_of("json_object")}, schema=_JSON_SCHEMA),
    record({"type": one_of("json_schema"), "json_schema": _NAMED_SCHEMA}),
    record({"type": one_of("structural_tag"), **_TAGS}),
)
STRUCTURED_OUTPUTS: Schema = either(
    *(record({kind: schema}, structural_tag=NULL) for kind, schema in _GRAMMARS.items()),
    record({"json_object": one_of(True)}, structural_tag=NULL),
    record({"structural_tag": either(record(_TAGS), text(MAX_BYTES))}),
)
STREAM_OPTIONS = record({}, include_usage=BOOLEAN, continuous_usage_stats=BOOLEAN)

TOOL_NAMED: Schema = {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}
ARGUMENTS: Schema = {"type": "object", "properties": {"type": one_of("object")}}
_TEXT_FORMAT = either(
    record({"type": one_of("text")}),
    record(
        {
            "type": one_of("grammar"),
            "grammar": record(
                {"syntax": one_of("lark", "regex"), "definition": {**TEXT, "pattern": r"\S"}}
            ),
        }
    ),
)
TOOLS = list_of(
    either(
        {
            "type": "object",
            "properties": {
                "type": one_of("function"),
                "function": record(
                    {"name": TOOL_NAMED},
                    description=TEXT,
                    parameters=ARGUMENTS,
                    strict=BOOLEAN,
                ),
            },
            "required": ["function"],
        },
        record(
            {
                "type": one_of("custom"),
                "custom": record(
                    {"name": TOOL_NAMED}, description=TEXT, format=_TEXT_FORMAT, strict=BOOLEAN
                ),
            }
        ),
    ),
    0,
    MAX_TOOLS,
)
_NAMED = either(
    {
        "type": "object",
        "properties": {"type": one_of("function"), "function": record({"name": TEXT})},
        "required": ["function"],
    },
    record({"type": one_of("custom"), "custom": record({"name": TEXT})}),
)
_ALLOWED = record({"mode": one_of("auto", "required"), "tools": list_of(_NAMED, 1)})
_TOOL_CHOICE = either(
    one_of("none", "auto", "required"),
    _NAMED,
    record({"type": one_of("allowed_tools"), "allowed_tools": _ALLOWED}),
)

_PART = either(
    record({"type": one_of("text"), "text": TEXT}),
    record({"type": one_of("refusal"), "refusal": TEXT}),
)
_CONTENT = either(TEXT, list_of(_PART, 1, MAX_MESSAGE_PARTS))
_CALL = either(
    {
        "type": "object",
        "properties": {
            "id": TEXT,
            "type": one_of("function"),
            "function": record({"name": TEXT}, arguments={}),
        },
        "required": ["id", "function"],
    },
    record({"id": TEXT, "type": one_of("custom"), "custom": record({"name": TEXT})}),
)
_SAID = {"name": TEXT, "reasoning_content": TEXT, "reasoning": TEXT}
_CALLING: Schema = record(
    {
        "role": one_of("assistant"),
        "tool_calls": list_of(_CALL, 1, MAX_MESSAGE_CALLS),
    },
    content=_CONTENT,
    **_SAID,
)
CHAT_MESSAGES = list_of(
    either(
        record(
            {
                "role": one_of(*(role for role in ROLES if role not in ("assistant", "tool"))),
                "content": _CONTENT,
            },
            **_SAID,
        ),
        record(
            {"role": one_of("assistant"), "content": _CONTENT},
            tool_calls=list_of(_CALL, 0, MAX_MESSAGE_CALLS),
            **_SAID,
        ),
        _CALLING,
        record({"role": one_of("tool"), "content": _CONTENT, "tool_call_id": TEXT}, **_SAID),
    ),
    1,
    MAX_MESSAGES,
)
TEMPLATE: Mapping[str, Schema] = {
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "chat_template_kwargs": OBJECT,
}
SIDES = ("left", "right")  # of a text that is cut
TRUNCATION: Mapping[str, Schema] = {
    "truncate_prompt_tokens": either(one_of(-1), integer(1, 2**31 - 1)),
    "truncation_side": one_of(*SIDES),
}
# Of every request that is queued.
QUEUED: Mapping[str, Schema] = {
    "priority": integer(LEAST_PRIORITY, 2**31 - 1),
    DEADLINE: number(0, MAX_DEADLINE, above=True),
}
CACHE_SALT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_SALT_BYTES}
THINKING_BUDGET = integer(-1, 2**31 - 1)
REASONING_EFFORT = one_of(*EFFORTS)
TOP_LOGPROBS = integer(0, MAX_LOGPROBS)

_COMMON: Mapping[str, Schema] = {
    **SAMPLING,
    **QUEUED,
    "model": TEXT,
    "stream": BOOLEAN,
    "stream_options": STREAM_OPTIONS,
    "cache_salt": CACHE_SALT,
    "return_token_ids": BOOLEAN,
    "return_tokens_as_token_ids": BOOLEAN,
    **TRUNCATION,
    "best_of": integer(1, MAX_N),
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
    **{name: _GRAMMARS[kind] for name, kind in ALIASES.items()},
    "grammar": either(_GRAMMAR, one_of("")),
}
_OLD_TOOLS: Mapping[str, Schema] = {
    "functions": NOTHING,
    "function_call": one_of(*NOTHING["enum"], "none", "auto"),
}

_CHAT: Mapping[str, Schema] = {
    **_COMMON,
    "messages": CHAT_MESSAGES,
    "max_tokens": integer(1, RANGES["max_tokens"][1]),
    "max_completion_tokens": integer(1, RANGES["max_tokens"][1]),
    "max_new_tokens": integer(1, RANGES["max_tokens"][1]),
    "include_reasoning": BOOLEAN,
    "separate_reasoning": BOOLEAN,
    "logprobs": BOOLEAN,
    "top_logprobs": TOP_LOGPROBS,
    "tools": TOOLS,
    "tool_choice": _TOOL_CHOICE,
    "parallel_tool_calls": BOOLEAN,
    "reasoning_effort": REASONING_EFFORT,
    "thinking_token_budget": THINKING_BUDGET,
    "modalities": one_of(["text"]),
    **TEMPLATE,
}
CHAT = openai_body(_CHAT, ("messages",), _OLD_TOOLS)
_COMPLETION: Mapping[str, Schema] = {
    **_COMMON,
    "prompt": either(TEXT, list_of(TOKEN, 1), list_of(TEXT, 1), list_of(list_of(TOKEN, 1), 1)),
    "suffix": TEXT,
    "echo": BOOLEAN,
    "max_completion_tokens": _range("max_tokens"),
    "logprobs": either(_range("logprobs"), one_of(False)),
    "add_special_tokens": BOOLEAN,
}
COMPLETION = openai_body(
    _COMPLETION,
    ("prompt",),
    {"tools": NOTHING, **_OLD_TOOLS},
)
