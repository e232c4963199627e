"""open_folder: opens the disk tier's folder, which only this user can access."""

import fcntl
import os
from pathlib import Path

from engine.errors import ConfigError

_IN_MEMORY = Path("/dev/shm")


def in_memory(folder: Path) -> bool:
    """Whether a folder is in memory (below /dev/shm), which all processes of the machine share."""
    return folder.is_relative_to(_IN_MEMORY)


def make_private(path: Path) -> None:
    """Create a folder that only this user can access, and its parents."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_folder(folder: Path) -> int:
    """Create the folder if it does not exist; return a descriptor that holds its lock shared.

    Raises ConfigError.
    """
    make_private(folder)
    stat = folder.stat(follow_symlinks=False)
    if stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
        raise ConfigError(
            f"disk_kv_folder: others than this user can reach {folder}, and it would have what "
            f"users wrote; run `chmod 700 {folder}` as its owner, or name another folder",
            param="disk_kv_folder",
        )
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(folder / "lock", flags, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def refusal(folder: Path, error: OSError) -> ConfigError:
    """Return the error for a folder that cannot be used, with a suggestion."""
    return ConfigError(
        f"disk_kv_folder: {folder} cannot be used: {error.strerror or error}; name a folder that "
        "this user can write, on a disk with room, or leave disk_kv_bytes out",
        param="disk_kv_folder",
    )
