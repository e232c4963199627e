"""ReplicaEngine: the protocol (interface) of the engine behind a replica's server."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.config.engine_config import EngineConfig
from engine.errors import MantaError
from engine.messages import AdapterInfo, EngineRequest, KVSource, Pulse, Ready, StepFrame


class ReplicaEngine(Protocol):
    """The interface of `engine.process.client.EngineClient` that a replica's server uses."""

    @property
    def alive(self) -> bool: ...

    @property
    def pid(self) -> int: ...

    @property
    def pulses(self) -> int: ...

    @property
    def pulse(self) -> Pulse: ...

    async def start(self, config: EngineConfig) -> Ready: ...

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, ids: list[int]) -> None: ...

    def control(self, what: str) -> int: ...

    async def pause(self, mode: str) -> None: ...

    async def sleep(self, level: int = 1, tags: Sequence[str] = ()) -> None: ...

    async def wake(self, tags: Sequence[str] = ()) -> None: ...

    async def update_weights(
        self,
        folder: str,
        *,
        version: str = "",
        recompute: bool = False,
        check_only: bool = False,
    ) -> None: ...

    async def transfer_weights(self, what: str, info: dict[str, Any] | None = None) -> str: ...

    async def serve_kv(self, host: str) -> tuple[KVSource, float]: ...

    async def add_adapter(
        self, name: str, folder: str, *, revision: str = "", load: bool = True, digest: str = ""
    ) -> AdapterInfo: ...

    async def remove_adapter(self, name: str, revision: str = "") -> AdapterInfo: ...

    async def close(self) -> None: ...


MakeEngine = Callable[[Callable[[StepFrame], None], Callable[[MantaError], None]], ReplicaEngine]
