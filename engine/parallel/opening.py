"""How the ranks of a model come together, once each knows its device."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from socket import AF_INET, AF_INET6, create_server
from threading import Thread

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.parallel.group import DistributedGroup, TensorParallelGroup
from engine.parallel.link import DistributedLink, Link, SharedMemoryLink, ring
from engine.parallel.peers import over_peers
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import RankFailed, SharedMemoryGroup
from engine.parallel.stages import Stage

BACKEND = "nccl"  # of torch.distributed, between GPUs; between CPUs of several nodes it is gloo
_HOST = "127.0.0.1"
_LATE = (5, 30, 300)  # seconds

logger = logging.getLogger("manta.engine")


@dataclass(frozen=True, slots=True)
class Place:
    """Of one rank among all.

    world: of all ranks, that agree on something in it. group: that layers are divided among, which
    is a stage's. stage: which layers this rank has. link: to the stages before and after it.
    groups: on rank 0, those of all stages, if they are others than the world.
    """

    world: TensorParallelGroup = TensorParallelGroup()  # noqa: RUF009, it is frozen
    group: TensorParallelGroup = TensorParallelGroup()  # noqa: RUF009, it is frozen
    stage: Stage = Stage()  # noqa: RUF009, it is frozen
    link: Link | None = None
    groups: tuple[SharedMemoryGroup, ...] = ()

    @property
    def recovers(self) -> bool:
        """Between GPUs, kernels that wait for each other cannot be ended."""
        return isinstance(self.world, SharedMemoryGroup)

    def fail(self, error: Exception) -> None:
        """This rank's step has failed with it: let the ranks that wait for it know. Where they are
        in a stage and in a link, those that it was told by one of these are to tell the others."""
        assert self.recovers
        meets = [each for each in (self.link, self.group) if each is not None]
        both = self.link is not None and self.group.size > 1
        if both or not isinstance(error, RankFailed):
            for each in meets if both else meets[:1]:
                assert isinstance(each, SharedMemoryLink | SharedMemoryGroup)
                each.fail()

    def begin_round(self) -> None:
        """On rank 0: end all waits of the others for the failed step."""
        for each in (self.world, *self.groups):
            assert isinstance(each, SharedMemoryGroup)
            each.begin_round()

    def join_round(self) -> None:
        """The failed step is put behind; no rank is in one."""
        for each in (self.world, self.group, self.link):
            if isinstance(each, SharedMemoryGroup | SharedMemoryLink):
                each.join_round()

    def late(self) -> list[tuple[int, int]]:
        """On rank 0, of ranks that it waits for in a step: the number, and how far it has come."""
        world, link, each = self.world, self.link, self.group.size
        assert isinstance(world, SharedMemoryGroup)
        if not isinstance(link, SharedMemoryLink):
            return world.late()
        if self.groups and (found := self.groups[0].late()):
            return found
        found = link.late()
        for stage, done in found[:1]:
            behind = self.groups[stage].behind() if self.groups else []
            return [(stage * each + rank, met) for rank, met in behind] or [(stage * each, done)]
        return found


@dataclass(frozen=True, slots=True)
class Activations:
    """What stages hand on: of so many steps at once, each of at most so many tokens."""

    steps: int
    tokens: int
    hidden_size: int
    dtype: torch.dtype


# Where a rank computes, what it hands on, and whether sums have to have the same bits whatever the
# size of the message -> its place.
Open = Callable[[torch.device, Activations, bool], Place]


def alone(device: torch.device, handed_on: Activations, exact: bool) -> Place:
    """The place of a rank that has the whole model."""
    return Place()


def first(ranks: Ranks) -> Open:
    """How rank 0 opens it."""

    def open_place(device: torch.device, handed_on: Activations, exact: bool) -> Place:
        size, stages, memory = ranks.size, ranks.stages, ranks.memory
        if device.type == "cpu" and ranks.per_node == size:
            place = _shared(0, size, stages, memory, handed_on)
            Thread(
                target=_name_the_late, args=(place, size), name="late-ranks", daemon=True
            ).start()
            return place
        host = ranks.address or _HOST
        family = AF_INET6 if ":" in host else AF_INET
        listener = create_server((host, 0), family=family, backlog=size)  # of no other interface
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        ranks.order("meet_at", host, port)
        _check_alike(store, 0, ranks.per_node, device)
        return distributed(0, size, stages, device, store, handed_on, exact, memory)

    return open_place


def other(
    rank: int, config: EngineConfig, memory: int, meet: Callable[[], tuple[str, int]]
) -> Open:
    """How another rank does. meet: waits for what rank 0 says to `meet_at`."""
    size, stages, per_node = config.num_ranks, config.pipeline_parallel, config.ranks_per_node

    def open_place(device: torch.device, handed_on: Activations, exact: bool) -> Place:
        if device.type == "cpu" and per_node == size:
            place = _shared(rank, size, stages, memory, handed_on)
        else:
            host, port = meet()
            store = TCPStore(host, port, is_master=False)
            _check_alike(store, rank, per_node, device)
            place = distributed(rank, size, stages, device, store, handed_on, exact, memory)
        if device.type == "cpu":
            os.close(memory)
        return place

    return open_place


def _check_alike(store: Store, rank: int, per_node: int, device: torch.device) -> None:
    """Raises ConfigError where the GPUs of this rank's node are of another kind than rank 0's.
    Those of one node are compared by `engine.resolve`."""
    if device.type == "cpu" or rank % per_node:
        return
    kind = torch.cuda.get_device_properties(device)
    same_kind(store, rank, f"{kind.name} with {kind.total_memory / 2**30:.0f} GiB")


def same_kind(store: Store, rank: int, kind: str) -> None:
    """kind: of this rank's GPU, in words. Raises ConfigError."""
    if not rank:
        store.set("kind", kind)
        return
    wanted = store.get("kind").decode()
    if kind != wanted:
        raise ConfigError(
            f"pipeline_nodes: ranks need GPUs of one kind, and rank 0 has {wanted}, rank {rank} on "
            f"another node {kind}; give the pool's nodes a label of their own (labels), or other "
            "custom resources (resources)",
            param="pipeline_nodes",
        )


