"""BatchPace: the share of steps that batch work gets beside other requests, and launch times.

A request that arrives waits for the steps in flight, so batch work bounds the time to first tokens:

- While prompts of other requests wait or are computed, decodes of batch work lengthen each step.
  The prompts' chunks grow in the same ratio, so that prompts are computed as quickly as without
  batch work. The token budget bounds this growth, and with it the decodes of batch work; at least a
  32nd of the rows decode. Other batch work keeps its rows and blocks, and goes on afterwards.
- Otherwise batch work decodes in all rows, as a decode costs little. Its prompts get 18 % of the
  budget, but no more tokens than fit into 25 ms.
- One batch ahead, a request waits for the rest of the running step and for the whole next one.
  While batch work runs, the loop therefore takes input until the device is about to become idle,
  and decides the next step then. So a request waits for one step at most.
"""

from engine.scheduling.pacing.chunking import prefill_tokens
from engine.scheduling.pacing.step_costs import StepCosts

CALM_STEPS = 64  # steps without other requests, after which batch work fills steps

_ROWS = 32  # 1 / the least share of the rows for batch work's decodes
_SHARE = 0.18  # share of the token budget for batch work's prompts
_SECONDS = 0.025  # seconds of batch work's prompts in a step
_LEAD = 0.002  # least seconds from a launch to the expected end of the step before
_ENOUGH = 8  # steps before times are predicted
_LATE = 0.0002  # seconds: a result that took no longer to come was ready, so the device was idle
_KEEP = 0.98  # part of the lead that is kept after a launch in time


class BatchPace:
    """The pace of batch work, from the times of the last steps."""

    def __init__(self) -> None:
        self._costs = StepCosts()
        self._lead = _LEAD  # seconds
        self._early = 0.0  # recent maximum of 1 - time / expected time of a step

    def observe(
        self, decodes: int, context: int, tokens: int, seconds: float, waited: float
    ) -> None:
        """Learn from a step, as `PromptPace.observe` does.

        waited: seconds that the loop waited for the result, after it had launched the next step.
        """
        expected = self._costs.expected(decodes, context, tokens)
        if expected > 0:
            self._early = max(_KEEP * self._early, 1 - seconds / expected)
        if waited < _LATE:
            self._lead = min(2 * self._lead, seconds)
        else:
            self._lead = max(_LEAD, _KEEP * self._lead)
        self._costs.observe(decodes, context, tokens, seconds)

    def _beside_prompts(
        self, rows: int, budget: int, waiting: int, decodes: tuple[int, int], context: float
    ) -> tuple[int, int]:
        """Return the maximum of batch work's decodes beside prompts of other requests, and the
        tokens of these prompts; see `limits`."""
        chunk, least = prefill_tokens(waiting, budget), max(1, rows // _ROWS)
        others, batch = decodes
        if self._costs.steps < _ENOUGH or not batch:
            return least, chunk
        base, row, read, _ = self._costs.costs.tolist()
        row += read * context
        fixed = base + row * others
        if row <= 0 or fixed <= 0:
            return least, chunk
        room = budget / chunk - 1
        allowed = int(room * fixed / row)
        tokens = int(chunk * (1 + min(batch, allowed) * row / fixed))
        later = waiting - tokens
        if later <= prefill_tokens(later, budget):  # the rest would be a step of its own
            tokens = waiting
        return min(rows, max(least, allowed)), min(budget, tokens)

    def limits(
        self, rows: int, budget: int, waiting: int, decodes: tuple[int, int], context: float
    ) -> tuple[int, int, int]:
        """Return the limits of a step beside other requests: batch work's decodes, its prompt
        tokens, and the prompt tokens of the other requests.

        rows: the maximum number of requests that may run.
        budget: tokens of a step.
        waiting: prompt tokens that other requests lack.
        decodes: the numbers of requests that could decode: others, and those of batch work.
        context: tokens of a request's context, on average.
        """
        if waiting:
            most, chunk = self._beside_prompts(rows, budget, waiting, decodes, context)
            return most, 0, chunk
        tokens, cost = int(_SHARE * budget), float(self._costs.costs[3])
        if self._costs.steps >= _ENOUGH and cost > 0:
            tokens = min(tokens, int(_SECONDS / cost))
        return rows, max(1, tokens), 0

    def launch_after(self, decodes: int, context: int, tokens: int) -> float:
        """Return the seconds from a step's start to the launch of the next one."""
        if self._costs.steps < _ENOUGH:
            return 0.0
        expected = self._costs.expected(decodes, context, tokens)
        return (1 - self._early) * expected - self._lead
