"""How the ranks of a model come together, once each knows its device."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from engine.parallel.group import DistributedGroup, TensorParallelGroup
from engine.parallel.link import DistributedLink, Link, SharedMemoryLink, ring
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.parallel.stages import Stage

_HOST = "127.0.0.1"
_LATE = (5, 30, 300)  # seconds

logger = logging.getLogger("manta.engine")


@dataclass(frozen=True, slots=True)
class Place:
    """Of one rank among all.

    world: of all ranks, that agree on something in it. group: that layers are divided among.
    stage: which layers this rank has. link: to the stages before and after it.
    """

    world: TensorParallelGroup = TensorParallelGroup()  # noqa: RUF009, it is frozen
    group: TensorParallelGroup = TensorParallelGroup()  # noqa: RUF009, it is frozen
    stage: Stage = Stage()  # noqa: RUF009, it is frozen
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Activations:
    """What stages hand on: of so many steps at once, each of at most so many tokens."""

    steps: int
    tokens: int
    hidden_size: int
    dtype: torch.dtype


# Where a rank computes, and what it hands on -> its place.
Open = Callable[[torch.device, Activations], Place]


def alone(device: torch.device, handed_on: Activations) -> Place:
    """The place of a rank that has the whole model."""
    return Place()


def first(ranks: Ranks) -> Open:
    """How rank 0 opens it."""

    def open_place(device: torch.device, handed_on: Activations) -> Place:
        if device.type == "cpu":
            place = _shared(0, ranks.size, ranks.stages, ranks.memory, handed_on)
            late = place.world if place.link is None else place.link
            Thread(
                target=_name_the_late, args=(late, ranks.size), name="late-ranks", daemon=True
            ).start()
            return place
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        ranks.order("meet_at", store.port)
        return _distributed(0, ranks.size, ranks.stages, device, store, handed_on)

    return open_place


def other(rank: int, size: int, stages: int, memory: int, port: Callable[[], int]) -> Open:
    """How another rank does. port: waits for what rank 0 says to `meet_at`."""

    def open_place(device: torch.device, handed_on: Activations) -> Place:
        if device.type == "cpu":
            place = _shared(rank, size, stages, memory, handed_on)
            os.close(memory)
            return place
        store = TCPStore(_HOST, port(), is_master=False)
        return _distributed(rank, size, stages, device, store, handed_on)

    return open_place


def _shared(rank: int, size: int, stages: int, memory: int, handed_on: Activations) -> Place:
    world = SharedMemoryGroup.open(rank, size, memory)
    if stages == 1:
        return Place(world, world)
    shape = handed_on.tokens, handed_on.hidden_size
    link = SharedMemoryLink(world, memory, handed_on.steps, shape, handed_on.dtype)
    return Place(world, stage=Stage(rank, stages), link=link)


def _name_the_late(waiting: Any, size: int) -> None:
    """waiting: the group, or the link, whose `late` tells for whom rank 0 waits."""
    before: list[tuple[int, int]] = []
    seconds = 0
    while True:
        time.sleep(1.0)
        late = waiting.late()
        seconds = seconds + 1 if late and late == before else 0
        before = late
        if seconds in _LATE:
            for rank, _ in late:
                logger.warning("rank %d of %d is late by %d s", rank, size, seconds)


def _distributed(
    rank: int,
    size: int,
    stages: int,
    device: torch.device,
    store: Store,
    handed_on: Activations,
) -> Place:
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    world = DistributedGroup(rank, size, dist.group.WORLD, device)
    if stages == 1:
        return Place(world, world)
    link = DistributedLink(
        rank,
        size,
        ring(rank, size),
        handed_on.steps,
        handed_on.hidden_size,
        handed_on.dtype,
        device,
    )
    return Place(world, stage=Stage(rank, stages), link=link)
