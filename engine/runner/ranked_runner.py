"""RankedRunner, RankedCopies, RankedRefill, RankedMemory: wrappers on rank 0 of an engine's parts.

Each does the work on rank 0, and makes the other ranks do the same.
"""

from collections import deque
from collections.abc import Collection

from engine.batch import Batch
from engine.errors import EngineDead, MantaError
from engine.messages import PARTS
from engine.parallel.ranks import Ranks
from engine.parallel.rendezvous import Place
from engine.runner.caches.copied_items import Pairs
from engine.runner.caches.host_copies import Copies
from engine.runner.caches.sleep_memory import SleepMemory
from engine.runner.model_runner import ModelRunner
from engine.runner.refill import Refill
from engine.runner.staged_result import StagedResult
from engine.sampling.device_result import DeviceResult

# seconds to wait for the report of a rank's end, after sending to that rank has failed
_NOTICED = 0.5


class RankedCopies:
    """The copies of all ranks to their host memory: `HostCopies` of `engine.scheduling.memory`.

    A load has succeeded when rank 0's copy is done and the other ranks have begun theirs, for which
    their next steps wait.
    """

    def __init__(self, copies: Copies, ranks: Ranks) -> None:
        self._copies = copies
        self._ranks = ranks
        self._owed: deque[int] = deque()  # tickets of loads to which the ranks have not replied
        self._begun: dict[int, bool] = {}  # ticket -> whether all ranks could begin the load
        self._ended: dict[int, bool] = {}  # ticket -> how rank 0's copy ended

    @property
    def load_rate(self) -> float:
        return self._copies.load_rate

    @property
    def store_seconds(self) -> float:
        return self._copies.store_seconds

    @property
    def load_seconds(self) -> float:
        return self._copies.load_seconds

    def room(self) -> int:
        return self._copies.room()

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        self._ranks.call("store_blocks", pairs, states)
        return self._copies.store(pairs, states)

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        self._ranks.call("load_blocks", ticket, pairs, states)
        self._owed.append(ticket)
        return self._copies.load(ticket, pairs, states)

    def finished(self) -> list[tuple[int, bool]]:
        self._ended |= dict(self._copies.finished())
        if any(ticket in self._ended for ticket in self._owed):
            self.settle()
        done = [
            (ticket, ended and self._begun.pop(ticket)) for ticket, ended in self._ended.items()
        ]
        self._ended.clear()
        return done

    def ending(self) -> dict[int, float]:
        return {}  # whether all ranks could begin a load is known only at its end

    def settle(self) -> None:
        """Receive the ranks' replies to earlier loads, before a call with a different reply."""
        while self._owed:
            self._begun[self._owed.popleft()] = all(self._ranks.replies())

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        return self._copies.stored(slots, states)

    def wait(self) -> None:
        self._copies.wait()


class RankedRefill:
    """The replacement of all ranks' weights: `WeightLoader` of `engine.scheduling.orders`."""

    def __init__(self, refill: Refill, ranks: Ranks, copies: RankedCopies | None = None) -> None:
        """Set up the replacement of all ranks' weights.

        copies: the copies between the ranks and their host memory, if they have any.
        """
        self._refill = refill
        self._ranks = ranks
        self._copies = copies

    def holds(self, folder: str) -> bool:
        return False  # with several ranks, weights are always read from files

    def check(self, folder: str) -> None:
        self._refill.check(folder)

    def load(self, folder: str) -> None:
        if self._copies is not None:
            self._copies.settle()
        self._ranks.call("refill", folder)  # a rank that fails ends, which ends the engine
        try:
            self._refill.load(folder)
        except MantaError as error:
            raise EngineDead(
                f"the weights of one rank were not replaced: {error.message}", code="weights_mixed"
            ) from error
        self._ranks.replies()


class RankedMemory:
    """The memory that all ranks free for a sleep (`engine.scheduling.orders.sleeping.Sleeper`)."""

    def __init__(self, memory: SleepMemory, ranks: Ranks) -> None:
        self._memory = memory
        self._ranks = ranks

    def sleep(self, parts: Collection[str] = PARTS, *, drop: bool = False) -> None:
        self._ranks.call("sleep", sorted(parts), drop)
        self._memory.sleep(parts, drop=drop)
        self._ranks.replies()

    def wake(self, parts: Collection[str] = PARTS) -> None:
        self._ranks.call("wake", sorted(parts))  # a rank without enough memory ends
        self._memory.wake(parts)
        self._ranks.replies()


class RankedRunner:
    """The `Runner` of rank 0 (`engine.scheduling.step_runner`): all ranks run each of its steps."""

    def __init__(self, runner: ModelRunner, place: Place, ranks: Ranks) -> None:
        self._runner = runner
        self._place = place
        self._ranks = ranks
        self.copies = None if runner.host is None else RankedCopies(runner.host, ranks)

    def launch(self, batch: Batch) -> DeviceResult | StagedResult:
        # sent first, because the launch on this rank may change the batch
        self._ranks.call("launch", batch)
        if self._runner.link is not None:
            self._runner.link.begin()
        launched = self._runner.launch(batch)
        if isinstance(launched, StagedResult) and self._place.group.size > 1:
            # The LM head is divided among the ranks of this stage.
            launched.conclude_others = lambda: self._ranks.call(
                "conclude", below=self._place.group.size
            )
        return launched

    def recover(self) -> bool:
        """Prepare all ranks for the next step after one has raised; return False if the engine is
        lost.

        On the CPU, ranks that wait in the failed step are released, and the counters by which ranks
        synchronise are reset. With several GPUs or nodes the engine is lost. Raises the error of a
        rank that has ended, if there is one.
        """
        if not self._place.recovers:
            self._ranks.check(_NOTICED)
            return False
        self._place.begin_round()
        self._ranks.call("recover")
        if self.copies is not None:
            self.copies.settle()
        done = [self._runner.recover(), *self._ranks.replies()]
        self._place.join_round()
        return all(done)

    def shrink(self, num_blocks: int) -> None:
        self._ranks.call("shrink", num_blocks)
        self._runner.shrink(num_blocks)
