"""RealReplicas: the HTTP API over a dispatcher and replicas with engine processes, without Ray."""

from pathlib import Path
from typing import Any

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.backend import ModelCard
from deployments.replica.server import ReplicaServer
from deployments.replica.watchdog import StallLimits
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.models.models_backend import ModelsBackend
from deployments.router.training import RouterTraining
from deployments.transport.channel import ChannelLimits
from engine.config.engine_config import EngineConfig
from engine.text.tokenizer import Tokenizer
from tests.deployments.router.fleet import until


class RealReplicas:
    """An ASGI application for tests/deployments/api/server.py, whose replicas start with its
    lifespan.

    fields: fields of EngineConfig.
    """

    def __init__(self, folder: Path, count: int = 1, **fields: Any) -> None:
        self._folder, self._count = folder, count
        self._config = EngineConfig(model=str(folder), **fields)
        self._servers: list[ReplicaServer] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._api(scope, receive, send)
            return
        await receive()
        await self._start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.dispatcher.close()
        for server in self._servers:
            await server.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        tokenizer = Tokenizer.load(self._folder)
        published = {}
        for number in range(self._count):
            server = ReplicaServer(ChannelLimits(), StallLimits())
            self._servers.append(server)
            ready = await server.start(self._config, "127.0.0.1")
            published[f"r{number}"] = server.published()
        card = ModelCard("tiny", ready.max_model_len, ready.vocab_size, (2,), 0)
        self.dispatcher = Dispatcher(card, tokenizer, DispatchLimits(), "router")
        self.dispatcher.set_replicas(published)
        await until(lambda: len(self.dispatcher.state().replicas) == self._count, 30)
        front = ModelsBackend("router")
        front.set_dispatcher("tiny", self.dispatcher, 0)
        options = ApiOptions(training=RouterTraining(front), max_prompts=256)
        self._api = build_asgi(front, options)
