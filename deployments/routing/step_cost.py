"""StepCostModel: the cost of a replica's steps, estimated from the counters on its frames.

  seconds = base x steps + sequence x output tokens + token x prompt tokens

Seconds, steps, output tokens and prompt tokens are the differences of cumulative counters between
two frames. So it does not matter which frames arrive, nor when: a router that was busy, or read
three frames at once, gets the same estimate.

Differences are taken over intervals of many steps. If a step is launched while the previous one
runs, part of a long step's time is counted in the previous frame. With differences between single
frames, prompt tokens of an 8B model on an H200 appeared to be free. Over intervals of 0.2 s, steps
are predicted with an error of 2 % (median). A GPU's step cost hardly depends on the number of
sequences; a CPU's is nearly proportional to it. A slow machine is detected within seconds of work.
"""

from collections.abc import Iterable
from typing import NamedTuple

from engine.messages import EngineStats

STRETCH = 0.2  # minimum busy seconds of an interval between two observations
# Factor on the weights of earlier intervals at each new one, so that about twenty count, as
# replicas may change.
_FADE = 0.95
_REFIT = 4  # number of intervals between two fits, after the first few
_SWEEPS = 12  # number of Gauss-Seidel iterations per fit


class StepCost(NamedTuple):
    """The cost of a step in seconds: a constant, plus terms per sequence and per prompt token in
    the step."""

    base: float
    sequence: float
    token: float

    @classmethod
    def mean(cls, costs: Iterable["StepCost"]) -> "StepCost":
        """Return the mean of the costs of similar replicas; without any, a default between those of
        a GPU and a CPU."""
        known = list(costs)
        if not known:
            return cls(0.01, 0.002, 0.0005)
        return cls(*(sum(column) / len(known) for column in zip(*known, strict=True)))

    def rates(self, rows: int, step_tokens: int) -> tuple[float, float]:
        """Return the prompt tokens/s of a replica that only computes prompts, and the output
        tokens/s of one that only decodes a full batch.

        rows: number of sequences in a full batch.
        step_tokens: maximum of tokens in a step.
        """
        prompt = 1 / (self.token + self.base / step_tokens)
        return prompt, rows / max(1e-6, self.base + self.sequence * rows)


class StepCostModel:
    """A least-squares fit of step times with non-negative coefficients and exponential decay.

    prior: the assumed cost at the beginning.
    fade: factor by which each new observation multiplies the weights of earlier ones.
    """

    def __init__(self, prior: StepCost, fade: float = _FADE) -> None:
        self.cost = prior
        self._fade = fade
        self._last: EngineStats | None = None  # stats at the beginning of the interval
        self._stretches = 0
        # The normal equations, initially of three typical steps with the prior's cost. s: steps, o:
        # output tokens, p: prompt tokens.
        self._matrix = [0.0] * 6  # ss, so, sp, oo, op, pp
        self._vector = [0.0] * 3
        for outputs, prompts in ((1, 0), (16, 0), (8, 256)):
            self._add(
                1,
                outputs,
                prompts,
                prior.base + outputs * prior.sequence + prompts * prior.token,
                0.3,
            )

    def observe_frame(self, stats: EngineStats) -> None:
        """Add a frame's stats to the fit. Frames may be missing, as the counters are cumulative."""
        last = self._last
        if (
            last is None
            or not 0 < last.step <= stats.step
            or stats.busy_seconds < last.busy_seconds
        ):
            self._last = stats  # the first frame, or the first of a new engine
        elif stats.busy_seconds - last.busy_seconds >= STRETCH:
            self.observe(
                stats.step - last.step,
                stats.output_tokens - last.output_tokens,
                stats.prompt_tokens - last.prompt_tokens,
                stats.busy_seconds - last.busy_seconds,
            )
            self._last = stats

    def observe(self, steps: int, outputs: int, prompts: int, seconds: float) -> None:
        """Add an observation to the fit: steps, output tokens and prompt tokens that took `seconds`
        of busy time."""
        if seconds <= 0:
            return
        self._matrix = [value * self._fade for value in self._matrix]
        self._vector = [value * self._fade for value in self._vector]
        self._add(steps, outputs, prompts, seconds)
        self._stretches += 1
        if self._stretches % _REFIT == 0 or self._stretches in (1, 2, 4, 8):
            self._solve()

    @property
    def measured(self) -> bool:
        """Whether the cost is measured; if not, it is the prior."""
        return self._stretches >= _REFIT

    def rates(self, rows: int, step_tokens: int) -> tuple[float, float] | None:
        """Return `StepCost.rates` of the measured cost; None until it is measured."""
        return self.cost.rates(rows, step_tokens) if self.measured else None

    def _add(self, s: float, o: float, p: float, seconds: float, weight: float = 1.0) -> None:
        weight /= seconds * seconds  # weighted so that relative errors are minimised
        m, v = self._matrix, self._vector
        m[0] += weight * s * s
        m[1] += weight * s * o
        m[2] += weight * s * p
        m[3] += weight * o * o
        m[4] += weight * o * p
        m[5] += weight * p * p
        v[0] += weight * s * seconds
        v[1] += weight * o * seconds
        v[2] += weight * p * seconds

    def _solve(self) -> None:
        """Solve the normal equations by Gauss-Seidel from the last solution, with coefficients
        clamped to be non-negative."""
        ss, so, sp, oo, op, pp = self._matrix
        vs, vo, vp = self._vector
        base, sequence, token = self.cost
        for _ in range(_SWEEPS):
            if ss > 0:
                base = max(0.0, (vs - so * sequence - sp * token) / ss)
            if oo > 0:
                sequence = max(0.0, (vo - so * base - op * token) / oo)
            if pp > 0:
                token = max(1e-7, (vp - sp * base - op * sequence) / pp)
        self.cost = StepCost(base, sequence, token)
