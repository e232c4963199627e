"""Converted: a tokenizer that was converted to tokenizer.json from another format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Converted:
    """A tokenizer in the form of the `tokenizers` library.

    tokenizer: the contents of tokenizer.json.
    special: {name in tokenizer_config.json: text} of the special tokens.
    """

    tokenizer: Mapping[str, Any]
    special: Mapping[str, str] = field(default_factory=dict)
