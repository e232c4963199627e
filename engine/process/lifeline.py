"""The start of an engine process: reads its start message, ends it with its parent, sets
threads."""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def read_start() -> bytes:
    """Read the start message, one line on stdin; return b"" if the parent has ended.

    Nothing else is ever written to stdin, so its end means that the parent has ended.
    """
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(0, 65536)
        if not read:
            return b""
        line += read
    return line


def tie_to_parent(parent: int) -> None:
    """Make the kernel end this process when its parent ends, in any state.

    parent: the parent's process id.
    """
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def set_threads(count: int) -> None:
    """Set OpenMP's environment variables, before torch is imported and OpenMP reads them.

    count: the number of threads; 0 leaves the choice to the engine core.
    """
    # An OpenMP thread that waits for the other threads of its step spins on a core. GNU OpenMP
    # spins 300,000 times by default, 14 ms, in which a second engine or a router cannot use the
    # core. Two engines on two cores were measured at a sixth of their speed. 30,000 spins take a
    # millisecond, several times the pause between two matmuls of a step.
    os.environ["GOMP_SPINCOUNT"] = "30000"
    if count:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(count)
