"""TokenizerFolder: reads the small files of a model folder for a tokenizer's conversion."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.errors import ConfigError


class TokenizerFolder:
    """A model folder whose tokenizer is to be converted.

    Properties raise ConfigError (param model), with the name of the file, if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def has(self, *names: str) -> bool:
        """Whether the folder has all the named files."""
        return all((self.path / name).is_file() for name in names)

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; empty if there is no such file."""
        file = self.path / name
        if not file.is_file():
            return {}
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.error(name, error) from None
        if not isinstance(value, dict):
            raise self.error(name, "it holds no JSON object")
        return value

    def bytes(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise self.error(name, error.strerror or error) from None

    def error(self, name: str, reason: object) -> ConfigError:
        """Return the ConfigError about a tokenizer file that is damaged or not as expected."""
        return ConfigError(
            f"{self.path / name} cannot be converted to tokenizer.json: {reason}; "
            "download it again, or save the model with a fast tokenizer",
            param="model",
        )

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The keys of tokenizer_config.json and special_tokens_map.json."""
        return {**self.json("special_tokens_map.json"), **self.json("tokenizer_config.json")}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The keys of config.json."""
        return self.json("config.json")

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The keys of generation_config.json."""
        return self.json("generation_config.json")

    @cached_property
    def tokenizer_class(self) -> str:
        """The tokenizer_class of the model, without the suffix Fast; "" if none is declared."""
        name = self.settings.get("tokenizer_class") or ""
        return str(name).removesuffix("Fast")

    @cached_property
    def added(self) -> dict[int, tuple[str, bool]]:
        """The tokens in addition to the vocabulary file: {id: (text, whether it is special)}."""
        added: dict[int, tuple[str, bool]] = {}
        try:
            for content, index in self.json("added_tokens.json").items():
                added[int(index)] = (str(content), True)
            for index, token in (self.settings.get("added_tokens_decoder") or {}).items():
                added[int(index)] = (str(token["content"]), bool(token.get("special", False)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.error("tokenizer_config.json", f"its added tokens: {error!r}") from None
        return added

    def named(self, name: str) -> str | None:
        """Return the text of a special token such as bos_token; None if it is not declared."""
        value = self.settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        return value if isinstance(value, str) else None
