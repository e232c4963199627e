"""Every environment variable that Manta reads, in one place."""

import contextlib
import os
import secrets
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_TOKEN = "~/.ray/auth_token"  # Ray's default


def cache_dir() -> Path:
    """Return the folder of converted models: MANTA_CACHE, else manta in the user's cache folder."""
    if chosen := os.environ.get("MANTA_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "manta"


@cache
def installed_version() -> str:
    """Return the installed version of Manta; "unknown" if it runs out of a folder."""
    try:
        return version("manta-serve")
    except PackageNotFoundError:  # out of a folder
        return "unknown"


def gpus_here() -> int:
    """Return the number of NVIDIA's GPUs of this machine, by their device files."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def visible_devices() -> str:
    """Return the GPUs of this process as CUDA_VISIBLE_DEVICES names them; "" if it names none."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def auth_token_source() -> str | None:
    """Return the source of Ray's authentication token on this machine; None if none is there."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return path
    default = Path(_TOKEN).expanduser()
    return str(default) if default.exists() else None


def make_auth_token() -> None:
    """Make Ray's token where a Ray started here would make it, for its owner only.

    A user with the token can run code in the cluster, and Ray leaves it readable by all. Nothing is
    done if there is a token, or none is wanted. Raises OSError.
    """
    if auth_token_source() is not None or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return
    path = Path(_TOKEN).expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another start was quicker
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def send_auth_token() -> None:
    """Let Ray's client send the token of this machine, where there is one and nothing else was
    said: a Ray that `manta serve` started asks for it."""
    if auth_token_source() is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def asks_for_token() -> bool:
    """Whether Ray's processes started from here check the token.

    A local Ray decides that as it starts.
    """
    return os.environ.get("RAY_AUTH_MODE") == "token"


def api_key() -> str | None:
    """Return the key for an OpenAI-compatible server."""
    return os.environ.get("OPENAI_API_KEY")


def ray_address() -> str | None:
    """Return the address of the Ray cluster to join."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_temporary_folder() -> Path:
    """Return the folder below which Ray puts its sessions unless it is told another."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").absolute()


def set_for_children(variables: dict[str, str]) -> None:
    """Hand variables to the processes that this one starts. An existing PYTHONPATH is kept."""
    for name, value in variables.items():
        before = os.environ.get(name)
        if name == "PYTHONPATH" and before:
            value = f"{value}{os.pathsep}{before}"
        os.environ[name] = value


def no_ray_metrics() -> dict[str, str]:
    """Return variables that keep Ray from serving its metrics on all interfaces, to every client.

    Variables that are set already are the user's wish. A port that does not exist is the only way
    to say none.
    """
    wanted = {
        "RAY_enable_metrics_collection": "0",
        "AUTOSCALER_METRIC_PORT": "65536",
        "DASHBOARD_METRIC_PORT": "65536",
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def edge_settings() -> str:
    """Return the JSON settings of HAProxy's launcher; "": all defaults (haproxy/settings.py)."""
    return os.environ.get("MANTA_EDGE", "")


def haproxy_binary() -> str:
    """Return the path of the HAProxy that Serve is told to run; "" if none is named."""
    return os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH", "")
