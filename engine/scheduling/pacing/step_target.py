"""Steps short enough for a promise: `target_tpot_ms` bounds the time between a request's tokens.

A stream has a token a step, so the promise is one on the seconds of a step. These are taken to be

    base + row * (requests that decode) + token * (prompt tokens)

with costs that are fitted to the last steps, newer ones counting more: what a row costs grows with
the contexts, and differs by model, device and format. Two bounds follow. Only so many requests run
that their decodes leave a part of the step to prompts. And a step computes only the prompt tokens
that the rest of it has time for. Requests beyond that wait, in the routers, which see fewer rows.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.pacing.chunking import PromptPace

_AIM = 0.9  # of the target: steps of the same work do not take the same time
_PROMPTS = 0.25  # of the time of a step, kept free of decodes
_KEEP = 0.98  # weight of older steps
_LEAST_STEPS = 8  # before a bound follows from them
_RIDGE = 1e-6  # of the mean square: where steps were all alike, costs are shared out evenly
_LEAST_TOKENS = 8  # prompt tokens of a step, however long they take
_BEYOND = (4, 32)  # times those that ran at once lately, and more: as far as the fit is believed


class StepTarget(PromptPace):
    """seconds: that a step may take."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._aim = _AIM * seconds
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._steps = 0
        self._costs = np.zeros(3)  # seconds of a step, of a row and of a prompt token
        self._most = 1  # requests that decoded at once lately

    def observe(self, decodes: int, tokens: int, seconds: float) -> None:
        super().observe(decodes, tokens, seconds)
        work = np.array([1.0, decodes, tokens])
        if self._steps > _LEAST_STEPS:  # a pause of the process tells nothing of the work
            seconds = min(seconds, 3 * float(work @ self._costs))
        self._steps += 1
        self._most = max(decodes, int(self._most * 0.99))
        self._squares = _KEEP * self._squares + np.outer(work, work)
        self._products = _KEEP * self._products + seconds * work
        self._costs = self._fitted()

    def _fitted(self) -> NDArray[Any]:
        """Costs of least squares, none below zero: one that would be is taken out of the fit."""
        scale = np.sqrt(np.maximum(np.diag(self._squares), 1e-12))
        squares = self._squares / np.outer(scale, scale)
        costs, used = np.zeros(3), [0, 1, 2]
        while used:
            part = squares[np.ix_(used, used)] + _RIDGE * np.eye(len(used))
            found = np.linalg.solve(part, (self._products / scale)[used])
            if found.min() >= 0:
                costs[used] = found
                break
            used.pop(int(found.argmin()))
        return costs / scale

    def rows(self, most: int) -> int:
        if self._steps < _LEAST_STEPS:
            return most
        base, row, _ = self._costs
        left = (1 - _PROMPTS) * self._aim - base
        fit = left / row if row > 0 else math.inf
        times, more = _BEYOND
        return int(min(most, max(1.0, min(fit, times * self._most + more))))

    def limit(self, tokens: int, decodes: int) -> int:
        base, row, token = self._costs
        if not decodes or self._steps < _LEAST_STEPS or token <= 0:
            return super().limit(tokens, decodes)
        left = self._aim - base - row * decodes
        return min(tokens, max(_LEAST_TOKENS, int(left / token)))
