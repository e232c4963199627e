"""AdaptersConfig: the configuration's section `adapters`, with checks before a start."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from deployments.adapters.paths import MAX_PATH, is_url, scan
from engine.errors import AdapterError, ConfigError
from engine.lora.peft_config import check_name, read_peft_config


class AdaptersConfig(BaseModel):
    """LoRA adapters of the model, each served under its own name. They need engine.max_loras."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    paths: dict[str, str] = Field(
        default_factory=dict,
        description="Name -> folder in PEFT's format, or a URL that fsspec knows. An adapter is "
        "read when it is first asked for.",
    )
    watch: str | None = Field(
        None,
        description="A folder whose subfolders are adapters, served by the subfolders' names. "
        "New, removed and replaced ones are noticed within a second.",
    )
    roots: list[str] = Field(
        default_factory=list,
        description="Folders and URLs from which adapters may be added while the server runs; "
        "`watch` is always one. Default none.",
    )

    @field_validator("paths", "watch", "roots")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if isinstance(value, dict):
            paths = list(value.values())
        else:
            paths = value if isinstance(value, list) else [value or "."]
        for path in paths:
            if not path or len(path) > MAX_PATH or not path.isprintable():
                raise ValueError(f"must be a folder or the URL of an object store: {path[:64]!r}")
        return value

    def check_names(self, model: str, aliases: Sequence[str] = ()) -> None:
        """Check that adapter names are valid and differ from the model's names. Raises ValueError.

        model: the base model's name.
        aliases: other names of the base model.
        """
        for name in self.paths:
            try:
                check_name(name)
            except AdapterError as error:
                raise ValueError(f"adapters.paths: {error.message}") from None
            if name == model:
                raise ValueError(f"adapters.paths: {name} is the model's own name")
            if name in aliases:
                raise ValueError(f"adapters.paths: {name} is also in aliases")

    def check_folders(self) -> None:
        """Check the local adapter folders. Raises ConfigError that names the key."""
        for name, path in self.paths.items():
            if not is_url(path):
                try:
                    read_peft_config(Path(path))
                except AdapterError as error:
                    raise ConfigError(error.message, param=f"adapters.paths.{name}") from None
        if self.watch is not None:
            _check_folder(self.watch, "adapters.watch")
            try:
                scan(self.watch)
            except OSError as error:
                raise ConfigError(
                    f"{self.watch}: {error.strerror}", param="adapters.watch"
                ) from None
        for root in self.roots:
            if not is_url(root):
                _check_folder(root, "adapters.roots")


def make_absolute(section: Any, found: Callable[[str], str]) -> None:
    """Make relative folders of the section `adapters` absolute, in place.

    section: the section as parsed, not yet validated.
    found: function that returns the absolute path of a relative folder.
    """
    if not isinstance(section, dict):
        return
    for key, value in section.items():
        if isinstance(value, str):
            section[key] = _absolute(value, found)
        elif isinstance(value, list):
            section[key] = [_absolute(path, found) for path in value]
        elif isinstance(value, dict):
            section[key] = {name: _absolute(path, found) for name, path in value.items()}


def _absolute(value: Any, found: Callable[[str], str]) -> Any:
    return found(value) if isinstance(value, str) and value and not is_url(value) else value


def _check_folder(path: str, key: str) -> None:
    if is_url(path):
        raise ConfigError(f"{path}: must be a folder", param=key)
    if not os.path.isabs(path) or not os.path.isdir(path):
        raise ConfigError(f"{path}: no such folder", param=key)
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"{path}: cannot be read", param=key)
