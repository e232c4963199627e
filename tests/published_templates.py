"""Chat templates of published models: those in TRL's wheel, and those of the tokenizers in
published_tokenizers. Fetched when a test first asks, kept in .cache/templates."""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest

from deployments.checkpoints.package import fetch_package
from engine.errors import ConfigError
from tests.published_tokenizers import CACHE, NAMES, fetched, unavailable
from tests.published_tokenizers import folder as tokenizer

TRL = "trl==1.16.0"
SHA256 = "6c73f218049230f4820d92e26a6670ad3ca82b868afd88f2fba6a861648f238e"  # of `_digest`


def trl() -> Path:
    """Return the folder of TRL's unpacked modules, to read as text: importing them needs more
    packages."""
    return fetched(CACHE.with_name("templates") / TRL.replace("==", "-"), _fetch)


@cache
def of_trl() -> dict[str, dict[str, str]]:
    """Return the sources of chat templates in TRL, by model and template name, without training
    ones."""
    return {
        path.stem: {"default": path.read_text("utf-8")}
        for path in sorted((trl() / "chat_templates").glob("*.jinja"))
        if not path.stem.endswith("_training")
    }


@cache
def of_tokenizers() -> dict[str, dict[str, str]]:
    """Return the sources of the chat templates of published tokenizers, by model and template
    name."""
    settings_of: dict[str, dict[str, str]] = {}
    for name in NAMES:
        settings = json.loads((tokenizer(name) / "tokenizer_config.json").read_text("utf-8"))
        template = settings.get("chat_template")
        if isinstance(template, list):
            settings_of[name] = {item["name"]: item["template"] for item in template}
        elif template:
            settings_of[name] = {"default": template}
    return settings_of


def _fetch(place: Path) -> Path:
    try:
        package = fetch_package(TRL, place) / "trl"
    except ConfigError as error:
        unavailable(error.message)
    if (digest := _digest(package)) != SHA256:
        pytest.fail(f"{TRL} is not what the hash here names: {digest}")
    return package


def _digest(package: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted([package / "chat_template_utils.py", *package.glob("chat_templates/*")]):
        whole.update(b"%s %d " % (path.name.encode(), path.stat().st_size) + path.read_bytes())
    return whole.hexdigest()
