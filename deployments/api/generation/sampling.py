"""RequestedSampling: the sampling parameters of a client's request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from deployments.api.fields.generation import Generation, Sampling
from deployments.api.http.errors import invalid, wrong_type
from engine.errors import InvalidRequest
from engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_BYTES, SamplingParams
from engine.text.tokenizer import Tokenizer

# The fields that have the same name in bodies and SamplingParams, and need no conversion.
_SAME = {
    name: name
    for name in SamplingParams.__struct_fields__
    if name in Generation.__struct_fields__ and name not in ("logit_bias", "max_tokens")
}


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """The sampling parameters in a client's request.

    values: field of SamplingParams -> its value, whose range is not yet checked
    bad_words: texts that the output must not contain
    suppressed: token ids that the output must not contain
    """

    values: Mapping[str, Any]
    bad_words: list[str] | None = None
    suppressed: list[int] | None = None

    def params(self, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
        """Return the SamplingParams for a model, with the model's defaults for missing ones. Raises
        InvalidRequest.

        tokenizer, vocab_size: those of the model
        """
        params = SamplingParams(**{**tokenizer.sampling_defaults, **self.values})
        params.check_vocabulary(vocab_size)
        if self.suppressed:
            single = [[token] for token in self.suppressed]
            params = _without("suppress_tokens", single, params, vocab_size)
        if self.bad_words:
            ways = [ids for word in self.bad_words for ids in _ways_to_write(word, tokenizer)]
            params = _without("bad_words", ways, params, vocab_size)
        return params


def _without(
    name: str, sequences: list[list[int]], params: SamplingParams, vocab_size: int
) -> SamplingParams:
    """Return params that also forbid the given token sequences. Raises InvalidRequest.

    name: the request's field with the sequences, for errors
    """
    try:
        more = (*params.bad_words_ids, *sequences)
        params = msgspec.structs.replace(params, bad_words_ids=more)
        params.check_vocabulary(vocab_size)
    except InvalidRequest as error:
        message = error.message.replace("bad_words_ids", name)
        raise InvalidRequest(message, param=name, code=error.code) from None
    return params


def take_sampling(
    fields: Struct,
    names: Mapping[str, str] = _SAME,
    *,
    max_tokens: int | None = None,
    logprobs: int | None = None,
) -> RequestedSampling:
    """Return the sampling parameters in a request; null means the default.

    fields: a body or a part of one; its other fields are not read
    names: field of `fields` -> the field of SamplingParams that it sets
    max_tokens: the limit of output tokens; None: the context is the only limit
    logprobs: the number of alternatives to each output token; None: no log-probabilities

    Raises ApiError 400.
    """
    values: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs}
    for own, name in names.items():
        value = getattr(fields, own, None)
        if value is not None:
            values[name] = value
    if values.get("stop") == "":
        del values["stop"]
    if values.get("top_k") == -1:  # in other servers -1 means all tokens
        values["top_k"] = 0
    if not isinstance(fields, Sampling):
        return RequestedSampling(values)
    if (least := fields.min_new_tokens) is not None:
        values["min_tokens"] = agreed("min_tokens", fields.min_tokens, "min_new_tokens", least)
    if fields.logit_bias is not None:
        values["logit_bias"] = _logit_bias(fields.logit_bias)
    words, single = fields.bad_words, fields.suppress_tokens
    for index, word in enumerate(words or ()):
        if not word.strip() or len(word.encode()) > MAX_STOP_BYTES:
            raise invalid(
                f"bad_words[{index}] must have 1 to {MAX_STOP_BYTES} bytes, and not only "
                "white space",
                "bad_words",
            )
    return RequestedSampling(values, words, single)


def check_length(tokens: int | None, most: int | None, name: str = "max_tokens") -> None:
    """Raise ApiError 400 if a request asks for a longer answer than the operator allows.

    tokens: the requested maximum; None: not set
    most: `limits.max_tokens`; None: any length
    name: the request's field
    """
    if most is not None and tokens is not None and tokens > most:
        raise invalid(f"{name} is {tokens}, and at most {most} here (limits.max_tokens)", name)


def limited(params: SamplingParams, most: int | None, room: int) -> SamplingParams:
    """Return params with max_tokens set to the operator's limit, if they have no max_tokens.

    most: `limits.max_tokens`; None: the context is the only limit
    room: the number of context tokens that the prompt leaves

    Raises InvalidRequest if min_tokens exceeds the limit.
    """
    if most is None or params.max_tokens is not None:
        return params
    return msgspec.structs.replace(params, max_tokens=min(most, room))


def agreed(name: str, value: int | None, other: str, same: int) -> int:
    """Check that two fields with the same meaning do not differ, and return `same`.

    name, value: name and value of the first field; None: the request does not set it
    other, same: name and value of the second field

    Raises ApiError 400 conflicting_fields if the two values differ.
    """
    if value is not None and value != same:
        raise invalid(f"{name} and {other} differ; give one of them", other, "conflicting_fields")
    return same


def _ways_to_write(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the distinct token id lists of a word: at the beginning of a text, after a space, and
    after a line break."""
    word = word.lstrip()
    line = tokenizer.encode("\n", add_special_tokens=False)
    behind = tokenizer.encode("\n" + word, add_special_tokens=False)
    ways = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word)]
    if behind[: len(line)] == line:
        ways.append(behind[len(line) :])
    return [ids for index, ids in enumerate(ways) if ids and ids not in ways[:index]]


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise wrong_type("logit_bias", "an object from token ids to numbers")
    if len(bias) > MAX_LOGIT_BIAS:
        raise invalid(f"logit_bias takes at most {MAX_LOGIT_BIAS} entries", "logit_bias")
    biases: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("each key of logit_bias must be a token id", "logit_bias")
        biases[int(key)] = value
    if len(biases) != len(bias):
        raise invalid("logit_bias names a token twice", "logit_bias", "duplicate_key")
    return biases
