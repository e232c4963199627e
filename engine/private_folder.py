"""private_folder: creates a folder with a short path for sockets, which only this user can
access."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ConfigError

MAX_PATH = 95  # maximum characters of a folder's path, as a socket's path has at most 107 bytes
_RANDOM = 8  # number of characters that mkdtemp appends
_PREFIXES = ("manta-", "mt-")  # the second is used where the first makes the path too long


def temporary_folders() -> list[Path]:
    """Return the folders that may hold temporary files, the user's choice (TMPDIR) first."""
    folders = [Path("/tmp"), Path(f"/run/user/{os.getuid()}"), Path("/var/tmp"), Path("/dev/shm")]
    with contextlib.suppress(FileNotFoundError):  # raised if Python finds no writable folder
        folders.insert(0, Path(tempfile.gettempdir()))
    return list(dict.fromkeys(folders))


def why_unusable(folder: Path, *, programs: bool = False) -> str:
    """Return why this process cannot put files into the folder; "" if it can.

    programs: whether the files will be executed.
    """
    if not folder.is_dir():
        return "is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "no permission to write"
    if programs and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return "is mounted noexec"
    return ""


def private_folder(
    longest: int, *, programs: bool = False, parents: Sequence[Path] | None = None
) -> Path:
    """Make a private folder whose path has at most `longest` characters; the caller removes it.

    programs: whether files in it will be executed.
    parents: folders to try; None = temporary_folders().
    Raises ConfigError with the reason for each.
    """
    faults = []
    for parent in temporary_folders() if parents is None else parents:
        fault = why_unusable(parent, programs=programs)
        lengths = {len(f"{parent}/{prefix}") + _RANDOM: prefix for prefix in _PREFIXES}
        fitting = [prefix for length, prefix in lengths.items() if length <= longest]
        if not fault and not fitting:
            fault = f"is too long by {min(lengths) - longest} characters for the path of a socket"
        if not fault:
            try:
                return Path(tempfile.mkdtemp(prefix=fitting[0], dir=parent))
            except OSError as error:  # e.g. no space is left
                fault = error.strerror or str(error)
        faults.append(f"{parent} {fault}")
    raise ConfigError(
        f"no folder for sockets{' and programs' if programs else ''}: {'; '.join(faults)}. "
        "Set TMPDIR to a short path of a folder that can be written"
        f"{', not mounted noexec' if programs else ''}"
    )
