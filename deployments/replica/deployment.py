"""EngineReplica: the Serve deployment of one engine.

Serve places, checks and replaces replicas. Requests and tokens are sent over the ReplicaServer's
channels, not through Serve.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec
import ray
from ray._private.state import state
from ray.serve.handle import DeploymentHandle

from deployments.checkpoints.resolve import ModelIdentity
from deployments.encoder.deployment import asks
from deployments.encoder.rows import EncoderPool
from deployments.observe.logs import log_through_serve
from deployments.observe.ray_exporter import ServeExport
from deployments.observe.replica_metrics import replica_families
from deployments.observe.tasks import tasks
from deployments.replica.other_nodes import OtherNodes, node_address, node_id
from deployments.replica.server import FAREWELL, ReplicaServer
from deployments.replica.sleep import SleepSettings
from deployments.replica.watchdog import StallLimits
from deployments.scaling.engine_load import EngineLoad
from deployments.transport.channel import ChannelLimits
from engine.config.engine_config import EngineConfig
from engine.errors import EngineDead
from engine.process.client import EngineClient

logger = logging.getLogger("manta.replica")

_NOTICE_SECONDS = 1.0  # seconds between polls for drain notices of this replica's nodes
_BEFORE_DEADLINE = 2.0  # seconds before a node's deadline at which requests are returned


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The settings of one engine replica. Times are in seconds.

    engine: fields of EngineConfig, with the model as configured by the user.
    stall_seconds: maximum seconds of an engine's step. drain_seconds: maximum seconds of a drain.
    loopback: whether the service is for this machine only, so that the replica of a one-node
        cluster listens on loopback.
    """

    engine: dict[str, Any]
    stall_seconds: float = 30.0
    drain_seconds: float = 60.0
    loopback: bool = False
    channel: ChannelLimits = field(default_factory=ChannelLimits)
    sleep: SleepSettings | None = None  # None: the replica never sleeps
    role: str = "engine"  # role of its pool
    encode_seconds: float = 0.0  # maximum seconds to wait for an image's embeddings


