"""The environment variables that Manta reads, and those that it sets for child processes."""

import contextlib
import os
import secrets
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_TOKEN = "~/.ray/auth_token"  # Ray's default


def cache_dir() -> Path:
    """Return the folder of converted models: MANTA_CACHE, else `manta` in the user's cache
    folder."""
    if chosen := os.environ.get("MANTA_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "manta"


def modelscope_endpoint() -> str:
    """Return the URL of ModelScope: MODELSCOPE_DOMAIN, with https:// if it has no scheme."""
    domain = os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
    has_scheme = domain.startswith(("https://", "http://"))
    return (domain if has_scheme else f"https://{domain}").rstrip("/")


@cache
def installed_version() -> str:
    """Return the installed version of Manta; "unknown" if Manta runs from a source folder."""
    try:
        return version("manta-serve")
    except PackageNotFoundError:
        # Manta runs from a source folder.
        return "unknown"


def gpus_here() -> int:
    """Return the number of NVIDIA GPUs of this machine, counted by their device files."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def visible_devices() -> str:
    """Return the value of CUDA_VISIBLE_DEVICES; "" if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def worker_rank() -> int:
    """Return the rank of this process among a trainer's workers (RANK); 0 if it is not set."""
    return int(os.environ.get("RANK", "0"))


def auth_token_source() -> str | None:
    """Return where Ray's authentication token comes from: "RAY_AUTH_TOKEN" or the path of a file;
    None without a token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return path
    default = Path(_TOKEN).expanduser()
    return str(default) if default.exists() else None


def make_auth_token() -> None:
    """Write a new authentication token to Ray's default file, readable by its owner only.

    Anyone who can read the token can run code in the cluster, and Ray itself would let all users
    read it. Does nothing if there already is a token, or if authentication is off. Raises OSError.
    """
    if auth_token_source() is not None or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return
    path = Path(_TOKEN).expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Another process may have created the file meanwhile.
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def send_auth_token() -> None:
    """Set RAY_AUTH_MODE, unless it is already set, so that Ray's client sends this machine's token,
    if any.

    A Ray cluster that `manta serve` started requires the token.
    """
    if auth_token_source() is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def asks_for_token() -> bool:
    """Return whether Ray processes that this process starts require the authentication token.

    A cluster requires it if RAY_AUTH_MODE is "token" when the cluster starts.
    """
    return os.environ.get("RAY_AUTH_MODE") == "token"


def api_key() -> str | None:
    """Return the API key for an OpenAI-compatible server; None if OPENAI_API_KEY is not set."""
    return os.environ.get("OPENAI_API_KEY")


def ray_address() -> str | None:
    """Return the address of a Ray cluster to join (RAY_ADDRESS); None if it is not set."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_temporary_folder() -> Path:
    """Return the default parent folder of Ray's session folders."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").absolute()


def set_for_children(variables: dict[str, str]) -> None:
    """Set environment variables for the processes that this process starts.

    A new PYTHONPATH is put before the existing value.
    """
    for name, value in variables.items():
        before = os.environ.get(name)
        if name == "PYTHONPATH" and before:
            value = f"{value}{os.pathsep}{before}"
        os.environ[name] = value


def no_ray_metrics() -> dict[str, str]:
    """Return environment variables that prevent Ray from serving its metrics on all interfaces.

    Variables that the user has set are left out. A metrics port can be turned off only by an
    invalid port number.
    """
    wanted = {
        "RAY_enable_metrics_collection": "0",
        "AUTOSCALER_METRIC_PORT": "65536",
        "DASHBOARD_METRIC_PORT": "65536",
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def edge_settings() -> str:
    """Return the JSON settings of HAProxy's launcher (MANTA_EDGE, see haproxy/settings.py); "": all
    defaults."""
    return os.environ.get("MANTA_EDGE", "")


def haproxy_binary() -> str:
    """Return the path of the HAProxy binary for Serve (RAY_SERVE_HAPROXY_BINARY_PATH); "" if it is
    not set."""
    return os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH", "")
