"""LiveServer: an application with replicas that count instead of thinking, for the live view."""

import asyncio
from typing import Any

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.router.models.front import ModelFront
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import Fleet


class LiveServer:
    """ASGI. Its replicas start with the server, on its loop. fleet: once it has started."""

    def __init__(self, replicas: int, rows: int) -> None:
        self._replicas, self._rows = replicas, rows
        self.front = ModelFront("router-1")
        self.loop: asyncio.AbstractEventLoop
        self.fleet: Fleet
        self._app: Any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        self.loop = asyncio.get_running_loop()
        tokenizer = tiny_tokenizer()
        async with Fleet(self._replicas, rows=self._rows, tokenizer=tokenizer) as self.fleet:
            self.front.put("m", self.fleet.dispatcher, 0.0)
            self._app = build_asgi(
                self.front, ApiOptions(page=True, live=self._look, explain=self._explain)
            )
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self.front.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _look(self) -> list[dict[str, Any]]:
        return [self.front.live()]

    async def _explain(self, id: str, owner: str | None) -> list[dict[str, Any]]:
        return self.front.explain(id, owner)

    def slow_down(self, pace: float) -> None:
        """pace: seconds a step of all replicas."""
        for engine in self.fleet.engines.values():
            engine.pace = pace

    def kill(self, replica: str) -> None:
        """As SIGKILL would."""
        self.loop.call_soon_threadsafe(self.fleet.engines[replica].die)