def _shared(rank: int, size: int, stages: int, memory: int, handed_on: Activations) -> Place:
    """In the file are the world, the stages' groups if they have several ranks, the links."""
    world = SharedMemoryGroup.open(rank, size, memory)
    if stages == 1:
        return Place(world, world)
    each = size // stages  # ranks of a stage, which follow each other
    number, member = divmod(rank, each)
    at = world.num_bytes(size)
    group, groups = TensorParallelGroup(), []
    if each > 1:
        length = world.num_bytes(each)
        group = SharedMemoryGroup.open(member, each, memory, at + number * length)
        if not rank:
            groups = [
                SharedMemoryGroup.open(0, each, memory, at + n * length) for n in range(stages)
            ]
            groups[0] = group
        at += stages * length
    stage, shape = Stage(number, stages), (handed_on.tokens, handed_on.hidden_size)
    link = SharedMemoryLink(
        world, stage, memory, at, member, handed_on.steps, shape, handed_on.dtype
    )
    return Place(world, group, stage, link, tuple(groups))


def _name_the_late(place: Place, size: int) -> None:
    before: list[tuple[int, int]] = []
    seconds = 0
    while True:
        time.sleep(1.0)
        late = place.late()
        seconds = seconds + 1 if late and late == before else 0
        before = late
        if seconds in _LATE:
            for rank, _ in late:
                logger.warning("rank %d of %d is late by %d s", rank, size, seconds)


def distributed(
    rank: int,
    size: int,
    stages: int,
    device: torch.device,
    store: Store,
    handed_on: Activations,
    exact: bool,
    memory: int | None = None,
) -> Place:
    """Over torch.distributed. On the CPU a stage's ranks, which are on one machine, share memory:
    a file that all of these have open."""
    backend = "gloo" if device.type == "cpu" else BACKEND
    library = backend == "nccl"
    bound = device if library else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=bound)
    of_control = device if library else torch.device("cpu")
    world = DistributedGroup(rank, size, dist.group.WORLD, of_control)
    if stages == 1:
        return Place(world, _summing(world, device, exact))
    each = size // stages
    stage, member = Stage(rank // each, stages), rank % each
    group = TensorParallelGroup()
    if each > 1 and device.type == "cpu" and memory is not None:
        at = stage.number * SharedMemoryGroup.num_bytes(each)
        group = SharedMemoryGroup.open(member, each, memory, at)
    elif each > 1:
        made = [dist.new_group([n * each + m for m in range(each)]) for n in range(stages)]
        group = DistributedGroup(member, each, made[stage.number], of_control)
        group = _summing(group, device, exact)
    likes = [[n * each + m for n in range(stages)] for m in range(each)]
    links = [ring(ranks) for ranks in likes][member]
    link = DistributedLink(
        stage,
        likes[member],
        (links[stage.number], links[stage.number - 1]),
        handed_on.steps,
        handed_on.hidden_size,
        handed_on.dtype,
        device,
    )
    return Place(world, group, stage, link)


def _summing(group: DistributedGroup, device: torch.device, exact: bool) -> DistributedGroup:
    return over_peers(group, device, exact) if device.type == "cuda" else group
