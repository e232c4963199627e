"""The process of a rank: `python -m engine.process.rank`.

`engine.parallel.ranks.Ranks` starts it, or on another node `engine.parallel.rank_host.RankHost`.
The process has a part of the model, and runs each step together with rank 0, from which it receives
the sampled tokens. It knows nothing of requests.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from engine.batch import Batch
from engine.errors import AdapterError, MantaError
from engine.parallel.nodes import bind
from engine.parallel.ranks import RankReport, RankStart
from engine.process.device_ahead import prepare_device
from engine.process.lifeline import read_start, set_threads, tie_to_parent

if TYPE_CHECKING:
    from engine.lora.loader import AdapterLoader
    from engine.parallel.rendezvous import Place
    from engine.runner.caches.copied_items import Pairs
    from engine.runner.caches.sleep_memory import SleepMemory
    from engine.runner.model_runner import ModelRunner
    from engine.runner.refill import Refill
    from engine.runner.staged_result import StagedResult
    from engine.sampling.device_result import DeviceResult

logger = logging.getLogger("manta.engine")


class RankLoop:
    """The loop that runs rank 0's calls, each of which is the name of a method and its
    arguments."""

    def __init__(
        self,
        runner: "ModelRunner",
        refill: "Refill",
        place: "Place",
        calls: "Connection[Any, Any]",
        memory: "SleepMemory | None" = None,
    ) -> None:
        self._runner = runner
        self._refill = refill
        self._memory = memory
        self._place = place
        self._calls = calls
        # the steps in flight; None = the step has failed
        self._launched: deque[DeviceResult | StagedResult | None] = deque()

    def run(self) -> None:
        """Run rank 0's calls until rank 0 ends."""
        while True:
            try:
                method, arguments = self._calls.recv()
            except (EOFError, OSError):
                return
            getattr(self, method)(*arguments)

    def launch(self, batch: Batch) -> None:
        if self._runner.link is not None:
            self._runner.link.begin()
        self._launched.append(None)
        with self._failing():
            self._launched[-1] = self._runner.launch(batch)
            # At most two steps are in flight, as on rank 0. In a pipeline there may be more, as
            # the first stage waits for a step only after its `conclude`.
            over = getattr(self._launched[0], "concluded", not self._concludes)
            if len(self._launched) > 1 and over:
                self._wait_for_oldest()

    def conclude(self) -> None:
        """Receive the last stage's output of the oldest unfinished step, and launch its sampling.

        Called on a pipeline's first stage, if stages have several ranks.
        """
        for at, launched in enumerate(self._launched):
            if launched is None:
                del self._launched[at]
                return
            if not getattr(launched, "concluded", True):
                with self._failing():
                    launched.conclude()
                return

    @property
    def _concludes(self) -> bool:
        return self._runner.link is not None and self._runner.model.stage.first

    def _wait_for_oldest(self) -> None:
        oldest = self._launched.popleft()
        if oldest is not None:
            oldest.wait()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """If the `with` block raises, mark the step as failed for the ranks that wait for this
        rank.

        Rank 0 then abandons the step on all ranks.
        """
        from engine.parallel.shared_memory import RankFailed

        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            if not self._place.recovers:
                raise
            if not isinstance(error, RankFailed):
                logger.warning("a step has failed", exc_info=error)
            self._place.fail(error)

    def recover(self) -> None:
        """Recover from a step that failed on any rank, and reply whether the device is usable."""
        self._launched.clear()
        done = self._runner.recover()
        self._place.join_round()
        self._calls.send(done)

    def refill(self, folder: str) -> None:
        """Replace this rank's weights, and reply. Raises MantaError, which ends the process."""
        while self._launched:
            self._wait_for_oldest()
        self._refill.load(folder)
        self._calls.send(True)

    def sleep(self, parts: list[str], drop: bool) -> None:
        """Free the given parts of this rank's memory, and reply."""
        assert self._memory is not None
        while self._launched:
            self._wait_for_oldest()
        self._memory.sleep(parts, drop=drop)
        self._calls.send(True)

    def wake(self, parts: list[str]) -> None:
        """Allocate freed parts of this rank's memory, and reply.

        Raises MantaError, which ends the process.
        """
        assert self._memory is not None
        self._memory.wake(parts)
        self._calls.send(True)

    def store_blocks(self, pairs: "Pairs", states: "Pairs") -> None:
        """Begin to copy KV blocks to host memory; see `HostCopies.store`."""
        assert self._runner.host is not None
        # a failure is not reported, as later loads of these slots then fail
        self._runner.host.store(pairs, states)

    def load_blocks(self, ticket: int, pairs: "Pairs", states: "Pairs") -> None:
        """Begin to copy KV blocks from host memory, and reply whether that succeeded."""
        host = self._runner.host
        assert host is not None
        host.finished()
        self._calls.send(host.load(ticket, pairs, states))

    def shrink(self, num_blocks: int) -> None:
        self._launched.clear()
        self._runner.shrink(num_blocks)


def _load_adapters(loader: "AdapterLoader", asked: "Connection[Any, Any]") -> None:
    """Load adapters when rank 0 asks for them, in a separate thread; see `Ranks.load_adapter`."""
    while True:
        try:
            path, digest, slot = asked.recv()
        except (EOFError, OSError):
            return
        answer = None
        try:
            loaded = loader.read(path, digest)
            if loaded.digest != digest:
                raise AdapterError(f"{path}: was written to while it was read; add it again")
            loader.upload(loaded.weights, slot)
        except AdapterError as error:
            answer = error.code, error.message
        except Exception as error:
            logger.exception("an adapter could not be loaded")
            why = f"it could not be loaded: {type(error).__name__}: {error}"
            answer = AdapterError.code, why
        asked.send(answer)


class _LogToRank0(logging.Handler):
    def __init__(self, reports: "Connection[Any, Any]") -> None:
        super().__init__()
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        self._reports.send(RankReport(self.format(record), level=record.levelno))


def run(start: RankStart) -> None:
    """Load the rank's part, then run rank 0's calls until rank 0 ends.

    Raises errors of loading and of steps.
    """
    calls: Connection[Any, Any] = Connection(start.calls)

    def meet() -> tuple[str, int]:
        method, (host, port) = calls.recv()
        assert method == "meet_at"
        return host, port

    prepare_device(start.config, start.rank)
    from engine.factory import build_rank

    runner, refill, place, loader, memory = build_rank(start.config, start.rank, start.memory, meet)
    if loader is not None:
        adapters: Connection[Any, Any] = Connection(start.adapters)
        arguments = (loader, adapters)
        threading.Thread(
            target=_load_adapters, args=arguments, name="adapters", daemon=True
        ).start()
    gc.collect()
    gc.freeze()
    RankLoop(runner, refill, place, calls, memory).run()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    line = read_start()
    if not line:
        return 1
    start = msgspec.json.decode(line, type=RankStart)
    tie_to_parent(start.parent)
    os.chdir(start.directory)
    set_threads(start.config.num_threads)
    sys.setswitchinterval(5e-4)
    reports: Connection[Any, Any] = Connection(start.reports)
    ours = logging.getLogger("manta")
    ours.addHandler(_LogToRank0(reports))
    ours.propagate = False
    ours.setLevel(logging.WARNING)  # only warnings, as rank 0 logs what is common to all ranks
    try:
        if start.node is not None:
            bind(start.node)
        run(start)
    except MantaError as error:
        reports.send(RankReport(error.message, error.code, error.param))
        return 1
    except Exception as error:
        traceback.print_exc()
        reports.send(RankReport(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    # The interpreter is not shut down, as in the engine process.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
