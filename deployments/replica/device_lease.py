"""DeviceLease: a lease of a device that several replicas share in turn.

The replica that holds the lease is awake; the others sleep. The lease is a file lock, which the
kernel releases when its holder ends in any way. Waiting replicas hold a shared lock on a second
file, by which the holder notices them.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import tempfile
from pathlib import Path

_POLL_SECONDS = 0.02
_BEHIND_SECONDS = 0.1


class DeviceLease:
    """A lock by which replicas that share a device use it in turn.

    device: the device's name on this machine; replicas with the same name share it.

    Raises OSError if the machine's temporary folder cannot be written.
    """

    def __init__(self, device: str, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir()) / f"manta-devices-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        stem = folder / (re.sub(r"[^A-Za-z0-9_.-]", "-", device) or "all")
        self._lease = os.open(f"{stem}.turn", os.O_CREAT | os.O_RDWR, 0o600)
        self._waiting = os.open(f"{stem}.waiting", os.O_CREAT | os.O_RDWR, 0o600)
        self.held = False
        self._released = -_BEHIND_SECONDS

    def wanted(self) -> bool:
        """Return whether another replica waits for the lease."""
        if not _lock(self._waiting, fcntl.LOCK_EX):
            return True
        fcntl.flock(self._waiting, fcntl.LOCK_UN)
        return False

    async def acquire(self, seconds: float | None = None) -> bool:
        """Wait for the lease, and return whether it was acquired.

        seconds: longest wait; None: no limit.
        """
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        # A replica that waited while this one held the lease gets the lease first.
        await asyncio.sleep(max(0.0, self._released + _BEHIND_SECONDS - loop.time()))
        try:
            while not _lock(self._lease, fcntl.LOCK_EX):
                _lock(self._waiting, fcntl.LOCK_SH)
                if deadline is not None and loop.time() > deadline:
                    return False
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            # The file may be closed by now.
            with contextlib.suppress(OSError):
                fcntl.flock(self._waiting, fcntl.LOCK_UN)
        self.held = True
        return True

    def release(self) -> None:
        """End the lease, so that another replica can take it. Idempotent."""
        if self.held:
            fcntl.flock(self._lease, fcntl.LOCK_UN)
            self.held = False
            self._released = asyncio.get_running_loop().time()

    def close(self) -> None:
        for descriptor in (self._lease, self._waiting):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Try to lock an open file without waiting, and return whether it succeeded.

    descriptor: the file. kind: fcntl.LOCK_SH or fcntl.LOCK_EX.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
