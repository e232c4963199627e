"""Service: real routers and replica servers with simulated engines, in virtual time.

All code between a request and its engine is real: admission, queue, routing, channel, replica
server.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.backend import ModelCard
from deployments.replica.server import ReplicaServer
from deployments.replica.watchdog import StallLimits
from deployments.router.admission.scale_from_zero import Waking
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import DispatchLimits
from deployments.simulation.core_engine import CoreEngine
from deployments.simulation.engine import VOCABULARY
from deployments.simulation.speed import Speed
from engine.config.engine_config import EngineConfig

MODEL = "m"  # the name of the served model


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedReplica:
    """A started replica. engine: the simulated engine that Service's `make_engine` has created."""

    name: str
    speed: Speed
    server: ReplicaServer
    engine: Any


class Service:
    """A service of real routers connected to simulated replicas.

    speeds: one Speed per replica that `start` adds.
    make_engine: a subclass of VirtualEngine.
    make_waking: returns a Waking for a router; None: the model never sleeps.
    context: maximum of tokens of a request, until replicas report theirs.
    """

    def __init__(
        self,
        speeds: Sequence[Speed],
        routers: int,
        limits: DispatchLimits,
        make_engine: Callable[..., Any] = CoreEngine,
        make_waking: Callable[[], Waking] | None = None,
        context: int = 32768,
    ) -> None:
        self.replicas: list[SimulatedReplica] = []  # replicas that routers may use
        self._speeds = speeds
        self._limits = limits
        self._make_engine = make_engine
        self._started = 0
        card = ModelCard(MODEL, context, VOCABULARY, (2,), 0)
        self.routers = [
            Dispatcher(
                card,
                None,  # type: ignore[arg-type]  # requests come as token ids
                limits,
                f"router-{number}",
                waking=make_waking() if make_waking is not None else None,
            )
            for number in range(routers)
        ]

    @property
    def engines(self) -> list[Any]:
        """The engines of the replicas that routers may use."""
        return [replica.engine for replica in self.replicas]

    async def start(self) -> None:
        """Add the replicas, and wait until every router is connected to all of them."""
        for speed in self._speeds:
            self.replicas.append(await self._make(speed))
        self._publish()
        count = len(self._speeds)
        while not all(len(router.state().replicas) == count for router in self.routers):
            await asyncio.sleep(0.01)

    async def add(self, speed: Speed) -> SimulatedReplica:
        """Add a replica, to which the routers connect."""
        replica = await self._make(speed)
        self.replicas.append(replica)
        self._publish()
        return replica

    def withdraw(self, replica: SimulatedReplica) -> None:
        """Remove a replica from those that routers may use; the caller then drains and stops the
        replica."""
        self.replicas.remove(replica)
        self._publish()

    async def stop(self) -> None:
        for router in self.routers:
            router.close()
        for replica in self.replicas:
            await replica.server.stop()

    async def _make(self, speed: Speed) -> SimulatedReplica:
        engines: list[Any] = []

        def make(*callbacks: Any) -> Any:
            engines.append(self._make_engine(speed, *callbacks))
            return engines[-1]

        server = ReplicaServer(self._limits.channel, StallLimits(), make)
        caching = speed.prefix_caching
        await server.start(EngineConfig(model="simulated", prefix_caching=caching), "memory")
        name = f"{speed.pool}/{self._started}"
        self._started += 1
        return SimulatedReplica(name, speed, server, engines[0])

    def _publish(self) -> None:
        published = {replica.name: replica.server.published() for replica in self.replicas}
        for router in self.routers:
            router.set_replicas(published)
