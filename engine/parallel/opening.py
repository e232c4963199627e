"""How the ranks of a model come together, once each knows its device."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from engine.parallel.group import DistributedGroup, TensorParallelGroup
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup

_HOST = "127.0.0.1"

Open = Callable[[torch.device], TensorParallelGroup]


def alone(device: torch.device) -> TensorParallelGroup:
    """The group of a model that is whole."""
    return TensorParallelGroup()


def first(ranks: Ranks) -> Open:
    """How rank 0 opens it."""

    def open_group(device: torch.device) -> TensorParallelGroup:
        if device.type == "cpu":
            return SharedMemoryGroup.open(0, ranks.size, ranks.memory)
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        ranks.order("meet_at", store.port)
        return _distributed(0, ranks.size, device, store)

    return open_group


def other(rank: int, size: int, memory: int, port: Callable[[], int]) -> Open:
    """How another rank does. port: waits for what rank 0 says to `meet_at`."""

    def open_group(device: torch.device) -> TensorParallelGroup:
        if device.type == "cpu":
            group = SharedMemoryGroup.open(rank, size, memory)
            os.close(memory)
            return group
        store = TCPStore(_HOST, port(), is_master=False)
        return _distributed(rank, size, device, store)

    return open_group


def _distributed(rank: int, size: int, device: torch.device, store: Store) -> DistributedGroup:
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    return DistributedGroup(rank, size, dist.group.WORLD, device)
