"""SamplingParams: the sampling options of a request, validated where they are made."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Literal, get_type_hints

import msgspec

from engine.errors import ConfigError, InvalidRequest
from engine.structured.grammar import Grammar
from engine.structured.thinking import ThinkingBudget
from engine.typecheck import fits, without_none, words

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]  # vLLM's names

MAX_N = 128  # OpenAI's limit
MAX_LOGPROBS = 32
MAX_STOP_STRINGS = 128
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_IDS = 2**18  # more than any vocabulary has
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_IDS = 64  # the maximum number of ids of one sequence
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
_UINT31 = 2**31 - 1

# name -> (minimum, maximum); the OpenAPI document is also generated from these.
RANGES: Mapping[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "max_tokens": (0, _UINT31),
    "min_tokens": (0, _UINT31),
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, _UINT31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (INT64_MIN, INT64_MAX),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
# The parameters whose defaults come from generation_config.json or the operator.
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
ABOVE_LEAST = frozenset({"top_p"})  # names whose minimum is excluded
BIAS_RANGE = (-100.0, 100.0)  # bounds of each value of logit_bias


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters by which the next tokens of one request are chosen.

    Order on the device: logit_bias, then penalties (repetition, presence, frequency), then the ban
    of end tokens below min_tokens or the mask of a grammar and of lists of tokens, then
    temperature, min_p, top_k, top_p, then Gumbel-max with noise that is a function of
    (seed, choice, position, token id) alone.
    Reported logprobs are those of the raw model distribution, before any of these, or those of the
    distribution from which the token is drawn: `logprobs_mode`.

    n: independent choices, 1..128.
    max_tokens: maximum number of output tokens; None = up to the context length.
    min_tokens: no end-of-sequence or stop token before this many output tokens.
    temperature: 0 = greedy; 0..2.
    top_p: nucleus mass in (0, 1].
    top_k: the k most likely tokens; 0 = all.
    min_p: in [0, 1], relative to the largest probability.
    repetition_penalty: 0.01..10, over prompt and output (Keskar et al. 2019). Logits are divided by
        the penalty, so a much smaller one would make them infinite.
    presence_penalty, frequency_penalty: -2..2, over the output only (OpenAI's definition).
    seed: int64; None = decided at submission, so that a resumed request keeps its numbers:
        `seed_for`.
    stop: a string or up to 128, of 1..256 bytes; the text is cut before the first occurrence.
    stop_token_ids: end tokens in addition to the model's.
    allowed_token_ids: the only tokens that may be sampled, end tokens included; none = all.
    bad_words_ids: sequences of token ids that never occur as a whole.
    logprobs: None = none; k = those of the chosen token and of the k most likely (k <= 32).
    logprobs_mode: "processed_logprobs" = after all of these operations but the noise: excluded
        tokens have -inf, and greedy requests count as temperature 1 without filters.
        "raw_logprobs" = before all of them. None = `EngineConfig.logprobs_mode`.
    prompt_logprobs: None = none; k = raw log-probabilities of each prompt token but the first, and
        of the k most likely tokens at its position.
    structured: the constraint of the output, such as a grammar. The output ends where the grammar
        is complete, or at an end token where the grammar is satisfied. stop_token_ids end it only
        where the grammar is satisfied. min_tokens and ignore_eos apply as long as the grammar
        allows other tokens. With finish "length" the output is only a prefix of a valid one.
    thinking: the limit on thinking tokens, where `structured` describes thoughts before the output.
    pooled: whether to return the prompt's embedding (engine/pooling.py) and no output: max_tokens
        must be 0.
    return_routed_experts: whether to return the ids of the experts that each MoE layer chooses for
        each token. Such a request uses no cached prefix, and its steps use no CUDA graph.
    unscaled: whether `pooled` leaves out the final L2 normalisation of the vector, if any.

    Raises InvalidRequest naming the field.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()  # converted to a tuple, like the next fields
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    allowed_token_ids: Sequence[int] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: Grammar | None = None
    thinking: ThinkingBudget | None = None
    pooled: bool = False
    unscaled: bool = False
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        self._check_types()
        for name, default, low, high in _BOUNDED:
            value = getattr(self, name)
            if value is default or value is None:
                continue
            if isinstance(low, int):
                _range(name, value, low, high)
            else:
                _number(name, value, low, high, open_low=name in ABOVE_LEAST)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        for text in self.stop:
            if not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
                raise InvalidRequest(
                    f"each stop string must have 1 to {MAX_STOP_BYTES} bytes", param="stop"
                )
        for token in self.stop_token_ids:
            _range("stop_token_ids", token, 0, _UINT31)
        for token in self.allowed_token_ids:
            _range("allowed_token_ids", token, 0, _UINT31)
        for ids in self.bad_words_ids:
            if not 1 <= len(ids) <= MAX_BAD_WORD_IDS:
                raise InvalidRequest(
                    f"each sequence of bad_words_ids must have 1 to {MAX_BAD_WORD_IDS} ids",
                    param="bad_words_ids",
                )
            for token in ids:
                _range("bad_words_ids", token, 0, _UINT31)
        for token, bias in self.logit_bias.items():
            _range("logit_bias", token, 0, _UINT31)
            _number("logit_bias", bias, *BIAS_RANGE)
        if self.pooled and (self.max_tokens != 0 or self.n != 1):
            raise InvalidRequest("pooled needs max_tokens 0 and n 1", param="pooled")
        if self.pooled and not (self.prompt_logprobs is None and self.structured is None):
            raise InvalidRequest(
                "pooled cannot be combined with prompt_logprobs or structured", param="pooled"
            )

        if self.return_routed_experts and (self.stop or self.pooled):
            raise InvalidRequest(
                "return_routed_experts cannot be combined with stop or pooled; use stop_token_ids",
                param="return_routed_experts",
            )

    def _check_types(self) -> None:
        """Check that each field has a valid length and type.

        Lengths are checked first, so that no long list is iterated.

        Raises InvalidRequest.
        """
        for name, kind, default in _FIELDS:
            value = getattr(self, name)
            if value is default or (name == "logit_bias" and value == {}):
                continue
            if name in _MOST and isinstance(value, (list, tuple, dict)):
                most, what = _MOST[name]
                if len(value) > most:
                    raise InvalidRequest(f"{name} takes at most {most} {what}", param=name)
            if not fits(value, kind):
                raise InvalidRequest(
                    f"{name} must be {words(kind)}", param=name, code="invalid_type"
                )
            if isinstance(value, list):
                msgspec.structs.force_setattr(self, name, tuple(value))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def seed_for(self, prompt: Sequence[int], engine_seed: int | None) -> int | None:
        """Return the seed of a request with this prompt (token ids), in 0..2**63 - 1.

        The result is the request's `seed`, else a function of prompt and engine_seed
        (`EngineConfig.seed`). It is None if neither is set; the caller then draws a seed.
        """
        if self.seed is not None or engine_seed is None:
            return self.seed
        digest = blake2b(f"{engine_seed} ".encode(), digest_size=8)
        digest.update(array("I", prompt).tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest (code token_out_of_range) for token ids outside the vocabulary."""
        lists: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words_ids": chain.from_iterable(self.bad_words_ids),
        }
        for name, ids in lists.items():
            for token in ids:
                if token >= vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token} is outside the vocabulary (0..{vocab_size - 1})",
                        param=name,
                        code="token_out_of_range",
                    )


