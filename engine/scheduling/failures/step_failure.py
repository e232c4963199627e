"""StepBlame, MemoryShortages: failures of a step, and which step is to blame.

bisection.py decides about the requests of a failed step.
"""

from types import TracebackType

_SHRINK_AFTER = 3  # consecutive steps without memory until the KV cache shrinks by an eighth
# number of successful steps until larger steps are tried again; doubled after each new shortage
_PATIENCE = 64


class StepBlame:
    """A context manager that catches exceptions in a part of the step loop: `with blame(index):
    ...`.

    The exception is suppressed and becomes `failure`, replacing an earlier one. A broken invariant
    (AssertionError) is not caught, as no valid state is left.

    failure: the last exception; None = no block has raised since `take_failure`.
    suspect: the index in `Scheduler.in_flight` of the step that the `with` block works on.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.suspect = self._blamed = -1

    def __call__(self, suspect: int) -> "StepBlame":
        """Set the step that the next `with` block works on, and return this object."""
        self.suspect = suspect
        return self

    def __enter__(self) -> None:
        """Do nothing: `__call__` has set the step that the `with` block works on."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Store the block's exception as `failure`, and suppress it.

        Returns False, which raises it again, if it is an AssertionError or no Exception.
        """
        if not isinstance(error, Exception) or isinstance(error, AssertionError):
            return False
        self.failure, self._blamed = error, self.suspect
        return True

    def take_failure(self) -> tuple[Exception, int]:
        """Return the failure and the index of the step to blame, and clear the failure."""
        failure, self.failure = self.failure, None
        assert failure is not None, "no step has failed"
        return failure, self._blamed


class MemoryShortages:
    """The counts of memory shortages, which decide when smaller steps may be larger again.

    in_a_row: number of shortages since the last successful step.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self._good_steps = 0
        self._patience = _PATIENCE // 2  # halved here, as the first shortage doubles it

    @property
    def persists(self) -> bool:
        """Whether smaller steps did not help, so that the KV cache has to shrink."""
        return self.in_a_row % _SHRINK_AFTER == 0

    def count_shortage(self) -> None:
        """Count a step for which the device had no memory."""
        self.in_a_row += 1
        if self.in_a_row == 1:
            self._patience *= 2
        self._good_steps = 0

    def count_success(self) -> bool:
        """Count a step that had memory enough; return whether larger steps may be tried again.

        Larger steps may be tried after every `_patience` such steps.
        """
        self.in_a_row = 0
        self._good_steps += 1
        return self._good_steps % self._patience == 0
