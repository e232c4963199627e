"""RankedRunner, RankedRefill, RankedMemory: rank 0's, which make the other ranks do the same."""

from collections.abc import Collection

from engine.batch import Batch
from engine.errors import EngineDead, MantaError
from engine.messages import PARTS
from engine.parallel.ranks import Ranks
from engine.parallel.rendezvous import Place
from engine.runner.caches.sleep_memory import SleepMemory
from engine.runner.model_runner import ModelRunner
from engine.runner.refill import Refill
from engine.runner.staged_result import StagedResult
from engine.sampling.device_result import DeviceResult

_NOTICED = 0.5  # seconds; sending to a rank that has ended fails before its end is reported


class RankedRefill:
    """The replacement of the weights on all ranks (`engine.scheduling.updates.WeightLoader`)."""

    def __init__(self, refill: Refill, ranks: Ranks) -> None:
        self._refill = refill
        self._ranks = ranks

    def check(self, folder: str) -> None:
        self._refill.check(folder)

    def load(self, folder: str) -> None:
        self._ranks.call("refill", folder)  # a rank that fails ends, and with it the engine
        try:
            self._refill.load(folder)
        except MantaError as error:
            raise EngineDead(
                f"the weights of one rank were not replaced: {error.message}", code="weights_mixed"
            ) from error
        self._ranks.replies()


class RankedMemory:
    """The memory that all ranks free for a sleep (`engine.scheduling.sleeping.Sleeper`)."""

    def __init__(self, memory: SleepMemory, ranks: Ranks) -> None:
        self._memory = memory
        self._ranks = ranks

    def sleep(self, parts: Collection[str] = PARTS, *, drop: bool = False) -> None:
        self._ranks.call("sleep", sorted(parts), drop)
        self._memory.sleep(parts, drop=drop)
        self._ranks.replies()

    def wake(self, parts: Collection[str] = PARTS) -> None:
        self._ranks.call("wake", sorted(parts))  # a rank that finds no room ends
        self._memory.wake(parts)
        self._ranks.replies()


class RankedRunner:
    """The `engine.scheduling.core.Runner` of rank 0, which makes the other ranks run each step."""

    def __init__(self, runner: ModelRunner, place: Place, ranks: Ranks) -> None:
        self._runner = runner
        self._place = place
        self._ranks = ranks

    def launch(self, batch: Batch) -> DeviceResult | StagedResult:
        self._ranks.call("launch", batch)  # sent first, because our launch may write into the batch
        if self._runner.link is not None:
            self._runner.link.begin()
        launched = self._runner.launch(batch)
        if isinstance(launched, StagedResult) and self._place.group.size > 1:
            # The head is divided among the ranks of this stage.
            launched.conclude_others = lambda: self._ranks.call(
                "conclude", below=self._place.group.size
            )
        return launched

    def recover(self) -> bool:
        """Prepare all ranks for the next step after one has raised; return False if the engine is
        lost.

        Between CPU ranks, all waits for the failed step are ended, and counting begins anew.
        Between GPUs or nodes the engine is lost. Raises the error of a rank that has ended, if
        there is one.
        """
        if not self._place.recovers:
            self._ranks.check(_NOTICED)
            return False
        self._place.begin_round()
        self._ranks.call("recover")
        done = [self._runner.recover(), *self._ranks.replies()]
        self._place.join_round()
        return all(done)

    def shrink(self, num_blocks: int) -> None:
        self._ranks.call("shrink", num_blocks)
        self._runner.shrink(num_blocks)
