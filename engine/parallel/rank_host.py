"""RankHost: runs the ranks of an engine on another node than rank 0's."""

import contextlib
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.errors import MantaError
from engine.parallel.connections import accept, hang_up
from engine.parallel.nodes import Places, place
from engine.parallel.ranks import RankProcesses, RankReport


class RankHost(RankProcesses):
    """The host of an engine's ranks on another node than rank 0's.

    The host waits for rank 0's connection, starts this node's ranks and forwards their reports.
    When the connection or this process ends, so do the ranks.

    config: rank 0's config, but with this node's model folder.
    node: the number of this node, from 1 on.
    address: the address at which other nodes reach this one.
    key: see `RemoteRanks`.
    port: the port on which the host listens.
    Raises ConfigError, OSError.
    """

    def __init__(self, config: EngineConfig, node: int, address: str, key: bytes) -> None:
        super().__init__(config, place(config, Places()), address)
        self._first = node * self.per_node
        self._key = key
        self._reports: Connection[Any, Any] | None = None
        self._reports_lock = threading.Lock()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        # One thread for the host's lifetime, as the kernel kills the ranks when the thread that
        # started them ends.
        self._thread = threading.Thread(target=self._run, name="rank-host", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._listener:
                reports = self._reports = accept(self._listener, self._key)
                ends = [self._accept_pair() for _ in range(self.per_node)]
        except OSError:  # the host was closed before rank 0 connected
            return
        try:
            for number, (calls, adapters) in enumerate(ends, self._first):
                self._spawn(number, calls, adapters)
            reports.recv()  # waits for the end of the connection, on which rank 0 sends nothing
        except MantaError as error:
            self._report(number, RankReport(error.message, error.code, error.param))
        except (EOFError, OSError):
            pass
        super().close()
        with self._reports_lock:
            self._reports = None
            reports.close()

    def _accept_pair(self) -> "tuple[Connection[Any, Any], Connection[Any, Any]]":
        return accept(self._listener, self._key), accept(self._listener, self._key)

    def _report(self, number: int, report: RankReport | None, status: int = 0) -> None:
        with self._reports_lock, contextlib.suppress(OSError):  # rank 0 has ended
            if self._reports is not None:
                self._reports.send((number, report, status))

    def _on_log(self, number: int, line: RankReport) -> None:
        self._report(number, line)

    def _on_exit(self, number: int, status: int, last: RankReport | None) -> None:
        self._report(number, last, status)

    def close(self) -> None:
        """End the ranks and wait for their end. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread if it waits for rank 0
        with self._reports_lock:
            if self._reports is not None:
                hang_up(self._reports, socket.SHUT_RDWR)
        self._thread.join()
