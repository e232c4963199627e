"""ray_folder: chooses the folder for the sockets and logs of the Ray that `manta serve` starts.

Ray's default (TMPDIR/ray) may be too long for a socket's path, or belong to another user.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from deployments.environment import ray_temporary_folder
from engine.errors import ConfigError
from engine.private_folder import temporary_folders, why_unusable

# Maximum bytes of the folder's path: Linux allows 107 for a socket's path, and Ray appends
# /session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.0
_LONGEST = 107 - 66


def ray_folder(parents: Sequence[Path] | None = None) -> Path:
    """Return Ray's default folder if it is usable, otherwise a folder of this user.

    parents: folders in which this user's folder may be, in order; None: temporary_folders().

    Raises ConfigError with the problem of each folder.
    """
    faults = []
    default = ray_temporary_folder() / "ray"
    own = temporary_folders() if parents is None else parents
    for folder in (default, *(parent / f"ray-{os.getuid()}" for parent in own)):
        fault = _why_unusable(folder, own=folder != default)
        if not fault:
            return folder
        faults.append(f"{folder} {fault}")
    raise ConfigError(
        f"no folder for Ray: {'; '.join(faults)}. Set TMPDIR to a short path of a folder that "
        "can be written"
    )


def _why_unusable(folder: Path, *, own: bool) -> str:
    if len(os.fsencode(folder)) > _LONGEST:
        return f"is longer than {_LONGEST} bytes, which Ray's sockets allow"
    if not folder.exists():
        fault = why_unusable(folder.parent)
        return f"cannot be made: {folder.parent} {fault}" if fault else ""
    if own and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
        return "belongs to another user"
    return why_unusable(folder)
