"""Every environment variable that Manta reads, in one place; nothing below deployments/ reads any."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where converted models are kept: MANTA_CACHE, else XDG_CACHE_HOME/manta, else ~/.cache/manta."""
    if chosen := os.environ.get("MANTA_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "manta"
