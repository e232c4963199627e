"""Every environment variable that Manta reads, in one place."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where converted models are kept: MANTA_CACHE, else manta in the user's cache folder."""
    if chosen := os.environ.get("MANTA_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "manta"


def auth_token_source() -> str | None:
    """Where Ray on this machine takes its authentication token from; None if it has none yet."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return path
    default = Path("~/.ray/auth_token").expanduser()
    return str(default) if default.exists() else None


def asks_for_token() -> bool:
    """Whether Ray's processes started from here check it; a local Ray decides that as it starts."""
    return os.environ.get("RAY_AUTH_MODE") == "token"


def api_key() -> str | None:
    """The key for an OpenAI-compatible server."""
    return os.environ.get("OPENAI_API_KEY")


def ray_address() -> str | None:
    """The Ray cluster to join."""
    return os.environ.get("RAY_ADDRESS") or None


def set_for_children(variables: dict[str, str]) -> None:
    """Hand variables to the processes that this one starts. An existing PYTHONPATH is kept."""
    for name, value in variables.items():
        before = os.environ.get(name)
        if name == "PYTHONPATH" and before:
            value = f"{value}{os.pathsep}{before}"
        os.environ[name] = value
