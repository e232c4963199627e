"""Converted: a tokenizer out of another format than tokenizer.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Converted:
    """A tokenizer in the form of the `tokenizers` library.

    tokenizer: the contents of tokenizer.json.
    special: texts of special tokens by their names in tokenizer_config.json.
    """

    tokenizer: Mapping[str, Any]
    special: Mapping[str, str] = field(default_factory=dict)
