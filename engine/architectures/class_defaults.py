"""ClassDefaults: the default values of config.json's keys, by model_type.

A file may omit keys with the defaults of its transformers class. class_defaults.json has these
defaults, because importing transformers takes seconds and its versions differ. `python -m
tests.parity.class_defaults` writes that file, and a test compares it with transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """The defaults of one configuration class of transformers.

    A wrapper is the configuration class of a multimodal model, with a text_config.

    values: key of config.json -> default; for a wrapper the keys of a missing text_config.
    aliases: alternative name of a key -> the key.
    text: for a wrapper, the model_type of a text_config without one.
    only_text: for a wrapper, whether the text model always has type `text`.
    tied: for a wrapper, the default of whether the LM head is tied to the embedding.
    either: for a wrapper, whether the head is also tied if only text_config says so.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    only_text: bool = False
    tied: bool = False
    either: bool = False


_NONE = ClassDefaults()


def class_defaults(name: str, other: ClassDefaults = _NONE) -> ClassDefaults:
    """Return the defaults of a configuration class of transformers.

    name: a model_type, or the name of a wrapper.
    other: the result if transformers has no such class.
    """
    known = _read().get(name)
    return other if known is None else ClassDefaults(**known)


@cache
def _read() -> dict[str, dict[str, Any]]:
    read: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return read
