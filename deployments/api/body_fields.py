"""The bounds of request fields, and checks that the body schemas of deployments/api/fields/ share.

Each field of a body is used, listed in the header x-ignored-fields, or refused. `cache_control` is
listed only once, however many blocks have it: this hint has no effect on the prefix cache.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from deployments.api.http.errors import did_you_mean, invalid, shown, wrong_type

MAX_MESSAGES = 1024
MAX_CALLS = 4096  # tool calls in all messages together
MAX_PARTS = 16_384  # content parts in all messages together
MAX_MESSAGE_CALLS = 128  # tool calls in one message
MAX_MESSAGE_PARTS = 1024  # content parts in one message
# role in a request -> role in chat templates; newer clients send developer instead of system
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "observation",  # the role of tool results in templates such as ChatGLM's
}

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

ConstraintKind = Literal["json", "regex", "choice", "grammar", "tags"]
# field of another server -> the kind of `structured_outputs` that it sets
ALIASES: dict[str, ConstraintKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
MAX_TAGS = 128  # maximum number of structures of a structural tag, and of its triggers
SCHEMA_NAME = "[A-Za-z0-9_-]{1,64}"

MAX_DEADLINE = 7 * 86400.0  # seconds
MAX_SALT_BYTES = 128

BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]
MAX_BATCH_METADATA = 16  # entries; OpenAI's limit
MAX_BATCH_WINDOW = 30 * 86400  # seconds


# Fields that OpenAI's clients send, and that have no effect here.
WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "safety_identifier",
        "verbosity",
        "reasoning_effort",
        "parallel_tool_calls",
        "prediction",
        "audio",
        "web_search_options",
        "moderation",
    }
)
# Refused fields: those of other servers that control engine internals, and `chat_template`, as
# templates are code.
NOT_ALLOWED = frozenset(
    {
        "kv_transfer_params",
        "prompt_embeds",
        "chat_template",
        "custom_logit_processor",
        "logits_processors",
        "request_id",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "vllm_xargs",
        "lora_path",
    }
)
# Field of another server that limits the output -> (values without effect, advice in the error).
# Other values are refused, as the answer would lack the limit that the client asked for.
LIMITS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "begin_suppress_tokens": (([],), "use suppress_tokens"),
    "force_words_ids": (([],), "use structured_outputs"),
    "no_repeat_ngram_size": ((0,), "use repetition_penalty"),
    "repetition_detection": ((), "use repetition_penalty"),
    "use_beam_search": ((False,), "use n"),
    "num_beams": ((1,), "use n"),
    "length_penalty": ((1, 0), "it is of beam search"),
    "early_stopping": ((False,), "it is of beam search"),
    "stop_regex": (([], ""), "use stop"),
    "stop_words": (([], ""), "use stop"),
    "stop_strings": (([], ""), "use stop"),
    "stop_sequences": (([], ""), "use stop"),
    "n_predict": ((-1,), "use max_tokens"),
    "num_predict": ((-1,), "use max_tokens"),
    "max_length": ((), "use max_tokens"),
    "max_output_tokens": ((), "use max_tokens"),
    "min_length": ((0,), "use min_tokens"),
    "max_time": ((), "use deadline_seconds"),
    "t_max_predict_ms": ((0, -1), "use deadline_seconds"),
    "n_indent": ((0,), "use structured_outputs"),
    "grammar_lazy": ((False,), "use tools"),
}
_HINT = "cache_control"
_MAX_NAMED = 16  # maximum number of names in the header x-ignored-fields
_HEADER_SAFE = re.compile(r"[^A-Za-z0-9_.\-\[\]/~$]")


def check_names(
    body: Mapping[str, Any],
    known: frozenset[str],
    *,
    strict: bool,
    generates: bool = False,
    unused: frozenset[str] = frozenset(),
) -> list[str]:
    """Return the names of the body's fields that will be ignored, as header-safe names.

    Raises ApiError 400: field_not_allowed, not_supported; unknown_field if strict.

    known: the fields that are read, which are never ignored
    generates: whether the body is a generation request, in which the fields in LIMITS are refused
    unused: the fields that are accepted without effect, in addition to WITHOUT_EFFECT
    """
    ignored: list[str] = []
    for name in body:
        if name in known:
            continue
        if name in NOT_ALLOWED:
            if body[name] is None:
                continue
            raise invalid(f"{name} cannot be set in a request", name, "field_not_allowed")
        if generates and name in LIMITS:
            neutral, instead = LIMITS[name]
            value = body[name]
            if value is None or any(
                value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
                for allowed in neutral
            ):
                continue
            raise invalid(f"{name} is not supported; {instead}", name, "not_supported")
        if name in unused or name in WITHOUT_EFFECT:
            if body[name] is None:
                continue
        elif strict:
            raise invalid(
                f"unknown field {shown(name)}{did_you_mean(name, known)}",
                name[:128],
                "unknown_field",
            )
        ignored.append(name)
    return name_fields(ignored) if ignored else []


def name_fields(names: Iterable[str], inside: str = "") -> list[str]:
    """Return the names of ignored fields in header-safe characters; "..." replaces names beyond a
    maximum.

    inside: the text before each name, e.g. ``stream_options.``
    """
    safe_names = [
        inside + (_HEADER_SAFE.sub("?", name[:64]) or "?")
        for name in itertools.islice(names, _MAX_NAMED + 1)
    ]
    return safe_names if len(safe_names) <= _MAX_NAMED else [*safe_names[: _MAX_NAMED - 1], "..."]


def name_hint(sent: Any, ignored: list[str]) -> None:
    """Add `cache_control` to the ignored fields, once, if a block or tool has this key.

    sent: the block or tool as sent by the client
    """
    if isinstance(sent, dict) and sent.get(_HINT) is not None and _HINT not in ignored:
        ignored.append(_HINT)


def kept_tokens(cut: int | None, limit: int) -> int | None:
    """Return the number of tokens to which a prompt is truncated; None: it is not truncated.

    cut: the value of `truncate_prompt_tokens`; -1 means `limit`
    limit: the maximum number of tokens of the model's prompts

    Raises ApiError 400.
    """
    if cut == 0:
        raise invalid(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as the model takes",
            "truncate_prompt_tokens",
        )
    if cut is not None and cut > limit:
        raise invalid(
            f"truncate_prompt_tokens must be at most {limit}, the model's context",
            "truncate_prompt_tokens",
        )
    return limit if cut == -1 else cut


def take_token_ids(ids: list[Any], path: str, vocab_size: int) -> list[int]:
    """Return the list `ids` itself if each item is an integer in [0, vocab_size).

    Raises ApiError 400 naming the first item that is not, e.g. ``prompt[3]``: token_out_of_range
    for a number, invalid_type for any other value.
    """
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    for index, item in enumerate(ids):
        if type(item) is int and 0 <= item < vocab_size:
            continue
        if isinstance(item, (int, float)):
            raise invalid(
                f"{path}[{index}] is not a token id (an integer from 0 to {vocab_size - 1})",
                f"{path}[{index}]",
                "token_out_of_range",
            )
        raise wrong_type(f"{path}[{index}]", "a token id")
    return ids
