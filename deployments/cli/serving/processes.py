"""The processes that a `manta serve` has started, from /proc, and their end. Nothing is found on
systems without /proc.

While the server lives, they are known by their parents, for the server adopts what was orphaned
(`adopt_orphans`), and by the driver's session, which Ray's processes keep. For ever, they are known
by a variable in the environment that they were started with, which names the server.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MARK = "_MANTA_SERVER"  # without MANTA_ in front, which makes a setting
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 5.0  # for the kernel to end what got SIGKILL; a large GPU process takes seconds


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process.

    started: clock ticks since boot; with the pid they name one process for ever.
    """

    pid: int
    parent: int
    session: int
    started: int
    name: str


def table() -> dict[int, ProcessInfo]:
    """Return all live processes by pid; zombies are not among them."""
    processes = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (process := read(int(entry.name))) is not None:
            processes[process.pid] = process
    return processes


def read(pid: int) -> ProcessInfo | None:
    """Read a process from /proc; None for one that has ended, be it a zombie."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    if fields[0] in "ZX":
        return None
    return ProcessInfo(pid, int(fields[1]), int(fields[3]), int(fields[19]), name.partition("(")[2])


def descendants(root: int, processes: Mapping[int, ProcessInfo] | None = None) -> list[int]:
    """Return the live processes below a process."""
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
    """Return the mark that names this server: pid, start, and the namespace that the pid is of, as
    a host sees the processes of its containers, too."""
    me = read(os.getpid())
    return f"{os.getpid()}.{me.started if me is not None else 0}.{_namespace()}"


def variable(server: str) -> dict[str, str]:
    """Return the variables that the driver adds to the environment of all that it starts. They are
    the server's mark, and one that keeps processes from writing their title over their environment,
    where the mark is looked for. Ray's processes do write titles, with setproctitle, whose variable
    this is."""
    return {MARK: server, "SPT_NOENV": "1"}


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return "0"


def marked(processes: Iterable[int]) -> dict[int, str]:
    """Return pid -> mark of the processes that have a mark and that we may read."""
    servers = {}
    wanted = f"{MARK}=".encode()
    for pid in processes:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(wanted):
                    servers[pid] = entry[len(wanted) :].decode(errors="replace")
    return servers


def started_by(server: str, sessions: Collection[int] = ()) -> set[int]:
    """Return the live processes that this process, the server of that mark, has started."""
    processes = table()
    pids = {pid for pid, by in marked(processes).items() if by == server}
    pids |= {process.pid for process in processes.values() if process.session in sessions}
    for root in (os.getpid(), *pids):
        pids.update(descendants(root, processes))
    return pids - {os.getpid()}


def leftovers() -> dict[int, ProcessInfo]:
    """Live processes whose server was killed: those with its mark, and what is below them."""
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
    """Send SIGKILL to all processes that are found, until none is. Returns False if some are left
    after so many seconds."""
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
    """Take the exit codes of children that have ended, which are zombies until then. but: the child
    whose end is taken later. True if no child is left."""
    try:
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but:
                return False
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        return True
    return False


def adopt_orphans() -> None:
    """Make this process, and not init, the parent of what its children leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, and exit at once if the parent has ended
    already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
