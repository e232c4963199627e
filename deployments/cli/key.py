"""`manta key`: a new API key, in a keys file as its digest with what it may do."""

import os
import secrets
import sys
from pathlib import Path

from deployments.cli.console import err
from deployments.config.keys import key_digest, parse_line, read_api_keys
from engine.errors import ConfigError


def run(file: Path, name: str, fields: list[str]) -> int:
    """Append the key's line and print the key, which is nowhere else. Raises ConfigError."""
    key = f"sk-{secrets.token_urlsafe(24)}"
    digest = f"sha256:{key_digest(key)}"
    line = " ".join((digest, f"name={name}", *fields))
    parse_line(" ".join((digest, *fields, f"name={name}")), name, "key")  # words as they were given
    if file.exists():
        known = [entry for entry in read_api_keys(file, str(file)) if entry.rule.name == name]
        if known:
            raise ConfigError(f"{file}: there is a key named {name} already", param=str(file))
        text = file.read_text("utf-8")
        text += "" if text.endswith("\n") else "\n"
    else:
        text = ""
    # Renamed into place: a router that reads meanwhile sees the old file or the new one.
    new = file.with_name(f"{file.name}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as target:
            target.write(f"{text}{line}\n")
        new.replace(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}", param=str(file)) from None
    err.print(f"added to {file}; routers that have this file take it within seconds. The key:")
    sys.stdout.write(f"{key}\n")
    return 0
