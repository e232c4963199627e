"""StagedResult: a launched step that other pipeline stages still compute."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import OutOfMemory, StepResult
from engine.sampling.device_result import DeviceResult


@dataclass(slots=True)
class StagedResult:
    """The result of a launched step that other pipeline stages still compute.

    take_back: a function that receives the last stage's output and samples.
    conclude_others: a function that makes the other ranks of the first stage do the same.
    """

    take_back: Callable[[], DeviceResult]
    conclude_others: Callable[[], None] | None = None
    masks: "NDArray[np.int32] | None" = None
    _pending: DeviceResult | None = None
    _failure: Exception | None = None

    @property
    def concluded(self) -> bool:
        return self._pending is not None or self._failure is not None

    def sample(self, masks: NDArray[np.int32]) -> None:
        """Store the masks for the sampling that `conclude` will launch."""
        self.masks = masks

    def conclude(self) -> None:
        """Receive the last stage's output and launch the sampling. Raises as `wait` does."""
        if self._pending is None and self._failure is None:
            if self.conclude_others is not None:
                self.conclude_others()
            try:
                with torch.inference_mode():
                    pending = self.take_back()
                    if self.masks is not None:
                        pending.sample(self.masks)
                self._pending = pending
            except torch.OutOfMemoryError as error:
                # a new error, as torch's keeps the step's tensors alive
                self._failure = OutOfMemory(str(error))
            except Exception as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure

    def ready(self) -> bool:
        """Return whether the step was concluded, and this device has done its part."""
        return self._pending is not None and self._pending.ready()

    def wait(self) -> StepResult:
        """Block until the step is done and return its result, as `DeviceResult.wait`.

        Raises OutOfMemory, and RankFailed if another stage's part of the step has failed.
        """
        self.conclude()
        assert self._pending is not None
        return self._pending.wait()
