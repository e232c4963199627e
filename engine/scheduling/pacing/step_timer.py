"""StepTimer: measures the last step and all steps, for EngineStats."""

import time


class StepTimer:
    """The timer of an engine's steps, for the stats of frames.

    step: seconds of the last step.
    total: seconds during which the engine had work, up to the result of the last finished step.
    between: the seconds that the last result added to `total`, which is the time between a
        request's last two tokens.
    since: time.perf_counter() of the last result, from which `total` continues; 0 = no work since.
    """

    def __init__(self, micro_batches: int = 1) -> None:
        self._results_at = [0.0] * micro_batches  # perf_counter() of each micro-batch's last result
        self.step = self.total = self.between = 0.0
        self.since = 0.0

    def stepped(self, began: float, *, result: bool, more: bool) -> None:
        """Measure a step that ends now: set `step` and, with a result, `between` and `total`.

        began: time.perf_counter() at its start.
        result: whether it returned a result.
        more: whether work is left.
        """
        now = time.perf_counter()
        self.step = now - began
        since = self.since or began
        if result:
            self.between = now - since
            self.total += self.between
            since = now
        self.since = since if more else 0.0

    def skip(self) -> None:
        """Leave the time up to the next step's start out of `total`, as no step could run."""
        self.since = 0.0

    def since_last(self, micro_batch: int, began: float) -> float:
        """Return the seconds since the micro-batch's previous result, or since the launch if later.

        They include the time of other micro-batches.

        began: time.perf_counter() at the launch of the result's step.
        """
        now = time.perf_counter()
        seconds = now - max(began, self._results_at[micro_batch])
        self._results_at[micro_batch] = now
        return seconds
