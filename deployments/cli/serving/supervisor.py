"""Supervisor: the parent process of `manta serve`, which starts and supervises the driver and Ray.

The supervisor restarts both when Ray's node is lost, and finally ends all their processes. It never
calls Ray, so it cannot hang in a call.

        signal
  start driver -> serving ------> driver stops; remaining processes are killed
   ^             | raylet or GCS ended, or reports missing: all are killed
   +-------------+ at most limits.restarts times an hour
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from deployments.cli.console import StatusLine, err, out
from deployments.cli.serving.cluster import STOP_SECONDS, Cluster, serving_folder
from deployments.cli.serving.driver import Driver, RayLostError
from deployments.cli.serving.processes import (
    adopt_orphans,
    kill,
    mark,
    read,
    reap,
    started_by,
    table,
)
from deployments.config.load import MantaConfig
from engine.errors import ConfigError, MantaError

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL = 0.1  # seconds
# Seconds within which a second signal is ignored, because `timeout` signals its child and then the
# group.
_SAME = 0.1
_UNWIND = 2.0  # maximum seconds for a download to remove its partial files
# Seconds without a report after which Ray counts as lost; Serve's controller may take long to
# restart.
_SILENT = 60.0
# name of a Ray process whose end means that the node is lost -> its name in messages
_NODE = {"raylet": "the raylet", "gcs_server": "the GCS"}
_HOUR = 3600.0

Serve = Callable[[Driver], None]
Close = Callable[[float | None], None]
OnceReady = Callable[[str, MantaConfig], bool]


class ServeError(MantaError):
    """The error raised if the application could not be deployed, or has disappeared."""

    code = "deploy_failed"


class Signals:
    """The signals received so far: the first determines how to stop, a later one means to stop
    immediately.

    first: number of the first signal; None: none yet.
    hurry: whether a later signal has come.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.hurry = False
        self.interrupts = False  # whether the first signal also raises KeyboardInterrupt
        self._at = 0.0

    @property
    def exit_code(self) -> int:
        """The exit code: 0 after SIGTERM, by which service managers stop services, otherwise 128
        plus the signal's number."""
        return 0 if self.first == signal.SIGTERM else 128 + (self.first or 0)

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        if self.first is None:
            self.first, self._at = number, time.monotonic()
            if self.interrupts:
                raise KeyboardInterrupt
        elif time.monotonic() - self._at > _SAME:
            self.hurry = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in _STOPS}
        for number, handler in before.items():
            # SIGHUP remains ignored if it was ignored before, as under nohup.
            if number != signal.SIGHUP or handler != signal.SIG_IGN:
                signal.signal(number, self.handle)
        try:
            yield
        finally:
            # After a stop signal further signals are ignored, so that the first one decides the
            # exit code.
            for number, handler in before.items():
                signal.signal(number, handler if self.first is None else signal.SIG_IGN)


class DriverProcess:
    """A driver process and the processes that it has started, such as Ray's unless a cluster was
    joined.

    serving, has_model, has_ray: whether the driver has sent the message "serving", "model", "ray".
    ended: whether the driver has closed its channel.
    """

    def __init__(self, cluster: Cluster, serve: Serve, close: Close) -> None:
        self.serving = False
        self.has_model = False
        self.has_ray = False
        self.ended = False
        self._heard = time.monotonic()
        self._rest = b""
        # Pids of the processes in _NODE, by name; 0: not found.
        self._node: dict[str, int] = {}
        self._own = cluster.own
        self._mark = mark()
        self._channel, theirs = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._channel.close()
            Driver(theirs, serve, close).run(server, self._mark)
        theirs.close()

    def messages(self, seconds: float) -> list[dict[str, Any]]:
        """Wait for messages from the driver for at most `seconds`, and return all new messages."""
        if self.ended:
            return []
        if self._selector.select(seconds):
            data = self._channel.recv(1 << 16)
            self.ended = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines:
                self._heard = time.monotonic()
            messages = [json.loads(line) for line in lines]
            for message in messages:
                self._note(message)
            return messages
        return []

    def _note(self, message: dict[str, Any]) -> None:
        self.has_model |= "model" in message
        self.serving |= "serving" in message
        if "ray" in message:
            self.has_ray = True
            processes = table() if self._own else {}
            below = {
                process.name: process.pid
                for process in processes.values()
                if process.parent == self.pid
            }
            if processes:  # empty without /proc
                self._node = {name: below.get(name, 0) for name in _NODE}

    def check(self) -> None:
        """Raise RayLostError if the driver or Ray's node has ended, or the last report of the
        driver is too old."""
        if gone := [_NODE[name] for name, pid in self._node.items() if read(pid) is None]:
            raise RayLostError(f"{gone[0]} of Manta's Ray has ended")
        if self.ended:
            raise RayLostError("the process that talks to Ray has ended")
        if self.serving and time.monotonic() - self._heard > _SILENT:
            raise RayLostError(f"Ray has not answered for {_SILENT:.0f} s")

    def stop(self, drain_seconds: float | None) -> None:
        """Tell the driver to stop the deployment and Ray; `ended` becomes true afterwards.

        drain_seconds: as in `Cluster.close`.
        """
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps({"stop": drain_seconds}).encode() + b"\n")

    def end(self) -> None:
        """Kill the driver and the processes that it has started.

        Processes of a joined cluster are not killed.
        """
        if not self.has_model:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)
            deadline = time.monotonic() + _UNWIND
            while read(self.pid) is not None and time.monotonic() < deadline:
                time.sleep(_POLL / 10)
        # The driver's zombie is collected last, so that its pid, which is the session id, is not
        # reused.
        if not kill(lambda: started_by(self._mark, [self.pid])):
            survivors = ", ".join(f"{pid}" for pid in sorted(started_by(self._mark, [self.pid])))
            err.print(f"these processes do not end: {survivors}", markup=False)
        # Without /proc no process was found, so the driver is killed by its pid.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # A process whose main thread is a zombie holds its ports until its last thread has ended.
        deadline = time.monotonic() + _UNWIND
        while not reap() and time.monotonic() < deadline:
            time.sleep(_POLL / 10)
        self._selector.close()
        self._channel.close()


