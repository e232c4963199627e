"""The processes of one Serve instance on this machine, found from the address under test.

The search starts at the process that listens at this address and goes up to its raylet. It includes
every raylet and GCS of the same Ray session, whose children are the possible victims. Only these
processes are matched by name, so other clusters on the machine are never affected.

    raylet --session_name=S --node_id=...
    ├── ray::ServeController
    ├── ray::ProxyActor                         listens
    ├── ray::ServeReplica:manta:router
    └── ray::ServeReplica:manta:engine-gpu
        └── python -m engine.process.main
"""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.errors import RunError, ScenarioError

_SESSION = re.compile(r"session_\d{4}-\d\d-\d\d_[\d-]+_\d+_\d+")
_LISTEN = "0A"
_LOOKS, _LOOK_S = 10, 0.05


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process of the server.

    started: start time in clock ticks since boot; together with the pid it is unique.
    """

    pid: int
    parent: int
    started: int
    title: str

    def send(self, number: signal.Signals) -> bool:
        """Send a signal, and return False if the process has ended. Raises RunError.

        A later process with the same pid is never signalled.
        """
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                now = _read(self.pid)
                if now is not None and now.started == self.started:
                    signal.pidfd_send_signal(handle, number)
                    return True
            except PermissionError:
                raise RunError(f"no permission to signal process {self.pid}") from None
            finally:
                os.close(handle)
        return False


# target -> function that returns whether a process of the instance belongs to the target
TARGETS: dict[str, Callable[[ServerProcess], bool]] = {
    "engine": lambda p: " -m engine.process.main" in p.title,
    "replica": lambda p: re.match(r"ray::ServeReplica:[^:]*:engine", p.title) is not None,
    "router": lambda p: re.match(r"ray::ServeReplica:[^:]*:router", p.title) is not None,
    "deployment": lambda p: p.title.startswith("ray::ServeReplica:"),
    "controller": lambda p: p.title.startswith("ray::ServeController"),
    "proxy": lambda p: p.title.startswith("ray::ProxyActor"),
    # Serve's actor that starts haproxy
    "manager": lambda p: p.title.startswith("ray::HAProxyManager"),
    "haproxy": lambda p: os.path.basename(p.title.split(" ")[0]) == "haproxy",
    "node": lambda p: _program(p) == "raylet",
    "gcs": lambda p: _program(p) == "gcs_server",
}


@dataclass(frozen=True, slots=True)
class ServerInstance:
    """The processes of one server instance on this machine.

    session: part of the command lines of the instance's raylets; None for a server without Ray.
    root: the listening process. Without Ray the instance consists of its descendants.
    port: the port on which root, or its successor, listens.
    """

    session: str | None
    root: ServerProcess
    port: int

    def processes(self) -> list[ServerProcess]:
        """Return all live processes, oldest first."""
        table = _table()
        if self.session is None:
            roots = [p.pid for p in self._servers(table)]
        else:
            roots = [
                p.pid
                for p in table.values()
                if _program(p) in ("raylet", "gcs_server") and _session(p) == self.session
            ]
        children: dict[int, list[int]] = {}
        for process in table.values():
            children.setdefault(process.parent, []).append(process.pid)
        processes: dict[int, ServerProcess] = {}
        while roots:
            pid = roots.pop()
            if pid in table and pid not in processes:
                processes[pid] = table[pid]
                roots += children.get(pid, [])
        return sorted(processes.values(), key=lambda p: (p.started, p.pid))

    def find(self, target: str) -> list[ServerProcess]:
        """Return the target's live processes. The target `server` is the listening process."""
        if target == "server":
            return self._servers({p.pid: p for p in self.processes()})
        return [p for p in self.processes() if TARGETS[target](p)]

    def _servers(self, table: dict[int, ServerProcess]) -> list[ServerProcess]:
        """Return the process that listens on the port, in a list: `root` or its successor; [] if
        there is none."""
        first = table.get(self.root.pid)
        if first is not None and first.started == self.root.started:
            return [first]
        there = [pid for pid in _listeners(self.port) if pid in table]
        return [table[min(there)]] if there else []


def instance_at(url: str) -> ServerInstance:
    """Find the instance that listens at a URL. Raises ScenarioError if it is not on this
    machine.
    """
    if not Path("/proc/net/tcp").exists():
        raise ScenarioError("faults need Linux: processes are found in /proc")
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_here(parts.hostname or ""):
        raise ScenarioError(f"faults need the server on this machine; {parts.hostname} is another")
    for _ in range(_LOOKS):  # haproxy hands its port to a new process whenever routers change
        table = _table()
        listeners = [pid for pid in _listeners(port) if pid in table]
        if listeners:
            break
        time.sleep(_LOOK_S)
    else:
        raise ScenarioError(f"no process that we may look into listens on port {port}")
    for listener in listeners:
        pid = listener
        while pid in table:
            if _program(table[pid]) == "raylet" and (session := _session(table[pid])):
                return ServerInstance(session, table[listener], port)
            pid = table[pid].parent
    return ServerInstance(None, table[min(listeners)], port)


def _program(process: ServerProcess) -> str:
    return os.path.basename(process.title.split(" ", 1)[0])


def _session(process: ServerProcess) -> str | None:
    match = _SESSION.search(process.title)
    return match[0] if match else None


def _is_here(host: str) -> bool:
    """Whether a host is this machine: whether a socket can bind to its address."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ScenarioError(f"cannot resolve {host}: {error}") from error
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _listeners(port: int) -> list[int]:
    """Return the pids of the processes that listen on a TCP port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    processes = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # another user's process, or it has ended
            for link in folder.iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link) in inodes:
                        processes.append(int(folder.parent.name))
                        break
    return processes


def _table() -> dict[int, ServerProcess]:
    processes = (_read(int(folder.name)) for folder in Path("/proc").glob("[0-9]*"))
    return {process.pid: process for process in processes if process is not None}


def _read(pid: int) -> ServerProcess | None:
    """Read a process from /proc. Returns None for processes that have ended, zombies included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    text = title.replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return ServerProcess(pid, int(fields[1]), int(fields[19]), text)
