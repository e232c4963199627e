"""StepTarget: steps short enough for the TPOT target, `target_tpot_ms`.

A stream gets a token a step, so the target bounds the seconds between the results of two steps.
They are modelled as

    base + row * (requests that decode) + key * (tokens of their contexts) + token * (prompt tokens)

with costs that are fitted to the last steps, newer steps counting more. The costs differ by model,
device and format, and a row costs less in a matmul of few rows than of many. Two bounds follow:
Only so many requests run that their decodes leave a part of the step to prompts. A step computes
only the prompt tokens that the rest of it has time for. Requests beyond that wait in the routers,
which see fewer rows.

Steps are aimed at less than the target, by what the last steps took beyond the fit: all but one in
a hundred of them would then have met the target. The fit is not believed for steps much larger than
those measured: a matmul that waits for its weights has room for a hundred tokens more, not for a
thousand.
"""

import heapq
import math
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.pacing.chunking import PromptPace

_DELIVERY = 0.03  # of the target, for what is between a step and a stream
_PROMPTS = 0.25  # of the time of a step, kept free of decodes
_KEEP = 0.98  # weight of older steps
_LEAST_STEPS = 8  # before a bound follows from them
_RIDGE = 1e-6  # of the mean square: where steps were all alike, costs are shared out evenly
_LEAST_TOKENS = 8  # prompt tokens of a step, however long they take
_BEYOND = (4, 32)  # times those that ran at once lately, and more: as far as the fit is believed
_COMPARED = 128  # steps: more than one of them in a hundred may be later than the target
_FIRST_ERROR = 0.1  # of a step: until as many were compared
_MOST_ERROR = 0.25  # of a step: no smaller step makes up for more
_PAUSE = 3  # times what a step should take: a pause of the process. The next may be as much shorter


class StepTarget(PromptPace):
    """The pace that keeps steps within a TPOT target. seconds: the longest time of a step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._target = (1 - _DELIVERY) * seconds
        self._squares = np.zeros((4, 4))
        self._products = np.zeros(4)
        self._steps = 0
        self._costs = np.zeros(4)  # seconds of a step, a row, a token of a context, a prompt token
        self._most_rows = 1  # requests that decoded at once lately
        self._most_tokens = 0  # of prompts in a step lately
        self._context = 1.0  # mean tokens of the requests that decode
        self._late = deque([_FIRST_ERROR] * 2, _COMPARED)  # 0.1: a tenth more than was expected
        self._aim = self._target / (1 + _FIRST_ERROR)  # seconds of a step, by the fit

    def observe(self, decodes: int, context: int, tokens: int, seconds: float) -> None:
        super().observe(decodes, context, tokens, seconds)
        work = np.array([1.0, decodes, context, tokens])
        expected = float(work @ self._costs)
        believed = expected > 0 and tokens <= _believed(self._most_tokens)
        if believed and self._steps >= _LEAST_STEPS:
            seconds = min(max(seconds, expected / _PAUSE), _PAUSE * expected)
            if decodes:  # others keep no stream waiting
                self._late.append(seconds / expected - 1)
                late = heapq.nlargest(2, self._late)[-1]
                self._aim = self._target / (1 + min(max(0.0, late), _MOST_ERROR))
        if decodes:
            self._context = context / decodes
        self._steps += 1
        self._most_rows = max(decodes, int(self._most_rows * 0.99))
        self._most_tokens = max(tokens, int(self._most_tokens * 0.99))
        weight = 1 / max(seconds, 1e-6)  # long steps vary more; those that compile are longest
        self._squares = _KEEP * self._squares + weight * np.outer(work, work)
        self._products = _KEEP * self._products + weight * seconds * work
        self._costs = self._fitted()

    def _fitted(self) -> NDArray[Any]:
        """Return the costs of a least-squares fit.

        No cost is below zero: one that would be is taken out of the fit.
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

    def rows(self, most: int) -> int:
        if self._steps < _LEAST_STEPS:
            return most
        base, row, key, _ = self._costs
        left = (1 - _PROMPTS) * self._aim - base
        row_cost = row + key * self._context
        fit = left / row_cost if row_cost > 0 else math.inf
        return int(min(most, max(1.0, min(fit, _believed(self._most_rows)))))

    def limit(self, tokens: int, decodes: int, context: int) -> int:
        if not decodes:
            return super().limit(tokens, decodes, context)
        base, row, key, token = self._costs
        tokens = min(tokens, _believed(self._most_tokens))
        if self._steps < _LEAST_STEPS or token <= 0:
            return tokens
        left = self._aim - base - row * decodes - key * context
        return min(tokens, max(_LEAST_TOKENS, int(left / token)))


def _believed(most: int) -> int:
    times, more = _BEYOND
    return times * most + more
