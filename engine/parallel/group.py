"""TensorParallelGroup: which part of a layer this process holds, and the sums between the parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.model_config import divide_heads
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """Layers take one and ask it what they keep; with size 1 that is everything and nothing is
    communicated. With more it only knows the parts: `SharedMemoryGroup` and `DistributedGroup` also
    communicate. Every rank makes the same calls in the same order.
    """

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> tuple[int, int]:
        """This rank's half-open range of ``total`` units. ConfigError if they do not divide."""
        if total % self.size:
            raise ConfigError(
                f"{what}: {total} cannot be divided among {self.size} ranks; tensor_parallel must"
                " divide it",
                param="tensor_parallel",
            )
        each = total // self.size
        return self.rank * each, (self.rank + 1) * each

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """This rank's half-open ranges of query and key heads; see `divide_heads`. ConfigError if
        they cannot be divided."""
        if self.size > num_kv_heads:
            self.part(num_heads, "num_attention_heads")
            if self.size % num_kv_heads:
                self.part(num_kv_heads, "num_key_value_heads")
        return divide_heads(num_heads, num_kv_heads, self.size, self.rank)

    def share(self, total: int, rank: int | None = None) -> tuple[int, int]:
        """Like part; but the last ranks have fewer units where they do not divide, or none (rows of
        a vocabulary). rank: None = this one."""
        rank, each = self.rank if rank is None else rank, -(-total // self.size)
        return min(rank * each, total), min((rank + 1) * each, total)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks, in place: the same bits on every rank."""
        self._alone()
        return x

    def add_reduced(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + the sum of x over the ranks, written over residual."""
        return residual.add_(self.all_reduce(x))

    def norm_reduced(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor | None:
        """As add_reduced, and RMSNorm of the residual then, in new memory, where both are one
        kernel. None: they are not, and nothing was done."""
        return None

    @property
    def recordable(self) -> bool:
        """Whether sums can stand in a program (`kernels.cpu.codegen.program`)."""
        return self.size == 1

    def all_can(self, attempt: Callable[[], bool]) -> bool:
        """Whether what each rank tries succeeds on all of them. Sums in it add up nothing."""
        return attempt()

    def check(self) -> None:
        """After a program with sums in it, or a step on a GPU. Raises RankFailed where one of them
        failed."""

    def gather(self, x: Tensor) -> Tensor:
        """x of each rank, of one shape -> [ranks, *x.shape] on all of them."""
        self._alone()
        return x[None]

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        """[n, columns] of each rank, its `share` of total -> [n, total] on rank 0. What the others
        get has no meaning."""
        self._alone()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, written over that of the others."""
        self._alone()
        return x

    def least(self, number: int) -> int:
        """Of what each rank says. Also a barrier."""
        self._alone()
        return number

    def _alone(self) -> None:
        if self.size > 1:
            raise NotImplementedError("this group only knows the parts")


@dataclass(frozen=True, slots=True)
class DistributedGroup(TensorParallelGroup):
    """Over torch.distributed, with NCCL between GPUs: all of it can be captured in a CUDA graph,
    but for `least`.

    process_group: a ``torch.distributed`` group of ``size`` processes. device: this rank's.
    """

    process_group: Any = None
    device: torch.device | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.process_group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous(), group=self.process_group)
        return parts

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        return self.beside(self.gather(self.padded(x, total)), total)

    def padded(self, x: Tensor, total: int) -> Tensor:
        """[n, columns] of a rank with as many as the first has."""
        lacking = -(-total // self.size) - x.shape[1]
        return torch.nn.functional.pad(x, (0, lacking)) if lacking else x

    @staticmethod
    def beside(parts: Tensor, total: int) -> Tensor:
        """[ranks, n, columns] of all ranks, `padded` -> [n, total]."""
        return parts.movedim(0, 1).flatten(1)[:, :total].contiguous()

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, group_src=0, group=self.process_group)
        return x

    def least(self, number: int) -> int:
        found = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.process_group)
        return int(found.item())
