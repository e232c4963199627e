"""Ranks: the worker processes with the other parts of a model, and rank 0's calls to them.

Rank 0, the engine process, calls methods of the other ranks (`engine.process.rank.RankLoop`)
through a pipe, or through a connection to another node of the cluster. A successful call has no
reply, as ranks wait for each other in a step's all-reduces. When a rank exits, its report pipe
closes and rank 0 stops the engine. The ranks end with rank 0.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from engine.config.engine_config import EngineConfig
from engine.errors import AdapterError, ConfigError, EngineDead, MantaError
from engine.parallel.connections import RemoteRanks, connect, hang_up, use_interface
from engine.parallel.nodes import Node

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 2.0

logger = logging.getLogger("manta.engine")


class RankStart(msgspec.Struct, forbid_unknown_fields=True):
    """The start message on a rank's stdin.

    memory: the descriptor of the shared memory file of the ranks.
    calls, adapters, reports: the descriptors of the rank's ends of its pipes.
    node: the node that the rank binds itself to; None = no node.
    """

    config: EngineConfig
    rank: int
    directory: str
    parent: int
    memory: int
    calls: int
    adapters: int
    reports: int
    node: Node | None = None


class RankReport(msgspec.Struct):
    """A report of a rank: the reason why it exits, or (level > 0) a line of its log."""

    message: str
    code: str = EngineDead.code
    param: str | None = None
    level: int = 0


@dataclass(slots=True)
class _Rank:
    number: int
    calls: "Connection[Any, Any]"
    adapters: "Connection[Any, Any]"


@dataclass(slots=True)
class _Process:
    number: int
    process: "subprocess.Popen[bytes]"
    reports: "Connection[Any, Any]"


class RankProcesses:
    """The rank processes of an engine on this machine.

    The processes end when the thread ends that created this object.

    nodes: the node of each rank of this machine, if they are bound (`engine.parallel.nodes.place`).
    address: this machine's address in a cluster, if there are ranks on other nodes.
    memory: the descriptor of the ranks' shared memory, an unnamed file.
    """

    # Python's arguments in a rank's command line
    PROGRAM: Sequence[str] = ("-m", "engine.process.rank")

    def __init__(
        self, config: EngineConfig, nodes: Sequence[Node] = (), address: str | None = None
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("several ranks need Linux", param=config.ranks_key)
        self.size, self.stages = config.num_ranks, config.pipeline_parallel
        self.per_node = config.ranks_per_node
        self.memory = os.memfd_create("manta-ranks")
        # Far larger than needed, as memory pages are only allocated when they are first used.
        os.ftruncate(self.memory, 1 << 40)
        self._config = config
        self._nodes = nodes
        if address is not None:
            use_interface(address)
        self._closing = False
        self._processes: list[_Process] = []

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._processes]

    def _spawn(
        self, number: int, calls: "Connection[Any, Any]", adapters: "Connection[Any, Any]"
    ) -> None:
        """Start a rank's process and the thread that watches it.

        calls, adapters: the rank's ends of its pipes, which this function closes.
        Raises EngineDead.
        """
        reports, last = Pipe(duplex=False)
        passed = (self.memory, calls.fileno(), adapters.fileno(), last.fileno())
        node = self._nodes[number % self.per_node] if self._nodes else None
        start = RankStart(self._config, number, os.getcwd(), os.getpid(), *passed, node=node)
        try:
            process = self._start(start, passed)
        except OSError as error:
            raise EngineDead(f"cannot start rank {number} of {self.size}: {error}") from None
        finally:
            for end in (calls, adapters, last):
                end.close()
        rank = _Process(number, process, reports)
        self._processes.append(rank)
        name = f"rank-{number}"
        threading.Thread(target=self._watch, args=(rank,), name=name, daemon=True).start()

    def _start(self, start: RankStart, passed: Sequence[int]) -> "subprocess.Popen[bytes]":
        """Start a rank's process, write its start message, and return the process.

        passed: the descriptors that the process inherits.
        """
        process = subprocess.Popen(
            [sys.executable, *self.PROGRAM],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=passed,
        )
        assert process.stdin is not None
        # the process may have ended already, which `_watch` will notice
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        return process

    def _watch(self, rank: _Process) -> None:
        """Forward the rank's log lines until it ends, then report its end."""
        last: RankReport | None = None
        try:
            while True:
                report = rank.reports.recv()
                if report.level:
                    self._on_log(rank.number, report)
                else:
                    last = report
        except (EOFError, OSError):
            pass
        status = rank.process.wait()
        if not self._closing:
            self._on_exit(rank.number, status, last)

    def _on_log(self, number: int, line: RankReport) -> None:
        """Handle a line of a rank's log; called from a thread."""
        raise NotImplementedError

    def _on_exit(self, number: int, status: int, last: RankReport | None) -> None:
        """Handle the unexpected exit of a rank; called from a thread.

        last: the rank's last report.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the ranks and wait for their end. Idempotent."""
        self._closing = True
        for rank in self._processes:
            rank.process.kill()
        for rank in self._processes:
            rank.process.wait(STOP_SECONDS)


