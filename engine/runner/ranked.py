"""RankedRunner: the runner of rank 0, whose steps the other ranks make too."""

from engine.batch import Batch
from engine.parallel.group import TensorParallelGroup
from engine.parallel.link import Link, SharedMemoryLink
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.runner.model_runner import ModelRunner
from engine.runner.results import DeviceResult, StagedResult


class RankedRunner:
    """See `engine.scheduling.core.Runner`. world: of all ranks."""

    def __init__(self, runner: ModelRunner, world: TensorParallelGroup, ranks: Ranks) -> None:
        self._runner = runner
        self._world = world
        self._ranks = ranks

    def launch(self, batch: Batch) -> DeviceResult | StagedResult:
        self._ranks.order("launch", batch)  # first: ours may write into the batch
        if self._runner.link is not None:
            self._runner.link.begin()
        return self._runner.launch(batch)

    def recover(self) -> bool:
        """Between CPU ranks all waits for the failed step are ended, and steps begin anew. Between
        GPUs, kernels that wait for each other cannot be ended, so the engine is lost."""
        if not isinstance(self._world, SharedMemoryGroup):
            return False
        self._world.begin_round()
        self._ranks.order("recover")
        done = [self._runner.recover(), *self._ranks.answers()]
        join_round(self._world, self._runner.link)
        return all(done)

    def shrink(self, num_blocks: int) -> None:
        self._ranks.order("shrink", num_blocks)
        self._runner.shrink(num_blocks)


def join_round(world: TensorParallelGroup, link: Link | None) -> None:
    """On a CPU rank that has put a failed step behind it, with none in a step."""
    assert isinstance(world, SharedMemoryGroup)
    world.join_round()
    if isinstance(link, SharedMemoryLink):
        link.join_round()
