"""RankedRunner: the runner of rank 0, whose steps the other ranks make too."""

from engine.batch import Batch
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.runner.model_runner import DeviceResult, ModelRunner


class RankedRunner:
    """See `engine.scheduling.core.Runner`."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def launch(self, batch: Batch) -> DeviceResult:
        self._ranks.order("launch", batch)  # first: ours may write into the batch
        return self._runner.launch(batch)

    def recover(self) -> bool:
        """Between CPU ranks all waits for the failed step are ended, and steps begin anew. Between
        GPUs, kernels that wait for each other cannot be ended, so the engine is lost."""
        group = self._runner.model.group
        if not isinstance(group, SharedMemoryGroup):
            return False
        group.begin_round()
        self._ranks.order("recover")
        done = [self._runner.recover(), *self._ranks.answers()]
        group.join_round()
        return all(done)

    def shrink(self, num_blocks: int) -> None:
        self._ranks.order("shrink", num_blocks)
        self._runner.shrink(num_blocks)
