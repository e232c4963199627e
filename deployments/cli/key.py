"""`manta key`: make an API key and write its digest, rights and limits to a keys file."""

import os
import secrets
import sys
from pathlib import Path

from deployments.cli.console import err
from deployments.config.keys import key_digest, parse_line, read_api_keys
from engine.errors import ConfigError


def run(file: Path, name: str, fields: list[str]) -> int:
    """Make an API key, append its line to a keys file, and print the key, which is stored nowhere.

    Raises ConfigError.

    fields: rights and limits, such as "requests=60".
    """
    key = f"sk-{secrets.token_urlsafe(24)}"
    digest = f"sha256:{key_digest(key)}"
    line = " ".join((digest, f"name={name}", *fields))
    # The name is put last, so that errors number the fields as typed.
    parse_line(" ".join((digest, *fields, f"name={name}")), name, "key")
    if file.exists():
        known = [entry for entry in read_api_keys(file, str(file)) if entry.rule.name == name]
        if known:
            raise ConfigError(f"{file}: there is a key named {name} already", param=str(file))
        text = file.read_text("utf-8")
        text += "" if text.endswith("\n") else "\n"
    else:
        text = ""
    # The file is replaced by a rename, so that routers never read a half-written one.
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
