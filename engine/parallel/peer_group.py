"""PeerGroup: ranks on GPUs that can access each other's memory.

Small all-reduces use peer memory, large ones NCCL.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.group import DistributedGroup
from engine.parallel.shared_memory import RankFailed
from kernels.device_memory import reaches

# Number of ranks -> (maximum message bytes of one-shot all-reduce, maximum message bytes of peer
# memory); larger messages use NCCL. `python -m bench.kernels.sums` measures these limits. Two
# ranks: measured on two H200 with NVLink, where one-shot is fastest up to the size of peer memory.
# Four and eight: as measured by vLLM (pull requests 24111 and 24532).
CROSSINGS = {2: (16 << 20, 16 << 20), 4: (1 << 20, 8 << 20), 8: (256 << 10, 8 << 20)}

logger = logging.getLogger("manta.engine")


@dataclass(frozen=True, slots=True)
class PeerGroup(DistributedGroup):
    """The group of ranks on GPUs that can access each other's memory.

    memory: `kernels.all_reduce.PeerMemory`, whose kernels can be captured.
    exact: whether an element's sum must have the same bits for any message size. All-reduces then
        do not use NCCL, whose order of additions depends on the size.

    NCCL is not used either if process_group has another backend, as for ranks that share a device.
    """

    memory: Any = None
    exact: bool = False

    @property
    def crossings(self) -> tuple[int, int]:
        """The bytes up to which one-shot all-reduce and peer memory are used; see CROSSINGS."""
        return CROSSINGS[min(n for n in CROSSINGS if n >= min(self.size, max(CROSSINGS)))]

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._sum(x, None)

    def add_reduced(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._sum(x, residual)

    def norm_reduced(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor | None:
        few, most = self.crossings
        if not self.memory.norm_fits(x) or (few < most and x.nbytes > few):
            return None
        normed: Tensor = self.memory.norm_one_shot(x, residual, weight, eps)
        return normed

    def _sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self._beyond(x, self.exact):
            x = DistributedGroup.all_reduce(self, x)
            return x if residual is None else residual.add_(x)
        memory = self.memory
        few, flat = self.crossings[0], x.view(-1)
        onto = None if residual is None else residual.view(-1)
        for begin, end in self._pieces(x):
            shot = memory.one_shot if (end - begin) * x.itemsize <= few else memory.two_shot
            shot(flat[begin:end], None if onto is None else onto[begin:end])
        return x if residual is None else residual

    def gather(self, x: Tensor) -> Tensor:
        return DistributedGroup.gather(self, x) if self._beyond(x) else self._gather(x, self.size)

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        if self._beyond(x):
            return DistributedGroup.gather_columns(self, x, total)
        parts = self._gather(self.padded(x, total), 0 if self.rank else self.size)
        return x if self.rank else self.beside(parts, total)

    def broadcast(self, x: Tensor) -> Tensor:
        if self._beyond(x):
            return DistributedGroup.broadcast(self, x)
        return x.copy_(self._gather(x, 1)[0])

    def _gather(self, x: Tensor, ranks: int) -> Tensor:
        """Gather x of the first `ranks` ranks; return [ranks, *x.shape]."""
        flat = x.contiguous().view(-1)
        pieces = [self.memory.gather(flat[begin:end], ranks) for begin, end in self._pieces(x)]
        gathered = (
            pieces[0] if len(pieces) == 1 else torch.cat([flat.new_empty(ranks, 0), *pieces], 1)
        )
        return gathered.view(ranks, *x.shape)

    def _beyond(self, x: Tensor, exact: bool = False) -> bool:
        """Whether x goes through NCCL: it is large and NCCL is allowed.

        exact: whether NCCL is forbidden, as by the field `exact`.
        """
        library = not exact and dist.get_backend(self.process_group) == "nccl"
        return library and x.nbytes > self.crossings[1]

    def _pieces(self, x: Tensor) -> list[tuple[int, int]]:
        step = self.crossings[1] // x.itemsize
        return [(at, min(at + step, x.numel())) for at in range(0, x.numel(), step)]

    def check(self) -> None:
        late = int(self.memory.missing_rank)
        if late >= 0:
            raise RankFailed(f"rank {late} of {self.size} has not come to a sum for minutes")


def over_peers(group: DistributedGroup, device: torch.device, exact: bool) -> DistributedGroup:
    """Return a PeerGroup of the group's ranks if their devices can access each other's memory.

    Otherwise log a warning and return the group itself. All ranks call this together.

    exact: see PeerGroup.
    """
    here = torch.tensor([device.index], device=group.device)
    devices = [int(number) for number in group.gather(here).flatten()]
    memory, why = None, "they have no way into each other's memory that carries signals"
    if group.least(all(reaches(device.index, number) for number in devices)):
        try:
            memory = _open(group, device)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
        if not group.least(memory is not None):
            memory = None
    if memory is None:
        if not group.rank:
            logger.warning("sums of GPUs %s go through NCCL: %s", devices, why)
        return group
    return PeerGroup(
        group.rank, group.size, group.process_group, group.device, memory=memory, exact=exact
    )


def _open(group: DistributedGroup, device: torch.device) -> Any:
    # imported here, as it exists only with CUDA
    import torch.distributed._symmetric_memory as symmetric

    from kernels.all_reduce import PeerMemory, region_bytes

    region = symmetric.empty(region_bytes(group.size), dtype=torch.uint8, device=device)
    region.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(region, group.process_group)
    group.least(0)  # a barrier, as no rank may signal before all memory is zeroed
    return PeerMemory.over(group.rank, handle.buffer_ptrs, device, holder=(region, handle))