class Ranks(RankProcesses):
    """The ranks 1 to config.num_ranks - 1, which begin to import and to load when this is created.

    Ranks on this machine are child processes. Ranks on other nodes are reached through their
    `RankHost`.

    on_death: called with the error, from a thread, once a rank has ended unexpectedly.
    remote: the hosts of the other nodes, if there are any.
    Raises ConfigError, EngineDead.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_death: Callable[[MantaError], None],
        nodes: Sequence[Node] = (),
        remote: RemoteRanks | None = None,
    ) -> None:
        others = config.pipeline_nodes - 1
        if others != (0 if remote is None else len(remote.hosts)):
            raise ConfigError(
                f"pipeline_nodes: {config.pipeline_nodes} nodes are those of a Ray cluster, where "
                "`manta serve` starts their ranks; leave it out here",
                param="pipeline_nodes",
            )
        self.address = None if remote is None else remote.address
        super().__init__(config, nodes, self.address)
        self._on_death = on_death
        self._death: MantaError | None = None
        self._dead = threading.Event()
        self._adapters_lock = threading.Lock()
        self._ranks: list[_Rank] = []
        self._hosts: list[tuple[Connection[Any, Any], threading.Thread]] = []
        try:
            for number in range(1, self.per_node):
                (calls, theirs), (adapters, also_theirs) = Pipe(), Pipe()
                self._spawn(number, theirs, also_theirs)
                self._ranks.append(_Rank(number, calls, adapters))
            for host in range(others):
                assert remote is not None
                self._join(host + 1, *remote.hosts[host], remote.key)
        except BaseException:
            self.close()
            raise

    def _join(self, node: int, address: str, port: int, key: bytes) -> None:
        """Connect to the ranks of another node. Raises EngineDead."""
        first = node * self.per_node
        try:
            reports = connect(address, port, key)
            watch = threading.Thread(
                target=self._follow,
                args=(reports, first, address),
                name=f"node-{node}",
                daemon=True,
            )
            self._hosts.append((reports, watch))
            for number in range(first, first + self.per_node):
                calls, adapters = connect(address, port, key), connect(address, port, key)
                self._ranks.append(_Rank(number, calls, adapters))
            watch.start()
        except (OSError, EOFError, AuthenticationError) as error:
            raise EngineDead(
                f"cannot reach rank {first} of {self.size} at {address}:{port}: {error}"
            ) from None

    def _follow(self, reports: "Connection[Any, Any]", first: int, address: str) -> None:
        """Forward the log lines of another node's ranks, and report their end; runs on a thread.

        first: the number of the node's first rank.
        """
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, report, status = reports.recv()
                if report is not None and report.level:
                    self._on_log(number, report)
                else:
                    self._on_exit(number, status, report, f" on {address}")
        last = first + self.per_node - 1
        which = f"rank {first}" if last == first else f"ranks {first} to {last}"
        # The host's process, its node or the network has failed.
        lost = f"{which} of {self.size} of the engine: the connection to {address} has ended"
        self._lost(EngineDead(lost, code="engine_killed"))

    # ---- calls

    def call(self, method: str, *arguments: Any, below: int | None = None) -> None:
        """Call a method of `engine.process.rank.RankLoop` on all ranks, without waiting for it.

        below: call only the ranks below this number.
        Raises EngineDead.
        """
        for rank in self._ranks[: None if below is None else below - 1]:
            try:
                rank.calls.send((method, arguments))
            except OSError:
                raise EngineDead(f"rank {rank.number} of {self.size} is gone") from None

    def replies(self) -> list[Any]:
        """Return each rank's reply to the last call, which must be one with a reply.

        Raises EngineDead.
        """
        replies = []
        for rank in self._ranks:
            try:
                replies.append(rank.calls.recv())
            except (OSError, EOFError):
                raise EngineDead(f"rank {rank.number} of {self.size} is gone") from None
        return replies

    def load_adapter(self, path: str, digest: str, slot: int) -> None:
        """Load an adapter into an unused slot of every rank. Thread-safe.

        digest: rank 0's digest of the files, which every rank's files must have.
        Raises AdapterError.
        """
        refusals = []
        with self._adapters_lock:
            try:
                for rank in self._ranks:
                    rank.adapters.send((path, digest, slot))
                refusals = [rank.adapters.recv() for rank in self._ranks]
            except (OSError, EOFError):
                raise AdapterError("a rank of the engine is gone") from None
        for refusal in refusals:
            if refusal is not None:
                code, message = refusal
                raise AdapterError(message, code=code)

    # ---- exits

    def _on_log(self, number: int, line: RankReport) -> None:
        logger.log(line.level, "rank %d: %s", number, line.message)

    def _on_exit(self, number: int, status: int, last: RankReport | None, where: str = "") -> None:
        self._lost(_death(number, self.size, where, status, last))

    def _lost(self, error: MantaError) -> None:
        if self._closing or self._dead.is_set():
            return
        self._death = error
        self._dead.set()
        self._on_death(error)

    def check(self, seconds: float) -> None:
        """Raise the error of a rank that has exited; called after a step has failed.

        seconds: how long to wait for a report of an exit.
        """
        if self._dead.wait(seconds) and self._death is not None:
            raise self._death

    def close(self) -> None:
        super().close()
        for reports, _ in self._hosts:
            hang_up(reports)  # the host ends its ranks and then closes the connection
        for _, watch in self._hosts:
            if watch.ident is not None:
                watch.join(STOP_SECONDS)


def _death(number: int, size: int, where: str, status: int, last: RankReport | None) -> MantaError:
    """Return the error that describes how a rank ended.

    where: " on NODE"; "" for this node.
    """
    rank = f"rank {number} of {size}{where}"
    if last is not None and (last.param is not None or last.code == ConfigError.code):
        return ConfigError(f"{last.message} ({rank})", param=last.param)
    if last is not None:
        return EngineDead(f"{rank}: {last.message}", code=last.code)
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    killed = -status in (signal.SIGKILL, signal.SIGTERM)
    code = "engine_killed" if killed else EngineDead.code
    return EngineDead(f"rank {number} of {size} of the engine{where} {how}", code=code)
