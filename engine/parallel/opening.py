"""How the ranks of a model come together, once each knows its device."""

import logging
import os
import time
from collections.abc import Callable
from threading import Thread

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from engine.parallel.group import DistributedGroup, TensorParallelGroup
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup

_HOST = "127.0.0.1"
_LATE = (5, 30, 300)  # seconds

logger = logging.getLogger("manta.engine")

Open = Callable[[torch.device], TensorParallelGroup]


def alone(device: torch.device) -> TensorParallelGroup:
    """The group of a model that is whole."""
    return TensorParallelGroup()


def first(ranks: Ranks) -> Open:
    """How rank 0 opens it."""

    def open_group(device: torch.device) -> TensorParallelGroup:
        if device.type == "cpu":
            group = SharedMemoryGroup.open(0, ranks.size, ranks.memory)
            Thread(target=_name_the_late, args=(group,), name="late-ranks", daemon=True).start()
            return group
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


def _name_the_late(group: SharedMemoryGroup) -> None:
    before: list[tuple[int, int]] = []
    seconds = 0
    while True:
        time.sleep(1.0)
        late = group.late()
        seconds = seconds + 1 if late and late == before else 0
        before = late
        if seconds in _LATE:
            for rank, _ in late:
                logger.warning("rank %d of %d is late by %d s", rank, group.size, seconds)


def _distributed(rank: int, size: int, device: torch.device, store: Store) -> DistributedGroup:
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    return DistributedGroup(rank, size, dist.group.WORLD, device)
