"""Runner, PendingResult: the interface between the step loop and the device."""

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
        """Launch the step's remaining work in a pipeline, as the next launched step may need its
        tokens.

        If the device allows, the call does not wait for the step. Raises as `wait`.
        """
        ...

    def ready(self) -> bool:
        """Return whether the device has done the whole step, without waiting for it."""
        ...

    def wait(self) -> StepResult:
        """Block until the step is done and return its result; call it once, in launch order."""
        ...


class Runner(Protocol):
    """An interface that runs batches on a device, in order.

    At most `CoreConfig.depth` batches are launched and not waited for.
    """

    def launch(self, batch: Batch) -> PendingResult:
        """Launch a step; the caller may change `batch` afterwards. Raises OutOfMemory.

        `batch.dropped_images` may include images that the runner has lost in a failure or a sleep.
        """
        ...

    def recover(self) -> bool:
        """Drop image embeddings and prepare for the next step, after a step has raised.

        Returns False if the device is lost. No step may be in flight.
        """
        ...

    def shrink(self, num_blocks: int) -> None:
        """Keep the memory of num_blocks KV blocks and free the rest; all KV is lost."""
        ...
