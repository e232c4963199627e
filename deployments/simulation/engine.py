"""VirtualEngine: the base class of simulated engines, which run on timers in virtual time."""

import asyncio
from collections.abc import Callable
from typing import Any

from deployments.simulation.speed import Speed
from engine.config.engine_config import EngineConfig
from engine.errors import MantaError
from engine.messages import AdapterInfo, Pulse, Ready, StepFrame

VOCABULARY = 1000


class VirtualEngine:
    """The base class of simulated engines: the methods of `replica.server.ReplicaEngine`, in
    virtual time.

    Adapters are not supported. Subclasses implement `submit`, and `abort` if requests can be
    aborted.
    """

    alive = True
    pid = 0
    pulse = Pulse("step")

    def __init__(
        self, speed: Speed, on_frame: Callable[[StepFrame], None], _: Callable[[MantaError], None]
    ) -> None:
        self._speed = speed
        self._on_frame = on_frame
        self._pulses = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None

    @property
    def pulses(self) -> int:
        """The number of keep-alive messages. It grows at each read, so that the watchdog never
        fires."""
        self._pulses += 1
        return self._pulses

    async def start(self, config: EngineConfig) -> Ready:
        speed = self._speed
        blocks = speed.kv_tokens // speed.block
        return Ready(speed.context, VOCABULARY, speed.block, blocks, [2], {}, "", speed.chunk)

    def abort(self, ids: list[int]) -> None:
        return None

    async def add_adapter(self, name: str, folder: str, **_: Any) -> AdapterInfo:
        raise NotImplementedError

    async def remove_adapter(self, name: str, revision: str = "") -> AdapterInfo:
        raise NotImplementedError

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
