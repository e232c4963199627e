"""StepCosts: the costs of a step's parts, fitted to the last steps."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_KEEP = 0.98  # factor on the weight of older steps at each new step
# ridge of the fit, relative to the mean square; it divides costs evenly if all steps are equal
_RIDGE = 1e-6


class StepCosts:
    """A linear model of a step's seconds, newer steps counting more.

    steps: the number of observed steps.
    costs: [4], the fixed seconds of a step, and those of each decode, of each token of the
        decodes' contexts, and of each prompt token.
    """

    def __init__(self) -> None:
        self._squares = np.zeros((4, 4))
        self._products = np.zeros(4)
        self.steps = 0
        self.costs = np.zeros(4)

    def expected(self, decodes: int, context: int, tokens: int) -> float:
        """Return the expected seconds of a step; 0 before any was observed."""
        return float(np.array([1.0, decodes, context, tokens]) @ self.costs)

    def observe(self, decodes: int, context: int, tokens: int, seconds: float) -> None:
        """Add a step to the fit; see `PromptPace.observe` for the parameters."""
        work = np.array([1.0, decodes, context, tokens])
        self.steps += 1
        # long steps have less weight, as they vary more; steps that compile kernels are the longest
        weight = 1 / max(seconds, 1e-6)
        self._squares = _KEEP * self._squares + weight * np.outer(work, work)
        self._products = _KEEP * self._products + weight * seconds * work
        self.costs = self._fitted()

    def _fitted(self) -> NDArray[Any]:
        """Return the costs of a least-squares fit.

        No cost is negative: a cost that would be is removed from the fit.
        """
        scale = np.sqrt(np.maximum(np.diag(self._squares), 1e-12))
        squares = self._squares / np.outer(scale, scale)
        costs, used = np.zeros(4), [0, 1, 2, 3]
        while used:
            part = squares[np.ix_(used, used)] + _RIDGE * np.eye(len(used))
            solution = np.linalg.solve(part, (self._products / scale)[used])
            if solution.min() >= 0:
                costs[used] = solution
                break
            used.pop(int(solution.argmin()))
        return costs / scale
