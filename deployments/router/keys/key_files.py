"""KeyFiles: a router's API keys, read from the configured files and again after each change."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.api.caller import KeyRule
from deployments.config.keys import ApiKey, read_api_keys
from engine.errors import ConfigError

logger = logging.getLogger("manta.router")


@dataclass(frozen=True, slots=True)
class KeySettings:
    """The API keys in a configuration, and the files that they come from.

    user, admin: the keys read when the configuration was built, used if the router's node lacks the
        files.
    files: {"api_keys_file" or "admin_keys_file": path}.
    """

    user: tuple[ApiKey, ...] = ()
    admin: tuple[ApiKey, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


class KeyFiles:
    """The API keys as last read from the files. `poll` blocks, and may run in one thread at a
    time."""

    def __init__(self, settings: KeySettings) -> None:
        self._keys = {"api_keys_file": settings.user, "admin_keys_file": settings.admin}
        self._files = {name: Path(path) for name, path in settings.files.items()}
        self._seen: dict[str, tuple[int, ...] | None] = dict.fromkeys(self._files)

    def poll(self) -> bool:
        """Read the files that have changed since the last call, and return whether any key has
        changed.

        If a file is missing or faulty, its previous keys remain valid, so that a mistake does not
        lock all users out.
        """
        changed = False
        for name, path in self._files.items():
            try:
                stat = path.stat()
            except OSError:
                if self._seen[name] is not None:
                    logger.error("http.%s: %s is gone; its keys stay as they were", name, path)
                    self._seen[name] = None
                continue
            mark = (stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_mode)
            if mark == self._seen[name]:
                continue
            self._seen[name] = mark
            try:
                keys = read_api_keys(path, f"http.{name}")
            except ConfigError as error:
                logger.error("http.%s: %s; its keys stay as they were", name, error.message)
                continue
            if keys != self._keys[name]:
                logger.info("http.%s: %s has %d keys now", name, path, len(keys))
                self._keys[name] = keys
                changed = True
        return changed

    def options(self) -> dict[str, Any]:
        """Return the fields of ApiOptions for these keys: their digests and rules."""
        user, admin = self._keys["api_keys_file"], self._keys["admin_keys_file"]
        rules: dict[bytes, KeyRule] = {
            bytes.fromhex(key.digest): key.rule for key in (*admin, *user) if key.rule != KeyRule()
        }
        return {
            "api_keys": frozenset(bytes.fromhex(key.digest) for key in user),
            "admin_keys": frozenset(bytes.fromhex(key.digest) for key in admin),
            "rules": rules,
        }

    def names(self) -> dict[str, str]:
        """Return {Caller.id of a key: the key's name in metrics and the usage file}."""
        keys = (*self._keys["admin_keys_file"], *self._keys["api_keys_file"])
        return {key.digest[:32]: key.rule.name or key.digest[:8] for key in keys}
