"""Rendezvous: connects the ranks of a model, after each has chosen its device."""

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
from engine.parallel.peer_group import over_peers
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import RankFailed, SharedMemoryGroup
from engine.parallel.stages import Stage

BACKEND = "nccl"  # torch.distributed's backend between GPUs; CPUs of several nodes use gloo
_HOST = "127.0.0.1"
# seconds of waiting after which a rank that delays the others is logged
_STRAGGLER_SECONDS = (5, 30, 300)

logger = logging.getLogger("manta.engine")


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's groups, pipeline stage and link, by which it communicates with the other ranks.

    world: the group of all ranks.
    group: the tensor-parallel group of the rank's stage.
    stage: the pipeline stage, which decides the rank's layers.
    link: the link to the previous and the next stage.
    groups: on rank 0, the groups of all stages, if they differ from the world.
    """

    world: TensorParallelGroup = TensorParallelGroup()  # noqa: RUF009, it is frozen
    group: TensorParallelGroup = TensorParallelGroup()  # noqa: RUF009, it is frozen
    stage: Stage = Stage()  # noqa: RUF009, it is frozen
    link: Link | None = None
    groups: tuple[SharedMemoryGroup, ...] = ()

    @property
    def recovers(self) -> bool:
        """Whether ranks can continue after a failed step.

        Only on the CPU, as waiting GPU kernels cannot be aborted.
        """
        return isinstance(self.world, SharedMemoryGroup)

    def fail(self, error: Exception) -> None:
        """Mark this rank's step as failed, for the ranks that wait for this rank.

        A failure that arrived through the group is passed on to the link, and the reverse.
        """
        assert self.recovers
        meets = [meeting for meeting in (self.link, self.group) if meeting is not None]
        both = self.link is not None and self.group.size > 1
        if both or not isinstance(error, RankFailed):
            for meeting in meets if both else meets[:1]:
                assert isinstance(meeting, SharedMemoryLink | SharedMemoryGroup)
                meeting.fail()

    def begin_round(self) -> None:
        """Release the ranks that wait in the failed step; only rank 0 calls this."""
        for group in (self.world, *self.groups):
            assert isinstance(group, SharedMemoryGroup)
            group.begin_round()

    def join_round(self) -> None:
        """Reset counters after a failed step; no rank may be in a step."""
        for meeting in (self.world, self.group, self.link):
            if isinstance(meeting, SharedMemoryGroup | SharedMemoryLink):
                meeting.join_round()

    def stragglers(self) -> list[tuple[int, int]]:
        """Return (rank, progress) of the ranks that rank 0 waits for in a step.

        The progress, a number of all-gathers or of a stage's finished steps, changes unless the
        rank hangs.
        """
        world, link, per_stage = self.world, self.link, self.group.size
        assert isinstance(world, SharedMemoryGroup)
        if not isinstance(link, SharedMemoryLink):
            return world.stragglers()
        if self.groups and (waits := self.groups[0].stragglers()):
            return waits
        waits = link.stragglers()
        for stage, done in waits[:1]:
            behind = self.groups[stage].behind() if self.groups else []
            return [(stage * per_stage + rank, met) for rank, met in behind] or [
                (stage * per_stage, done)
            ]
        return waits


@dataclass(frozen=True, slots=True)
class Activations:
    """The maximum size of the activations that pipeline stages send.

    Up to `steps` steps are in flight at once, each with up to `tokens` tokens.
    """

    steps: int
    tokens: int
    hidden_size: int
    dtype: torch.dtype


# Connects a rank: (device, size of the activations that it sends, `exact` of PeerGroup) -> its
# place.
Open = Callable[[torch.device, Activations, bool], Place]


def alone(device: torch.device, handed_on: Activations, exact: bool) -> Place:
    """Return the place of the only rank, which has the whole model.

    The function has the signature `Open`.
    """
    return Place()


def first(ranks: Ranks) -> Open:
    """Return the function that opens rank 0's place."""

    def open_place(device: torch.device, handed_on: Activations, exact: bool) -> Place:
        size, stages, memory = ranks.size, ranks.stages, ranks.memory
        if device.type == "cpu" and ranks.per_node == size:
            place = _shared(0, size, stages, memory, handed_on)
            Thread(
                target=_log_stragglers, args=(place, size), name="stragglers", daemon=True
            ).start()
            return place
        host = ranks.address or _HOST
        family = AF_INET6 if ":" in host else AF_INET
        # listens only on this interface
        listener = create_server((host, 0), family=family, backlog=size)
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        ranks.call("meet_at", host, port)
        _check_alike(store, 0, ranks.per_node, device)
        return distributed(0, size, stages, device, store, handed_on, exact, memory)

    return open_place


