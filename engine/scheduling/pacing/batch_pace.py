"""BatchPace: the share of steps that batch work gets beside other requests, and launch times.

A request that arrives waits for the steps in flight, so batch work bounds the time to first tokens:

- While a prompt of another request waits or is computed, batch work has decodes for a 32nd of the
  rows. Its other requests keep their rows and blocks and go on afterwards.
- Otherwise it decodes in all rows, as a decode costs little. Its prompts get a sixth of the budget,
  but no more tokens than 20 ms have room for.
- One batch ahead, a request waits for the rest of the running step and for the whole next one.
  While batch work runs, the loop therefore takes input until the device is about to become idle,
  and decides the next step then. So a request waits for one step at most.
"""

from engine.scheduling.pacing.step_costs import StepCosts

CALM_STEPS = 64  # steps of batch work alone, after which it fills them

_ROWS = 32  # 1 / the share of the rows
_SHARE = 6  # 1 / the share of the budget
_SECONDS = 0.02  # of prompts in a step
_LEAD = 0.002  # least seconds from a launch to the expected end of the step before
_ENOUGH = 8  # steps before times are predicted
_LATE = 0.0002  # seconds: a result that took no longer to come was ready, so the device was idle
_KEEP = 0.98  # part of the lead that is kept after a launch in time


class BatchPace:
    """The pace of batch work, from the times of the last steps."""

    def __init__(self) -> None:
        self._costs = StepCosts()
        self._lead = _LEAD  # seconds
        self._early = 0.0  # share of its expected time by which a step ended before

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

    def limits(self, rows: int, budget: int, *, prompts: bool) -> tuple[int, int]:
        """Return the most decodes and prompt tokens of batch work in a step beside other requests.

        rows: the most requests that may run.
        budget: tokens of a step.
        prompts: whether prompts of other requests are computed or wait.
        """
        if prompts:
            return max(1, rows // _ROWS), 0
        tokens, cost = budget // _SHARE, float(self._costs.costs[3])
        if self._costs.steps >= _ENOUGH and cost > 0:
            tokens = min(tokens, int(_SECONDS / cost))
        return rows, max(1, tokens)

    def launch_after(self, decodes: int, context: int, tokens: int) -> float:
        """Return the seconds from a step's begin to the launch of the next one."""
        if self._costs.steps < _ENOUGH:
            return 0.0
        expected = self._costs.expected(decodes, context, tokens)
        return (1 - self._early) * expected - self._lead
