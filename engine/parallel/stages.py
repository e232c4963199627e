"""Stage: the layers of a pipeline stage. No torch here.

The first stage also has the embedding and the LM head. So scheduler and sampler are on the rank
that embeds tokens and computes logits, tokens are never sent, and a tied head exists only once:

 rank 0   embedding, layers 0 .. a      head, sampler
 rank 1                     layers a .. b  |
 rank 2                         layers b .. end
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage with index `number` of a pipeline of `count` stages."""

    number: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding and the head."""
        return self.number == 0

    @property
    def alone(self) -> bool:
        return self.count == 1

    @property
    def last(self) -> bool:
        return self.number == self.count - 1

    def layers(self, costs: Sequence[int], ends: int) -> range:
        """Return the layers of this stage, at least one.

        costs: the cost of each layer, in any unit.
        ends: the cost of embedding and LM head, which the first stage has in addition.
        """
        cuts = divide(costs, ends, self.count)
        return range(cuts[self.number], cuts[self.number + 1])


def divide(costs: Sequence[int], ends: int, count: int) -> list[int]:
    """Divide consecutive layers into `count` stages, with the smallest possible maximum cost.

    Returns [0, the first layer of each further stage, the number of layers].

    costs: the cost of each layer, in any unit.
    ends: the additional cost of the first stage.
    """
    sums = list(accumulate(costs, initial=0))
    total = len(costs)
    # best[i]: the smallest possible maximum cost of the stages so far, if they have the layers
    # before i.
    best = [ends + sums[i] for i in range(total + 1)]
    cuts: list[list[int]] = []
    for piece in range(1, count):
        dearest, where = list(best), [0] * (total + 1)
        for end in range(piece + 1, total + 1):
            dearest[end], where[end] = min(
                (max(best[begin], sums[end] - sums[begin]), begin) for begin in range(piece, end)
            )
        best = dearest
        cuts.append(where)
    ways = [total]
    for where in reversed(cuts):
        ways.append(where[ways[-1]])
    return [0, *reversed(ways)] if count > 1 else [0, total]
