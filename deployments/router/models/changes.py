"""RouterChanges: changes of the models that come to one router over HTTP. They are written into
Serve's list of applications, where all routers see them."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.router.models.front import ModelFront
from deployments.router.models.keeper import ModelKeeper


@dataclass(frozen=True, slots=True)
class ChangeModels:
    """What changes Serve's list; all block. put(name, section): add a model, or change it.
    remove(name). trouble(name): as of ModelChanges. They raise MantaError."""

    put: Callable[[str, Mapping[str, Any]], None]
    remove: Callable[[str], None]
    trouble: Callable[[str], dict[str, str]]


class RouterChanges:
    """One change after the other; this router knows of a change when it has answered, the others
    within a second."""

    def __init__(self, change: ChangeModels, front: ModelFront, keeper: ModelKeeper) -> None:
        self._change, self._front, self._keeper = change, front, keeper
        self._turn = asyncio.Lock()

    def status(self, model: str) -> str:
        dispatcher = self._front.dispatchers.get(model)
        if dispatcher is None:
            return "starting"
        return dispatcher.status()

    async def trouble(self, model: str) -> dict[str, str]:
        return await asyncio.to_thread(self._change.trouble, model)

    async def put(self, name: str, section: Mapping[str, Any]) -> None:
        async with self._turn:
            await asyncio.to_thread(self._change.put, name, section)
            await self._keeper.look()
            if name in self._front.dispatchers:
                # Whether the model can start is to be seen now.
                self._front.dispatchers[name].waking.wake()

    async def remove(self, name: str) -> None:
        async with self._turn:
            await asyncio.to_thread(self._change.remove, name)
            await self._keeper.look()
