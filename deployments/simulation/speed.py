"""Speed: the cost of a simulated replica's steps, and the limits of its engine."""

from dataclasses import dataclass, replace

from deployments.routing.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Speed:
    """The cost of steps and the limits of one kind of simulated replica.

    base, sequence, token: constant seconds of a step, and seconds per sequence and per prompt token
        in it.
    kv_tokens: capacity of the KV cache in tokens. chunk: maximum number of tokens in a step.
    adapter_seconds: seconds to load an adapter. slots: number of adapter slots.
    ahead: whether a step is launched before the previous one ends, so that new requests wait for
        one more step.
    context: maximum number of tokens of a request. block: number of tokens in a KV block.
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