_HINTS = get_type_hints(SamplingParams)
# Fields with their default value are not checked, so None is not among the types.
_FIELDS = [
    (field.name, without_none(_HINTS[field.name]), field.default)
    for field in msgspec.structs.fields(SamplingParams)
]
_BOUNDED = [(name, default, *RANGES[name]) for name, _, default in _FIELDS if name in RANGES]
_MOST = {
    "stop": (MAX_STOP_STRINGS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"),
    "logit_bias": (MAX_LOGIT_BIAS, "entries"),
    "allowed_token_ids": (MAX_ALLOWED_IDS, "ids"),
    "bad_words_ids": (MAX_BAD_WORDS, "sequences"),
}


def _range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} must be between {low} and {high}, got {_given(value)}", param=name
        )


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # Only comparisons: JSON may have integers that do not fit into a float, and converting one
    # raises.
    if not (low < value if open_low else low <= value) or not value <= high:
        opening = "(" if open_low else "["
        raise InvalidRequest(
            f"{name} must be in {opening}{low}, {high}], got {_given(value)}", param=name
        )


def _given(value: float) -> str:
    """Return the value for a message; Python refuses to print integers of thousands of digits."""
    huge = isinstance(value, int) and value.bit_length() > 64
    return "an integer of more than 64 bits" if huge else str(value)


def read_defaults(values: Mapping[str, int | float]) -> dict[str, int | float]:
    """Check an operator's defaults of sampling parameters, by name, and return a copy.

    Raises ConfigError.
    """
    for name in values:
        if name not in DEFAULTS:
            raise ConfigError(
                f"generation_config: {name!r} is none of {', '.join(DEFAULTS)}",
                param="generation_config",
            )
    try:
        SamplingParams(**dict(values))  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise ConfigError(
            f"generation_config: {error.message}", param="generation_config"
        ) from None
    return dict(values)
