"""TensorParallelGroup: which part of a layer this process holds, and the sums between the parts."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """Layers take one and ask it what they keep; with size 1 that is everything and nothing is
    communicated.

    process_group: a ``torch.distributed`` group of ``size`` processes; unused with size 1.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None

    def part(self, total: int, what: str) -> tuple[int, int]:
        """This rank's half-open range of ``total`` units. ConfigError if they do not divide."""
        if total % self.size:
            raise ConfigError(
                f"{what}: {total} cannot be divided among the {self.size} ranks of this"
                " TensorParallelGroup: its size must divide it"
            )
        each = total // self.size
        return self.rank * each, (self.rank + 1) * each

    def part_or_copy(self, total: int, what: str) -> tuple[int, int]:
        """Like part; but fewer units than ranks are copied to neighbours (key heads under GQA)."""
        if total < self.size and self.size % total == 0:
            unit = self.rank // (self.size // total)
            return unit, unit + 1
        return self.part(total, what)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """[n, columns] of each rank -> [n, size * columns], in rank order."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(parts, x.contiguous(), group=self.process_group)
        return parts.movedim(0, 1).reshape(x.shape[0], -1)
