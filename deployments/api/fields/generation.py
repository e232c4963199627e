"""CHAT and COMPLETION: the bodies of /v1/chat/completions and /v1/completions."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct

from deployments.api.bounds import (
    MAX_MESSAGE_PARTS,
    MAX_SALT_BYTES,
    MAX_TAGS,
    MAX_TOOLS,
    SCHEMA_NAME,
    TOOL_NAME,
    Effort,
)
from deployments.api.fields.body import struct_body, words
from deployments.api.fields.chat import MESSAGES
from deployments.api.fields.common import UINT31, Queued, Side, TokenCut
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
    list_of,
    number,
    one_of,
    record,
    text,
)
from engine.errors import InvalidRequest
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
    SamplingParams,
)
from engine.structured.grammar import MAX_BYTES, MAX_CHOICES

_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}


def _fault_of(name: str, value: Any) -> InvalidRequest | None:
    """Return what SamplingParams says of a field's value; None if it takes the value."""
    try:
        SamplingParams(**{name: value})
    except InvalidRequest as error:
        return error
    return None


def sampled(name: str, **limits: Any) -> Meta:
    """Return the range of a field of SamplingParams, whose words its errors have."""
    extra = {"fault": partial(_fault_of, name)}
    if name not in RANGES:
        return Meta(**limits, extra=extra)
    low, high = RANGES[name]
    if name in ABOVE_LEAST:
        return Meta(gt=low, le=high, extra=extra)
    return Meta(**{"ge": low, "le": high, **limits}, extra=extra)


def of_schema(schema: Schema) -> Meta:
    """Return the schema of a field that is checked where it is read."""
    return Meta(extra_json_schema=schema)


_TokenId = Annotated[int, Meta(ge=0)]
_UInt31 = Annotated[int, Meta(ge=0, le=UINT31)]
Stop = Annotated[Any, of_schema(either(_STOP, list_of(_STOP, 0, MAX_STOP_STRINGS), one_of("")))]

StopTokenIds = (
    Annotated[list[_TokenId], sampled("stop_token_ids", max_length=MAX_STOP_TOKEN_IDS)] | None
)


class Sampling(Queued, kw_only=True):
    """The fields of all generations that change how tokens are chosen."""

    min_tokens: Annotated[int, sampled("min_tokens")] | None = None
    min_new_tokens: _UInt31 | None = None
    temperature: Annotated[float, sampled("temperature")] | None = None
    top_p: Annotated[float, sampled("top_p")] | None = None
    # -1 is how other servers spell "all".
    top_k: Annotated[int, sampled("top_k", ge=-1)] | None = None
    min_p: Annotated[float, sampled("min_p")] | None = None
    repetition_penalty: Annotated[float, sampled("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, sampled("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, sampled("frequency_penalty")] | None = None
    seed: Annotated[int, sampled("seed")] | None = None
    stop_token_ids: StopTokenIds = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[
        Any,
        of_schema(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "additionalProperties": number(*BIAS_RANGE),
                "maxProperties": MAX_LOGIT_BIAS,
            }
        ),
    ] = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: (
        Annotated[list[_TokenId], sampled("allowed_token_ids", max_length=MAX_ALLOWED_IDS)] | None
    ) = None
    bad_words: Annotated[
        Any,
        of_schema(
            list_of(
                {"type": "string", "pattern": r"\S", "maxLength": MAX_STOP_BYTES}, 0, MAX_BAD_WORDS
            )
        ),
    ] = None
    bad_words_ids: (
        Annotated[
            list[Annotated[list[_TokenId], Meta(min_length=1, max_length=MAX_BAD_WORD_IDS)]],
            sampled("bad_words_ids", max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = None
    suppress_tokens: Annotated[Any, of_schema(list_of(TOKEN, 0, MAX_BAD_WORDS))] = None


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

PREDICTION: Schema = record(
    {
        "type": one_of("content"),
        "content": either(
            TEXT, list_of(record({"type": one_of("text"), "text": TEXT}), 1, MAX_MESSAGE_PARTS)
        ),
    }
)


class StreamOptions(Struct, kw_only=True, gc=False):
    """The field `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_BYTES)]
ThinkingBudget = Annotated[int, Meta(ge=-1, le=UINT31)]  # -1: none
ReasoningEffort = Annotated[Effort, words(Effort, "one of ", ", ", code="invalid_value")]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class Generation(Sampling, kw_only=True):
    """The fields that /v1/chat/completions and /v1/completions have in common."""

    n: Annotated[int, sampled("n")] | None = None
    max_tokens: Annotated[int, sampled("max_tokens")] | None = None
    max_new_tokens: _UInt31 | None = None
    max_completion_tokens: Annotated[int, sampled("max_tokens")] | None = None
    prompt_logprobs: Annotated[int, sampled("prompt_logprobs")] | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    speculation: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: TokenCut | None = None
    truncation_side: Annotated[Side, words(Side)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    response_format: Annotated[Any, of_schema(RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[Any, of_schema(STRUCTURED_OUTPUTS)] = None
    guided_json: Annotated[Any, of_schema(_GRAMMARS["json"])] = None
    guided_regex: Annotated[Any, of_schema(_GRAMMARS["regex"])] = None
    guided_choice: Annotated[Any, of_schema(_GRAMMARS["choice"])] = None
    guided_grammar: Annotated[Any, of_schema(_GRAMMARS["grammar"])] = None
    regex: Annotated[Any, of_schema(_GRAMMARS["regex"])] = None
    ebnf: Annotated[Any, of_schema(_GRAMMARS["grammar"])] = None
    grammar: Annotated[Any, of_schema(either(_GRAMMAR, one_of("")))] = None
    json_schema: Annotated[Any, of_schema(_GRAMMARS["json"])] = None


class Chat(Generation, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[Any, of_schema(MESSAGES.schema)]
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[Any, of_schema(TOOLS)] = None
    tool_choice: Annotated[Any, of_schema(_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: ThinkingBudget | None = None
    modalities: Annotated[Any, of_schema(one_of(["text"]))] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Annotated[Any, of_schema(PREDICTION)] = None


class Completion(Generation, kw_only=True):
    """The body of /v1/completions. A `prompt` is not required where a gap is filled."""

    prompt: Annotated[
        Any,
        of_schema(either(TEXT, list_of(TOKEN, 1), list_of(TEXT, 1), list_of(list_of(TOKEN, 1), 1))),
    ] = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[
        Any,
        of_schema(
            either({"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}, one_of(False))
        ),
    ] = None
    add_special_tokens: bool | None = None


_OLD_TOOLS: Mapping[str, Schema] = {
    "functions": NOTHING,
    "function_call": one_of(*NOTHING["enum"], "none", "auto"),
}
_NO_FUNCTIONS = {
    name: (f"{name} is not supported; use tools", "not_supported") for name in _OLD_TOOLS
}
_FROM_ONE: Schema = {"minimum": 1}  # an answer in turns has at least one token
CHAT = struct_body(
    Chat,
    refused=_OLD_TOOLS,
    rejected=_NO_FUNCTIONS,
    generates=True,
    narrower=dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), _FROM_ONE),
)
COMPLETION = struct_body(
    Completion,
    refused={"tools": NOTHING, **_OLD_TOOLS},
    rejected={"tools": ("tools are for chat completions", "not_supported"), **_NO_FUNCTIONS},
    generates=True,
    required=("prompt",),
)
