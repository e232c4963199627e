"""started_by, leftovers, kill: find in /proc, and kill, the processes that a `manta serve` has
started.

Without /proc no process is found. While the server lives, its processes are identified by their
ancestors and by the driver's session: the server adopts orphans (`adopt_orphans`), and Ray's
processes keep the session. After the server's death they are identified by an environment variable,
MARK, which contains the server's mark.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MARK = "_MANTA_SERVER"  # without the prefix MANTA_, which is for settings
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Maximum seconds for the kernel to end killed processes; a large GPU process takes several.
_KILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process of this machine.

    started: start time in clock ticks since boot; together with the pid it is unique.
    """

    pid: int
    parent: int
    session: int
    started: int
    name: str


def table() -> dict[int, ProcessInfo]:
    """Return all live processes by pid, without zombies."""
    processes = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (process := read(int(entry.name))) is not None:
            processes[process.pid] = process
    return processes


def read(pid: int) -> ProcessInfo | None:
    """Return a process from /proc; None if it has ended or is a zombie."""
    try:
        name, _, after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = after_name.split()
    if fields[0] in "ZX":
        return None
    return ProcessInfo(pid, int(fields[1]), int(fields[3]), int(fields[19]), name.partition("(")[2])


def descendants(root: int, processes: Mapping[int, ProcessInfo] | None = None) -> list[int]:
    """Return the pids of all live descendants of a process."""
    children: dict[int, list[int]] = {}
    for process in (table() if processes is None else processes).values():
        children.setdefault(process.parent, []).append(process.pid)
    pids, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        pids += below
        pending += below
    return pids


def mark() -> str:
    """Return the text that identifies this server process (its mark): pid, start time and pid
    namespace.

    The namespace is part of the mark because a host also sees its containers' processes.
    """
    me = read(os.getpid())
    return f"{os.getpid()}.{me.started if me is not None else 0}.{_namespace()}"


def variable(server: str) -> dict[str, str]:
    """Return the environment variables for all processes that the driver starts.

    MARK has the server's mark. SPT_NOENV keeps setproctitle, which Ray uses, from overwriting the
    environment.

    server: the server's mark.
    """
    return {MARK: server, "SPT_NOENV": "1"}


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return "0"


def marked(processes: Iterable[int]) -> dict[int, str]:
    """Return {pid: mark of the server that started the process}, from the processes' environments.

    Processes without a mark, and those whose environment cannot be read, are left out.

    processes: the pids to examine.
    """
    servers = {}
    wanted = f"{MARK}=".encode()
    for pid in processes:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(wanted):
                    servers[pid] = entry[len(wanted) :].decode(errors="replace")
    return servers


def started_by(server: str, sessions: Collection[int] = ()) -> set[int]:
    """Return the pids of the live processes that this server process has started.

    server: this server's mark.
    sessions: ids of sessions whose processes are included.
    """
    processes = table()
    pids = {pid for pid, by in marked(processes).items() if by == server}
    pids |= {process.pid for process in processes.values() if process.session in sessions}
    for root in (os.getpid(), *pids):
        pids.update(descendants(root, processes))
    return pids - {os.getpid()}


def leftovers() -> dict[int, ProcessInfo]:
    """Return the marked processes whose server has died, and their descendants, by pid."""
    processes = table()
    pids: set[int] = set()
    living = {(str(process.pid), str(process.started)) for process in processes.values()}
    for pid, by in marked(processes).items():
        server, started, namespace = (*by.split("."), "", "")[:3]
        if namespace == _namespace() and (server, started) not in living:
            pids |= {pid, *descendants(pid, processes)}
    pids -= {os.getpid()}
    return {pid: processes[pid] for pid in sorted(pids)}


def kill(find: Callable[[], Collection[int]], seconds: float = _KILL_SECONDS) -> bool:
    """Send SIGKILL to the processes that `find` returns, until it returns none.

    Returns False if there are still some after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while pids := find():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def reap(but: int = 0) -> bool:
    """Collect the exit codes of ended child processes, which would remain zombies.

    Returns whether this process has no children left.

    but: pid of a child that is not collected; no child is collected once this one has ended.
    """
    try:
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but:
                return False
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        return True
    return False


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; exit immediately if the parent has
    already ended.

    parent: pid of the parent.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
