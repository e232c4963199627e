"""read_api_keys: reads files of API keys, whose lines have a key, its rights and its limits.

sha256:9f86d0...  name=team-a models=llama,legal-* requests=60 tokens=100000 budget=5000000/day
sk-plain-text     priority=-8
"""

import difflib
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from deployments.api.caller import KeyRule
from engine.errors import ConfigError

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,64}")
_MODEL = re.compile(r"[A-Za-z0-9._:/@+=*?\[\]!-]{1,256}")
_INTEGER = re.compile(r"-?[0-9]{1,15}")
_BUDGET = re.compile(r"([0-9]{1,15})/(day|month)")

FIELDS = (
    "name=<word>, models=<name or pattern>,..., requests=<a minute>, tokens=<a minute>, "
    "budget=<tokens>/day or /month, priority=<integer> such as priority=-8"
)


class ApiKey(NamedTuple):
    """An API key, known by its digest, with its rights and limits.

    digest: SHA-256 of the key, in hex.
    """

    digest: str
    rule: KeyRule = KeyRule()


def key_digest(key: str) -> str:
    """Return the SHA-256 of an API key in hex, which represents the key in files and tables."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_api_keys(path: str | Path, param: str = "http.api_keys_file") -> tuple[ApiKey, ...]:
    """Return the keys in a file; lines that begin with # are comments.

    Raises ConfigError (about `param`) if the file is missing, empty or readable by others, if a
    line is malformed, or if a key or a name is there twice.
    """
    path = Path(path).expanduser()
    try:
        mode = path.stat().st_mode
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}",
            param=param,
        ) from None
    if mode & 0o077:
        raise ConfigError(f"{path}: other users may read it; chmod 600 {path}", param=param)
    keys: list[ApiKey] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        key = parse_line(line, f"{path}:{number}", param)
        for what in (key.digest, key.rule.name):
            if what and seen.setdefault(what, number) != number:
                # The message may show names, but never a key.
                whose = f"the name {what}" if what == key.rule.name else "this key"
                message = f"{path}:{number}: {whose} is in line {seen[what]} already"
                raise ConfigError(message, param=param)
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path}: no key in it", param=param)
    return tuple(keys)


def parse_line(line: str, where: str, param: str) -> ApiKey:
    """Return the key and the rights in a line of a keys file.

    where: file and number of the line, for error messages.
    param: configuration key of the file, for error messages.

    Raises ConfigError, whose message never contains the key.
    """
    key, *words = line.split()
    match = _DIGEST.fullmatch(key)
    if match is None and key.startswith("sha256:"):
        raise ConfigError(f"{where}: sha256: is followed by 64 hexadecimal digits", param=param)
    rule = KeyRule()
    for number, word in enumerate(words, 1):
        name, equals, value = word.partition("=")
        changes = _PARSERS[name](value) if equals and name in _PARSERS else None
        if changes is None:
            known = name in _PARSERS
            near = difflib.get_close_matches(name, _PARSERS, n=1) if equals and not known else ()
            # A word without a known field name may be a key, so the message does not show it.
            shown = f"the value of {name}=" if known else f"word {number} behind the key"
            hint = f"; did you mean {near[0]}=?" if near else ""
            message = f"{where}: {shown} is not understood{hint}; behind the key may stand {FIELDS}"
            raise ConfigError(message, param=param)
        rule = replace(rule, **changes)
    return ApiKey(match[1] if match else key_digest(key), rule)


def _name(value: str) -> dict[str, Any] | None:
    return {"name": value} if _NAME.fullmatch(value) else None


def _models(value: str) -> dict[str, Any] | None:
    models = tuple(value.split(","))
    return {"models": models} if all(map(_MODEL.fullmatch, models)) else None


def _number(name: str, least: int | None) -> Callable[[str], dict[str, Any] | None]:
    def parse(value: str) -> dict[str, Any] | None:
        if not _INTEGER.fullmatch(value) or (least is not None and int(value) < least):
            return None
        return {name: int(value)}

    return parse


def _budget(value: str) -> dict[str, Any] | None:
    match = _BUDGET.fullmatch(value)
    return None if match is None else {"budget": int(match[1]), "period": match[2]}


_PARSERS: dict[str, Callable[[str], dict[str, Any] | None]] = {
    "name": _name,
    "models": _models,
    "requests": _number("requests", 1),
    "tokens": _number("tokens", 1),
    "budget": _budget,
    "priority": _number("priority", None),
}
