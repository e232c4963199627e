"""Reader: a JSON object of a model folder, with typed reads whose errors name the file and key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

# suffix of a sequence classifier's class name in "architectures"
CLASSIFIER = "ForSequenceClassification"
MODULES = "modules.json"  # file in the folder of an embedding model: engine/pooling.py


class Reader:
    """A JSON object of a model folder, read under Manta's names of the keys.

    names: Manta's key -> the file's key, where they differ (hidden_size is n_embd in GPT-2's
        config.json). If the file lacks its own key, Manta's key is read. Every method takes
        Manta's key.
    """

    def __init__(
        self, values: dict[str, Any], path: str, names: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.path = path
        self._names = names or {}

    @classmethod
    def from_file(cls, path: Path) -> "Reader":
        """Read a JSON file. Raises ConfigError if the file is missing or holds no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: no such file; a model folder needs it", param="model"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON: {error}", param="model") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must hold a JSON object", param="model")
        return cls(values, str(path))

    def renamed(self, names: Mapping[str, str], defaults: Mapping[str, Any]) -> "Reader":
        """Return a reader of the same object under other key names, with defaults for absent keys.

        defaults: key -> its value where the file has the key under neither name.
        """
        # a file's key may equal Manta's name of another key
        theirs = {key: key for key in names.values()}
        known = {**names, **theirs}
        present = {known.get(key, key) for key in self.values}
        missing = {
            key: value for key, value in defaults.items() if known.get(key, key) not in present
        }
        return Reader({**missing, **self.values}, self.path, names)

    def inner(self, key: str) -> "Reader":
        """Return a reader of the object that a key holds; empty where the file has no such key."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {value!r}")
        return Reader(value, f"{self.path}: {self._names.get(key, key)}")

    def error(self, key: str, message: str) -> ConfigError:
        key = self._names.get(key, key)
        return ConfigError(f"{self.path}: {key}: {message}", param=key)

    def raw(self, key: str, default: Any = None) -> Any:
        """Return the file's value of a key, which may be null; the default for an absent key."""
        theirs = self._names.get(key, key)
        return self.values.get(theirs if theirs in self.values else key, default)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the file's value of a key; default for null and for an absent key."""
        value = self.raw(key)
        return default if value is None else value

    def classifies(self) -> bool:
        """Whether the file is the config.json of a sequence classifier."""
        named = self.get("architectures")
        return isinstance(named, list) and bool(named) and str(named[0]).endswith(CLASSIFIER)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"must be a positive integer, got {value!r}")
        return value

    def square(self, key: str, default: int) -> int:
        """Return a key's size, which the file may write as [size, size]."""
        value = self.get(key)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return Reader({key: value[0]}, self.path).size(key)
        return self.size(key, default)

    def count(self, key: str, default: int = 0) -> int:
        """Return a key's value as an integer of at least 0."""
        return 0 if self.get(key, default) in (0, None) else self.size(key, default)

    def listed(self, key: str, *kinds: type) -> list[Any] | None:
        """Return a key's list of values of the given types; None for null and for an absent key."""
        value = self.get(key)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(item, kinds) for item in value)
        ):
            types = " or ".join(kind.__name__ for kind in kinds)
            raise self.error(key, f"must be a list whose values are of type {types}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(key, f"must be a positive number, got {value!r}")
        return float(value)

    def size_or_none(self, key: str) -> int | None:
        """Return a key's value as a positive integer; None for null and for an absent key."""
        return None if self.get(key) is None else self.size(key)

    def number_or_none(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.get(key, default)
        if value not in allowed:
            raise self.error(key, f"{value!r} is not supported; supported: {', '.join(allowed)}")
        return str(value)

    def ids(self, key: str) -> list[int]:
        """Return a key's token ids, in files one number or a list; [] for an absent key."""
        value = self.get(key, [])
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.error(key, f"must be a token id or a list of them, got {value!r}")
        return values
