"""ClassDefaults: the values of keys that config.json leaves out, by model_type.

A file may leave out whatever its class of transformers has by default, and each class has its own
values. class_defaults.json has them, because importing transformers takes seconds and its versions
differ. `python -m tests.parity.class_defaults` writes it, and a test compares it with transformers.
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
    """The defaults of one class of transformers.

    values: key of config.json -> its default; for a wrapper, the keys and values of a missing
        text_config.
    aliases: another name of a key -> the key's own name.
    text: of a wrapper, the model_type of a text_config that names none.
    only_text: of a wrapper, whether every text_config is of type `text`, whatever it says.
    tied: of a wrapper, whether head and embedding share weights where the wrapper does not say.
    either: of a wrapper, whether they share weights also where only its text_config says so.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    only_text: bool = False
    tied: bool = False
    either: bool = False


_NONE = ClassDefaults()


def class_defaults(name: str, other: ClassDefaults = _NONE) -> ClassDefaults:
    """Return the defaults of a class of transformers.

    name: a model_type, or the name of a wrapper.
    other: the defaults where transformers has no such class.
    """
    known = _read().get(name)
    return other if known is None else ClassDefaults(**known)


@cache
def _read() -> dict[str, dict[str, Any]]:
    read: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return read
