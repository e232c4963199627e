"""Ranks: the processes that hold the other parts of a model, as rank 0 sees them.

Rank 0 is the engine process. It tells the others by pipe what to do, and hears nothing of a step
that went well: the sums in it are where ranks meet. A rank that ends is noticed at once, by the end
of the pipe that its last words come through, and ends the engine. The ranks end with rank 0.
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
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from engine.config.engine_config import EngineConfig
from engine.errors import AdapterError, ConfigError, EngineDead, MantaError
from engine.parallel.nodes import Node

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 2.0

logger = logging.getLogger("manta.engine")


class RankStart(msgspec.Struct, forbid_unknown_fields=True):
    """The line on a rank's stdin. The numbers at the end are descriptors: of the memory that ranks
    share, and of its ends of the pipes. node: that it binds itself to; None: to none."""

    config: EngineConfig
    rank: int
    directory: str
    parent: int
    memory: int
    orders: int
    adapters: int
    words: int
    node: Node | None = None


class LastWords(msgspec.Struct):
    """Why a rank ends, or (level > 0) a line for the log."""

    message: str
    code: str = EngineDead.code
    param: str | None = None
    level: int = 0


@dataclass(slots=True)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    orders: "Connection[Any, Any]"
    adapters: "Connection[Any, Any]"
    words: "Connection[Any, Any]"


class Ranks:
    """Spawns ranks 1 to config.num_ranks - 1, which begin to import and load at once.

    on_death(error): from a thread, once a rank has ended that was not asked to. The thread that
    makes this has to live as long as the ranks shall.
    nodes: of each rank, if they are bound (`engine.parallel.nodes.place`).
    memory: descriptor of the file that they share, which has no name.
    """

    PROGRAM: Sequence[str] = ("-m", "engine.process.rank")  # what Python runs

    def __init__(
        self,
        config: EngineConfig,
        on_death: Callable[[MantaError], None],
        nodes: Sequence[Node] = (),
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("several ranks need Linux", param="tensor_parallel")
        self.size, self.stages = config.num_ranks, config.pipeline_parallel
        self.memory = os.memfd_create("manta-ranks")
        # More than what is laid out in it: a page is taken when it is first used.
        os.ftruncate(self.memory, 1 << 40)
        self._nodes = nodes
        self._on_death = on_death
        self._closing = False
        self._adapters_lock = threading.Lock()
        self._ranks: list[_Rank] = []
        try:
            for number in range(1, self.size):
                self._ranks.append(self._spawn(config, number))
        except OSError as error:
            self.close()
            raise EngineDead(f"cannot start rank {number} of {self.size}: {error}") from None
        for rank in self._ranks:
            name = f"rank-{rank.number}"
            threading.Thread(target=self._watch, args=(rank,), name=name, daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def _spawn(self, config: EngineConfig, number: int) -> _Rank:
        (orders, theirs), (adapters, also_theirs) = Pipe(), Pipe()
        words, last = Pipe(duplex=False)
        passed = (self.memory, theirs.fileno(), also_theirs.fileno(), last.fileno())
        node = self._nodes[number] if self._nodes else None
        start = RankStart(config, number, os.getcwd(), os.getpid(), *passed, node=node)
        process = self._start(start, passed)
        for end in (theirs, also_theirs, last):
            end.close()
        return _Rank(number, process, orders, adapters, words)

    def _start(self, start: RankStart, passed: Sequence[int]) -> "subprocess.Popen[bytes]":
        """passed: the descriptors."""
        process = subprocess.Popen(
            [sys.executable, *self.PROGRAM],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=passed,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, as will be noticed
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        return process

    # ---- what they are told

    def order(self, what: str, *given: Any, below: int | None = None) -> None:
        """A method of `engine.process.rank.RankLoop` that each calls, or those below a number.
        Raises EngineDead."""
        for rank in self._ranks[: None if below is None else below - 1]:
            try:
                rank.orders.send((what, given))
            except OSError:
                raise EngineDead(f"rank {rank.number} of {self.size} is gone") from None

    def answers(self) -> list[Any]:
        """What each answers to an order that has an answer. Raises EngineDead."""
        found = []
        for rank in self._ranks:
            try:
                found.append(rank.orders.recv())
            except (OSError, EOFError):
                raise EngineDead(f"rank {rank.number} of {self.size} is gone") from None
        return found

    def load_adapter(self, path: str, digest: str, slot: int) -> None:
        """Into a slot of each, which no step uses. From any thread. Raises AdapterError."""
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

    # ---- their end

    def _watch(self, rank: _Rank) -> None:
        """Its log, and its end."""
        last: LastWords | None = None
        try:
            while True:
                said = rank.words.recv()
                if said.level:
                    logger.log(said.level, "rank %d: %s", rank.number, said.message)
                else:
                    last = said
        except (EOFError, OSError):
            pass
        status = rank.process.wait()
        if not self._closing:
            self._on_death(_death(rank.number, self.size, status, last))

    def close(self) -> None:
        """End them and wait for it. Idempotent."""
        self._closing = True
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait(STOP_SECONDS)


def _death(number: int, size: int, status: int, last: LastWords | None) -> MantaError:
    if last is not None and (last.param is not None or last.code == ConfigError.code):
        return ConfigError(f"{last.message} (rank {number} of {size})", param=last.param)
    if last is not None:
        return EngineDead(f"rank {number} of {size}: {last.message}", code=last.code)
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    killed = -status in (signal.SIGKILL, signal.SIGTERM)
    code = "engine_killed" if killed else EngineDead.code
    return EngineDead(f"rank {number} of {size} of the engine {how}", code=code)
