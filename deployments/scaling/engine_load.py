"""EngineLoad: computes the load metrics of an engine that a replica reports to the scaling
policy."""

import time

from deployments.routing.step_cost import StepCostModel
from deployments.scaling.policy import CounterRates
from engine.messages import EngineStats

_ROWS = 256  # maximum number of running sequences for which tokens/s are predicted


class EngineLoad:
    """The load of one engine, with rates over the time between two calls of `figures`.

    step_tokens: maximum of tokens in a step.
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._rates = CounterRates(time.monotonic())

    def figures(self, stats: EngineStats, steps: StepCostModel) -> dict[str, int | float]:
        """Return {metric: value} for the scaling policy.

        prompt_rate and output_rate are tokens/s since the last call. prompt_able and output_able
        are the maximum tokens/s of the engine, from its measured steps; they are missing until
        steps were measured.
        """
        used = 1 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
        rates = self._rates.update(
            time.monotonic(), prompt=stats.prompt_tokens, output=stats.output_tokens
        )
        able = steps.rates(min(stats.rows or _ROWS, _ROWS), self._step_tokens)
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "waiting_tokens": stats.waiting_tokens,
            "kv_usage": used,
            "prompt_rate": rates["prompt"],
            "output_rate": rates["output"],
            **(dict(zip(("prompt_able", "output_able"), able, strict=True)) if able else {}),
        }
