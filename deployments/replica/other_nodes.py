"""OtherNodes: starts a multi-node replica's ranks on the nodes other than the replica's own.

Pipelines may span several nodes. Serve creates a placement group with one bundle per node for such
a replica. The replica's own actor is in the first bundle and owns the actors on the other nodes, so
Ray ends them together.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.checkpoints.resolve import ModelIdentity
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead
from engine.parallel.connections import RemoteRanks
from engine.parallel.rank_host import RankHost

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class HostedRanks:
    """A node's report that its ranks have started and wait for a connection from rank 0.

    address, port: where the ranks listen.
    model: folder of the model on that node. weights: identity of the weights on that node.
    """

    node_id: str
    address: str
    port: int
    model: str
    weights: str


class RankActor:
    """The actor that runs the engine's ranks on one of the other nodes."""

    def start(self, prepare: Callable[[], EngineConfig], node: int, key: bytes) -> HostedRanks:
        """Start this node's ranks.

        prepare: returns the engine's configuration on this node.
        node: index of the node in the replica, from 1 on.
        key: secret of the connections between the nodes.

        Raises the errors of `prepare`.
        """
        config, address = prepare(), node_address()
        identity = ModelIdentity.of(config.model)
        self._host = RankHost(config, node, address, key)  # its processes end with this process
        return HostedRanks(node_id(), address, self._host.port, config.model, identity.weights)


class OtherNodes:
    """The actors on a replica's nodes other than its own.

    node_ids: Ray's ids of these nodes.
    remote: addresses of the ranks on these nodes, for `EngineClient`.
    """

    def __init__(self, actors: list[Any], node_ids: tuple[str, ...], remote: RemoteRanks) -> None:
        self._actors = actors
        self.node_ids = node_ids
        self.remote = remote

    @classmethod
    async def start(
        cls,
        prepare: Callable[[], EngineConfig],
        config: EngineConfig,
        identity: ModelIdentity,
    ) -> "OtherNodes":
        """Start an actor on each other node, and wait until its ranks run.

        prepare: returns the engine's configuration; it is called on the other nodes.
        config, identity: engine configuration and model identity of this node.

        Raises the errors of `prepare`, ConfigError if a node has other weights or this actor has no
        placement group with a bundle for each node, and EngineDead if a node is lost.
        """
        group = cast(Any, ray).util.get_current_placement_group()
        if group is None or len(group.bundle_specs) != config.pipeline_nodes:
            raise ConfigError(
                f"pipeline_nodes: {config.pipeline_nodes} nodes need a placement group of as many "
                "bundles, which `manta serve` and `manta build` ask Ray for",
                param="pipeline_nodes",
            )
        key = secrets.token_bytes(_KEY_BYTES)
        actors = []
        for node in range(1, config.pipeline_nodes):
            wanted = dict(group.bundle_specs[node])
            actor = cast(Any, ray.remote(RankActor)).options(
                num_cpus=wanted.pop("CPU", 0),
                num_gpus=wanted.pop("GPU", 0),
                resources=wanted,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
            )
            actors.append(actor.remote())
        try:
            calls = [actor.start.remote(prepare, node, key) for node, actor in enumerate(actors, 1)]
            hosts_ranks: list[HostedRanks] = await asyncio.gather(*calls)
            for node, host in enumerate(hosts_ranks, 1):
                _check_weights(config, identity, node, host)
        except RayTaskError as error:
            _end(actors)
            raise error.cause from None
        except RayError as error:
            _end(actors)
            raise EngineDead(f"a node of the replica is lost: {error}") from None
        except BaseException:
            _end(actors)
            raise
        hosts = tuple((host.address, host.port) for host in hosts_ranks)
        nodes = tuple(host.node_id for host in hosts_ranks)
        return cls(actors, nodes, RemoteRanks(node_address(), hosts, key))

    def end(self) -> None:
        _end(self._actors)


def _end(actors: list[Any]) -> None:
    for actor in actors:
        with contextlib.suppress(RayError):
            ray.kill(actor)


def _check_weights(
    config: EngineConfig, identity: ModelIdentity, node: int, ranks: HostedRanks
) -> None:
    if identity.weights != ranks.weights:
        raise ConfigError(
            f"model: {config.model} has other weights than {ranks.model} on node {node} of the "
            f"replica, {ranks.address}; put the same files on all nodes, or give a hub name with "
            "its revision",
            param="model",
        )


def node_id() -> str:
    """Return Ray's id of this process's node."""
    return str(cast(Any, ray).get_runtime_context().get_node_id())


def node_address() -> str:
    """Return this node's address in the cluster."""
    return str(cast(Any, ray).util.get_node_ip_address())
