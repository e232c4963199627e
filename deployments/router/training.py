"""RouterTraining: passes trainers' orders (weights, pauses, sleeps) to a router's models."""

from collections.abc import Sequence
from typing import Any

from deployments.api.options import EngineFacts
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.models_backend import ModelsBackend
from engine.errors import InvalidRequest


class RouterTraining:
    """The implementation of `deployments.api.options.Training`, the trainers' orders to a router's
    models."""

    def __init__(self, front: ModelsBackend) -> None:
        self._front = front

    async def update(self, model: str, folder: str, version: str) -> str:
        return await self._of(model).weights.update(folder, version)

    async def init_transfer(self, model: str, info: dict[str, Any]) -> None:
        await self._of(model).weights.init_transfer(info)

    async def start_update(self, model: str) -> None:
        await self._of(model).weights.start_update()

    async def take_tensors(self, model: str, info: dict[str, Any], version: str) -> str:
        return await self._of(model).weights.take_tensors(info, version)

    async def finish_update(self, model: str, version: str) -> str:
        return await self._of(model).weights.finish_update(version)

    async def begin_sent(self, model: str) -> None:
        await self._of(model).weights.begin_sent()

    async def take_sent(self, model: str, info: dict[str, Any], version: str) -> str:
        return await self._of(model).weights.take_sent(info, version)

    async def end_sent(self, model: str) -> str:
        return await self._of(model).weights.end_sent()

    async def pause(self, model: str, mode: str) -> None:
        await self._of(model).weights.pause(mode)

    async def resume(self, model: str) -> None:
        await self._of(model).weights.resume()

    async def sleep(self, model: str, level: int, tags: Sequence[str], mode: str) -> None:
        await self._of(model).weights.sleep(level, tags, mode)

    async def wake(self, model: str, tags: Sequence[str]) -> None:
        await self._of(model).weights.wake(tags)

    async def reset_prefix_cache(self, model: str) -> None:
        await self._of(model).weights.reset_prefix_cache()

    async def state(self, model: str) -> dict[str, Any]:
        dispatcher = self._of(model)
        await dispatcher.weights.refresh()
        replicas = {
            name: {
                "weight_version": stats.weights_version,
                "paused": stats.paused,
                "asleep": stats.asleep,
                "weights_dropped": stats.weights_dropped,
            }
            for name, stats in dispatcher.state().replicas.items()
        }
        weights = dispatcher.weights
        return {
            "weight_version": weights.version,
            "is_paused": weights.paused,
            "is_sleeping": weights.asleep,
            "weights_dropped": weights.dropped,
            "replicas": replicas,
        }

    async def engine(self, model: str) -> EngineFacts:
        dispatcher = self._of(model)
        card, clients = dispatcher.cards.base, dispatcher.weights.connected()
        endpoint = clients[0].endpoint
        return EngineFacts(
            card.id,
            card.max_model_len,
            endpoint.dtype,
            endpoint.logprobs_mode,
            len(clients),
            endpoint.tensor_parallel,
            endpoint.pipeline_parallel,
        )

    def _of(self, model: str) -> Dispatcher:
        """Return the dispatcher of a model; "": of the only model. Raises InvalidRequest."""
        known = self._front.dispatchers
        name = model or self._front.only
        if name not in known:
            what = f"no model is called {model!r}" if model else "?model= has to name the model"
            raise InvalidRequest(
                f"{what}; served: {', '.join(known)}", param="model", code="model_not_found"
            )
        return known[name]