class Supervisor:
    """The supervisor of one `manta serve`, which serves until a signal comes.

    serve, close: as in Driver; `serve` also gets the folder of `serving_folder`.
    once_ready: as in `deployments.cli.serve.run`.
    """

    def __init__(
        self,
        config: MantaConfig,
        cluster: Cluster,
        serve: Callable[[Driver, str], None],
        close: Close,
        once_ready: OnceReady | None = None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._serve = serve
        self._close = close
        self._once_ready = once_ready
        self._signals = Signals()
        self._served = False
        self._losses: list[float] = []

    def run(self) -> int:
        """Serve until a signal comes, and return the exit code. Raises MantaError."""
        adopt_orphans()
        with self._signals.installed():
            while True:
                try:
                    return self._once()
                except RayLostError as lost:
                    self._again(lost)

    def _again(self, lost: RayLostError) -> None:
        """Print that the server restarts after losing Ray; raise `lost` if the restart limit is
        reached."""
        times = self._config.limits.restarts
        if not (self._cluster.own and self._served):
            raise lost
        now = time.monotonic()
        self._losses = [at for at in self._losses if now - at < _HOUR] + [now]
        if len(self._losses) > times:
            raise RayLostError(f"{lost.message}; limits.restarts is {times}, so this is the end")
        self._say(f"{lost.message}; starting again ({len(self._losses)} of {times} in an hour)")

    def _once(self) -> int:
        folder = serving_folder(self._config)
        child = DriverProcess(
            self._cluster, lambda driver: self._serve(driver, folder), self._close
        )
        try:
            while self._signals.first is None:
                for message in child.messages(_POLL):
                    if not self._hear(child, message):
                        return 0
                reap(but=child.pid)
                self._check(child)
            return self._stop(child)
        finally:
            child.end()
            shutil.rmtree(folder, ignore_errors=True)
            if err.is_terminal:
                # A killed spinner may have left the cursor hidden.
                err.show_cursor(True)

    def _check(self, child: DriverProcess) -> None:
        try:
            child.check()
        except RayLostError:
            # A signal to all processes of a service may end Ray before it arrives here.
            time.sleep(_POLL)
            for message in child.messages(0):
                self._hear(child, message)
            if self._signals.first is None:
                raise

    def _hear(self, child: DriverProcess, message: dict[str, Any]) -> bool:
        """Handle a message of the driver; return whether serving continues.

        Raises MantaError for a failed start or a lost Ray.
        """
        if "failed" in message:
            if self._served and not child.serving:
                # This restart failed, but the next one may succeed.
                raise RayLostError(message["failed"])
            kind = ConfigError if message["code"] == 2 else ServeError
            raise kind(message["failed"])
        if "lost" in message:
            raise RayLostError(message["lost"])
        if "serving" in message:
            self._served = True
            for line in message["about"]:
                out.print(line, markup=False)
            if self._once_ready is not None:
                return self._ready(message["serving"])
        return True

    def _ready(self, url: str) -> bool:
        assert self._once_ready is not None
        self._signals.interrupts = True
        try:
            return self._signals.first is not None or self._once_ready(url, self._config)
        except KeyboardInterrupt:
            return True  # the main loop handles the signal
        finally:
            self._signals.interrupts = False

    def _stop(self, child: DriverProcess) -> int:
        """Stop the driver and return the exit code. After SIGTERM, running requests may end
        first."""
        signals, own = self._signals, self._cluster.own
        terminated = signals.first == signal.SIGTERM
        drains = child.serving and (terminated or not own)
        how = "Letting requests end" if drains else "Stopping"
        if not drains and child.serving:
            how += "; SIGTERM would let requests end"
        self._say(f"{how}. Once more to stop at once")
        if drains or (child.has_ray and not own):
            seconds = self._config.limits.drain_seconds if drains else None
            deadline = time.monotonic() + (seconds or 0.0) + STOP_SECONDS
            child.stop(seconds)
            with StatusLine("Stopping"), contextlib.suppress(RayLostError):
                while not signals.hurry and time.monotonic() < deadline:
                    child.messages(_POLL)
                    child.check()
        return signals.exit_code

    def _say(self, text: str) -> None:
        # The terminal may be closed, so output may fail.
        with contextlib.suppress(OSError):
            err.print(text, markup=False)