class EngineReplica:
    """A replica: one engine that routers reach over channels.

    The replica counts as started once its engine accepts requests.

    settings: the replica's settings from the configuration.
    prepare: returns the EngineConfig for this machine, and downloads the model if needed.
    encoders: handle of the model's encoder pool; None: there is none.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: ReplicaSettings,
        prepare: Callable[[ReplicaSettings], EngineConfig],
        encoders: DeploymentHandle[Any] | None = None,
    ) -> None:
        began = time.monotonic()
        log_through_serve(settings.engine.get("log_level", "info"))
        self._drain_seconds = settings.drain_seconds
        config = await asyncio.to_thread(prepare, settings)
        identity = await asyncio.to_thread(ModelIdentity.of, config.model)
        self._others: OtherNodes | None = None
        if config.pipeline_nodes > 1:
            make_config = partial(prepare, settings)
            self._others = await OtherNodes.start(make_config, config, identity)
        # Whether another node of this replica is draining, and the requests were returned to the
        # routers.
        self._drained = False
        remote = None if self._others is None else self._others.remote
        pool = None
        if encoders is not None:
            pool = EncoderPool(asks(encoders, identity.weights), settings.encode_seconds)
        self._server = ReplicaServer(
            settings.channel,
            StallLimits(step=settings.stall_seconds),
            partial(EngineClient, remote=remote),
            settings.sleep,
            pool,
        )
        # The replica listens on one address, never on all interfaces.
        host = _address(settings.loopback)
        ready = await self._server.start(config, host)
        self._load = EngineLoad(ready.step_tokens)
        phases = ", ".join(f"{name} {took:.1f}" for name, took in ready.start_seconds.items())
        logger.info("engine ready on %s:%d (seconds: %s)", host, self._server.port, phases)
        logger.info("%s", ready.memory_table)
        self._notice = asyncio.create_task(self._await_notice())
        self._export = ServeExport(lambda: replica_families(self._server.stats))
        self._metadata = {
            **self._server.published(),
            "weights": identity.weights,
            "tokenizer": identity.tokenizer,
            "start_seconds": time.monotonic() - began,
            "role": settings.role,
        }

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the fields of ReplicaEndpoint, by which routers connect; Serve calls this hook
        once, when the replica is ready."""
        return self._metadata

    def record_autoscaling_stats(self) -> dict[str, int | float]:
        """Return the engine's load metrics for scaling/policy.py; Serve calls this hook."""
        return self._load.figures(self._server.stats, self._server.steps)

    async def _await_notice(self) -> None:
        """Wait for a drain notice for a node of this replica. Then refuse new requests, and before
        the node's deadline return the running requests to the routers.

        Spot instances and operators cause such notices. Serve starts a replacement at the same
        time, and ends this replica when the replacement is ready. But Serve considers only the node
        of this actor. If another node drains, the replica reports itself as unhealthy after the
        requests were returned.
        """
        own = node_id()
        ours = {own, *(() if self._others is None else self._others.node_ids)}
        while not (
            draining := ours & (deadlines := await asyncio.to_thread(_draining_nodes)).keys()
        ):
            await asyncio.sleep(_NOTICE_SECONDS)
        self._server.refuse_new()
        soonest = min((deadlines[node] for node in draining if deadlines[node]), default=0)
        seconds_left = soonest / 1000 - time.time()
        when = f" in {seconds_left:.0f} s" if soonest else ""
        logger.warning("a node of this replica is to be drained%s: no new requests", when)
        patience = max(0.0, seconds_left - _BEFORE_DEADLINE)
        if own not in draining:
            await self._server.drain(patience if soonest else self._drain_seconds)
            self._drained = True
        elif soonest:
            await asyncio.sleep(patience)
            self._server.hand_over()

    async def check_health(self) -> None:
        """End the process if the engine is dead or stuck; raise EngineDead if another node of this
        replica is draining.

        Serve calls this hook every two seconds. Serve replaces a replica that has raised three
        times, and at once a replica whose process has ended.
        """
        if self._drained:
            raise EngineDead("another node of this replica is to be drained")
        try:
            self._server.check_health()
        except EngineDead:
            await asyncio.sleep(FAREWELL)  # seconds for sending the message to the routers
            os._exit(1)

    async def stats(self) -> dict[str, Any]:
        """Return the replica's stats for operators: `handle.stats.remote()`.

        `tasks` has the number of asyncio tasks by name.
        """
        server = self._server
        return {
            **msgspec.structs.asdict(server.stats),
            "pid": os.getpid(),
            "tasks": tasks(),
            "engine_pid": server.engine_pid,
            "routers": server.num_routers,
            "in_flight": server.in_flight,
        }

    async def __del__(self) -> None:
        """Drain and stop the replica; Serve calls this hook at the replica's end."""
        server = getattr(self, "_server", None)
        if server is not None:
            await server.drain(self._drain_seconds)
            self._notice.cancel()  # after the drain, which a node's deadline may cut short
            self._export.stop()
            await server.stop()
            if self._others is not None:
                self._others.end()


def _draining_nodes() -> Mapping[str, int]:
    """Return {Ray node id: deadline in Unix milliseconds, or 0} of the nodes to be drained.

    Returns {} while Ray's control plane does not answer.
    """
    try:
        return cast(Mapping[str, int], state.get_draining_nodes())
    except Exception as error:
        logger.debug("draining nodes cannot be asked for: %s", error)
        return {}


def _address(loopback: bool) -> str:
    """Return the address to listen on: this node's address in the cluster, or loopback.

    Loopback is used if `loopback` is set and the cluster has one node.
    """
    if loopback and sum(node["Alive"] for node in cast(Any, ray).nodes()) == 1:
        return "127.0.0.1"
    return node_address()
