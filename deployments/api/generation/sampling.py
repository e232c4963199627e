"""sampling_params: from a request's fields to SamplingParams, with its own names in errors."""

from collections.abc import Mapping
from typing import Any

import msgspec

from deployments.api.body_fields import take_int
from deployments.api.fields.generation import SAME_FIELDS, SAMPLING
from deployments.api.http.errors import invalid, wrong_type
from engine.errors import InvalidRequest
from engine.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_BYTES,
    RANGES,
    SamplingParams,
)
from engine.text.tokenizer import Tokenizer

_WORD_CHARS = 64  # a word is encoded three times, each with the overhead of a call
_AS_GIVEN = SAMPLING.keys() - {
    *("logit_bias", "logprobs", "top_k", "max_tokens", "bad_words", "suppress_tokens"),
    *SAME_FIELDS,
}


def sampling_params(
    body: dict[str, Any],
    *,
    max_tokens: int | None,
    chat: bool,
    defaults: Mapping[str, float] | None = None,
) -> SamplingParams:
    """Defaults are the model's, then OpenAI's; null is the default. max_tokens: the route's
    default. defaults: of the model (`Tokenizer.sampling_defaults`).

    chat: logprobs is a boolean with top_logprobs beside it.
    Raises ApiError 400 naming the field.
    """
    body = _one_name_each(body)
    given: dict[str, Any] = dict(defaults or {})
    given |= {name: body[name] for name in _AS_GIVEN & body.keys() if body[name] is not None}
    if given.get("stop") == "":
        del given["stop"]
    limit_name = "max_tokens"
    if (limit := body.get("max_tokens")) is None:
        limit = max_tokens
    if (other := body.get("max_completion_tokens")) is not None:
        # Type first: true == 1 must not pass as agreement.
        if body.get("max_tokens") is not None and (type(limit), limit) != (type(other), other):
            raise invalid(
                "max_tokens and max_completion_tokens differ; give one of them",
                "max_completion_tokens",
                "conflicting_fields",
            )
        limit, limit_name = other, "max_completion_tokens"
    given["max_tokens"] = limit
    if (top_k := body.get("top_k")) is not None:
        # -1 is how other servers spell "all".
        given["top_k"] = 0 if type(top_k) is int and top_k == -1 else top_k
    if (bias := body.get("logit_bias")) is not None:
        given["logit_bias"] = _logit_bias(bias)
    if chat:
        given["logprobs"] = _chat_logprobs(body)
    elif body.get("logprobs") is not False:
        given["logprobs"] = take_int(body, "logprobs", 0, MAX_LOGPROBS)
    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        if error.param == "max_tokens":
            message = error.message.replace("max_tokens", limit_name, 1)
            raise invalid(message, limit_name, error.code) from None
        raise invalid(error.message, error.param, error.code) from None


def add_bad_words(
    params: SamplingParams, body: dict[str, Any], tokenizer: Tokenizer
) -> SamplingParams:
    """Return params with `bad_words` (texts) and `suppress_tokens` (ids) of a body among its
    `bad_words_ids`.

    A word is banned as the tokenizer writes it at the beginning of a text, behind a space and
    behind a line break. Raises ApiError 400.
    """
    words, single = body.get("bad_words"), body.get("suppress_tokens")
    if words is None and single is None:
        return params
    sequences = [list(ids) for ids in params.bad_words_ids]
    if single is not None:
        if not isinstance(single, list) or not all(type(token) is int for token in single):
            raise wrong_type("suppress_tokens", "a list of token ids")
        sequences += [[token] for token in single]
    if words is not None:
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise wrong_type("bad_words", "a list of strings")
        if len(words) > MAX_BAD_WORDS:
            raise invalid(f"bad_words takes at most {MAX_BAD_WORDS} strings", "bad_words")
        for index, word in enumerate(words):
            if not word.strip() or len(word.encode()) > MAX_STOP_BYTES:
                raise invalid(
                    f"bad_words[{index}] must have 1 to {MAX_STOP_BYTES} bytes, and not only "
                    "white space",
                    "bad_words",
                )
            sequences += _ways_to_write(word.lstrip(), tokenizer)
    try:
        return msgspec.structs.replace(params, bad_words_ids=sequences)
    except InvalidRequest as error:
        name = "bad_words" if words else "suppress_tokens"
        raise invalid(error.message.replace("bad_words_ids", name), name, error.code) from None


def bad_words_size(body: dict[str, Any]) -> int:
    """Return how many characters of text cost as much to encode as a body's `bad_words`."""
    words = body.get("bad_words")
    return _WORD_CHARS * len(words) if isinstance(words, list) else 0


def _ways_to_write(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of a word at the beginning of a text, behind a space and behind a line break."""
    line = tokenizer.encode("\n", add_special_tokens=False)
    behind = tokenizer.encode("\n" + word, add_special_tokens=False)
    ways = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word)]
    if behind[: len(line)] == line:
        ways.append(behind[len(line) :])
    return [ids for index, ids in enumerate(ways) if ids and ids not in ways[:index]]


def _one_name_each(body: dict[str, Any]) -> dict[str, Any]:
    """The body with other servers' names of fields replaced by ours. Raises ApiError 400."""
    others = {name for name in SAME_FIELDS.keys() & body.keys() if body[name] is not None}
    if not others:
        return body
    made = dict(body)
    for name in sorted(others):
        own, value = SAME_FIELDS[name], body[name]
        low, high = RANGES[own]
        take_int(body, name, int(low), int(high))
        if made.get(own) is not None and (type(made[own]), made[own]) != (int, value):
            raise invalid(f"{own} and {name} differ; give one of them", name, "conflicting_fields")
        made[own] = value
    return made


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    wanted = body.get("logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise wrong_type("logprobs", "true or false")
    top = take_int(body, "top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise wrong_type("logit_bias", "an object from token ids to numbers")
    if len(bias) > MAX_LOGIT_BIAS:
        raise invalid(f"logit_bias takes at most {MAX_LOGIT_BIAS} entries", "logit_bias")
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("each key of logit_bias must be a token id", "logit_bias")
        found[int(key)] = value
    if len(found) != len(bias):
        raise invalid("logit_bias names a token twice", "logit_bias", "duplicate_key")
    return found
