"""Runner, PendingResult: what the step loop asks of the device."""

from typing import Protocol

from engine.batch import Batch, StepResult
from engine.structured.token_limits import Masks


class PendingResult(Protocol):
    """The pending result of a launched step."""

    def sample(self, masks: Masks) -> None:
        """Launch the sampling of a batch with `masked` entries; call it once, before `wait`.

        masks: a row for each masked entry, [n, ceil(vocab / 32)] int32, 1 = allowed; unchanged
            until the step is done.
        Raises OutOfMemory.
        """
        ...

    def conclude(self) -> None:
        """Launch the rest of the step, in a pipeline.

        If the device allows, the call does not wait for the step. The next launched step may need
        the tokens. Raises as `wait`.
        """
        ...

    def wait(self) -> StepResult:
        """Block until the step is done and return its result; call it once, in launch order."""
        ...


class Runner(Protocol):
    """An interface that runs batches on a device, in order.

    At most `CoreConfig.depth` batches are launched and not waited for.
    """

    def launch(self, batch: Batch) -> PendingResult:
        """Start a step, which needs nothing from `batch` after the return. Raises OutOfMemory.

        Of `batch.dropped_images` the runner may have lost some, as in a failure or a sleep.
        """
        ...

    def recover(self) -> bool:
        """Drop the embeddings of images and prepare for the next step, after one has raised and
        with none in flight; False: device lost."""
        ...

    def shrink(self, num_blocks: int) -> None:
        """Keep the memory of num_blocks KV blocks and free the rest. All keys are lost."""
        ...