def other(
    rank: int, config: EngineConfig, memory: int, meet: Callable[[], tuple[str, int]]
) -> Open:
    """Return the function that opens the place of a rank other than 0.

    memory: the descriptor of the ranks' shared file, as in `distributed`.
    meet: a function that waits for the address that rank 0 sends by `meet_at`, and returns it.
    """
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
    """Raise ConfigError if the GPUs of this rank's node differ from those of rank 0's node.

    `engine.resolve` already compares the GPUs of one node.
    """
    if device.type == "cpu" or rank % per_node:
        return
    kind = torch.cuda.get_device_properties(device)
    same_kind(store, rank, f"{kind.name} with {kind.total_memory / 2**30:.0f} GiB")


def same_kind(store: Store, rank: int, kind: str) -> None:
    """Check that this rank's GPU is of the same kind as rank 0's.

    kind: this rank's GPU, in words.
    Raises ConfigError.
    """
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
    """Open the place of a rank whose groups and link all use one shared memory file.

    The file has the memory of the world group, then of the stages' groups if stages have several
    ranks, then of the links.
    """
    world = SharedMemoryGroup.open(rank, size, memory)
    if stages == 1:
        return Place(world, world)
    per_stage = size // stages  # number of ranks of a stage; they are consecutive
    number, member = divmod(rank, per_stage)
    at = world.num_bytes(size)
    group, groups = TensorParallelGroup(), []
    if per_stage > 1:
        length = world.num_bytes(per_stage)
        group = SharedMemoryGroup.open(member, per_stage, memory, at + number * length)
        if not rank:
            groups = [
                SharedMemoryGroup.open(0, per_stage, memory, at + n * length) for n in range(stages)
            ]
            groups[0] = group
        at += stages * length
    stage, shape = Stage(number, stages), (handed_on.tokens, handed_on.hidden_size)
    link = SharedMemoryLink(
        world, stage, memory, at, member, handed_on.steps, shape, handed_on.dtype
    )
    return Place(world, group, stage, link, tuple(groups))


def _log_stragglers(place: Place, size: int) -> None:
    before: list[tuple[int, int]] = []
    seconds = 0
    while True:
        time.sleep(1.0)
        stragglers = place.stragglers()
        seconds = seconds + 1 if stragglers and stragglers == before else 0
        before = stragglers
        if seconds in _STRAGGLER_SECONDS:
            for rank, _ in stragglers:
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
    """Open and return the place of a rank that communicates over torch.distributed.

    exact: see PeerGroup.
    memory: on the CPU, the descriptor of the shared memory file of a stage's ranks, which are on
        one machine.
    """
    backend = "gloo" if device.type == "cpu" else BACKEND
    library = backend == "nccl"
    bound = device if library else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=bound)
    of_control = device if library else torch.device("cpu")
    world = DistributedGroup(rank, size, dist.group.WORLD, of_control)
    if stages == 1:
        return Place(world, _summing(world, device, exact))
    per_stage = size // stages
    stage, member = Stage(rank // per_stage, stages), rank % per_stage
    group = TensorParallelGroup()
    if per_stage > 1 and device.type == "cpu" and memory is not None:
        at = stage.number * SharedMemoryGroup.num_bytes(per_stage)
        group = SharedMemoryGroup.open(member, per_stage, memory, at)
    elif per_stage > 1:
        groups = [
            dist.new_group([n * per_stage + m for m in range(per_stage)]) for n in range(stages)
        ]
        group = DistributedGroup(member, per_stage, groups[stage.number], of_control)
        group = _summing(group, device, exact)
    likes = [[n * per_stage + m for n in range(stages)] for m in range(per_stage)]
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
