"""TensorParallelGroup: how layers are divided among ranks, and the ranks' collective operations."""

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
    """The ranks that divide layers. Every rank makes the same calls in the same order.

    The group tells layers which part they have. With size 1 a layer has everything and nothing is
    communicated. With more ranks this class only computes the parts; its subclasses
    `SharedMemoryGroup` and `DistributedGroup` also communicate.
    """

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> tuple[int, int]:
        """Return this rank's half-open range (begin, end) of `total` heads, experts or columns.

        what: the name of the divided items, for the error.
        Raises ConfigError if the number of ranks does not divide `total`.
        """
        if total % self.size:
            raise ConfigError(
                f"{what}: {total} cannot be divided among {self.size} ranks; tensor_parallel must"
                " divide it",
                param="tensor_parallel",
            )
        units = total // self.size
        return self.rank * units, (self.rank + 1) * units

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return this rank's half-open ranges of query heads and KV heads; see `divide_heads`.

        Raises ConfigError if the heads cannot be divided.
        """
        if self.size > num_kv_heads:
            self.part(num_heads, "num_attention_heads")
            if self.size % num_kv_heads:
                self.part(num_kv_heads, "num_key_value_heads")
        return divide_heads(num_heads, num_kv_heads, self.size, self.rank)

    def share(self, total: int, rank: int | None = None) -> tuple[int, int]:
        """Return a rank's half-open range (begin, end) of `total` rows, such as a vocabulary's.

        Unlike `part`, the last ranks get fewer rows, or none, if ranks do not divide the total.

        rank: None = this one.
        """
        rank, units = self.rank if rank is None else rank, -(-total // self.size)
        return min(rank * units, total), min((rank + 1) * units, total)

    def all_reduce(self, x: Tensor) -> Tensor:
        """All-reduce (sum) x in place and return x, which has the same bits on every rank."""
        self._alone()
        return x

    def add_reduced(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the all-reduce of x to the residual in place, and return the residual."""
        return residual.add_(self.all_reduce(x))

    def norm_reduced(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor | None:
        """Run `add_reduced` and the RMSNorm of the residual as one kernel; return the norm.

        Without such a kernel the method does nothing and returns None.
        """
        return None

    @property
    def recordable(self) -> bool:
        """Whether a compiled program may contain all-reduces (`kernels.cpu.codegen.program`)."""
        return self.size == 1

    def all_can(self, attempt: Callable[[], bool]) -> bool:
        """Return whether `attempt` returns True on all ranks; all-reduces inside it are skipped."""
        return attempt()

    def check(self) -> None:
        """Raise RankFailed if an all-reduce of the last program or GPU step failed."""

    def gather(self, x: Tensor) -> Tensor:
        """Gather the ranks' tensors x of one shape; return [ranks, *x.shape] on all ranks."""
        self._alone()
        return x[None]

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        """Gather each rank's [n, columns], its `share` of total; return [n, total] on rank 0.

        The result on other ranks is not valid.
        """
        self._alone()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x on all other ranks with rank 0's x; return x."""
        self._alone()
        return x

    def least(self, number: int) -> int:
        """Return the minimum of the ranks' numbers; the call is also a barrier."""
        self._alone()
        return number

    def _alone(self) -> None:
        if self.size > 1:
            raise NotImplementedError("this group only knows the parts")


@dataclass(frozen=True, slots=True)
class DistributedGroup(TensorParallelGroup):
    """The group of ranks that communicate over torch.distributed, with NCCL between GPUs.

    All calls except `least` can be captured in a CUDA graph.

    process_group: a ``torch.distributed`` group of ``size`` processes.
    device: this rank's device.
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
        """Return x [n, columns], padded to the number of columns of the rank with the most."""
        lacking = -(-total // self.size) - x.shape[1]
        return torch.nn.functional.pad(x, (0, lacking)) if lacking else x

    @staticmethod
    def beside(parts: Tensor, total: int) -> Tensor:
        """Join the columns of all ranks' `padded` parts, and drop the padding.

        parts: [ranks, n, columns]; the result is [n, total].
        """
        return parts.movedim(0, 1).flatten(1)[:, :total].contiguous()

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, group_src=0, group=self.process_group)
        return x

    def least(self, number: int) -> int:
        minimum = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(minimum, dist.ReduceOp.MIN, group=self.process_group)
        return int(minimum.item())
