"""Every environment variable that Manta reads, in one place."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where converted models are kept: MANTA_CACHE, else manta in the user's cache folder."""
    if chosen := os.environ.get("MANTA_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "manta"
