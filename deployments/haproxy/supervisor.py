"""The process that Serve takes for HAProxy: it starts HAProxy as its child, and again when HAProxy
has died.

  Serve's HAProxyManager --signals, admin.sock--> supervisor --signals, cli.sock--> haproxy

Serve would notice a dead HAProxy by three failed polls, replace its actor, and start HAProxy from
there, which takes 5 to 6 s. The supervisor starts HAProxy again with the same configuration, and
Serve notices nothing. To Serve the supervisor must look like HAProxy, which Serve recognises by the
pid that `show info` prints on admin.sock.
"""

import contextlib
import ctypes
import importlib.util
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

NOTE = "manta-edge: "  # beginning of a line on stderr that is no reason for a failed start
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.01
_LEAST_SECONDS = 0.2  # between two starts, so that a HAProxy that ends at once takes no whole core
# Longer than Serve's own patience of 5 s, so that Serve sees a HAProxy that hangs.
_REPLY_SECONDS = 6.0
_COMMAND_SECONDS = 1.0
_STOPS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_FORWARDED = (*_STOPS, signal.SIGTTOU, signal.SIGTTIN, signal.SIGHUP, signal.SIGQUIT)
# The options with which Serve of Ray 2.60 starts HAProxy, and the line by which it recognises it.
_OPTIONS = {"-db", "-dR", "-f", "-sf", "-x"}
_PID_CHECK = 'line.startswith("Pid:")'


def own_socket(admin: Path) -> Path:
    """Return the path of HAProxy's own command socket, given that of the supervisor. The name is
    not longer, as the path's length is limited."""
    return admin.with_name("cli.sock")


def why_unsupervised(arguments: Sequence[str]) -> str:
    """Return the reason why this release of Ray Serve needs HAProxy itself in place of the
    supervisor; "" if there is none.

    arguments: HAProxy's, as Serve gives them.
    """
    if unknown := {word for word in arguments if word.startswith("-")} - _OPTIONS:
        return f"Ray Serve starts HAProxy with unknown options: {' '.join(sorted(unknown))}"
    spec = importlib.util.find_spec("ray")
    for folder in (spec and spec.submodule_search_locations) or ():
        with contextlib.suppress(OSError):
            if _PID_CHECK in Path(folder, "serve/_private/haproxy.py").read_text():
                return ""
    return "Ray Serve recognises HAProxy in another way"


def supervise(binary: str, arguments: Sequence[str], text: str, admin: Path) -> int:
    """Run HAProxy until it is told to stop or cannot be started, and return the exit code.

    text: the configuration, whose command socket is `own_socket(admin)`.
    admin: path of the socket on which Serve sends commands.
    """
    # Serve may write the file anew at any time, so the configuration stays in memory.
    config = os.memfd_create("haproxy.cfg", 0)
    os.write(config, text.encode())
    first = [binary, *arguments]
    first[first.index("-f") + 1] = f"/dev/fd/{config}"
    code = _Supervisor(first, admin).run()
    return code if code >= 0 else 128 - code  # as shells do it for signals


def end_with(parent: int, number: signal.Signals) -> bool:
    """Let this process get a signal when its parent ends, also after an exec; return whether the
    parent still runs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent


def is_listening(path: Path) -> bool:
    """Return whether a process listens on this Unix socket."""
    with socket.socket(socket.AF_UNIX) as line:
        return line.connect_ex(str(path)) == 0


class _Supervisor:
    """The supervisor of one HAProxy.

    command: HAProxy's command line. admin: path of the socket for Serve.
    """

    def __init__(self, command: Sequence[str], admin: Path) -> None:
        self._command = list(command)
        self._admin = admin
        self._child = 0
        self._started = 0.0  # when HAProxy was last started
        self._stopping = False

    def run(self) -> int:
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        if (code := self._start()) is not None:
            return code
        # A successor need not take sockets from a predecessor, nor stop it, once more.
        self._command = _without_predecessor(self._command)
        with _listen(self._admin) as listener:
            while True:
                end = os.pidfd_open(self._child)
                readable, _, _ = select.select([end, listener.fileno()], [], [])
                os.close(end)
                if end not in readable:
                    self._answer(listener)
                elif (code := self._restart()) is not None:
                    return code

    def _start(self) -> int | None:
        """Start HAProxy and wait until it listens; return its exit code if it has ended instead."""
        self._started = time.monotonic()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            try:
                # HAProxy must end with the supervisor, which Serve kills in order to kill HAProxy.
                if end_with(parent, signal.SIGKILL):
                    os.execv(self._command[0], self._command)
            finally:
                os._exit(1)
        self._child = child
        if self._stopping:  # the signal came before the child
            os.kill(child, signal.SIGTERM)
        while _running_pid(own_socket(self._admin)) != child:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(_POLL_SECONDS)
        return None

    def _restart(self) -> int | None:
        """Start HAProxy again after its death; return the exit code if it was told to end, or
        cannot be started."""
        began = time.monotonic()
        dead = self._child
        _, status = os.waitpid(dead, 0)
        self._child = 0
        code = os.waitstatus_to_exitcode(status)
        if not self._stopping and code != 0:
            time.sleep(max(0.0, self._started + _LEAST_SECONDS - began))
        if self._stopping or code == 0:
            return code
        failed = self._start()
        result = "it could not be started again" if failed is not None else "it was started again"
        print(
            f"{NOTE}HAProxy {dead} ended with {code}, {result} after "
            f"{time.monotonic() - began:.2f} s",
            file=sys.stderr,
            flush=True,
        )
        return failed

    def _answer(self, listener: socket.socket) -> None:
        """Let HAProxy answer a command of Serve, with the supervisor's pid in place of its own."""
        with contextlib.suppress(OSError), listener.accept()[0] as line:
            line.settimeout(_COMMAND_SECONDS)
            command = b""
            while not command.endswith(b"\n") and (data := line.recv(65536)):
                command += data
            reply = _ask(own_socket(self._admin), command)
            line.settimeout(_REPLY_SECONDS)
            line.sendall(re.sub(rb"(?m)^Pid: \d+$", b"Pid: %d" % os.getpid(), reply))

    def _forward(self, number: int, _: FrameType | None) -> None:
        self._stopping |= number in _STOPS
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)


def _without_predecessor(command: Sequence[str]) -> list[str]:
    """Return a command line of HAProxy without `-sf PID...` and `-x SOCKET`."""
    words = []
    option = ""
    for word in command:
        if word.startswith("-"):
            option = word
        if option not in ("-sf", "-x"):
            words.append(word)
    return words


def _listen(path: Path) -> socket.socket:
    """Return a socket that listens at this path in place of any other, for this user only."""
    listener = socket.socket(socket.AF_UNIX)
    new = path.with_name(str(os.getpid()))
    new.unlink(missing_ok=True)
    listener.bind(str(new))
    new.chmod(0o600)
    listener.listen()
    new.replace(path)
    return listener


def _ask(path: Path, command: bytes) -> bytes:
    """Return HAProxy's reply to a command. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_REPLY_SECONDS)
        line.connect(str(path))
        line.sendall(command)
        return b"".join(iter(lambda: line.recv(65536), b""))


def _running_pid(path: Path) -> int | None:
    """Return the pid of the HAProxy that answers on this socket; None without an answer."""
    try:
        match = re.search(rb"(?m)^Pid: (\d+)$", _ask(path, b"show info\n"))
    except OSError:
        return None
    return int(match[1]) if match else None
