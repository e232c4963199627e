"""BatchPace: bounds the batch work of steps, and delays launches, so that other requests wait less.

A request that arrives waits for the steps in flight, so batch work bounds the time to first tokens:

- While prompts of other requests wait or are computed, decodes of batch work lengthen each step.
  The prompts' chunks grow in the same ratio, so that prompts are computed as quickly as without
  batch work. The token budget bounds this growth, and with it the decodes of batch work. Batch work
  in at least a 32nd of the rows decodes; the rest keeps its rows and blocks, and continues later.
- Otherwise batch work decodes in all rows, as a decode costs little. Its prompts get 18 % of the
  budget, at most 25 ms. Beyond 8 ms they get at most half the tokens of a mean prompt of other
  requests. So the time that another request waits is in proportion to its own prompt.
- One batch ahead, a request waits for the rest of the running step and for the whole next one.
  While batch work runs, the loop therefore takes input until the device is about to become idle,
  and decides the next step then. So a request waits for one step at most.
"""

from engine.scheduling.pacing.chunking import prefill_tokens
from engine.scheduling.pacing.step_costs import StepCosts

CALM_STEPS = 64  # number of steps without other requests, after which batch work fills steps

_ROWS = 32  # 1 / the least share of the rows for batch work's decodes
_SHARE = 0.18  # share of the token budget for batch work's prompts
_SECONDS = 0.025  # maximum seconds of batch work's prompts in a step
_SHORT = 0.008  # seconds of batch work's prompts that are allowed beside any other prompts
_PART = 0.5  # maximum tokens of batch work's prompts, as a share of the mean other prompt
_RECENT = 0.05  # weight of the newest prompt in that mean
_LEAD = 0.002  # minimum seconds from a launch to the expected end of the step before it
_ENOUGH = 8  # number of observed steps before times are predicted
_KEEP = 0.98  # factor on the lead after each launch that was early enough


class BatchPace:
    """The limits of batch work and the times of launches, from the times of the last steps."""

    def __init__(self) -> None:
        self._costs = StepCosts()
        self._lead = _LEAD  # seconds from a launch to the expected end of the step before it
        self._early = 0.0  # recent maximum of 1 - time / expected time of a step
        self._prompt = 0.0  # recent mean of the prompt tokens of requests that are no batch work

    def observe(
        self, decodes: int, context: int, tokens: int, seconds: float, *, late: bool
    ) -> None:
        """Update the costs with a step; see `PromptPace.observe` for the other parameters.

        late: whether the device had done the step before the next one was launched.
        """
        expected = self._costs.expected(decodes, context, tokens)
        if expected > 0:
            self._early = max(_KEEP * self._early, 1 - seconds / expected)
        if late:
            self._lead = min(2 * self._lead, seconds)
        else:
            self._lead = max(_LEAD, _KEEP * self._lead)
        self._costs.observe(decodes, context, tokens, seconds)

    def observe_prompt(self, tokens: int) -> None:
        """Learn from the prompt of a new request that is no batch work."""
        self._prompt += _RECENT * (tokens - self._prompt) if self._prompt else tokens

    def _beside_prompts(
        self, rows: int, budget: int, waiting: int, decodes: tuple[int, int], context: float
    ) -> tuple[int, int]:
        """Return the limits of a step with prompts of other requests; see `limits` for the
        parameters.

        The result is (maximum number of batch work's decodes, number of the others' prompt tokens).
        """
        chunk, least = prefill_tokens(waiting, budget), max(1, rows // _ROWS)
        others, batch = decodes
        if self._costs.steps < _ENOUGH or not batch:
            return least, chunk
        base, row, read, _ = self._costs.costs.tolist()
        row += read * context
        fixed = base + row * others
        if row <= 0 or fixed <= 0:
            return least, chunk
        room = min(budget, waiting) / chunk - 1
        allowed = int(room * fixed / row)
        tokens = int(chunk * (1 + min(batch, allowed) * row / fixed))
        later = waiting - tokens
        # the remaining tokens would take another whole step
        if later <= prefill_tokens(later, budget):
            tokens = waiting
        return min(rows, max(least, allowed)), min(budget, tokens)

    def limits(
        self, rows: int, budget: int, waiting: int, decodes: tuple[int, int], context: float
    ) -> tuple[int, int, int]:
        """Return the limits of a step with batch work and other requests.

        The result is (maximum number of batch work's decodes, of its prompt tokens, and of the
        other requests' prompt tokens).

        rows: the maximum number of requests that may run.
        budget: maximum number of tokens of a step.
        waiting: number of the other requests' prompt tokens that are not computed.
        decodes: (other requests, batch work) that could decode.
        context: mean number of tokens of a request's context.
        """
        if waiting:
            most, chunk = self._beside_prompts(rows, budget, waiting, decodes, context)
            return most, 0, chunk
        tokens, cost = int(_SHARE * budget), float(self._costs.costs[3])
        if self._costs.steps >= _ENOUGH and cost > 0:
            most = max(int(_SHORT / cost), int(_PART * self._prompt))
            tokens = min(tokens, int(_SECONDS / cost), most)
        return rows, max(1, tokens), 0

    def launch_after(self, decodes: int, context: int, tokens: int) -> float:
        """Return the seconds from a step's start to the launch of the next one.

        The result is 0 until enough steps were observed. The parameters describe the running step,
        see `PromptPace.observe`.
        """
        if self._costs.steps < _ENOUGH:
            return 0.0
        expected = self._costs.expected(decodes, context, tokens)
        return (1 - self._early) * expected - self._lead
