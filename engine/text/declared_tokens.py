"""DeclaredTokens: tokens that tokenizer_config.json declares in addition to tokenizer.json.

The two files of a checkpoint may differ: Command R+'s end of turn is a control token in only one.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import ConfigError

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True)
class DeclaredTokens:
    """The tokens that tokenizer_config.json declares.

    added: tokens with their flags.
    named: control tokens, such as bos_token.
    more: further control tokens, unless `added` has them as ordinary tokens.
    """

    added: tuple[AddedToken, ...]
    named: tuple[str, ...]
    more: tuple[str, ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any], named: Iterable[str], path: Path) -> "DeclaredTokens":
        """Read the tokens from the content of tokenizer_config.json.

        path: the file's path, for errors.
        Raises ConfigError.
        """
        added = settings.get("added_tokens_decoder") or {}
        more: list[str] = []
        try:
            for name in ("additional_special_tokens", "extra_special_tokens"):
                declared = settings.get(name) or ()
                more += map(
                    _content, declared.values() if isinstance(declared, Mapping) else declared
                )
            return cls(tuple(map(_with_flags, added.values())), tuple(named), tuple(more))
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: its tokens cannot be read: {error}", param="model"
            ) from None

    @property
    def special(self) -> frozenset[str]:
        """The names of control tokens."""
        other = {token.content for token in self.added if not token.special}
        flagged = {token.content for token in self.added if token.special}
        return frozenset(flagged).union(self.named, set(self.more) - other)

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Add the declared tokens to a tokenizer, as transformers does.

        Tokens that are not in the vocabulary are left out, as they would get ids that the model
        does not have.
        """
        present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        tokens = {**present, **{token.content: token for token in self.added}}
        for content in self.named:
            token = tokens.get(content, AddedToken(content, special=True))
            flags = {flag: getattr(token, flag) for flag in _FLAGS}
            tokens[content] = AddedToken(content, **{**flags, "special": True})
        for content in self.more:
            tokens.setdefault(content, AddedToken(content, special=True))
        changed = [
            token
            for content, token in tokens.items()
            if repr(token) != repr(present.get(content))
            and backend.token_to_id(content) is not None
        ]
        if changed:
            backend.add_tokens(changed)


def _content(token: Any) -> str:
    content: str = token if isinstance(token, str) else token["content"]
    return content


def _with_flags(token: Mapping[str, Any]) -> AddedToken:
    return AddedToken(token["content"], **{flag: token[flag] for flag in _FLAGS if flag in token})


def read_declared(folder: Path) -> tuple[dict[str, Any], dict[str, str], DeclaredTokens]:
    """Read the files that accompany tokenizer.json.

    Returns (settings of special_tokens_map.json and tokenizer_config.json, special tokens by key,
    all declared tokens).
    """
    named = {
        **read_settings(folder / "special_tokens_map.json"),
        **read_settings(folder / "tokenizer_config.json"),
    }
    special = {name: text for name, value in named.items() if (text := _named(name, value))}
    tokens = DeclaredTokens.of(named, special.values(), folder / "tokenizer_config.json")
    return named, special, tokens


def declared_special(folder: str | Path) -> frozenset[str]:
    """Return the control tokens that a checkpoint declares outside tokenizer.json.

    Raises ConfigError.
    """
    return read_declared(Path(folder))[2].special


def read_settings(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} without the file. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", param="model") from error
    return value if isinstance(value, dict) else {}


def _named(name: str, value: Any) -> str | None:
    """Return the text of a special token in a settings file; None if the entry names none.

    value: the text, as in "bos_token": "<s>", or an object such as {"content": "<s>"}.
    """
    if not name.endswith("_token"):
        return None
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
