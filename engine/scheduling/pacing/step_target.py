"""StepTarget: keeps steps short enough for the TPOT target, `target_tpot_ms`.

A stream gets a token a step, so the target bounds the seconds between the results of two steps.
They are modelled as

 base + row * (decoding requests) + key * (tokens of their contexts) + token * (prompt tokens)

with costs that are fitted to the last steps, newer steps counting more. Costs differ by model,
device and format, and a row costs less in a matmul of few rows than of many. Two bounds follow. The
number of running requests is bounded, so that decodes leave a part of the step to prompts. A step
computes only the prompt tokens that fit into the remaining time. Further requests wait in the
routers, to which the engine reports fewer rows.

Steps aim below the target, by the error of recent predictions: all but one in a hundred of them
would then have met the target. The fit is not trusted for steps much larger than those measured: a
memory-bound matmul takes a hundred more tokens at no cost, but not a thousand.
"""

import heapq
import math
from collections import deque

from engine.scheduling.pacing.chunking import PromptPace
from engine.scheduling.pacing.step_costs import StepCosts

_DELIVERY = 0.03  # share of the target reserved for the delivery of tokens from a step to a stream
_PROMPTS = 0.25  # share of a step's time that is kept free of decodes
_LEAST_STEPS = 8  # number of observed steps before bounds are derived from the fit
_LEAST_TOKENS = 8  # minimum number of prompt tokens of a step, however long they take
_BEYOND = (4, 32)  # (factor, addend): the fit is trusted up to factor * recent maximum + addend
# number of recent steps whose errors are kept, more than a hundred to tell one in a hundred
_COMPARED = 128
_FIRST_ERROR = 0.1  # relative error that is assumed until enough steps were compared
_MOST_ERROR = 0.25  # largest relative error that smaller steps compensate
# Maximum factor between a step's time and the expected one. A longer step means that the process
# was stopped, so that the next step may seem shorter by as much.
_PAUSE = 3


class StepTarget(PromptPace):
    """The bounds on a step's requests and prompt tokens that keep it within a TPOT target.

    seconds: the maximum time of a step.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._target = (1 - _DELIVERY) * seconds
        self._fit = StepCosts()
        self._most_rows = 1  # recent maximum of decoding requests
        self._most_tokens = 0  # recent maximum of prompt tokens in a step
        self._context = 1.0  # mean context of decoding requests, in tokens
        # relative errors of predictions; 0.1 = the step took a tenth longer than expected
        self._late = deque([_FIRST_ERROR] * 2, _COMPARED)
        self._aim = self._target / (1 + _FIRST_ERROR)  # predicted seconds that a step aims at

    def observe(self, decodes: int, context: int, tokens: int, seconds: float) -> None:
        super().observe(decodes, context, tokens, seconds)
        expected = self._fit.expected(decodes, context, tokens)
        believed = expected > 0 and tokens <= _believed(self._most_tokens)
        if believed and self._fit.steps >= _LEAST_STEPS:
            seconds = min(max(seconds, expected / _PAUSE), _PAUSE * expected)
            if decodes:  # without decodes no stream waits
                self._late.append(seconds / expected - 1)
                late = heapq.nlargest(2, self._late)[-1]
                self._aim = self._target / (1 + min(max(0.0, late), _MOST_ERROR))
        if decodes:
            self._context = context / decodes
        self._most_rows = max(decodes, int(self._most_rows * 0.99))
        self._most_tokens = max(tokens, int(self._most_tokens * 0.99))
        self._fit.observe(decodes, context, tokens, seconds)

    def rows(self, most: int) -> int:
        if self._fit.steps < _LEAST_STEPS:
            return most
        base, row, key, _ = self._fit.costs
        seconds_left = (1 - _PROMPTS) * self._aim - base
        row_cost = row + key * self._context
        fit = seconds_left / row_cost if row_cost > 0 else math.inf
        return int(min(most, max(1.0, min(fit, _believed(self._most_rows)))))

    def limit(self, tokens: int, decodes: int, context: int) -> int:
        if not decodes:
            return super().limit(tokens, decodes, context)
        base, row, key, token = self._fit.costs
        tokens = min(tokens, _believed(self._most_tokens))
        if self._fit.steps < _LEAST_STEPS or token <= 0:
            return tokens
        seconds_left = self._aim - base - row * decodes - key * context
        return min(tokens, max(_LEAST_TOKENS, int(seconds_left / token)))


def _believed(most: int) -> int:
    times, more = _BEYOND
    return times * most + more
