"""LiveServer: an application with fake engines, for tests of the page's live view."""

import asyncio
from typing import Any

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.router.models.models_backend import ModelsBackend
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import Fleet

# Times in milliseconds of a request that moved once, as in docs/img/page-request.png. The move and
# the event after it have the same time, so that the page has to order them.
PICTURED: dict[str, Any] = {
    "timing_ms": {"queue": 0.1, "prefill": 22, "first_token": 22, "decode": 4142, "total": 4164},
    "route": [
        {"at_ms": 0.1, "expected_ms": 33, "emitted_tokens": 0},
        {"at_ms": 3229, "expected_ms": 157, "emitted_tokens": 154},
    ],
    "moves": [{"at_ms": 3229}],
}


class LiveServer:
    """An ASGI application whose replicas start with the server, on its event loop.

    fleet: the replicas, once the server has started.
    pictured: whether to report the times of PICTURED instead of measured ones, so that screenshots
        are equal.
    """

    def __init__(self, replicas: int, rows: int) -> None:
        self._replicas, self._rows = replicas, rows
        self.front = ModelsBackend("router-1")
        self.loop: asyncio.AbstractEventLoop
        self.fleet: Fleet
        self._app: Any
        self.pictured = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        self.loop = asyncio.get_running_loop()
        tokenizer = tiny_tokenizer()
        async with Fleet(self._replicas, rows=self._rows, tokenizer=tokenizer) as self.fleet:
            self.front.set_dispatcher("m", self.fleet.dispatcher, 0.0)
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
        parts = self.front.explain(id, owner)
        if self.pictured:
            for part in parts:
                part["timing_ms"] |= PICTURED["timing_ms"]
                for name in ("route", "moves"):
                    pairs = zip(part[name], PICTURED[name], strict=True)
                    part[name] = [entry | times for entry, times in pairs]
        return parts

    def slow_down(self, pace: float) -> None:
        """Set the seconds per step of all replicas."""
        for engine in self.fleet.engines.values():
            engine.pace = pace

    def kill(self, replica: str) -> None:
        """End a replica's engine as SIGKILL would."""
        self.loop.call_soon_threadsafe(self.fleet.engines[replica].die)
