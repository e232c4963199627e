"""Speculation settings: `engine.speculation` of the configuration, with vLLM's names accepted."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError
from engine.speculation.lookup import LookupOptions

logger = logging.getLogger("manta.engine")

TOKENS = 7  # maximum tokens of a draft; with the sampled token a step gives up to eight tokens
MAX_TOKENS = 16
MAX_MATCH = 256
MAX_SHARED_TOKENS = 2**24
_ANSWER_TOKENS = 256  # assumed tokens of an answer, for settings that count answers
# names of the look-up drafter: Manta's, then vLLM's
_METHODS = ("lookup", "ngram", "ngram_gpu", "suffix")
_OF_FILES = ("eagle3", "draft_model")  # methods that need `model`
_MODEL_TOKENS = 3  # maximum tokens of a model's draft, each a pass of that model
# vLLM's names of MTP by model
_MTP_NAMES = (
    "mtp",
    "deepseek_mtp",
    "glm4_moe_mtp",
    "glm4_moe_lite_mtp",
    "mimo_mtp",
    "qwen3_next_mtp",
    "qwen3_5_mtp",
)
# vLLM's name -> ours
_ALIASES = {
    "num_speculative_tokens": "tokens",
    "prompt_lookup_min": "min_match",
    "prompt_lookup_max": "max_match",
    "suffix_decoding_max_tree_depth": "max_match",
    "suffix_decoding_max_spec_factor": "factor",
    "suffix_decoding_min_token_prob": "min_probability",
    "suffix_decoding_max_cached_requests": "shared_answers",
}
# name -> (type, minimum, maximum)
_RANGES: Mapping[str, tuple[type, float, float]] = {
    "tokens": (int, 1, MAX_TOKENS),
    "min_match": (int, 1, MAX_MATCH),
    "max_match": (int, 1, MAX_MATCH),
    "factor": (float, 0.1, float(MAX_TOKENS)),
    "min_probability": (float, 0.0, 1.0),
    "shared_tokens": (int, 0, MAX_SHARED_TOKENS),
    "shared_answers": (int, 0, MAX_SHARED_TOKENS // _ANSWER_TOKENS),
}


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """The speculation settings of an engine.

    tokens: the maximum number of draft tokens of a request in a step.
    explicit: whether the configuration names a method, instead of "auto".
    rates: the rates of synthetic acceptance (synthetic.py), one for each draft; () = drafts are
        accepted if they equal the sampled tokens.
    method: "lookup"; or with a model "mtp" (a layer of the checkpoint itself), "eagle3" or
        "draft_model".
    model: the folder of the draft model; "" = the checkpoint's.
    """

    tokens: int = TOKENS
    lookup: LookupOptions = field(default_factory=LookupOptions)
    explicit: bool = False
    rates: tuple[float, ...] = ()
    method: str = "lookup"
    model: str = ""

    @property
    def by_model(self) -> bool:
        """Whether a model computes the drafts on the device."""
        return self.method != "lookup"


def read_speculation(value: str | bool | Mapping[str, Any]) -> SpeculationSettings | None:
    """Read the value of `engine.speculation`; None = speculation is off. Raises ConfigError.

    value: the setting's value; false means "off", as YAML 1.1 reads it so.
    """
    if value == "auto" or value is True:
        return SpeculationSettings()
    if value == "off" or isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = {"method": value}
    entries = {key: item for key, item in value.items() if item is not None}
    method = entries.pop("method", "lookup")
    if method == "synthetic":
        return _synthetic(entries)
    if method in _MTP_NAMES or method in _OF_FILES:
        return _by_model(method, entries)
    if method not in _METHODS or "model" in entries:
        what, near = f"method {method!r}", _near(method, (*_METHODS, *_MTP_NAMES, *_OF_FILES))
        if method in _METHODS:
            what, near = f"model {entries['model']!r}", ""
        raise _refused(
            f"{what} is not there; {near}Manta drafts by look-up, which needs no weights: set "
            f"auto, or method {_METHODS[0]} (vLLM's ngram and suffix mean it too), or off; or by "
            "models: method mtp, eagle3 or draft_model"
        )
    options: dict[str, Any] = {}
    for key, item in entries.items():
        name = _ALIASES.get(key, key)
        if name not in _RANGES:
            names = ["method", *_RANGES, *_ALIASES]
            near = _near(key, names)
            raise _refused(f"unknown key {key!r}; {near}the keys are {', '.join(names)}")
        if name in options:
            raise _refused(f"{key} is said twice, by vLLM's name and ours; leave one of them out")
        options[name] = _number(key, item, *_RANGES[name])
    if "shared_answers" in options:
        options["shared_tokens"] = options.pop("shared_answers") * _ANSWER_TOKENS
    elif method.startswith("ngram"):
        options.setdefault("shared_tokens", 0)  # drafts then come only from the request's own text
    tokens = options.pop("tokens", TOKENS)
    lookup = LookupOptions(**options)
    if lookup.min_match > lookup.max_match:
        raise _refused(
            f"min_match {lookup.min_match} exceeds max_match {lookup.max_match}; lower it"
        )
    return SpeculationSettings(tokens, lookup, explicit=True)


def check_speculation(
    settings: SpeculationSettings | None,
    *,
    generates: bool,
    stages: int,
    admission: str,
    most: int,
) -> SpeculationSettings | None:
    """Return the settings to use; None = the engine does not speculate.

    settings: the configured settings; None = off.
    generates: whether the model generates text.
    stages: number of pipeline stages.
    most: maximum number of entries of a step.
    Raises ConfigError if the engine does not support the configured settings. With "auto" the
    result is None instead.
    """
    why = ""
    if settings is None or not generates:
        return None
    if stages > 1:
        why = "pipeline stages compute several steps at a time"
    elif admission == "peak":
        why = "engine.admission peak counts on one token a step"
    elif most < 2:
        why = "a step has room for one token; raise engine.max_num_seqs"
    if not why:
        return settings
    if settings.explicit:
        raise ConfigError(
            f"engine.speculation: {why}; set it to auto, which leaves it out here, or to off",
            param="speculation",
        )
    logger.info("no speculation: %s", why)
    return None


def _by_model(method: str, entries: dict[str, Any]) -> SpeculationSettings:
    """Read the settings of a draft model. Raises ConfigError."""
    mtp = method in _MTP_NAMES
    model = "" if mtp else entries.pop("model", "")
    if not mtp and (not model or not isinstance(model, str)):
        raise _refused(f"method {method} needs model: the folder or hub name of the drafter")
    if entries.pop("draft_tensor_parallel_size", 1) != 1:
        raise _refused("draft_tensor_parallel_size must be 1, as one rank has the drafter whole")
    if "tokens" in entries and "num_speculative_tokens" in entries:
        raise _refused(
            "num_speculative_tokens is said twice, by vLLM's name and ours; leave one out"
        )
    rates = _rates(entries.pop("rates", None))
    number = entries.pop("num_speculative_tokens", None)
    tokens = entries.pop("tokens", _MODEL_TOKENS if number is None else number)
    if entries:
        key = next(iter(entries))
        why = (
            ", whose layer is the model's own; it takes tokens"
            if mtp
            else "; it takes model, tokens"
        )
        near = _near(key, ("tokens", "num_speculative_tokens", "model"))
        text = f"{key} does not go with method {method}{why} (num_speculative_tokens)"
        raise _refused(f"{text}; {near}".rstrip("; "))
    tokens = _number("tokens", tokens, *_RANGES["tokens"])
    return SpeculationSettings(
        len(rates) or tokens,
        explicit=True,
        rates=rates,
        method="mtp" if mtp else method,
        model=model,
    )


def _synthetic(entries: Mapping[str, Any]) -> SpeculationSettings:
    if entries.keys() != {"rates"}:
        raise _refused("method synthetic, of benchmarks, takes rates alone, such as 0.75 0.55 0.4")
    rates = _rates(entries["rates"])
    return SpeculationSettings(len(rates), explicit=True, rates=rates)


def _rates(value: Any) -> tuple[float, ...]:
    """Read the rates of synthetic acceptance, one for each draft.

    value: numbers separated by spaces; None = no synthetic acceptance, so that the result is ().
    """
    if value is None:
        return ()
    try:
        rates = tuple(map(float, str(value).split()))
    except ValueError:
        rates = ()
    if not 1 <= len(rates) <= MAX_TOKENS or not all(0 <= rate <= 1 for rate in rates):
        raise _refused(f"rates must be 1 to {MAX_TOKENS} numbers in 0..1, with spaces between")
    return rates


def _number(key: str, value: Any, kind: type, least: float, greatest: float) -> Any:
    numbers = int if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, numbers) or not least <= value <= greatest:
        what = "an integer" if kind is int else "a number"
        raise _refused(f"{key} must be {what} in {least}..{greatest}, got {str(value)[:64]!r}")
    return value


def _near(name: Any, known: Sequence[str]) -> str:
    """Return a question about the known name that is nearest to a misspelt one; "" = none is
    near."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _refused(why: str) -> ConfigError:
    return ConfigError(f"speculation: {why}", param="speculation")
