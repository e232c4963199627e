"""Speed: what a simulated replica's steps cost, and what fits into its engine."""

from dataclasses import dataclass, replace

from deployments.routing.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a kind of replica.

    base, sequence, token: seconds per step, per sequence and per prompt token in it.
    adapter_seconds: seconds to load an adapter. slots: adapter slots.
    ahead: whether a step is launched before the previous one ends, so that arrivals wait one more
    step.
    context: most tokens of a request. block: tokens of a KV block.
    """

    pool: str
    base: float
    sequence: float
    token: float
    kv_tokens: int
    max_num_seqs: int
    chunk: int
    slots: int = 16
    adapter_seconds: float = 0.1
    ahead: bool = False
    context: int = 32768
    block: int = 16
    prefix_caching: bool = True

    @property
    def cost(self) -> StepCost:
        return StepCost(self.base, self.sequence, self.token)

    def slower(self, factor: float) -> "Speed":
        return replace(
            self,
            base=self.base * factor,
            sequence=self.sequence * factor,
            token=self.token * factor,
        )
