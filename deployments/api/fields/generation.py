"""CHAT and COMPLETION: the bodies of /v1/chat/completions and /v1/completions; Queued, Sampling and
ItemChat: the fields that they share with the bodies of other routes."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deployments.api.body_fields import MAX_DEADLINE, MAX_SALT_BYTES, Effort
from deployments.api.caller import LEAST_PRIORITY
from deployments.api.fields.body import expects, of_schema, struct_body, words
from deployments.api.fields.chat import Messages, Prediction
from deployments.api.fields.formats import (
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    Choices,
    GrammarText,
    JsonSchema,
    MaybeGrammar,
)
from deployments.api.fields.schema import (
    NOTHING,
    TEXT,
    TOKEN,
    Schema,
    either,
    list_of,
    number,
    one_of,
)
from deployments.api.fields.tools import TOOL_CHOICE, TOOLS
from engine import sampling_params
from engine.errors import InvalidRequest

UINT31 = 2**31 - 1
Side = Literal["left", "right"]  # the side of a text that is cut
# A list of token ids; `take_token_ids` checks that they are in the vocabulary.
TokenIds = Annotated[
    list[Any], Meta(extra_json_schema={"items": TOKEN}, extra={"expected": "a list of token ids"})
]
TokenCut = Annotated[int, Meta(ge=-1, le=UINT31, extra_json_schema={"not": {"const": 0}})]


class Queued(Struct, kw_only=True, gc=False):
    """The fields that every request to a model may have."""

    model: str | None = None
    priority: Annotated[int, Meta(ge=LEAST_PRIORITY, le=UINT31)] | None = None
    deadline_seconds: Annotated[float, Meta(gt=0, le=MAX_DEADLINE)] | None = None


# field name of llama.cpp and Ollama -> the field of SamplingParams that it sets
LLAMA_SAMPLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}


def _fault_of(name: str, value: Any) -> InvalidRequest | None:
    """Return the error by which SamplingParams refuses a field's value; None if the value is
    accepted."""
    try:
        sampling_params.SamplingParams(**{name: value})
    except InvalidRequest as error:
        return error
    return None


def sampled(name: str, **limits: Any) -> Meta:
    """Return the Meta of a field of SamplingParams, with its range and with SamplingParams' own
    error messages.

    limits: further arguments of Meta, which override the range
    """
    extra = {"fault": partial(_fault_of, name)}
    if name not in sampling_params.RANGES:
        return Meta(**limits, extra=extra)
    low, high = sampling_params.RANGES[name]
    if name in sampling_params.ABOVE_LEAST:
        return Meta(gt=low, le=high, extra=extra)
    return Meta(**{"ge": low, "le": high, **limits}, extra=extra)


_TokenId = Annotated[int, Meta(ge=0)]
_UInt31 = Annotated[int, Meta(ge=0, le=UINT31)]
_StopText = Annotated[str, of_schema({"minLength": 1, "maxLength": sampling_params.MAX_STOP_BYTES})]
_Stops = Annotated[list[_StopText], of_schema({"maxItems": sampling_params.MAX_STOP_STRINGS})]
# SamplingParams checks the texts. An empty text means no stop string.
Stop = (
    Annotated[
        Annotated[str, of_schema({"maxLength": sampling_params.MAX_STOP_BYTES})] | _Stops,
        sampled("stop"),
    ]
    | None
)

StopTokenIds = (
    Annotated[
        list[_TokenId], sampled("stop_token_ids", max_length=sampling_params.MAX_STOP_TOKEN_IDS)
    ]
    | None
)


_AllowedIds = Annotated[
    list[_TokenId], sampled("allowed_token_ids", max_length=sampling_params.MAX_ALLOWED_IDS)
]
_BadWord = Annotated[
    str, of_schema({"pattern": r"\S", "maxLength": sampling_params.MAX_STOP_BYTES})
]
_WORDS = f"takes at most {sampling_params.MAX_BAD_WORDS} strings"
_BadWords = Annotated[
    list[_BadWord],
    Meta(max_length=sampling_params.MAX_BAD_WORDS),
    expects("a list of strings", whole=True, sizes=_WORDS),
]
_WordIds = Annotated[
    list[_TokenId], Meta(min_length=1, max_length=sampling_params.MAX_BAD_WORD_IDS)
]
_BadWordIds = Annotated[
    list[_WordIds], sampled("bad_words_ids", max_length=sampling_params.MAX_BAD_WORDS)
]
_Suppressed = Annotated[
    list[Annotated[int, of_schema({"minimum": 0})]],
    of_schema({"maxItems": sampling_params.MAX_BAD_WORDS}),
    expects("a list of token ids", whole=True),
]
_BIAS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": number(*sampling_params.BIAS_RANGE),
    "maxProperties": sampling_params.MAX_LOGIT_BIAS,
}


class Sampling(Queued, kw_only=True):
    """The fields that change how tokens are sampled, which all bodies of generations share."""

    min_tokens: Annotated[int, sampled("min_tokens")] | None = None
    min_new_tokens: _UInt31 | None = None
    temperature: Annotated[float, sampled("temperature")] | None = None
    top_p: Annotated[float, sampled("top_p")] | None = None
    # In other servers -1 means all tokens.
    top_k: Annotated[int, sampled("top_k", ge=-1)] | None = None
    min_p: Annotated[float, sampled("min_p")] | None = None
    repetition_penalty: Annotated[float, sampled("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, sampled("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, sampled("frequency_penalty")] | None = None
    seed: Annotated[int, sampled("seed")] | None = None
    stop_token_ids: StopTokenIds = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[Any, of_schema(_BIAS)] = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: _AllowedIds | None = None
    bad_words: _BadWords | None = None
    bad_words_ids: _BadWordIds | None = None
    suppress_tokens: _Suppressed | None = None


class StreamOptions(Struct, kw_only=True, gc=False):
    """The field `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_BYTES)]
ThinkingBudget = Annotated[int, Meta(ge=-1, le=UINT31)]  # -1: no limit
ReasoningEffort = Annotated[Effort, words(Effort, "one of ", ", ", code="invalid_value")]
Logprobs = Annotated[
    sampling_params.LogprobsMode, words(sampling_params.LogprobsMode, code="invalid_value")
]
TopLogprobs = Annotated[int, Meta(ge=0, le=sampling_params.MAX_LOGPROBS)]


class Generation(Sampling, kw_only=True):
    """The fields that /v1/chat/completions and /v1/completions have in common."""

    n: Annotated[int, sampled("n")] | None = None
    max_tokens: Annotated[int, sampled("max_tokens")] | None = None
    max_new_tokens: _UInt31 | None = None
    max_completion_tokens: Annotated[int, sampled("max_tokens")] | None = None
    prompt_logprobs: Annotated[int, sampled("prompt_logprobs")] | None = None
    logprobs_mode: Logprobs | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    speculation: bool | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: TokenCut | None = None
    truncation_side: Annotated[Side, words(Side)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=sampling_params.MAX_N)] | None = None
    response_format: Annotated[Any, of_schema(RESPONSE_FORMAT.schema)] = None
    structured_outputs: Annotated[Any, of_schema(STRUCTURED_OUTPUTS.schema)] = None
    guided_json: JsonSchema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    grammar: MaybeGrammar | None = None
    json_schema: JsonSchema | None = None


class Chat(Generation, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Messages
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[Any, of_schema(TOOLS)] = None
    tool_choice: Annotated[Any, of_schema(TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: ThinkingBudget | None = None
    modalities: Annotated[Any, of_schema(one_of(["text"]))] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Annotated[Prediction, expects("an object with type and content")] | None = None


class Completion(Generation, kw_only=True):
    """The body of /v1/completions. `prompt` is optional if there is a `suffix`."""

    prompt: Annotated[
        Any,
        of_schema(either(TEXT, list_of(TOKEN, 1), list_of(TEXT, 1), list_of(list_of(TOKEN, 1), 1))),
    ] = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[
        Any,
        of_schema(
            either(
                {"type": "integer", "minimum": 0, "maximum": sampling_params.MAX_LOGPROBS},
                one_of(False),
            )
        ),
    ] = None
    add_special_tokens: bool | None = None


_NO_FUNCTIONS = {
    name: (f"{name} is not supported; use tools", "not_supported")
    for name in ("functions", "function_call")
}
_NO_CALL = {"function_call": one_of(*NOTHING["enum"], "none", "auto")}
# Answers without any token do not exist in these APIs.
_FROM_ONE: Schema = {"minimum": 1}
CHAT = struct_body(
    Chat,
    rejected=_NO_FUNCTIONS,
    accepted=_NO_CALL,
    generates=True,
    narrower=dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), _FROM_ONE),
)
COMPLETION = struct_body(
    Completion,
    rejected={
        "tools": ("tools are for chat completions", "not_supported"),
        **_NO_FUNCTIONS,
        **{
            name: (f"{name}: images are for chat completions", "modality_not_supported")
            for name in ("images", "image_data", "multi_modal_data", "multimodal_data")
        },
    },
    accepted=_NO_CALL,
    generates=True,
    required=("prompt",),
)


Count = Annotated[int, Meta(ge=1, le=UINT31)]


def not_supported(instead: Mapping[str, str]) -> Mapping[str, tuple[str, str]]:
    """Return {field: (message, code)} of refused fields. instead: field -> advice in its error."""
    return {
        name: (f"{name} is not supported; {advice}", "not_supported")
        for name, advice in instead.items()
    }


class ItemChat(Sampling, kw_only=True):
    """The fields that the bodies of /v1/responses and /v1/messages share."""

    cache_salt: CacheSalt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: ThinkingBudget | None = None
    structured_outputs: Annotated[Any, of_schema(STRUCTURED_OUTPUTS.schema)] = None
